//! Every label and annotation key of the contract, and the resource names that are not ours, once.
//!
//! `nvidia.com/…` keys are those that users of NVIDIA's GPU Operator know; `gpuvirt.io/…` keys are ours.

/// A node's workload mode: `container`, `vm-passthrough` or `vm-vgpu`. Written by the user.
pub const WORKLOAD_CONFIG: &str = "nvidia.com/gpu.workload.config";
/// `"true"` on nodes with an NVIDIA GPU. Written by the operator.
pub const GPU_PRESENT: &str = "nvidia.com/gpu.present";
/// Prefix of the gates that operands' node selectors use.
pub const DEPLOY_PREFIX: &str = "nvidia.com/gpu.deploy.";
/// `"false"` keeps every operand off the node. Written by the user.
pub const DEPLOY_OPERANDS: &str = "nvidia.com/gpu.deploy.operands";
/// `"false"` leaves the node's vGPUs to others. Written by the user.
pub const DEPLOY_VGPU_DEVICE_MANAGER: &str = "nvidia.com/gpu.deploy.vgpu-device-manager";
/// Name of a node's vGPU layout. Written by the user.
pub const VGPU_CONFIG: &str = "nvidia.com/vgpu.config";
/// `pending`, `success` or `failed`: how far the node is with its vGPU layout. Written by the operator.
pub const VGPU_CONFIG_STATE: &str = "nvidia.com/vgpu.config.state";
/// MIG-capable nodes get the MIG manager. Written by GPU feature discovery.
pub const MIG_CAPABLE: &str = "nvidia.com/mig.capable";
/// A node's MIG layout, by name. Written by the user, and by the operator where the policy has a default.
pub const MIG_CONFIG: &str = "nvidia.com/mig.config";
/// Written by the MIG manager: `pending`, `success`, `failed`.
pub const MIG_CONFIG_STATE: &str = "nvidia.com/mig.config.state";
/// Which of its configurations the device plugin uses there.
pub const DEVICE_PLUGIN_CONFIG: &str = "nvidia.com/device-plugin.config";
/// The GPU's marketing name. Written by GPU feature discovery.
pub const GPU_PRODUCT: &str = "nvidia.com/gpu.product";
/// Written by GPU feature discovery where a vGPU host driver runs: no MIG manager there.
pub const VGPU_HOST_DRIVER_VERSION: &str = "nvidia.com/vgpu.host-driver-version";

/// NFD's labels that hint at an NVIDIA GPU. Hints only: the proof is a `GPUNode`.
pub const NFD_HINTS: [&str; 3] = [
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
];

