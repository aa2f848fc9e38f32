//! `GPUNode`: what one node has, what is asked of its agent, and what became of it.
//!
//! The agent creates the object when it sees a GPU. `spec` and `status.operator` are the operator's,
//! `status.agent` is the agent's; each applies only its own subtree. Users read it and never edit it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ResourceAlias, VgpuLayout, VgpuState, VgpuStatus};
use crate::{WorkloadMode, schema};

#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type of its own")]
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpuvirt.io",
    version = "v1alpha1",
    kind = "GPUNode",
    plural = "gpunodes",
    shortname = "gpun",
    category = "gpu",
    status = "GPUNodeStatus",
    doc = "What one node has of GPUs, what is asked of its agent, and what became of it.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.operator.ready"),
    printcolumn(name = "GPUs", type_ = "integer", json_path = ".status.agent.summary.gpus"),
    printcolumn(name = "In use", type_ = "integer", json_path = ".status.agent.summary.inUse"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.agent.summary.driver"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.operator.reason"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.operator.message", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [schema::rule(
    "!has(self.advertise) || self.advertise != 'Offered' || has(self.mode) || (has(self.gpus) && size(self.gpus) > 0)",
    "advertise: Offered needs a mode: nothing can be verified in no mode",
)]))]
pub struct GPUNodeSpec {
    /// Mode of every GPU that `gpus` does not name. Unset: the agent looks and changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<WorkloadMode>,
    /// Modes of single GPUs, by PCI address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["address"]))]
    pub gpus: Vec<GPUMode>,
    /// The vGPUs of the GPUs in mode `vm-vgpu`. Unset: those that exist stay, and none is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vgpu: Option<VgpuLayout>,
    /// Whether the agent may offer devices to the kubelet.
    #[serde(default)]
    pub advertise: Advertise,
    /// Resource names in place of those made from the PCI id table, as `GPUVirtConfig` has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["selector"]))]
    pub aliases: Vec<ResourceAlias>,
    /// Agent functions that the node's admin has switched off (`nvidia.com/gpu.deploy.<function>=false`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub disabled: Vec<AgentFunction>,
    /// How much the agent logs, as `GPUVirtConfig` has it; unset: as at its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub log_level: Option<String>,
    /// The operator's lease transitions when it wrote this. An agent refuses a lower one than it has executed,
    /// so that an operator that has lost its lease cannot drive a node.
    #[serde(default)]
    pub epoch: i64,
}

/// The mode of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUMode {
    /// PCI address, as in `0000:01:00.0`.
    #[schemars(regex(pattern = r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$"))]
    pub address: String,
    pub mode: WorkloadMode,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Advertise {
    /// Nothing new is handed out; devices that pods have stay theirs.
    #[default]
    Withdrawn,
    /// Devices that are verified in their mode are offered.
    Offered,
}

/// Functions of the agent, named by the peer's pods that they replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AgentFunction {
    VfioManager,
    SandboxDevicePlugin,
    SandboxValidator,
    VgpuDeviceManager,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUNodeStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<OperatorStatus>,
}

/// What the agent observes. Everything here is read from the kernel after the act.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// `metadata.generation` of the spec that this answers.
    #[serde(default)]
    pub observed_generation: i64,
    /// The agent's version.
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub summary: Summary,
    #[serde(default)]
    pub host: HostFacts,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["address"]))]
    pub gpus: Vec<GPUStatus>,
    /// How far the agent is with `spec.vgpu`. Unset while that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vgpu: Option<VgpuState>,
    /// What is registered with the kubelet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub resources: Vec<ResourceStatus>,
    /// What the agent would do now, or is doing, one sentence a step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plan: Vec<String>,
    /// PCI functions that could not be read, with the reason; the others are served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// The line that `kubectl get gpunodes` shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub gpus: i32,
    pub in_use: i32,
    /// The driver of all GPUs, `none`, or `mixed`.
    pub driver: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostFacts {
    /// `uname -r`.
    #[serde(default)]
    pub kernel: String,
    /// `uname -m`.
    #[serde(default)]
    pub architecture: String,
    /// `ID` and `VERSION_ID` of os-release, as in `ubuntu24.04`.
    #[serde(default)]
    pub os: String,
    /// Whether devices have IOMMU groups.
    #[serde(default)]
    pub iommu: bool,
    /// Whether `/dev/iommu` exists.
    #[serde(default)]
    pub iommufd: bool,
    /// Unset: the kernel module `nvidia` is not loaded, and the host has no driver of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<NvidiaDriver>,
}

/// The NVIDIA driver of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NvidiaDriver {
    /// Of the loaded module, as in `595.91.07`; empty while none is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    pub origin: DriverOrigin,
}

