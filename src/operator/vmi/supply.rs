//! What a node has of what an instance asks for. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentStatus, GPUNode, GPUStatus, Holder, NodePhase, OperatorStatus, Severity},
};
use kube::ResourceExt;

use super::layouts;

/// A node's answer, the nearest to a "yes" first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It has them, free.
    Fits,
    /// Its mode or its vGPU layout is changing.
    InTransition(String),
    /// It has enough of them, and others use them.
    InUse(String),
    /// Some of them cannot be given out.
    Unhealthy(String),
    /// It was to have them, and its vGPU layout failed.
    LayoutFailed(String),
    /// Its GPUs could be cut into them, and its vGPU layout has none.
    OtherLayout(String),
    /// It serves another mode.
    OtherMode(String),
    /// It has some, and fewer than are asked for.
    TooFew(String),
    /// It has none of at least one resource.
    Lacks,
}

/// One thing that can be given out: a whole GPU, or a vGPU.
#[derive(Clone, Copy)]
struct Unit<'a> {
    gpu: &'a GPUStatus,
    /// What the kubelet knows it by.
    id: &'a str,
    /// Mode of the nodes that give it out.
    mode: WorkloadMode,
    holders: &'a [Holder],
}

fn all_units(agent: &AgentStatus) -> impl Iterator<Item = (&str, Unit<'_>)> {
    agent.gpus.iter().flat_map(|gpu| {
        let mode = WorkloadMode::VmPassthrough;
        let whole = Unit { gpu, id: &gpu.address, mode, holders: &gpu.holders };
        let whole = gpu.resource.as_deref().map(|resource| (resource, whole));
        let parts = gpu.vgpu.iter().flat_map(|vgpu| &vgpu.instances).filter_map(move |part| {
            let unit = Unit { gpu, id: &part.id, mode: WorkloadMode::VmVgpu, holders: &part.holders };
            Some((part.resource.as_deref()?, unit))
        });
        whole.into_iter().chain(parts)
    })
}

fn units<'a>(agent: &'a AgentStatus, resource: &str) -> Vec<Unit<'a>> {
    all_units(agent).filter(|(name, _)| *name == resource).map(|(_, unit)| unit).collect()
}

/// Every resource name that a GPU or a vGPU of these nodes has.
pub fn names(nodes: &[GPUNode]) -> BTreeSet<&str> {
    nodes.iter().filter_map(agent).flat_map(all_units).map(|(name, _)| name).collect()
}

/// Free, and all, of a resource on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub free: usize,
    pub all: usize,
}

pub fn count(node: &GPUNode, resource: &str) -> Count {
    let Some(agent) = agent(node) else { return Count::default() };
    let of = units(agent, resource);
    let steady = matches!(phase(node), NodePhase::Steady | NodePhase::Waiting);
    let serves = |unit: &Unit<'_>| steady && mode(node) == Some(unit.mode);
    let free = of.iter().filter(|unit| serves(unit) && unusable(agent, unit).is_none() && unit.holders.is_empty());
    Count { free: free.count(), all: of.len() }
}

