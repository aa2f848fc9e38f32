//! Alerts, runbooks, their tests, dashboards and the reference of metrics belong together.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use serde_json::Value;

const ALERTS: &str = "charts/gpuvirt/files/alerts.yaml";
const TESTS: &str = "tests/alerts/tests.yaml";
const RUNBOOKS: &str = "docs/runbooks";
const DASHBOARDS: &str = "charts/gpuvirt/files/dashboards";
const METRICS: &str = "docs/metrics.md";
/// Of other programs.
const FOREIGN: [&str; 1] = ["kubevirt_"];

fn yaml(path: &str) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn alerts() -> Vec<Value> {
    let groups = yaml(ALERTS);
    let groups = groups["groups"].as_array().expect("groups").iter();
    groups.flat_map(|group| group["rules"].as_array().expect("rules").clone()).collect()
}

fn name(alert: &Value) -> String {
    alert["alert"].as_str().expect("a name").to_owned()
}

#[test]
fn every_alert_has_a_runbook_that_says_what_to_do_and_every_runbook_an_alert() {
    let alerts: BTreeSet<String> = alerts().iter().map(name).collect();
    let runbooks = fs::read_dir(RUNBOOKS).expect("runbooks").map(|entry| entry.expect("readable").path());
    let runbooks: BTreeSet<String> = runbooks.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    assert_eq!(alerts, runbooks);
    for alert in alerts {
        let text = fs::read_to_string(format!("{RUNBOOKS}/{alert}.md")).expect("a runbook");
        for part in [&*format!("# {alert}\n"), "## What it means", "## What it does to workloads", "## Look", "## Act"]
        {
            assert!(text.contains(part), "{alert}.md has no {part}");
        }
    }
}

#[test]
fn every_alert_is_tested_firing_and_silent() {
    let mut tested: BTreeMap<String, (bool, bool)> = BTreeMap::new();
    for test in yaml(TESTS)["tests"].as_array().expect("tests") {
        for case in test["alert_rule_test"].as_array().expect("cases") {
            let seen = tested.entry(case["alertname"].as_str().expect("a name").to_owned()).or_default();
            match case["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty()) {
                true => seen.0 = true,
                false => seen.1 = true,
            }
        }
    }
    for alert in alerts() {
        assert_eq!(tested.get(&name(&alert)), Some(&(true, true)), "{}: firing, silent", name(&alert));
    }
}

#[test]
fn every_alert_has_a_severity_and_says_where_to_look() {
    for alert in alerts() {
        let severity = alert["labels"]["severity"].as_str();
        assert!(severity.is_some_and(|severity| ["warning", "critical"].contains(&severity)), "{alert}");
        for text in ["summary", "description"] {
            assert!(alert["annotations"][text].as_str().is_some_and(|text| text.len() > 20), "{alert}");
        }
    }
}

/// Words of a query that begin as our metrics do.
fn metrics(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let known = |word: &&str| ["gpuvirt_", "gpu_operator_"].iter().any(|start| word.starts_with(start));
    words.filter(known).map(str::to_owned).collect()
}

#[test]
fn alerts_and_dashboards_ask_for_metrics_that_there_are() {
    let page = fs::read_to_string(METRICS).expect("the reference");
    let mut queries: Vec<String> = alerts().iter().map(|alert| alert["expr"].to_string()).collect();
    for entry in fs::read_dir(DASHBOARDS).expect("dashboards") {
        let path = entry.expect("readable").path();
        let text = fs::read_to_string(&path).expect("readable");
        let dashboard: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for panel in dashboard["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().expect("targets") {
                let query = target["expr"].as_str().expect("a query").to_owned();
                assert!(!metrics(&query).is_empty() || FOREIGN.iter().any(|of| query.contains(of)), "{query}");
                queries.push(query);
            }
        }
    }
    for query in queries {
        for metric in metrics(&query) {
            let parts = ["_bucket", "_sum", "_count"].iter().find_map(|end| metric.strip_suffix(end));
            let known = |name: &str| page.contains(&format!("`{name}`"));
            assert!(known(&metric) || parts.is_some_and(known), "{metric} of {query} is not in {METRICS}");
        }
    }
}
