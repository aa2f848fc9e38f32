//! The deploy labels of each mode: which operands a node asks for.
//!
//! The tables are those that users of NVIDIA's operator know (gpu-operator 26.7 node labelling), so that selectors and
//! dashboards keep working; functions that our agent performs keep their keys, and `=false` switches them off.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentFunction, DriverOrigin, HostFacts},
};

use crate::operator::{
    host::{label_value, os_tag},
    transition::Pause,
};

/// What is run on vm-passthrough nodes: KubeVirt VMs, or Kata containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    #[default]
    KubeVirt,
    Kata,
}

const CONTAINER: &[&str] = &[
    "client",
    "container-toolkit",
    "dcgm",
    "dcgm-exporter",
    DEVICE_PLUGIN,
    "driver",
    "gpu-feature-discovery",
    "node-status-exporter",
    "operator-validator",
];
const PASSTHROUGH_KUBEVIRT: &[&str] =
    &["cc-manager", "client", "kata-manager", "sandbox-device-plugin", "sandbox-validator", "vfio-manager"];
const PASSTHROUGH_KATA: &[&str] =
    &["cc-manager", "client", "kata-manager", "kata-sandbox-device-plugin", "sandbox-validator", "vfio-manager"];
const VGPU: &[&str] =
    &["cc-manager", "client", "sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager", "vgpu-manager"];
/// The gate of the checks.
pub const VALIDATOR: &str = "nvidia.com/gpu.deploy.operator-validator";
/// The peer's word for a node whose driver is its host's.
pub const PRE_INSTALLED: &str = "pre-installed";
pub const MIG_MANAGER: &str = "mig-manager";
pub const DEVICE_PLUGIN: &str = "device-plugin";

/// Suffixes of `nvidia.com/gpu.deploy.` that nodes of this mode carry, without the MIG manager.
fn table(mode: WorkloadMode, sandbox: SandboxMode) -> &'static [&'static str] {
    match (mode, sandbox) {
        (WorkloadMode::Container, _) => CONTAINER,
        (WorkloadMode::VmPassthrough, SandboxMode::KubeVirt) => PASSTHROUGH_KUBEVIRT,
        (WorkloadMode::VmPassthrough, SandboxMode::Kata) => PASSTHROUGH_KATA,
        (WorkloadMode::VmVgpu, _) => VGPU,
    }
}

/// All keys that a node of this mode carries.
pub fn wanted(mode: WorkloadMode, sandbox: SandboxMode, node: &BTreeMap<String, String>) -> Vec<String> {
    let mig = mode == WorkloadMode::Container && mig_capable(node);
    table(mode, sandbox).iter().copied().chain(mig.then_some(MIG_MANAGER)).map(key).collect()
}

/// Every key of any table: what the operator may remove.
pub fn known() -> impl Iterator<Item = String> {
    let mut suffixes: Vec<&str> = [CONTAINER, PASSTHROUGH_KUBEVIRT, PASSTHROUGH_KATA, VGPU, &[MIG_MANAGER]].concat();
    suffixes.sort_unstable();
    suffixes.dedup();
    suffixes.into_iter().map(key)
}

/// The gate of the operand that gives the GPUs their driver.
pub fn main_gate(mode: WorkloadMode) -> String {
    key(match mode {
        WorkloadMode::Container => "driver",
        WorkloadMode::VmPassthrough => "vfio-manager",
        WorkloadMode::VmVgpu => "vgpu-manager",
    })
}

fn key(suffix: &str) -> String {
    format!("{}{suffix}", labels::DEPLOY_PREFIX)
}

/// What the host runs, for the selectors of driver DaemonSets. A host that has not said it keeps the labels that it has.
pub fn host(node: &BTreeMap<String, String>, host: &HostFacts) -> impl Iterator<Item = (String, Option<String>)> {
    let marks = [(labels::OS, label_value(&os_tag(&host.os))), (labels::KERNEL, label_value(&host.kernel))];
    let differs = |(key, value): &(&str, String)| !value.is_empty() && node.get(*key) != Some(value);
    marks.into_iter().filter(differs).map(|(key, value)| (key.to_owned(), Some(value))).collect::<Vec<_>>().into_iter()
}

/// The label of a MIG layout that a container node gets because it has none. It goes with the policy, unless somebody else
/// has written it since.
pub fn mig_layout(
    mode: WorkloadMode,
    node: &BTreeMap<String, String>,
    default: Option<&'static str>,
) -> Option<(String, Option<String>)> {
    let default = default.filter(|_| mode == WorkloadMode::Container && mig_capable(node))?;
    let labelled = node.get(labels::MIG_CONFIG).is_some_and(|value| !value.is_empty());
    (!labelled).then(|| (labels::MIG_CONFIG.to_owned(), Some(default.to_owned())))
}

