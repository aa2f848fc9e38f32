//! What a node has of what an instance asks for. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentStatus, GPUNode, GPUStatus, NodePhase, OperatorStatus, Severity},
};
use kube::ResourceExt;

/// A node's answer, the nearest to a "yes" first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It has them, free.
    Fits,
    /// Its mode is changing.
    InTransition(String),
    /// It has enough of them, and others use them.
    InUse(String),
    /// Some of them cannot be given out.
    Unhealthy(String),
    /// It serves another mode.
    OtherMode(String),
    /// It has some, and fewer than are asked for.
    TooFew(String),
    /// It has none of at least one resource.
    Lacks,
}

/// Every resource name that a GPU of these nodes has.
pub fn names(nodes: &[GPUNode]) -> BTreeSet<&str> {
    nodes.iter().filter_map(agent).flat_map(|agent| &agent.gpus).filter_map(|gpu| gpu.resource.as_deref()).collect()
}

/// Free, and all, of a resource on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub free: usize,
    pub all: usize,
}

pub fn count(node: &GPUNode, resource: &str) -> Count {
    let Some(agent) = agent(node) else { return Count::default() };
    let of = gpus(agent, resource);
    let steady = matches!(phase(node), NodePhase::Steady | NodePhase::Waiting);
    let serves = mode(node) == Some(WorkloadMode::VmPassthrough) && steady;
    let free = of.iter().filter(|gpu| serves && unusable(agent, gpu).is_none() && gpu.holders.is_empty()).count();
    Count { free, all: of.len() }
}

pub fn standing(node: &GPUNode, asks: &BTreeMap<String, usize>) -> Standing {
    let Some(agent) = agent(node) else { return Standing::Lacks };
    let name = node.name_any();
    let has: Vec<(&str, usize, Vec<&GPUStatus>)> =
        asks.iter().map(|(resource, wanted)| (resource.as_str(), *wanted, gpus(agent, resource))).collect();
    if has.iter().any(|(_, _, gpus)| gpus.is_empty()) {
        return Standing::Lacks;
    }
    if let Some((resource, wanted, gpus)) = has.iter().find(|(_, wanted, gpus)| gpus.len() < *wanted) {
        return Standing::TooFew(format!("{name} has {} of {wanted} {resource}", gpus.len()));
    }
    match phase(node) {
        NodePhase::Withdrawing | NodePhase::Switching => {
            let why = operator(node).map_or("", |operator| operator.message.as_str());
            return Standing::InTransition(format!("{name} is changing its mode: {why}"));
        }
        NodePhase::Steady | NodePhase::Waiting | NodePhase::Refused => {}
    }
    match mode(node) {
        Some(WorkloadMode::VmPassthrough) => {}
        Some(other @ (WorkloadMode::Container | WorkloadMode::VmVgpu)) => return other_mode(node, other.as_str()),
        None => return other_mode(node, "none"),
    }
    let usable = |gpus: &[&GPUStatus]| gpus.iter().filter(|gpu| unusable(agent, gpu).is_none()).count();
    if let Some((_, _, gpus)) = has.iter().find(|(_, wanted, gpus)| usable(gpus) < *wanted) {
        let why: Vec<String> = gpus.iter().filter_map(|gpu| unusable(agent, gpu)).collect();
        return Standing::Unhealthy(format!("{name}: {}", why.join("; ")));
    }
    let short = has.iter().filter(|(resource, wanted, _)| count(node, resource).free < *wanted);
    let users: Vec<String> = short.flat_map(|(resource, _, _)| users(node, resource)).collect();
    match users.is_empty() {
        true => Standing::Fits,
        false => Standing::InUse(format!("{name}: {}", users.join(", "))),
    }
}

fn other_mode(node: &GPUNode, mode: &str) -> Standing {
    let name = node.name_any();
    let operator = operator(node).filter(|operator| operator.phase == NodePhase::Refused);
    match operator {
        Some(operator) => Standing::OtherMode(format!("{name} has it in mode {mode}: {}", operator.message)),
        None => Standing::OtherMode(format!(
            "{name} has it in mode {mode}: kubectl label --overwrite node {name} {}={}",
            labels::WORKLOAD_CONFIG,
            WorkloadMode::VmPassthrough
        )),
    }
}

/// Whether the kubelet has it from this node.
pub fn offers(node: &GPUNode, resource: &str) -> bool {
    let resources = agent(node).map(|agent| agent.resources.as_slice()).unwrap_or_default();
    resources.iter().any(|offered| offered.name == resource && !offered.devices.is_empty())
}

/// Who has GPUs of a resource, as in `0000:43:00.0 by VM vms/a`.
pub fn users(node: &GPUNode, resource: &str) -> Vec<String> {
    let gpus = agent(node).map(|agent| gpus(agent, resource)).unwrap_or_default();
    let held = gpus.into_iter().filter(|gpu| !gpu.holders.is_empty());
    held.map(|gpu| format!("{} by {}", gpu.address, user(node, gpu))).collect()
}

/// Who has a GPU: the virtual machine's name where it is known.
fn user(node: &GPUNode, gpu: &GPUStatus) -> String {
    let users = operator(node).map(|operator| operator.users.as_slice()).unwrap_or_default();
    if let Some(user) = users.iter().find(|user| user.gpus.contains(&gpu.address)) {
        return match &user.vmi {
            Some(vmi) => format!("VM {vmi}"),
            None => format!("pod {}", user.pod),
        };
    }
    match gpu.holders.first() {
        Some(holder) => match &holder.pod {
            Some(pod) => format!("pod {pod}"),
            None => format!("{} (pid {})", holder.command, holder.pid),
        },
        None => "nobody".to_owned(),
    }
}

/// Why a GPU of a node that serves virtual machines cannot be given out, to whoever asks.
fn unusable(agent: &AgentStatus, gpu: &GPUStatus) -> Option<String> {
    let address = &gpu.address;
    if let Some(refusal) = &gpu.refusal {
        return Some(format!("GPU {address}: {}", refusal.message));
    }
    if let Some(ailment) = gpu.ailments.iter().find(|ailment| ailment.severity == Severity::Unhealthy) {
        return Some(format!("GPU {address}: {}", ailment.message));
    }
    if let Some(withheld) = &gpu.withheld {
        return Some(format!("GPU {address}: {withheld}"));
    }
    let offered = agent.resources.iter().find(|resource| resource.devices.contains(address));
    match offered {
        Some(resource) if resource.registered => None,
        Some(_) => Some(format!("GPU {address}: the kubelet has not accepted it yet")),
        None => Some(format!("GPU {address} is not offered to the kubelet; see kubectl describe gpunode")),
    }
}

fn gpus<'a>(agent: &'a AgentStatus, resource: &str) -> Vec<&'a GPUStatus> {
    agent.gpus.iter().filter(|gpu| gpu.resource.as_deref() == Some(resource)).collect()
}

fn agent(node: &GPUNode) -> Option<&AgentStatus> {
    node.status.as_ref()?.agent.as_ref()
}

fn operator(node: &GPUNode) -> Option<&OperatorStatus> {
    node.status.as_ref()?.operator.as_ref()
}

fn phase(node: &GPUNode) -> NodePhase {
    operator(node).map_or(NodePhase::Steady, |operator| operator.phase)
}

/// The mode that it serves.
pub fn mode(node: &GPUNode) -> Option<WorkloadMode> {
    operator(node).and_then(|operator| operator.serving).or(node.spec.mode)
}
