//! Operands of nodes whose GPUs go to virtual machines.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Component, ConfigMapName, DriverManager};
use crate::WorkloadMode;

/// The switch for all that follows. While it is off a node's mode label has no effect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct SandboxWorkloads {
    pub enabled: Option<bool>,
    /// Mode of nodes without a (valid) label.
    pub default_workload: WorkloadMode,
    pub mode: SandboxMode,
}

impl SandboxWorkloads {
    /// Whether nodes may have a mode other than `container`.
    pub fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(false)
    }
}

/// Who runs the virtual machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SandboxMode {
    #[default]
    Kubevirt,
    Kata,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct VfioManager {
    #[serde(flatten)]
    pub component: Component,
    pub driver_manager: DriverManager,
}

/// The host driver that slices GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct VgpuManager {
    #[serde(flatten)]
    pub component: Component,
    pub driver_manager: DriverManager,
    /// ConfigMap with kernel module parameters.
    pub kernel_module_config: ConfigMapName,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct VgpuDeviceManager {
    #[serde(flatten)]
    pub component: Component,
    pub config: VgpuDeviceManagerConfig,
}

/// Named layouts; a node picks one by the label `nvidia.com/vgpu.config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct VgpuDeviceManagerConfig {
    pub name: Option<String>,
    /// Layout of nodes without the label.
    pub default: String,
}

impl Default for VgpuDeviceManagerConfig {
    fn default() -> Self {
        Self { name: None, default: "default".to_owned() }
    }
}

/// Confidential computing of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct CcManager {
    #[serde(flatten)]
    pub component: Component,
    pub default_mode: Option<CcMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CcMode {
    On,
    Off,
    Devtools,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct KataManager {
    #[serde(flatten)]
    pub component: Component,
    pub config: KataManagerConfig,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct KataManagerConfig {
    /// Directory on the host.
    pub artifacts_dir: String,
    pub runtime_classes: Vec<KataRuntimeClass>,
}

impl Default for KataManagerConfig {
    fn default() -> Self {
        Self {
            artifacts_dir: "/opt/nvidia-gpu-operator/artifacts/runtimeclasses".to_owned(),
            runtime_classes: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KataRuntimeClass {
    #[serde(default)]
    #[schemars(!default)]
    pub name: String,
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    #[serde(default)]
    #[schemars(!default)]
    pub artifacts: KataArtifacts,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KataArtifacts {
    #[serde(default)]
    #[schemars(!default)]
    pub url: String,
    #[serde(default)]
    pub pull_secret: Option<String>,
}