/// A vGPU host is none; else what GPU feature discovery says; else what the product's name tells.
fn mig_capable(node: &BTreeMap<String, String>) -> bool {
    if node.get(labels::VGPU_HOST_DRIVER_VERSION).is_some_and(|v| !v.is_empty()) {
        return false;
    }
    match node.get(labels::MIG_CAPABLE) {
        Some(value) => value == "true",
        None => node.get(labels::GPU_PRODUCT).is_some_and(|product| {
            let product = product.to_lowercase();
            ["h100", "a100", "a30"].iter().any(|name| product.contains(name))
        }),
    }
}

/// Label changes (`None` removes) that bring the node's deploy keys to exactly `keys`.
///
/// An admin's `false` survives every change, and so does any other value on a key that stays
/// (`paused-for-driver-upgrade`, `pre-installed`); an empty value counts as absent, since driver managers leave it behind.
pub fn patch(node: &BTreeMap<String, String>, keys: &[String]) -> BTreeMap<String, Option<String>> {
    let mut changes = BTreeMap::new();
    for key in keys {
        if node.get(key).is_none_or(String::is_empty) {
            changes.insert(key.clone(), Some("true".to_owned()));
        }
    }
    for key in known().filter(|key| !keys.contains(key)) {
        if node.get(&key).is_some_and(|value| value != "false") {
            changes.insert(key, None);
        }
    }
    changes
}

/// The driver's gate on a node whose host has a driver of its own: no driver pod, where one would be sent. And back, once
/// the host has none any more.
pub fn preinstalled(
    node: &BTreeMap<String, String>,
    keys: &[String],
    driver: Option<DriverOrigin>,
) -> Option<(String, Option<String>)> {
    let gate = main_gate(WorkloadMode::Container);
    let wanted = keys.contains(&gate);
    let change = match (node.get(&gate).map(String::as_str), driver) {
        (None | Some("" | "true"), Some(DriverOrigin::Host)) if wanted => PRE_INSTALLED,
        (Some(PRE_INSTALLED), Some(DriverOrigin::Pod) | None) if wanted => "true",
        (_, Some(DriverOrigin::Host | DriverOrigin::HostIdle | DriverOrigin::Pod) | None) => return None,
    };
    Some((gate, Some(change.to_owned())))
}

/// Operands that use the driver, and leave before it is renewed (gpu-operator 26.7, k8s-driver-manager).
const PAUSES: [&str; 11] = [
    "client",
    "container-toolkit",
    "dcgm",
    "dcgm-exporter",
    DEVICE_PLUGIN,
    "gpu-feature-discovery",
    MIG_MANAGER,
    "operator-validator",
    "sandbox-device-plugin",
    "sandbox-validator",
    "vgpu-device-manager",
];

/// Whether pods with this gate leave before the driver is renewed.
pub fn pauses(gate: &str) -> bool {
    gate.strip_prefix(labels::DEPLOY_PREFIX).is_some_and(|suffix| PAUSES.contains(&suffix))
}

/// Whether something is paused on the node.
pub fn paused(node: &BTreeMap<String, String>) -> bool {
    node.values().any(|value| value == labels::PAUSED_FOR_UPGRADE)
}

/// Whether the node still asks for something that pauses.
pub fn runs_what_pauses(node: &BTreeMap<String, String>) -> bool {
    node.iter().any(|(key, value)| pauses(key) && value == "true")
}

/// Label changes that pause the operands among `keys` that use the driver, or bring them back. Also those that somebody
/// paused and never brought back: while nothing of ours is under way, nobody renews a driver.
pub fn pause(
    node: &BTreeMap<String, String>,
    keys: &[String],
    pause: Pause,
) -> impl Iterator<Item = (String, Option<String>)> {
    let change = move |key: &String| {
        let value = node.get(key).map(String::as_str);
        let to = match (pause, value) {
            (Pause::On, None | Some("" | "true")) if pauses(key) => labels::PAUSED_FOR_UPGRADE,
            (Pause::Off, Some(labels::PAUSED_FOR_UPGRADE)) => "true",
            (Pause::On | Pause::Off | Pause::Keep, _) => return None,
        };
        Some((key.clone(), Some(to.to_owned())))
    };
    keys.iter().filter_map(change)
}

