//! The peer's `NVIDIADriver` (nvidia.com/v1alpha1, gpu-operator 26.7.0): a driver for the nodes that it selects, in place
//! of the one driver of a `ClusterPolicy`. No field here is ours.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{NodeAffinity, PodSecurityContext, Toleration},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use serde_json::Value;

use crate::{
    json, schema,
    v1::{
        ConfigMapName, Container, ContainerProbe, Drain, DriverManager, DriverSidecar, GpuDirectRdma, KernelModuleType,
        PodDeletion, UpgradePolicy, WaitForCompletion,
    },
};

#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type of its own")]
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "nvidia.com",
    version = "v1alpha1",
    kind = "NVIDIADriver",
    plural = "nvidiadrivers",
    shortname = "nvd",
    shortname = "nvdriver",
    shortname = "nvdrivers",
    status = "NVIDIADriverStatus",
    doc = "An NVIDIA driver for the nodes that it selects.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Default", type_ = "boolean", json_path = ".spec.default"),
    printcolumn(name = "Age", type_ = "string", json_path = ".metadata.creationTimestamp")
)]
// serde's own functions stay inherent, so that the traits below can put the forgiving step before them.
#[serde(remote = "Self", default, rename_all = "camelCase")]
#[schemars(!remote, extend(
    "required" = ["default", "driverType"],
    "x-kubernetes-validations" = [schema::rule(
        "has(self.default) && self.default ? !has(self.nodeSelector) || size(self.nodeSelector) == 0 : true",
        "a default NVIDIADriver takes the nodes that no other one selects: it must not have a nodeSelector",
    )],
))]
pub struct NVIDIADriverSpec {
    /// What kind of driver the image has.
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("driverType")]))]
    pub driver_type: DriverType,
    /// Whether it takes the nodes that no other one selects.
    pub default: bool,
    /// Whether the image has modules for the node's very kernel.
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("usePrecompiled")]))]
    pub use_precompiled: Option<bool>,
    #[serde(flatten)]
    pub container: Container,
    pub kernel_module_type: KernelModuleType,
    /// Deprecated: see `kernelModuleType`.
    pub use_open_kernel_modules: Option<bool>,
    pub startup_probe: Option<ContainerProbe>,
    pub liveness_probe: Option<ContainerProbe>,
    pub readiness_probe: Option<ContainerProbe>,
    pub rdma: GpuDirectRdma,
    pub gds: DriverSidecar,
    pub gdrcopy: DriverSidecar,
    pub manager: DriverManager,
    /// ConfigMap with package repositories, mounted in the driver container.
    pub repo_config: ConfigMapName,
    /// ConfigMap with CA certificates of those repositories.
    pub cert_config: ConfigMapName,
    pub licensing_config: DriverLicensing,
    /// ConfigMap with the vGPU topology daemon's configuration.
    pub virtual_topology_config: ConfigMapName,
    /// ConfigMap with kernel module parameters.
    pub kernel_module_config: ConfigMapName,
    /// Secret whose keys become environment variables.
    pub secret_env: Option<String>,
    /// Labels of the nodes that it is for; empty: all GPU nodes.
    pub node_selector: BTreeMap<String, String>,
    #[schemars(schema_with = "schema::node_affinity")]
    pub node_affinity: Option<NodeAffinity>,
    #[schemars(schema_with = "schema::tolerations")]
    pub tolerations: Vec<Toleration>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub priority_class_name: Option<String>,
    #[schemars(schema_with = "schema::pod_security_context")]
    pub pod_security_context: Option<PodSecurityContext>,
    pub upgrade_policy: DriverUpgradePolicy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DriverType {
    /// The data centre driver.
    #[default]
    Gpu,
    /// The guest driver of vGPUs, with a licence.
    Vgpu,
    /// The host driver that slices GPUs.
    VgpuHostManager,
}

impl DriverType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Vgpu => "vgpu",
            Self::VgpuHostManager => "vgpu-host-manager",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DriverLicensing {
    /// Deprecated: tokens belong in the secret. Name of a ConfigMap.
    pub name: Option<String>,
    pub secret_name: Option<String>,
    pub nls_enabled: Option<bool>,
}

/// [`UpgradePolicy`], which is on unless it is said otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DriverUpgradePolicy {
    pub auto_upgrade: bool,
    /// Nodes at once; 0 is no limit.
    pub max_parallel_upgrades: u64,
    /// GPU nodes that may be unavailable at once, as a count or a share, rounded up.
    pub max_unavailable: k8s_openapi::apimachinery::pkg::util::intstr::IntOrString,
    pub pod_deletion: PodDeletion,
    pub wait_for_completion: WaitForCompletion,
    pub drain: Drain,
}

impl Default for DriverUpgradePolicy {
    fn default() -> Self {
        let UpgradePolicy { max_parallel_upgrades, max_unavailable, pod_deletion, wait_for_completion, drain, .. } =
            UpgradePolicy::default();
        Self { auto_upgrade: true, max_parallel_upgrades, max_unavailable, pod_deletion, wait_for_completion, drain }
    }
}

impl<'de> Deserialize<'de> for NVIDIADriverSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // `Option` also takes an object that has no spec at all.
        let Some(written) = Option::<Value>::deserialize(deserializer)? else {
            return Ok(Self::default());
        };
        Self::deserialize(json::without_nulls(written)).map_err(de::Error::custom)
    }
}

impl Serialize for NVIDIADriverSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = Self::serialize(self, serde_json::value::Serializer).map_err(ser::Error::custom)?;
        json::without_empty(all).serialize(serializer)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("required" = ["state"]))]
pub struct NVIDIADriverStatus {
    /// Unset only in an object that nobody has answered yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<DriverState>,
    /// Namespace of the driver's pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, deserialize_with = "crate::json::or_default", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// `disabled`: the `ClusterPolicy` has a driver section of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum DriverState {
    Ignored,
    Ready,
    NotReady,
    Disabled,
}
