//! The section about the peer's operator itself.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ImageSpec, ServiceMonitor};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Operator {
    /// Deprecated: the runtime is read from each node.
    pub default_runtime: Option<String>,
    /// Name of the RuntimeClass of pods that manage GPUs.
    pub runtime_class: String,
    /// Deprecated.
    pub init_container: ImageSpec,
    /// Whether OpenShift's driver toolkit builds the driver.
    #[serde(rename = "use_ocp_driver_toolkit")]
    pub use_ocp_driver_toolkit: Option<bool>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub metrics: OperatorMetrics,
}

impl Default for Operator {
    fn default() -> Self {
        Self {
            default_runtime: None,
            runtime_class: "nvidia".to_owned(),
            init_container: ImageSpec::default(),
            use_ocp_driver_toolkit: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            metrics: OperatorMetrics::default(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct OperatorMetrics {
    pub service_monitor: ServiceMonitor,
}
