//! What the chart brings for who watches, and only if it is asked for.

use std::{collections::BTreeMap, fs};

use serde_json::Value;

use crate::support::{
    NAMESPACE,
    turn::{Turn, turn},
};

/// By kind and name.
fn rendered(t: &Turn, settings: &[&str]) -> BTreeMap<String, Value> {
    let rest = ["template", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE];
    let text = t.cluster.helm(&[&rest[..], settings].concat()).expect("a rendering");
    let parts = text.split("\n---\n").filter(|part| part.contains("kind: "));
    let objects = parts.map(|part| serde_saphyr::from_str::<Value>(part).expect("YAML"));
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    objects.map(|object| (format!("{} {}", word(&object["kind"]), word(&object["metadata"]["name"])), object)).collect()
}

#[test]
fn alerts_lead_to_their_runbooks_and_dashboards_are_what_is_tested() {
    turn(async |t| {
        let none = rendered(t, &[]);
        let kinds = ["PrometheusRule", "ServiceMonitor", "ConfigMap gpuvirt-dashboard"];
        assert!(!none.keys().any(|name| kinds.iter().any(|kind| name.starts_with(kind))), "nobody asked: {none:?}");

        let all = "--set=operator.metrics.prometheusRule.enabled=true,operator.metrics.prometheusRule.runbooks=https://runbooks.example/,operator.metrics.dashboards.enabled=true";
        let all = rendered(t, &[all]);
        let groups = all["PrometheusRule gpuvirt-operator"]["spec"]["groups"].as_array().expect("groups");
        let rules: Vec<&Value> = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules")).collect();
        assert!(rules.len() > 10);
        for rule in rules {
            let name = rule["alert"].as_str().expect("a name");
            assert_eq!(rule["annotations"]["runbook_url"], format!("https://runbooks.example/{name}.md"));
        }
        let failed =
            &groups[0]["rules"].as_array().expect("rules").iter().find(|r| r["alert"] == "GPUVirtChangeFailed");
        let summary = failed.expect("the alert")["annotations"]["summary"].as_str().expect("a text");
        assert!(summary.contains("{{ $labels.node }}"), "Prometheus' own templates stay: {summary}");
        for name in ["fleet", "node", "vm"] {
            let map = &all[&format!("ConfigMap gpuvirt-dashboard-{name}")];
            assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
            let file = fs::read_to_string(format!("charts/gpuvirt/files/dashboards/{name}.json")).expect("a dashboard");
            assert_eq!(map["data"][format!("gpuvirt-{name}.json")], file);
        }
    });
}

#[test]
fn a_service_monitor_speaks_as_the_metrics_are_served() {
    turn(async |t| {
        let monitors = "--set=operator.metrics.serviceMonitor.enabled=true";
        let of = |objects: &BTreeMap<String, Value>, name: &str| {
            objects[&format!("ServiceMonitor gpuvirt-{name}")]["spec"]["endpoints"][0].clone()
        };
        let tls = rendered(t, &[monitors]);
        let given = rendered(t, &[monitors, "--set=metrics.certificateSecret=cert"]);
        let plain = rendered(t, &[monitors, "--set=metrics.mode=plain"]);
        for name in ["operator", "agent"] {
            let endpoint = of(&tls, name);
            assert_eq!(
                (&endpoint["scheme"], &endpoint["tlsConfig"]["insecureSkipVerify"]),
                (&"https".into(), &true.into())
            );
            assert!(endpoint["bearerTokenFile"].is_string(), "{endpoint}");
            let endpoint = of(&given, name);
            assert_eq!(endpoint["tlsConfig"]["serverName"], format!("gpuvirt-metrics.{NAMESPACE}.svc"));
            assert!(endpoint["tlsConfig"]["insecureSkipVerify"].is_null(), "{endpoint}");
            let endpoint = of(&plain, name);
            assert!(endpoint["scheme"].is_null() && endpoint["bearerTokenFile"].is_null(), "{endpoint}");
            let ports = |objects: &BTreeMap<String, Value>| {
                objects[&format!("Service gpuvirt-{name}-metrics")]["spec"]["ports"][0]["port"].as_i64()
            };
            assert_eq!((ports(&tls), ports(&plain)), (Some(8443), Some(8080)));
        }
        assert_eq!(of(&tls, "agent")["honorLabels"], true, "the namespace of a GPU's user is the user's");
        let off = rendered(t, &[monitors, "--set=metrics.mode=off"]);
        assert!(!off.keys().any(|name| name.ends_with("-metrics") || name.starts_with("ServiceMonitor")), "{off:?}");
        assert!(!off.contains_key("ClusterRole gpuvirt-metrics-reader"));
    });
}