/// Agent functions that are off on this node: the admin has switched them off there, or the policy everywhere.
pub fn disabled(node: &BTreeMap<String, String>, policy: &[AgentFunction]) -> Vec<AgentFunction> {
    [
        ("vfio-manager", AgentFunction::VfioManager),
        ("sandbox-device-plugin", AgentFunction::SandboxDevicePlugin),
        ("sandbox-validator", AgentFunction::SandboxValidator),
        ("vgpu-device-manager", AgentFunction::VgpuDeviceManager),
    ]
    .into_iter()
    .filter(|(suffix, function)| {
        policy.contains(function) || node.get(&key(suffix)).is_some_and(|value| value == "false")
    })
    .map(|(_, function)| function)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
        labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn applied(mut node: BTreeMap<String, String>, mode: WorkloadMode) -> BTreeMap<String, String> {
        let keys = wanted(mode, SandboxMode::KubeVirt, &node);
        for (key, value) in patch(&node, &keys) {
            match value {
                Some(value) => node.insert(key, value),
                None => node.remove(&key),
            };
        }
        node
    }

    #[test]
    fn a_mode_change_leaves_exactly_the_keys_of_the_new_mode() {
        let container = applied(node(&[]), WorkloadMode::Container);
        let vgpu = applied(container, WorkloadMode::VmVgpu);
        let keys: Vec<_> = vgpu.keys().map(|k| k.trim_start_matches(labels::DEPLOY_PREFIX)).collect();
        assert_eq!(keys, VGPU);
    }

    #[test]
    fn an_admins_false_survives_every_mode_change() {
        let mut labels = node(&[("nvidia.com/gpu.deploy.dcgm", "false")]);
        for mode in
            [WorkloadMode::Container, WorkloadMode::VmVgpu, WorkloadMode::VmPassthrough, WorkloadMode::Container]
        {
            labels = applied(labels, mode);
            assert_eq!(labels["nvidia.com/gpu.deploy.dcgm"], "false", "{mode}");
        }
    }

    #[test]
    fn a_paused_operand_stays_paused_in_its_mode_and_an_empty_value_is_absent() {
        let labels = node(&[("nvidia.com/gpu.deploy.driver", "pre-installed"), ("nvidia.com/gpu.deploy.client", "")]);
        let labels = applied(labels, WorkloadMode::Container);
        assert_eq!(labels["nvidia.com/gpu.deploy.driver"], "pre-installed");
        assert_eq!(labels["nvidia.com/gpu.deploy.client"], "true");
    }

    #[test]
    fn a_host_with_a_driver_of_its_own_gets_no_driver_pod_and_gets_one_once_it_has_none() {
        let keys = wanted(WorkloadMode::Container, SandboxMode::KubeVirt, &node(&[]));
        let gate = main_gate(WorkloadMode::Container);
        let to =
            |labels: &[(&str, &str)], driver| preinstalled(&node(labels), &keys, driver).and_then(|(_, value)| value);
        let host = Some(DriverOrigin::Host);
        assert_eq!(to(&[], host).as_deref(), Some(PRE_INSTALLED));
        assert_eq!(to(&[(&gate, "true")], host).as_deref(), Some(PRE_INSTALLED));
        assert_eq!(to(&[(&gate, "false")], host), None, "an admin's word stays");
        assert_eq!(to(&[(&gate, PRE_INSTALLED)], host), None);
        // After a boot its module may come later.
        assert_eq!(to(&[(&gate, PRE_INSTALLED)], Some(DriverOrigin::HostIdle)), None);
        assert_eq!(to(&[(&gate, PRE_INSTALLED)], None).as_deref(), Some("true"));
        assert_eq!(to(&[(&gate, "true")], Some(DriverOrigin::Pod)), None);
        assert_eq!(preinstalled(&node(&[(&gate, "true")]), &[], host), None, "a node of VMs has no such gate");
    }

    #[test]
    fn a_settled_node_is_not_written_again() {
        let labels = applied(node(&[]), WorkloadMode::VmPassthrough);
        assert!(patch(&labels, &wanted(WorkloadMode::VmPassthrough, SandboxMode::KubeVirt, &labels)).is_empty());
    }

    #[test]
    fn kata_nodes_get_the_kata_device_plugin() {
        let keys = wanted(WorkloadMode::VmPassthrough, SandboxMode::Kata, &node(&[]));
        assert!(keys.contains(&"nvidia.com/gpu.deploy.kata-sandbox-device-plugin".to_owned()));
        assert!(!keys.contains(&"nvidia.com/gpu.deploy.sandbox-device-plugin".to_owned()));
    }

    #[test]
    fn the_mig_manager_goes_where_the_gpu_can_do_mig_and_is_no_vgpu_host() {
        let mig = |labels: &[(&str, &str)]| {
            wanted(WorkloadMode::Container, SandboxMode::KubeVirt, &node(labels))
                .contains(&"nvidia.com/gpu.deploy.mig-manager".to_owned())
        };
        assert!(mig(&[(labels::MIG_CAPABLE, "true")]));
        assert!(mig(&[(labels::GPU_PRODUCT, "NVIDIA-A100-SXM4-80GB")]));
        assert!(!mig(&[(labels::GPU_PRODUCT, "NVIDIA-A100-SXM4-80GB"), (labels::MIG_CAPABLE, "false")]));
        assert!(!mig(&[(labels::MIG_CAPABLE, "true"), (labels::VGPU_HOST_DRIVER_VERSION, "550.90")]));
        assert!(!mig(&[]));
    }

    #[test]
    fn a_mig_capable_container_node_without_a_layout_gets_the_policys_and_one_that_has_one_keeps_it() {
        let capable = [(labels::MIG_CAPABLE, "true")];
        let layout = |labels: &[(&str, &str)], mode| mig_layout(mode, &node(labels), Some("all-disabled"));
        let set = Some((labels::MIG_CONFIG.to_owned(), Some("all-disabled".to_owned())));
        assert_eq!(layout(&capable, WorkloadMode::Container), set);
        assert_eq!(layout(&capable, WorkloadMode::VmPassthrough), None);
        assert_eq!(layout(&[], WorkloadMode::Container), None);
        let own = [(labels::MIG_CAPABLE, "true"), (labels::MIG_CONFIG, "all-1g.10gb")];
        assert_eq!(layout(&own, WorkloadMode::Container), None);
        assert_eq!(mig_layout(WorkloadMode::Container, &node(&capable), None), None);
    }

    #[test]
    fn a_host_is_labelled_with_what_it_runs_and_keeps_that_when_it_does_not_say() {
        let ubuntu = HostFacts { os: "ubuntu24.04".to_owned(), kernel: "6.8.0+1".to_owned(), ..HostFacts::default() };
        let set: BTreeMap<_, _> = host(&node(&[]), &ubuntu).collect();
        assert_eq!(set[labels::OS].as_deref(), Some("ubuntu24.04"));
        assert_eq!(set[labels::KERNEL].as_deref(), Some("6.8.0_1"));
        let labelled = node(&[(labels::OS, "ubuntu24.04"), (labels::KERNEL, "6.8.0_1")]);
        assert_eq!(host(&labelled, &ubuntu).count(), 0);
        assert_eq!(host(&labelled, &HostFacts::default()).count(), 0);
    }

    #[test]
    fn what_uses_the_driver_pauses_while_that_is_renewed_and_an_admins_word_stays() {
        let mut labels = applied(node(&[("nvidia.com/gpu.deploy.dcgm", "false")]), WorkloadMode::Container);
        let keys = wanted(WorkloadMode::Container, SandboxMode::KubeVirt, &labels);
        let changes: Vec<_> = pause(&labels, &keys, Pause::On).collect();
        for (key, value) in changes {
            labels.insert(key, value.expect("a value"));
        }
        let of = |suffix: &str| labels[&format!("{}{suffix}", labels::DEPLOY_PREFIX)].as_str();
        assert_eq!([of("device-plugin"), of("operator-validator")], [labels::PAUSED_FOR_UPGRADE; 2]);
        assert_eq!([of("driver"), of("node-status-exporter"), of("dcgm")], ["true", "true", "false"]);
        assert!(paused(&labels) && !runs_what_pauses(&labels));
        assert!(patch(&labels, &keys).is_empty(), "the mode's own labels leave it alone");
        assert_eq!(pause(&labels, &keys, Pause::Keep).count(), 0);
        for (key, value) in pause(&labels.clone(), &keys, Pause::Off) {
            labels.insert(key, value.expect("a value"));
        }
        assert!(!paused(&labels) && runs_what_pauses(&labels));
    }

    #[test]
    fn a_function_is_off_by_the_nodes_label_or_by_the_policy() {
        let label = node(&[("nvidia.com/gpu.deploy.vfio-manager", "false")]);
        assert_eq!(disabled(&label, &[]), [AgentFunction::VfioManager]);
        assert_eq!(disabled(&node(&[]), &[AgentFunction::SandboxDevicePlugin]), [AgentFunction::SandboxDevicePlugin]);
        assert_eq!(disabled(&label, &[AgentFunction::VfioManager]), [AgentFunction::VfioManager]);
    }
}
