//! The peer's `ClusterPolicy`, field by field (gpu-operator 26.7.0). No field here is ours.
//!
//! Where the peer's schema has a default, the field has that value when it is absent; elsewhere absence is kept, since what
//! it means is the reader's matter. Decoding is as forgiving as the API server: nulls count as absent, sections may be
//! missing although the schema requires them in new objects, and fields that only older versions had are passed over.

mod component;
mod container_stack;
mod daemonsets;
mod dcgm;
mod driver;
mod monitoring;
mod operator;
mod sandbox;
mod status;
mod upgrade;
mod validator;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use serde_json::Value;

pub use self::{
    component::*, container_stack::*, daemonsets::*, dcgm::*, driver::*, monitoring::*, operator::*, sandbox::*,
    status::*, upgrade::*, validator::*,
};
use crate::json;

/// Sections that the peer's schema requires in a new object.
const REQUIRED_SECTIONS: [&str; 9] = [
    "daemonsets",
    "dcgm",
    "dcgmExporter",
    "devicePlugin",
    "driver",
    "gfd",
    "nodeStatusExporter",
    "operator",
    "toolkit",
];

#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type of its own")]
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "nvidia.com",
    version = "v1",
    kind = "ClusterPolicy",
    plural = "clusterpolicies",
    status = "ClusterPolicyStatus",
    doc = "What of the GPU stack runs in the cluster, and how. The oldest object counts.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "string", json_path = ".metadata.creationTimestamp")
)]
// serde's own functions stay inherent, so that the traits below can put the forgiving step before them.
#[serde(remote = "Self", default, rename_all = "camelCase")]
#[schemars(!remote, extend("required" = REQUIRED_SECTIONS))]
pub struct ClusterPolicySpec {
    /// The peer's operator itself, and the RuntimeClass that operands use.
    pub operator: Operator,
    /// What all operand DaemonSets share.
    pub daemonsets: Daemonsets,
    /// The NVIDIA driver of container nodes.
    pub driver: Driver,
    /// Makes the container runtime able to run GPU containers.
    pub toolkit: Toolkit,
    /// Offers GPUs of container nodes to the kubelet.
    pub device_plugin: DevicePlugin,
    /// The engine that reads GPU metrics, as a pod of its own.
    pub dcgm: Dcgm,
    /// GPU metrics for Prometheus.
    pub dcgm_exporter: DcgmExporter,
    /// Metrics about the state of a node's GPU stack.
    pub node_status_exporter: Component,
    /// GPU feature discovery: labels that describe a node's GPUs.
    pub gfd: Component,
    /// Slices of one GPU for containers.
    pub mig: Mig,
    /// Sets up MIG layouts by node label.
    pub mig_manager: MigManager,
    /// Removed from Kubernetes in 1.25; accepted and without effect.
    pub psp: Psp,
    /// Whether the operator labels its namespace for privileged pods.
    pub psa: Psa,
    /// The checks that each stage of a node's stack waits for.
    pub validator: Validator,
    /// GPUDirect Storage, in the driver pod.
    pub gds: DriverSidecar,
    /// Copies from GPU memory by the CPU, in the driver pod.
    pub gdrcopy: DriverSidecar,
    /// Whether GPUs may go to virtual machines, and what nodes do by default.
    pub sandbox_workloads: SandboxWorkloads,
    /// Binds whole GPUs to vfio-pci.
    pub vfio_manager: VfioManager,
    /// Offers GPUs of VM nodes to the kubelet, for KubeVirt.
    pub sandbox_device_plugin: Component,
    /// Offers GPUs of VM nodes to the kubelet, for Kata containers.
    pub kata_sandbox_device_plugin: Component,
    /// The host driver that slices GPUs for virtual machines.
    pub vgpu_manager: VgpuManager,
    /// Creates vGPUs by node label.
    pub vgpu_device_manager: VgpuDeviceManager,
    /// Container Device Interface.
    pub cdi: Cdi,
    /// Deprecated by the peer, which only cleans up after it.
    pub kata_manager: KataManager,
    /// Confidential computing of GPUs.
    pub cc_manager: CcManager,
    /// Where things are on the host.
    pub host_paths: HostPaths,
}

impl<'de> Deserialize<'de> for ClusterPolicySpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // `Option` also takes an object that has no spec at all.
        let Some(written) = Option::<Value>::deserialize(deserializer)? else {
            return Ok(Self::default());
        };
        Self::deserialize(json::without_nulls(written)).map_err(de::Error::custom)
    }
}

impl Serialize for ClusterPolicySpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = Self::serialize(self, serde_json::value::Serializer).map_err(ser::Error::custom)?;
        json::without_empty(all).serialize(serializer)
    }
}
