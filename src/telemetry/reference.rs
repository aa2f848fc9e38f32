//! The reference of all metrics, docs/metrics.md: written from what the programs register.

use std::fmt::Write as _;

use super::{Described, Kind, Unit};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
const WRITTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/metrics.md");
const HEAD: &str = include_str!("reference.md");

fn programs() -> Vec<(&'static str, Vec<Described>)> {
    vec![
        (
            "Operator",
            crate::operator::METRICS
                .iter()
                .chain(crate::operator::policy::METRICS)
                .flat_map(|all| all.to_vec())
                .collect(),
        ),
        ("Agent", crate::agent::metrics::ALL.concat()),
        ("Node status exporter", crate::node_status::METRICS.to_vec()),
    ]
}

fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Count => "count",
        Unit::Flag => "1 or 0",
        Unit::Info => "always 1",
        Unit::Seconds => "seconds",
        Unit::Time => "seconds since 1970",
        Unit::Code => "code",
        Unit::Lanes => "lanes",
        Unit::Transfers => "transfers/s",
    }
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    for (program, mut metrics) in programs() {
        metrics.sort_by_key(|metric| metric.name);
        let _ = write!(page, "\n## {program}\n\n| metric | kind | labels | unit | meaning |\n|---|---|---|---|---|\n");
        for Described { name, kind, labels, unit: of, help } in metrics {
            let (kind, end) = match kind {
                Kind::Gauge => ("gauge", ""),
                Kind::Counter => ("counter", "_total"),
                Kind::Histogram => ("histogram", ""),
            };
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            let (labels, unit) = (labels.join(", "), unit(of));
            let _ = writeln!(page, "| `{name}{end}` | {kind} | {labels} | {unit} | {help} |");
        }
    }
    page
}

#[test]
fn the_page_of_metrics_is_what_the_programs_register() {
    let (page, there) = (page(), std::fs::read_to_string(PAGE).unwrap_or_default());
    if page != there {
        std::fs::write(WRITTEN, &page).expect("a file");
        panic!("docs/metrics.md is not what the programs register: read target/metrics.md, and copy it there");
    }
}

#[test]
fn every_metric_keeps_to_the_customs_of_prometheus() {
    for (program, metrics) in programs() {
        let mut names: Vec<&str> = metrics.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "{program} has a name twice");
        for Described { name, kind, labels, unit, help } in metrics {
            let known = name.starts_with("gpuvirt_") || name.starts_with("gpu_operator_");
            assert!(known && name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
            assert!(help.len() > 10 && !help.ends_with('.') && !help.contains('|'), "{name}: {help}");
            assert!(
                labels.iter().all(|label| *label != "uid" && *label != "pid"),
                "{name} would have no end of series"
            );
            let ours = name.starts_with("gpuvirt_");
            assert!(!ours || unit != Unit::Seconds || name.ends_with("_seconds"), "{name} is in seconds");
            assert!(!ours || kind == Kind::Counter || !name.ends_with("_total"), "{name} is no counter");
        }
    }
}
