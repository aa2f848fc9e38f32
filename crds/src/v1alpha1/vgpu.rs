//! vGPUs in a [`GPUNode`](super::GPUNode): the layout that is asked of the agent, and what it found of it.
//!
//! The operator reads config files, filters and indices and writes addresses; the agent gets only this.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Holder;

/// The vGPUs that a node shall have. A GPU in mode `vm-vgpu` that is not named here shall have none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuLayout {
    /// Name of the config that it was made from, as in the label `nvidia.com/vgpu.config`.
    pub name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["address"]))]
    pub gpus: Vec<GPUVgpus>,
}

/// The vGPUs of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUVgpus {
    /// PCI address of the physical GPU, as in `0000:01:00.0`.
    #[schemars(regex(pattern = r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$"))]
    pub address: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub instances: Vec<VgpuCount>,
}

/// How many vGPUs of a type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuCount {
    /// As config files have it, e.g. `A10-4Q` or `H100-1-10CME`: compared whole with the last word of the kernel's name
    /// (`NVIDIA A10-4Q`, `NVIDIA RTX Pro 6000 Blackwell DC-48C`).
    #[serde(rename = "type")]
    #[schemars(length(min = 1))]
    pub kind: String,
    #[schemars(range(min = 0))]
    pub count: i32,
}

/// How far the agent is with the layout.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuState {
    /// [`VgpuLayout::name`] of the layout that this is about.
    pub config: String,
    pub state: VgpuProgress,
    /// Device, holder and next step where `state` is `failed`; what is awaited where it is `pending`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Values of the label `nvidia.com/vgpu.config.state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VgpuProgress {
    /// The layout is being applied, or waits for a driver or for virtual functions.
    #[default]
    Pending,
    /// The kernel shows the layout on every GPU.
    Success,
    /// At least one GPU does not have its layout, and waiting alone will not give it.
    Failed,
}

/// What a GPU offers of vGPUs, and which it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuStatus {
    #[serde(default)]
    pub framework: VgpuFramework,
    /// Why `framework` is `None`: one CamelCase word.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The same for a person, with the next step.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// What the driver knows for this GPU. At most 256 are listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub types: Vec<VgpuTypeStatus>,
    /// What the driver's library (NVML) says beyond that. Unset: it was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<VgpuLibrary>,
    /// What exists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub instances: Vec<VgpuInstance>,
}

/// What only the driver's library knows of a GPU. Unset is what it does not say, or what the board does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuLibrary {
    /// MIG mode, which has MIG-backed types only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// Whether vGPUs may differ in framebuffer size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heterogeneous: Option<bool>,
    /// Whether a display is connected or driven.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc: Option<bool>,
    /// Profiles of its GPU instances, as in `1g.5gb`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_instances: Vec<String>,
    /// Why it says nothing, or not all: one CamelCase word.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The same for a person.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// How the host's driver makes vGPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VgpuFramework {
    /// It makes none.
    #[default]
    None,
    /// Mediated devices.
    Mdev,
    /// Types of virtual functions (NVIDIA vGPU 17 on Linux 6.8 and newer).
    VendorVfio,
}

/// A vGPU type of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuTypeStatus {
    /// As in [`VgpuCount::kind`].
    pub name: String,
    /// The most that the kernel would still make now. With virtual functions each counts for itself, so that the GPU's
    /// memory may end before.
    pub available: i32,
}

/// A vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VgpuInstance {
    /// UUID of a mediated device, or PCI address of a virtual function: what the kubelet and KubeVirt know it by.
    pub id: String,
    /// As in [`VgpuCount::kind`].
    #[serde(rename = "type")]
    pub kind: String,
    /// The resource that it is offered under, e.g. `nvidia.com/NVIDIA_A10-4Q`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    /// PCI function that it is made from: the GPU itself, or a virtual function.
    pub parent: String,
    /// Who has it open, or was given it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
    /// The VM that runs with it: `namespace/name` of KubeVirt's, or the id that the driver knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}
