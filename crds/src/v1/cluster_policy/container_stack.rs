//! Operands of container nodes, apart from driver and metrics.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Component, ConfigMapName};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Toolkit {
    #[serde(flatten)]
    pub component: Component,
    /// Directory on the host.
    pub install_dir: String,
}

impl Default for Toolkit {
    fn default() -> Self {
        Self { component: Component::default(), install_dir: "/usr/local/nvidia".to_owned() }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DevicePlugin {
    #[serde(flatten)]
    pub component: Component,
    pub config: DevicePluginConfig,
    pub mps: Mps,
}

/// Named configurations; a node picks one by the label `nvidia.com/device-plugin.config`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DevicePluginConfig {
    /// ConfigMap with one key a configuration.
    pub name: Option<String>,
    /// Key for nodes without the label.
    pub default: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Mps {
    /// Directory on the host for pipes and shared memory.
    pub root: String,
}

impl Default for Mps {
    fn default() -> Self {
        Self { root: "/run/nvidia/mps".to_owned() }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Mig {
    pub strategy: Option<MigStrategy>,
}

/// How MIG devices are named as resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MigStrategy {
    None,
    Single,
    Mixed,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct MigManager {
    #[serde(flatten)]
    pub component: Component,
    pub config: MigManagerConfig,
    /// ConfigMap that names what must stop on the host while a layout changes.
    pub gpu_clients_config: ConfigMapName,
}

/// Named layouts; a node picks one by the label `nvidia.com/mig.config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct MigManagerConfig {
    pub name: Option<String>,
    /// Layout of nodes without the label: `all-disabled`, or empty to leave them alone.
    #[schemars(extend("enum" = ["all-disabled", ""]))]
    pub default: String,
}

impl Default for MigManagerConfig {
    fn default() -> Self {
        Self { name: None, default: "all-disabled".to_owned() }
    }
}

/// Container Device Interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Cdi {
    pub enabled: bool,
    /// Deprecated: CDI is the default wherever it is enabled.
    pub default: bool,
    pub nri_plugin_enabled: bool,
}

impl Default for Cdi {
    fn default() -> Self {
        Self { enabled: true, default: false, nri_plugin_enabled: false }
    }
}
