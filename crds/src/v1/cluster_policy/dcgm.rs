//! Metrics of GPUs: DCGM and its exporter.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Component, ConfigMapName, ServiceMonitor};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Dcgm {
    #[serde(flatten)]
    pub component: Component,
    /// Deprecated: the engine listens on 5555 in the cluster network only.
    pub host_port: Option<i32>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DcgmExporter {
    #[serde(flatten)]
    pub component: Component,
    /// On the exporter's pods.
    pub annotations: BTreeMap<String, String>,
    /// The ConfigMap whose key `dcgm-metrics.csv` lists what is exported.
    pub config: ConfigMapName,
    #[serde(rename = "hostPID")]
    pub host_pid: Option<bool>,
    pub service: ExporterService,
    pub service_monitor: ServiceMonitor,
    pub hpc_job_mapping: HpcJobMapping,
    /// Whether metrics carry the labels of the pod that has the GPU.
    pub enable_pod_labels: Option<bool>,
    /// Whether metrics carry the uid of the pod that has the GPU.
    #[serde(rename = "enablePodUID")]
    pub enable_pod_uid: Option<bool>,
    /// Which pod labels, as regular expressions.
    pub pod_label_allowlist_regex: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ExporterService {
    /// `ClusterIP`, `NodePort` …
    #[serde(rename = "type")]
    pub type_: Option<String>,
    /// `Cluster` or `Local`.
    pub internal_traffic_policy: Option<String>,
}

/// Names of batch jobs in metrics, from files that the scheduler writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct HpcJobMapping {
    pub enabled: Option<bool>,
    /// Directory on the host with one file a GPU.
    pub directory: Option<String>,
}
