//! The NVIDIA driver of container nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Component, ConfigMapName, DriverManager, UpgradePolicy};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Driver {
    #[serde(flatten)]
    pub component: Component,
    /// Whether `NVIDIADriver` objects describe the driver in place of this section.
    #[serde(rename = "useNvidiaDriverCRD")]
    pub use_nvidia_driver_crd: Option<bool>,
    pub kernel_module_type: KernelModuleType,
    /// Deprecated: see `kernelModuleType`.
    pub use_open_kernel_modules: Option<bool>,
    /// Whether the image has modules for the node's very kernel.
    pub use_precompiled: Option<bool>,
    pub manager: DriverManager,
    #[serde(rename = "rdma")]
    pub gpu_direct_rdma: GpuDirectRdma,
    pub startup_probe: Option<ContainerProbe>,
    pub liveness_probe: Option<ContainerProbe>,
    pub readiness_probe: Option<ContainerProbe>,
    pub upgrade_policy: UpgradePolicy,
    /// ConfigMap with package repositories, mounted in the driver container.
    pub repo_config: RepoConfig,
    /// ConfigMap with CA certificates of those repositories.
    pub cert_config: ConfigMapName,
    pub licensing_config: LicensingConfig,
    /// ConfigMap with the vGPU topology daemon's configuration.
    pub virtual_topology: VirtualTopology,
    /// ConfigMap with kernel module parameters.
    pub kernel_module_config: ConfigMapName,
    /// Secret whose keys become environment variables.
    pub secret_env: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KernelModuleType {
    #[default]
    Auto,
    Open,
    Proprietary,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct GpuDirectRdma {
    pub enabled: Option<bool>,
    /// Whether the network driver is installed on the host.
    pub use_host_mofed: Option<bool>,
}

/// The times of a probe; what is probed is the operand's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ContainerProbe {
    pub initial_delay_seconds: Option<i32>,
    #[schemars(range(min = 1))]
    pub timeout_seconds: Option<i32>,
    #[schemars(range(min = 1))]
    pub period_seconds: Option<i32>,
    #[schemars(range(min = 1))]
    pub success_threshold: Option<i32>,
    #[schemars(range(min = 1))]
    pub failure_threshold: Option<i32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RepoConfig {
    pub config_map_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct LicensingConfig {
    /// Deprecated: tokens belong in the secret.
    pub config_map_name: Option<String>,
    pub secret_name: Option<String>,
    pub nls_enabled: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct VirtualTopology {
    pub config: Option<String>,
}
