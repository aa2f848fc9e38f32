//! The effective workload mode of a node: its label, or the policy's default, and what is wrong with the label.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentFunction, GPUNode, ResourceAlias},
};

use super::gates::SandboxMode;
use crate::operator::{
    named::Named,
    owner::Claim,
    transition::{Upgrades, rules::Rules},
    vgpu,
};

/// What the node controller needs to know of the ClusterPolicy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// Name of the ClusterPolicy, for messages.
    pub name: String,
    pub sandbox: Sandbox,
    /// The policy is going away: nodes are brought back to what they were.
    pub teardown: bool,
    /// Resource names that agents use in place of their own.
    pub aliases: Vec<ResourceAlias>,
    /// How much agents log.
    pub log_level: Option<String>,
    /// Agent functions that the policy switches off on every node.
    pub disabled: Vec<AgentFunction>,
    /// MIG layout of container nodes without the label `nvidia.com/mig.config`, where the MIG manager is there to make it.
    pub mig_default: Option<&'static str>,
    /// Configurations that labels of container nodes pick from.
    pub named: Vec<Named>,
    /// Container nodes are checked: verdicts of theirs count.
    pub checks: bool,
    /// Container nodes are given a driver, unless they have one of their own.
    pub driver: bool,
    /// Where vGPU layouts are; `None`: vGPUs are not ours to make.
    pub vgpu: Option<vgpu::LayoutSource>,
    /// How nodes change.
    pub rules: Rules,
    /// How their drivers are renewed.
    pub upgrades: Upgrades,
    /// `NVIDIADriver` objects that share the nodes among them; none where the policy brings the driver itself. Unset while
    /// they have not been listed.
    pub claims: Option<Vec<Claim>>,
}

impl NodePolicy {
    /// A policy that asks for nothing but modes.
    pub fn new(name: String, sandbox: Sandbox) -> Self {
        Self {
            name,
            sandbox,
            teardown: false,
            aliases: Vec::new(),
            log_level: None,
            disabled: Vec::new(),
            mig_default: None,
            named: Vec::new(),
            checks: false,
            driver: false,
            vgpu: None,
            rules: Rules::default(),
            upgrades: Upgrades::default(),
            claims: Some(Vec::new()),
        }
    }
}

/// `spec.sandboxWorkloads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// As NVIDIA's operator does it: every node is a container node, whatever its label says.
    Off,
    On {
        default: WorkloadMode,
        mode: SandboxMode,
    },
}

impl Sandbox {
    pub fn mode(self) -> SandboxMode {
        match self {
            Self::Off => SandboxMode::default(),
            Self::On { mode, .. } => mode,
        }
    }
}

/// A label that does not mean what its author thinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Complaint {
    Invalid { value: String, used: WorkloadMode },
    SandboxOff { value: String, policy: String },
}

impl Complaint {
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "InvalidWorkloadConfig",
            Self::SandboxOff { .. } => "SandboxWorkloadsDisabled",
        }
    }

    pub fn message(&self, node: &str) -> String {
        match self {
            Self::Invalid { value, used } => format!(
                "node {node} has label {}={value}, which is no workload mode: {used} is used; set container, vm-passthrough or vm-vgpu",
                labels::WORKLOAD_CONFIG
            ),
            Self::SandboxOff { value, policy } => format!(
                "node {node} has label {}={value}, which has no effect while sandbox workloads are off: kubectl patch clusterpolicy {policy} --type merge -p '{{\"spec\":{{\"sandboxWorkloads\":{{\"enabled\":true}}}}}}'",
                labels::WORKLOAD_CONFIG
            ),
        }
    }
}

/// The mode that the node should be in, and a complaint about its label if there is one.
pub fn effective(node: &BTreeMap<String, String>, policy: &NodePolicy) -> (WorkloadMode, Option<Complaint>) {
    let label = node.get(labels::WORKLOAD_CONFIG);
    match (policy.sandbox, label) {
        (Sandbox::Off, None) => (WorkloadMode::Container, None),
        (Sandbox::Off, Some(value)) if value == WorkloadMode::Container.as_str() => (WorkloadMode::Container, None),
        (Sandbox::Off, Some(value)) => {
            (WorkloadMode::Container, Some(Complaint::SandboxOff { value: value.clone(), policy: policy.name.clone() }))
        }
        (Sandbox::On { default, .. }, None) => (default, None),
        (Sandbox::On { default, .. }, Some(value)) => match value.parse() {
            Ok(mode) => (mode, None),
            Err(_unknown) => (default, Some(Complaint::Invalid { value: value.clone(), used: default })),
        },
    }
}

/// Whether the node serves another mode than it should be in.
pub fn changes(node: &BTreeMap<String, String>, policy: &NodePolicy, gpu_node: Option<&GPUNode>) -> bool {
    let operator = gpu_node.and_then(|gpu_node| gpu_node.status.as_ref()?.operator.as_ref());
    operator.and_then(|operator| operator.serving).is_some_and(|serving| serving != effective(node, policy).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(sandbox: Sandbox) -> NodePolicy {
        NodePolicy::new("cluster-policy".to_owned(), sandbox)
    }

    fn on(default: WorkloadMode) -> NodePolicy {
        policy(Sandbox::On { default, mode: SandboxMode::KubeVirt })
    }

    fn labelled(value: &str) -> BTreeMap<String, String> {
        [(labels::WORKLOAD_CONFIG.to_owned(), value.to_owned())].into()
    }

    #[test]
    fn the_label_decides() {
        assert_eq!(effective(&labelled("vm-vgpu"), &on(WorkloadMode::Container)), (WorkloadMode::VmVgpu, None));
    }

    #[test]
    fn without_a_label_the_default_holds() {
        assert_eq!(effective(&BTreeMap::new(), &on(WorkloadMode::VmPassthrough)), (WorkloadMode::VmPassthrough, None));
    }

    #[test]
    fn an_unknown_label_falls_back_to_the_default_and_says_so() {
        let (mode, complaint) = effective(&labelled("vm-passthru"), &on(WorkloadMode::Container));
        assert_eq!(mode, WorkloadMode::Container);
        let message = complaint.expect("complaint").message("n1");
        assert!(message.contains("n1") && message.contains("vm-passthru"), "{message}");
    }

    #[test]
    fn with_sandbox_workloads_off_a_vm_label_has_no_effect_and_says_how_to_turn_them_on() {
        let (mode, complaint) = effective(&labelled("vm-passthrough"), &policy(Sandbox::Off));
        assert_eq!(mode, WorkloadMode::Container);
        let message = complaint.expect("complaint").message("n1");
        assert!(message.contains(r#"{"spec":{"sandboxWorkloads":{"enabled":true}}}"#), "{message}");
    }

    #[test]
    fn with_sandbox_workloads_off_a_container_label_is_fine() {
        assert_eq!(effective(&labelled("container"), &policy(Sandbox::Off)).1, None);
    }
}