/// A node's operating system as driver images are tagged, as in `ubuntu24.04`. Written by the operator from the agent's
/// report, and on driver DaemonSets: for whom each one is.
pub const OS: &str = "gpuvirt.io/os";
/// A node's kernel version, with `_` for what a label may not have. Written by the operator from the agent's report.
pub const KERNEL: &str = "gpuvirt.io/kernel";
/// The `NVIDIADriver` that a node belongs to. Written by the operator.
pub const DRIVER_OWNER: &str = "nvidia.com/gpu-operator.driver.owner";
/// On driver DaemonSets: the `NVIDIADriver` that asked for it.
pub const NVIDIA_DRIVER: &str = "gpuvirt.io/nvidia-driver";
/// Tells the pods of driver DaemonSets apart that share a value of `app`.
pub const DRIVER_POOL: &str = "gpuvirt.io/driver-pool";
/// On every object that the operator applies: which ClusterPolicy asked for it.
pub const POLICY: &str = "gpuvirt.io/policy";
/// `"true"` on a pod of the vGPU host driver while VMs have vGPUs of its node: it is not deleted, and not evicted.
pub const VGPUS_IN_USE: &str = "gpuvirt.io/vgpus-in-use";
/// Annotation beside it: who has them.
pub const VGPU_USERS: &str = "gpuvirt.io/vgpu-users";
/// Annotation `"true"` on such a pod: it may go all the same. Written by the user.
pub const ALLOW_DELETE: &str = "gpuvirt.io/allow-delete";
/// Annotation on applied objects: hash of what was applied last.
pub const APPLIED_HASH: &str = "gpuvirt.io/applied-hash";
/// Annotation on a ClusterPolicy: give up waiting for VMs when it is deleted.
pub const FORCE_TEARDOWN: &str = "gpuvirt.io/force-teardown";
/// Finalizer on a ClusterPolicy: operands leave in order, and not under a running VM.
pub const TEARDOWN_FINALIZER: &str = "gpuvirt.io/teardown";
/// Annotation on a node: the deploy keys that the operator has set there, so that it removes only its own.
pub const MANAGED_DEPLOY: &str = "gpuvirt.io/managed-deploy-labels";
/// Annotation on a node: closed for new pods by a change of ours, named here, which opens it again.
pub const CORDONED: &str = "gpuvirt.io/cordoned";
/// Annotation on a node, `"true"`: no change of it begins. Written by the user.
pub const PAUSE: &str = "gpuvirt.io/pause";
/// Annotation on a node, `"true"`: a change is planned, shown in its `GPUTransition`, and not made. Written by the user.
pub const DRY_RUN: &str = "gpuvirt.io/dry-run";
/// How far the node's driver upgrade is, in the words of NVIDIA's operator. Written by the operator.
pub const UPGRADE_STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
/// `"true"` on a node: its driver is not upgraded. Written by the user.
pub const UPGRADE_SKIP: &str = "nvidia.com/gpu-driver-upgrade.skip";
/// `"true"` on a pod: a drain for a driver upgrade leaves it. Written by the user.
pub const UPGRADE_DRAIN_SKIP: &str = "nvidia.com/gpu-driver-upgrade-drain.skip";
/// Annotation on a node: its driver pod waits to load the driver until this is taken away. Written by that pod.
pub const UPGRADE_SAFE_LOAD: &str = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load";
/// Annotation on a node: its driver pod is to be renewed, also if it is the newest. Written by the user.
pub const UPGRADE_REQUESTED: &str = "nvidia.com/gpu-driver-upgrade-requested";
/// Annotation, `true` where the operator renews the driver: whoever brings it up has nobody to evict.
pub const UPGRADE_ENABLED: &str = "nvidia.com/gpu-driver-upgrade-enabled";
/// Value of a deploy label: the operand is kept away while the driver under it is renewed.
pub const PAUSED_FOR_UPGRADE: &str = "paused-for-driver-upgrade";
/// On pods of a DaemonSet: which revision of it they are.
pub const CONTROLLER_REVISION_HASH: &str = "controller-revision-hash";
/// Annotation on a KubeVirt or `HyperConverged` object: the entries of its `permittedHostDevices` that are ours, as in
/// `10DE:1EB8=nvidia.com/TU104GL_TESLA_T4`, separated by commas.
pub const PERMITTED_HOST_DEVICES: &str = "gpuvirt.io/permitted-host-devices";
/// `"true"` beside it: the whole field was unset before our first entry, and is unset again after our last.
pub const PERMITTED_WAS_UNSET: &str = "gpuvirt.io/permitted-host-devices-was-unset";

/// `"true"` on a KubeVirt or `HyperConverged` object: we have told it to make no mediated devices.
pub const MEDIATED_DEVICES_OFF: &str = "gpuvirt.io/mediated-devices-off";

/// Field manager of everything that the operator applies.
pub const OPERATOR_MANAGER: &str = "gpuvirt.io/operator";
/// Field manager of `GPUNode.status.agent`.
pub const AGENT_MANAGER: &str = "gpuvirt.io/agent";

/// On the Deployment of NVIDIA's operator: how many replicas it had when it was taken over.
pub const TAKEN_OVER_REPLICAS: &str = "gpuvirt.io/taken-over-replicas";

pub const APP: &str = "app";
pub const APP_NAME: &str = "app.kubernetes.io/name";
pub const APP_COMPONENT: &str = "app.kubernetes.io/component";
pub const APP_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub const APP_PART_OF: &str = "app.kubernetes.io/part-of";

/// Whether NVIDIA's own device plugin owns this extended resource: whole GPUs, shared ones, MIG devices.
pub fn is_container_resource(resource: &str) -> bool {
    let Some(name) = resource.strip_prefix("nvidia.com/") else { return false };
    name == "gpu" || name.starts_with("mig-") || name.ends_with(".shared")
}
