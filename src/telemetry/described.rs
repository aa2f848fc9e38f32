//! What each metric means: the one place that gives it its name and its help, and from which the reference is written.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
    registry::{Metric, Registry},
};

/// How Prometheus takes a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gauge,
    Counter,
    Histogram,
}

/// What its number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// 1 or 0.
    Flag,
    /// Always 1: its labels are what it says.
    Info,
    Seconds,
    /// Seconds since 1970.
    Time,
    /// A code that its help explains.
    Code,
    Lanes,
    /// Transfers a second and lane.
    Transfers,
}

/// One metric, without its values.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    /// As Prometheus has it, but for the `_total` of a counter.
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub unit: Unit,
    pub help: &'static str,
}

impl Described {
    pub const fn gauge(name: &'static str, labels: &'static [&'static str], unit: Unit, help: &'static str) -> Self {
        Self { name, kind: Kind::Gauge, labels, unit, help }
    }

    pub const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self { name, kind: Kind::Counter, labels, unit: Unit::Count, help }
    }

    pub const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self { name, kind: Kind::Histogram, labels, unit: Unit::Seconds, help }
    }

    /// A value that is known at the moment of the question, of a gauge without labels of its own.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>, value: i64) -> fmt::Result {
        let gauge = ConstGauge::new(value);
        gauge.encode(encoder.encode_descriptor(self.name, self.help, None, gauge.metric_type())?)
    }

    /// Under its name and with its help.
    pub fn register(&self, registry: &mut Registry, metric: &(impl Metric + Clone)) {
        registry.register(self.name, self.help, metric.clone());
    }
}

/// Holds what a scrape shows against what is described. A family without a sample cannot be judged by its labels.
///
/// # Panics
/// Where they differ: this is for tests.
#[cfg(test)]
pub fn check(scrape: &str, described: &[Described]) {
    let kinds = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    for (name, kind) in kinds {
        let metric = described.iter().find(|metric| metric.name == name);
        let metric = metric.unwrap_or_else(|| panic!("{name} is not described"));
        assert_eq!(format!("{:?}", metric.kind).to_lowercase(), kind, "{name}");
        let own = |line: &&str| {
            let full = line.split(['{', ' ']).next().unwrap_or_default();
            let rest = full.strip_prefix(name).unwrap_or("?");
            ["", "_total", "_sum", "_count", "_bucket"].contains(&rest)
        };
        for line in scrape.lines().filter(own) {
            let inside =
                line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).map_or("", |(labels, _)| labels);
            let mut labels: Vec<&str> = inside.split("\",").filter_map(|pair| Some(pair.split_once('=')?.0)).collect();
            labels.retain(|label| *label != "le");
            labels.sort_unstable();
            let mut wanted = metric.labels.to_vec();
            wanted.sort_unstable();
            assert_eq!(labels, wanted, "labels of {line}");
        }
    }
    for metric in described {
        assert!(scrape.contains(&format!("# TYPE {} ", metric.name)), "{} is described and not served", metric.name);
    }
}