/// Whose the driver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriverOrigin {
    /// Installed on the host, and loaded: no driver pod is needed.
    Host,
    /// Installed on the host, and not loaded.
    HostIdle,
    /// The loaded module is not of the host's own driver: a driver pod's, or one that was left.
    Pod,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUStatus {
    /// PCI address of the GPU's primary function.
    pub address: String,
    /// Vendor and device id, as in `10de:1eb8`.
    pub id: String,
    /// Vendor and device id of its board, as in `10de:12a2`. Boards of one id may differ in this alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subsystem: Option<String>,
    /// PCI class, as in `0x030200`.
    #[serde(default)]
    pub class: String,
    /// Name from the PCI id table.
    #[serde(default)]
    pub product: String,
    /// The mode that the kernel shows, all of the group verified. Unset while it shows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<WorkloadMode>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iommu_group: Option<i32>,
    /// The other endpoint functions that go with this GPU: audio, USB, UCSI.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub companions: Vec<FunctionStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<i32>,
    /// The resource that it is offered under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    /// Who has it open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
    /// Its vGPUs, and how they are made. Unset where nobody asked for any and it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vgpu: Option<VgpuStatus>,
    /// Why it is in passthrough and not given out, while that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
    /// What is wrong with the device, the worst first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ailments: Vec<Ailment>,
    /// What stands in the way of modes that it is not in, holders aside: known before anything is touched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["mode"]))]
    pub obstacles: Vec<Obstacle>,
    /// Why it is not in the mode asked for, and the next step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
}

impl GPUStatus {
    /// Who has it open, or one of its vGPUs.
    pub fn all_holders(&self) -> impl Iterator<Item = &Holder> {
        let instances = self.vgpu.iter().flat_map(|vgpu| &vgpu.instances);
        self.holders.iter().chain(instances.flat_map(|instance| &instance.holders))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FunctionStatus {
    pub address: String,
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
}

/// A process that has a GPU open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// As the host sees it.
    pub pid: i32,
    pub command: String,
    /// The device node, as in `/dev/vfio/35`.
    pub path: String,
    /// UID of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The VM that it is: `namespace/name` of KubeVirt's, else as the hypervisor names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}

/// Why a GPU cannot be brought into a mode, and the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Obstacle {
    pub mode: WorkloadMode,
    /// One CamelCase word.
    pub reason: String,
    pub message: String,
}

/// Something that is wrong with a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ailment {
    /// One CamelCase word.
    pub reason: String,
    pub severity: Severity,
    /// Device, what was seen, next step.
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Severity {
    /// It is counted and not given out until it is well.
    Unhealthy,
    /// It serves, with less than it could or at a risk.
    Degraded,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// One CamelCase word.
    pub reason: String,
    /// Device, holder, next step.
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceStatus {
    pub name: String,
    /// Device ids offered: PCI addresses, or mdev UUIDs.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Whether the kubelet has accepted the registration.
    #[serde(default)]
    pub registered: bool,
}

/// How far the operator is with this node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OperatorStatus {
    /// The mode that the label (or the default) asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<WorkloadMode>,
    /// The mode that the node served last; it comes back if the next one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<WorkloadMode>,
    #[serde(default)]
    pub phase: NodePhase,
    /// `True` or `False`: the node serves its desired mode.
    #[serde(default)]
    pub ready: String,
    /// One CamelCase word.
    #[serde(default)]
    pub reason: String,
    /// A sentence for a person.
    #[serde(default)]
    pub message: String,
    /// Pods that the kubelet has given GPUs of this node to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["pod"]))]
    pub users: Vec<GPUUser>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// `status.operator.reason` of a node that the operator has left: the agent's end is for good.
pub const TORN_DOWN: &str = "TornDown";

/// A pod that has GPUs, and whose it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUUser {
    /// `namespace/name`.
    pub pod: String,
    /// `namespace/name` of the virtual machine instance that it is the launcher of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmi: Option<String>,
    /// PCI addresses; empty for one that has them by a promise that names none: a `ResourceClaim`, or `nvidia.com/gpu`.
    pub gpus: Vec<String>,
}

/// The order of a mode change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NodePhase {
    /// The node serves its mode; nothing changes.
    #[default]
    Steady,
    /// A change has its turn, or its users, to wait for: see the node's `GPUTransition`. The old mode serves.
    Waiting,
    /// The old mode's operands and advertisements are leaving.
    Withdrawing,
    /// The agent has been asked for the new mode.
    Switching,
    /// The agent refused; the old mode is back.
    Refused,
    /// Its driver is being renewed, and what uses that is paused: see the node's `GPUTransition`.
    Upgrading,
}
