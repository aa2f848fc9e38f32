//! What is told of GPUs.

use super::super::NODE;
use crate::telemetry::{Described, Unit};

const GPU: &[&str] = &["node", "gpu"];
pub const ALL_GPUS: Described = Described::gauge("gpuvirt_gpus", NODE, Unit::Count, "GPUs of this node");
pub const IN_USE: Described =
    Described::gauge("gpuvirt_gpus_in_use", NODE, Unit::Count, "GPUs that a process or a pod has");
pub const UNHEALTHY: Described = Described::gauge(
    "gpuvirt_gpus_unhealthy",
    NODE,
    Unit::Count,
    "GPUs that are not given out because of their health",
);
pub const INFO: Described = Described::gauge(
    "gpuvirt_gpu_info",
    &["node", "gpu", "id", "product", "driver", "mode", "resource"],
    Unit::Info,
    "What a GPU is, the driver that has it (`none`), the mode that the kernel shows (`none`), and the resource that it is offered under in mode vm-passthrough",
);
pub const GPU_IN_USE: Described = Described::gauge(
    "gpuvirt_gpu_in_use",
    GPU,
    Unit::Flag,
    "Whether a process or a pod has the GPU, or one of its vGPUs",
);
pub const HEALTHY: Described = Described::gauge(
    "gpuvirt_gpu_healthy",
    GPU,
    Unit::Flag,
    "Whether the GPU's health lets it be given out; `gpuvirt_gpu_ailment` says what it lacks",
);
pub const AILMENT: Described = Described::gauge(
    "gpuvirt_gpu_ailment",
    &["node", "gpu", "reason", "severity"],
    Unit::Info,
    "Something that is wrong with the GPU, while it is; `Unhealthy` keeps it from being given out, `Degraded` does not",
);
pub const REFUSED: Described = Described::gauge(
    "gpuvirt_gpu_refused",
    &["node", "gpu", "reason"],
    Unit::Info,
    "Why the GPU is not in the mode that is asked for, while that is so",
);
pub const WITHHELD: Described = Described::gauge(
    "gpuvirt_gpu_withheld",
    GPU,
    Unit::Flag,
    "Whether the GPU is in mode vm-passthrough and nevertheless not given out; its GPUNode says why",
);
pub const VGPUS: Described =
    Described::gauge("gpuvirt_gpu_vgpus", &["node", "gpu", "type"], Unit::Count, "vGPUs of the GPU, by their type");
pub const LINK_LANES: Described =
    Described::gauge("gpuvirt_gpu_link_lanes", GPU, Unit::Lanes, "Width of the PCIe link now");
pub const LINK_LANES_MAX: Described =
    Described::gauge("gpuvirt_gpu_link_lanes_max", GPU, Unit::Lanes, "Width of the PCIe link that the GPU is made for");
pub const LINK_SPEED: Described = Described::gauge(
    "gpuvirt_gpu_link_transfers_per_second",
    GPU,
    Unit::Transfers,
    "Speed of the PCIe link now; an idle GPU lowers it to save power",
);
pub const LINK_SPEED_MAX: Described = Described::gauge(
    "gpuvirt_gpu_link_transfers_per_second_max",
    GPU,
    Unit::Transfers,
    "Speed of the PCIe link that the GPU is made for",
);
pub const ERRORS: Described = Described::counter(
    "gpuvirt_gpu_pcie_errors",
    &["node", "gpu", "severity"],
    "Errors of the PCIe bus that the GPU has reported since boot (AER): `correctable`, `nonfatal` or `fatal`",
);
pub const POWER: Described = Described::gauge(
    "gpuvirt_gpu_power_state",
    &["node", "gpu", "state"],
    Unit::Info,
    "The GPU's power state as the kernel has it, `D0` to `D3cold` or `unknown`",
);
pub const VM: Described = Described::gauge(
    "gpuvirt_gpu_vm_info",
    &["node", "gpu", "namespace", "name"],
    Unit::Info,
    "The virtual machine instance that has the GPU, or a vGPU of it; `namespace` and `name` are those of KubeVirt's own metrics",
);
pub const POD: Described = Described::gauge(
    "gpuvirt_gpu_pod_info",
    &["node", "gpu", "namespace", "pod"],
    Unit::Info,
    "The pod that the kubelet has given the GPU to, or a vGPU of it; that of a virtual machine is its launcher",
);
pub const DEVICES: Described = Described::gauge(
    "gpuvirt_resource_devices",
    &["node", "resource"],
    Unit::Count,
    "GPUs or vGPUs that the kubelet is told of under this name",
);
pub const DEVICES_HEALTHY: Described = Described::gauge(
    "gpuvirt_resource_devices_healthy",
    &["node", "resource"],
    Unit::Count,
    "Those of them that it may give out",
);
pub const REGISTERED: Described = Described::gauge(
    "gpuvirt_resource_registered",
    &["node", "resource"],
    Unit::Flag,
    "Whether the kubelet has accepted the resource and reads its list",
);

#[cfg(test)]
pub const ALL: &[Described] = &[
    ALL_GPUS,
    IN_USE,
    UNHEALTHY,
    INFO,
    GPU_IN_USE,
    HEALTHY,
    AILMENT,
    REFUSED,
    WITHHELD,
    VGPUS,
    LINK_LANES,
    LINK_LANES_MAX,
    LINK_SPEED,
    LINK_SPEED_MAX,
    ERRORS,
    POWER,
    VM,
    POD,
    DEVICES,
    DEVICES_HEALTHY,
    REGISTERED,
];
