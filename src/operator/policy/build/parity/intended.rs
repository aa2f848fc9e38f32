//! Where our operands differ from the peer's on purpose.

pub(super) struct Row {
    /// DaemonSet, `*` for any text.
    pub operand: &'static str,
    /// Field, `*` for any text.
    pub path: &'static str,
    #[expect(dead_code, reason = "for the reader")]
    pub reason: &'static str,
}

const fn row(operand: &'static str, path: &'static str, reason: &'static str) -> Row {
    Row { operand, path, reason }
}

pub(super) const INTENDED: &[Row] = &[
    row("*", "labels.app.kubernetes.io/*", "labels of ours: what is pruned, counted and shown by them"),
    row("*", "labels.gpuvirt.io/policy", "whose object it is"),
    row("*", "podLabels.app.kubernetes.io/*", "labels of ours: what is pruned, counted and shown by them"),
    row("*", "podLabels.gpuvirt.io/policy", "the pods of a node that changes its mode are found by it"),
    row("*", "initContainers[*-validation].image", "our program checks and waits"),
    row("*", "initContainers[*-validation].command", "our program checks and waits, and no shell"),
    row("*", "initContainers[*-validation].args", "our program checks and waits, and no shell"),
    row("*", "initContainers[*-validation].env[COMPONENT]", "the check is an argument"),
    row("*", "initContainers[*-validation].env[WITH_WAIT]", "each check has a deadline of its own"),
    row("*", "initContainers[*-validation].env[OPERATOR_NAMESPACE]", "no check starts pods"),
    row("nvidia-operator-validator", "initContainers[*-validation].env[VALIDATOR_*]", "no check starts pods"),
    row("nvidia-operator-validator", "initContainers[plugin-validation].env[WITH_WORKLOAD]", "no check starts pods"),
    row(
        "nvidia-operator-validator",
        "initContainers[plugin-validation].env[MIG_STRATEGY]",
        "every strategy's resources count",
    ),
    row("nvidia-operator-validator", "initContainers[cuda-validation].env[NODE_NAME]", "no check starts pods"),
    row(
        "nvidia-operator-validator",
        "initContainers[cuda-validation].env[NVIDIA_VISIBLE_DEVICES]",
        "it computes itself, on every GPU, in place of a pod that does on one",
    ),
    row("nvidia-operator-validator", "containers[nvidia-operator-validator].image", "our program holds the verdicts"),
    row("nvidia-operator-validator", "containers[nvidia-operator-validator].command", "our program holds the verdicts"),
    row("nvidia-operator-validator", "containers[nvidia-operator-validator].args", "our program holds the verdicts"),
    row(
        "nvidia-operator-validator",
        "containers[nvidia-operator-validator].lifecycle.*",
        "our program takes the verdicts back itself when it is told to stop",
    ),
    row("nvidia-driver-daemonset", "labels.gpuvirt.io/os", "for whose nodes it is, so that it keeps its name"),
    row(
        "nvidia-driver-daemonset",
        "nodeSelector.gpuvirt.io/os",
        "nodes of another system may join: a selector that came with them would make every pod out of date",
    ),
    row("nvidia-vgpu-manager-daemonset", "*abels.gpuvirt.io/os", "as with the driver"),
    row("nvidia-vgpu-manager-daemonset", "nodeSelector.gpuvirt.io/os", "as with the driver"),
    row(
        "nvidia-vgpu-manager-daemonset",
        "updateStrategy.*",
        "at its end it takes the virtual functions away under running VMs: it is renewed by hand",
    ),
    row("nvidia-vgpu-manager-daemonset", "initContainers.order", "prepare-driver is our k8s-driver-manager"),
    row("nvidia-vgpu-manager-daemonset", "initContainers[k8s-driver-manager].*", "prepare-driver does its work"),
    row("nvidia-vgpu-manager-daemonset", "initContainers[prepare-driver].*", "it needs no Kubernetes"),
    row("nvidia-vgpu-manager-daemonset", "volumes[host-sys]", "prepare-driver has the host's /sys below its root"),
    row("nvidia-vgpu-manager-daemonset", "volumes[vfio]", "the vfio module may be loaded later"),
    row("nvidia-cc-manager", "podLabels.app", "every pod of ours has it"),
    row(
        "nvidia-kata-sandbox-device-plugin-daemonset",
        "initContainers[vfio-pci-validation].mounts*",
        "the check writes its verdict itself",
    ),
    row("nvidia-driver-daemonset", "initContainers.order", "prepare-driver is our k8s-driver-manager"),
    row(
        "nvidia-driver-daemonset",
        "initContainers[k8s-driver-manager].*",
        "prepare-driver unloads what is left, and nothing else",
    ),
    row("nvidia-driver-daemonset", "initContainers[prepare-driver].*", "it evicts nobody and needs no Kubernetes"),
    row("nvidia-driver-daemonset", "*.env[DRIVER_CONFIG_DIGEST]", "a hash of our own"),
    row("nvidia-driver-daemonset", "volumes[host-sys]", "prepare-driver has the host's /sys below its root"),
    row("nvidia-driver-daemonset", "volumes[run-nvidia-validations]", "no container mounts it"),
];

/// Operands whose work our agent does on VM nodes.
pub(super) const DONE_BY_THE_AGENT: &[&str] = &[
    "nvidia-vfio-manager",
    "nvidia-sandbox-device-plugin-daemonset",
    "nvidia-sandbox-validator",
    "nvidia-vgpu-device-manager",
];

/// Operands that the peer does not have, or that were not recorded: the exporter of node status.
pub(super) const OURS: &[&str] = &["gpuvirt-agent", "nvidia-node-status-exporter"];