pub fn standing(node: &GPUNode, asks: &BTreeMap<String, usize>) -> Standing {
    let Some(agent) = agent(node) else { return Standing::Lacks };
    let name = node.name_any();
    let has: Vec<(&str, usize, Vec<Unit<'_>>)> =
        asks.iter().map(|(resource, wanted)| (resource.as_str(), *wanted, units(agent, resource))).collect();
    if let Some((resource, _, _)) = has.iter().find(|(_, _, units)| units.is_empty()) {
        return layouts::could_have(node, resource).unwrap_or(Standing::Lacks);
    }
    if let Some((resource, wanted, units)) = has.iter().find(|(_, wanted, units)| units.len() < *wanted) {
        return Standing::TooFew(format!("{name} has {} of {wanted} {resource}", units.len()));
    }
    match phase(node) {
        NodePhase::Withdrawing | NodePhase::Switching => {
            let why = operator(node).map_or("", |operator| operator.message.as_str());
            return Standing::InTransition(format!("{name} is changing its mode: {why}"));
        }
        NodePhase::Upgrading => {
            let why = operator(node).map_or("", |operator| operator.message.as_str());
            return Standing::InTransition(format!("{name} is getting a new driver: {why}"));
        }
        NodePhase::Steady | NodePhase::Waiting | NodePhase::Refused => {}
    }
    let other = has.iter().flat_map(|(_, _, units)| units).find(|unit| mode(node) != Some(unit.mode));
    if let Some(unit) = other {
        return other_mode(node, unit.mode);
    }
    let usable = |units: &[Unit<'_>]| units.iter().filter(|unit| unusable(agent, unit).is_none()).count();
    if let Some((_, _, units)) = has.iter().find(|(_, wanted, units)| usable(units) < *wanted) {
        let why: Vec<String> = units.iter().filter_map(|unit| unusable(agent, unit)).collect();
        return Standing::Unhealthy(format!("{name}: {}", why.join("; ")));
    }
    let short = has.iter().filter(|(resource, wanted, _)| count(node, resource).free < *wanted);
    let users: Vec<String> = short.flat_map(|(resource, _, _)| users(node, resource)).collect();
    match users.is_empty() {
        true => Standing::Fits,
        false => Standing::InUse(format!("{name}: {}", users.join(", "))),
    }
}

fn other_mode(node: &GPUNode, wanted: WorkloadMode) -> Standing {
    let name = node.name_any();
    let mode = mode(node).map_or("none", WorkloadMode::as_str);
    let operator = operator(node).filter(|operator| operator.phase == NodePhase::Refused);
    match operator {
        Some(operator) => Standing::OtherMode(format!("{name} has it in mode {mode}: {}", operator.message)),
        None => Standing::OtherMode(format!(
            "{name} has it in mode {mode}: kubectl label --overwrite node {name} {}={wanted}",
            labels::WORKLOAD_CONFIG,
        )),
    }
}

/// Whether the kubelet has it from this node.
pub fn offers(node: &GPUNode, resource: &str) -> bool {
    let resources = agent(node).map(|agent| agent.resources.as_slice()).unwrap_or_default();
    resources.iter().any(|offered| offered.name == resource && !offered.devices.is_empty())
}

/// Who has GPUs or vGPUs of a resource, as in `0000:43:00.0 by VM vms/a`.
pub fn users(node: &GPUNode, resource: &str) -> Vec<String> {
    let units = agent(node).map(|agent| units(agent, resource)).unwrap_or_default();
    let held = units.into_iter().filter(|unit| !unit.holders.is_empty());
    held.map(|unit| format!("{} by {}", unit.id, user(node, &unit))).collect()
}

/// Who has it: the virtual machine's name where it is known.
fn user(node: &GPUNode, unit: &Unit<'_>) -> String {
    let users = operator(node).map(|operator| operator.users.as_slice()).unwrap_or_default();
    let holds = |pod: &str| unit.holders.iter().any(|holder| holder.pod.as_deref() == Some(pod));
    let whole = unit.id == unit.gpu.address;
    let found = users.iter().find(|user| holds(&user.pod) || (whole && user.gpus.contains(&unit.gpu.address)));
    if let Some(user) = found {
        return match &user.vmi {
            Some(vmi) => format!("VM {vmi}"),
            None => format!("pod {}", user.pod),
        };
    }
    match unit.holders.first() {
        Some(holder) => match &holder.pod {
            Some(pod) => format!("pod {pod}"),
            None => format!("{} (pid {})", holder.command, holder.pid),
        },
        None => "nobody".to_owned(),
    }
}

/// Why it cannot be given out by a node that serves its mode, to whoever asks.
fn unusable(agent: &AgentStatus, unit: &Unit<'_>) -> Option<String> {
    let (gpu, id) = (unit.gpu, unit.id);
    let what = match unit.mode {
        WorkloadMode::VmVgpu => format!("vGPU {id} of GPU {}", gpu.address),
        WorkloadMode::Container | WorkloadMode::VmPassthrough => format!("GPU {id}"),
    };
    let whole = unit.mode != WorkloadMode::VmVgpu;
    // A layout that was refused leaves the vGPUs that there are.
    if let Some(refusal) = gpu.refusal.as_ref().filter(|_| whole) {
        return Some(format!("{what}: {}", refusal.message));
    }
    if let Some(ailment) = gpu.ailments.iter().find(|ailment| ailment.severity == Severity::Unhealthy) {
        return Some(format!("{what}: {}", ailment.message));
    }
    if let Some(withheld) = gpu.withheld.as_ref().filter(|_| whole) {
        return Some(format!("{what}: {withheld}"));
    }
    let offered = agent.resources.iter().find(|resource| resource.devices.iter().any(|device| device == id));
    match offered {
        Some(resource) if resource.registered => None,
        Some(_) => Some(format!("{what}: the kubelet has not accepted it yet")),
        None => Some(format!("{what} is not offered to the kubelet; see kubectl describe gpunode")),
    }
}

pub fn agent(node: &GPUNode) -> Option<&AgentStatus> {
    node.status.as_ref()?.agent.as_ref()
}

pub fn operator(node: &GPUNode) -> Option<&OperatorStatus> {
    node.status.as_ref()?.operator.as_ref()
}

pub fn phase(node: &GPUNode) -> NodePhase {
    operator(node).map_or(NodePhase::Steady, |operator| operator.phase)
}

/// The mode that it serves.
pub fn mode(node: &GPUNode) -> Option<WorkloadMode> {
    operator(node).and_then(|operator| operator.serving).or(node.spec.mode)
}
