//! How Prometheus is told of an exporter, where its operator is there.

use std::collections::BTreeMap;

use kube::{CustomResource, core::ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Installation,
    dcgm::{EXPORTER, EXPORTER_PORT},
    node_status,
    pod::own_labels,
};
use crate::operator::policy::validate::{Monitor, Settings};

/// As much of the Prometheus operator's type as is set here.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monitoring.coreos.com",
    version = "v1",
    kind = "ServiceMonitor",
    namespaced,
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct ServiceMonitorSpec {
    pub job_label: String,
    pub namespace_selector: Value,
    pub selector: Value,
    pub endpoints: Vec<Value>,
}

/// All that there may be.
pub const NAMES: [&str; 2] = [EXPORTER, node_status::NAME];

pub(super) fn of_exporter(settings: &Settings, monitor: &Monitor, installation: &Installation) -> ServiceMonitor {
    let mut endpoint = json!({"port": EXPORTER_PORT, "path": "/metrics"});
    let optional = [
        ("interval", monitor.interval.as_ref().map(|interval| json!(interval))),
        ("scrapeTimeout", monitor.scrape_timeout.as_ref().map(|timeout| json!(timeout))),
        ("honorLabels", monitor.honor_labels.map(|honor| json!(honor))),
        ("relabelings", (!monitor.relabelings.is_empty()).then(|| json!(monitor.relabelings))),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            endpoint[name] = value;
        }
    }
    of(EXPORTER, endpoint, monitor.additional_labels.clone(), settings, installation)
}

/// The peer's, without a setting.
pub(super) fn of_node_status(settings: &Settings, installation: &Installation) -> ServiceMonitor {
    let endpoint = json!({"port": node_status::PORT, "path": "/metrics"});
    of(node_status::NAME, endpoint, BTreeMap::new(), settings, installation)
}

/// `name` of the exporter, which is its Service's too.
fn of(
    name: &str,
    endpoint: Value,
    mut labels: BTreeMap<String, String>,
    settings: &Settings,
    installation: &Installation,
) -> ServiceMonitor {
    labels.extend(own_labels(name, name, settings));
    ServiceMonitor {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(installation.namespace.clone()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        spec: ServiceMonitorSpec {
            job_label: crds::labels::APP.to_owned(),
            namespace_selector: json!({"matchNames": [installation.namespace]}),
            selector: json!({"matchLabels": {crds::labels::APP: name}}),
            endpoints: vec![endpoint],
        },
    }
}
