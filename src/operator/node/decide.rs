//! What to write for one node, from what is known of it. Pure.
//!
//! The order of a mode change, whatever its cause:
//! ```text
//! preflight ──blocked──▶ the old mode goes on, with the reason
//!    │ clear
//! withdraw: advertisement off ─▶ the agent answers ─▶ old deploy labels away ─▶ pods gone
//!    ─▶ GPUNode.spec.mode ─▶ the agent acts and verifies ─▶ new deploy labels, advertisement on
//! ```
//! Nothing is remembered between calls: labels, `GPUNode` and pods say how far a node is, so a restart goes on from there.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    WorkloadMode,
    conditions::Verdict,
    labels,
    v1alpha1::{Advertise, GPUNode, GPUNodeSpec, NodePhase},
};

use super::{
    course::{Course, Outcome, Reported},
    gates,
    mode::{Complaint, NodePolicy, effective},
    preflight::{Blocked, Findings},
    readiness::Readiness,
    users::Users,
    vgpus,
};
use crate::operator::{
    named::Kind,
    owner,
    transition::{Leave, Pause, Progress, Underway},
    vgpu,
};

/// One node as the operator sees it.
pub struct Observed<'a> {
    pub name: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub gpu_node: Option<&'a GPUNode>,
    pub policy: &'a NodePolicy,
    /// Our operands' pods on the node; `None` while they are not watched.
    pub pods: Option<&'a [OperandPod]>,
    pub users: &'a Users,
    /// What the policy's file of vGPU layouts says; `None` while it has not been read.
    pub layouts: Option<&'a vgpu::File>,
    /// Whether the node may leave the mode that it serves.
    pub leave: &'a Leave,
    /// What is done to its driver now.
    pub upgrade: Option<&'a Underway>,
    pub epoch: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandPod {
    pub uid: String,
    pub name: String,
    /// The deploy keys that its DaemonSet selects nodes by.
    pub gates: BTreeSet<String>,
    pub ready: bool,
}

/// What is to be written, and whether the node's operand pods must be watched for the next step.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Node labels to set, or to remove (`None`).
    pub labels: BTreeMap<String, Option<String>>,
    /// Only with a `GPUNode`.
    pub order: Option<Order>,
    pub watch_pods: bool,
}

/// The operator's part of a `GPUNode`.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    pub spec: GPUNodeSpec,
    pub desired: WorkloadMode,
    pub serving: Option<WorkloadMode>,
    pub phase: NodePhase,
    pub readiness: Readiness,
    pub complaint: Option<Complaint>,
    /// How far it is with its vGPU layout; `None` where it is to have none.
    pub vgpus: Option<vgpu::Standing>,
    /// What its labels pick by name, and what of it is not there.
    pub named: Vec<Verdict>,
}

/// What a change of mode would meet on a node that has GPUs of ours, and how far one is.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    pub desired: WorkloadMode,
    /// The mode that it served last.
    pub serving: Option<WorkloadMode>,
    /// PCI addresses of GPUs that are not in the desired mode.
    pub away: Vec<String>,
    pub findings: Findings,
    pub progress: Progress,
}

/// `None`: the node has no report or no GPU, or nothing is to be changed there. Whether it may leave does not count.
pub fn standing(observed: &Observed<'_>) -> Option<Standing> {
    let free = Observed { leave: &Leave::Free, ..*observed };
    let (desired, _) = asked(&free);
    let node = Reported::of(&free, desired)?;
    let progress = match node.course() {
        Course::NoGPUs | Course::OperandsDisabled => return None,
        Course::Wait(_) | Course::LookAtPods => Progress::Looking,
        Course::Hold(blocked) => Progress::Refused(blocked),
        Course::Withdraw { waiting_for } => Progress::Old { waiting_for },
        Course::Switch => node.switching(),
        Course::Serve => {
            let Readiness { ready, reason, message } = node.serving_readiness();
            Progress::Reached { unready: (!ready).then_some(Blocked { reason, message }) }
        }
    };
    let away = node.agent.gpus.iter().filter(|gpu| gpu.mode != Some(desired)).map(|gpu| gpu.address.clone()).collect();
    (!observed.policy.teardown).then(|| Standing {
        desired,
        serving: node.serving,
        away,
        findings: node.findings(),
        progress,
    })
}

/// The mode that the node should be in.
fn asked(observed: &Observed<'_>) -> (WorkloadMode, Option<Complaint>) {
    match observed.policy.teardown {
        true => (WorkloadMode::Container, None),
        false => effective(observed.labels, observed.policy),
    }
}

pub fn decide(observed: &Observed<'_>) -> Decision {
    let Some(gpu_node) = observed.gpu_node else {
        return without_gpu_node(observed);
    };
    let (desired, complaint) = asked(observed);
    let status = gpu_node.status.as_ref();
    let serving = status.and_then(|s| s.operator.as_ref()).and_then(|o| o.serving);
    let Some(node) = Reported::of(observed, desired) else {
        let waiting = Readiness::no("AgentStarting", "the agent on this node has not reported yet");
        let order = Order {
            spec: gpu_node.spec.clone(),
            desired,
            serving,
            phase: NodePhase::Steady,
            readiness: waiting,
            complaint,
            vgpus: None,
            named: Vec::new(),
        };
        return Decision { labels: present(observed.labels, true), order: Some(order), watch_pods: false };
    };
    let course = node.course();
    decision(&node, course, complaint)
}

/// A hint is worth one label; everything else needs the proof of a `GPUNode`, and so does its removal.
fn without_gpu_node(observed: &Observed<'_>) -> Decision {
    let hinted = labels::NFD_HINTS.iter().any(|hint| observed.labels.get(*hint).is_some_and(|v| v == "true"));
    let labels = if hinted && !observed.policy.teardown { present(observed.labels, true) } else { BTreeMap::new() };
    Decision { labels, order: None, watch_pods: false }
}

fn present(node: &BTreeMap<String, String>, present: bool) -> BTreeMap<String, Option<String>> {
    let value = if present { "true" } else { "false" };
    match node.get(labels::GPU_PRESENT) {
        Some(current) if current == value => BTreeMap::new(),
        None if !present => BTreeMap::new(),
        Some(_) | None => [(labels::GPU_PRESENT.to_owned(), Some(value.to_owned()))].into(),
    }
}

/// A node that serves, while its driver is renewed.
fn upgraded(outcome: Outcome, upgrade: Option<&Underway>) -> Outcome {
    let Some(upgrade) = upgrade.filter(|upgrade| upgrade.disturbs() && outcome.phase == NodePhase::Steady) else {
        return outcome;
    };
    let at = &upgrade.transition;
    let advertise = match (upgrade.pause, outcome.mode) {
        (Pause::On, Some(WorkloadMode::VmVgpu)) => Advertise::Withdrawn,
        (Pause::On | Pause::Off | Pause::Keep, _) => outcome.advertise,
    };
    let readiness = Readiness::no("DriverUpgrade", format!("the node's driver is being renewed: {}", at.message));
    Outcome { advertise, phase: NodePhase::Upgrading, readiness, ..outcome }
}

/// A node's labels and order on its course.
fn decision(node: &Reported<'_>, course: Course, complaint: Option<Complaint>) -> Decision {
    let upgrade = node.observed.upgrade;
    let watch_pods = node.watch_pods(&course) || upgrade.is_some_and(Underway::looks);
    let outcome = upgraded(node.outcome(course), upgrade);
    let mut labels = gates::patch(node.observed.labels, &outcome.deploy);
    let pause = upgrade.map_or(Pause::Off, |upgrade| upgrade.pause);
    labels.extend(gates::pause(node.observed.labels, &outcome.deploy, pause));
    if node.observed.policy.driver {
        let driver = node.agent.host.driver.as_ref().map(|driver| driver.origin);
        labels.extend(gates::preinstalled(node.observed.labels, &outcome.deploy, driver));
    }
    labels.extend(present(node.observed.labels, !node.agent.gpus.is_empty()));
    if !node.observed.policy.teardown {
        labels.extend(gates::host(node.observed.labels, &node.agent.host));
        labels.extend(owner::label(node.observed.labels, node.observed.policy.claims.as_deref()));
    }
    // Only a node that serves its mode has a MIG manager to do it.
    let layout = outcome.mode.filter(|_| !outcome.deploy.is_empty());
    let named = node.observed.policy.named.iter();
    let lacking = named.clone().any(|named| named.kind == Kind::Mig && !named.knows("all-disabled"));
    let default = node.observed.policy.mig_default.filter(|_| !lacking);
    let picked = named.filter(|_| outcome.mode == Some(WorkloadMode::Container));
    let named =
        picked.filter_map(|named| named.verdict(node.observed.name, node.observed.labels, &outcome.deploy)).collect();
    labels.extend(layout.and_then(|mode| gates::mig_layout(mode, node.observed.labels, default)));
    let vgpus = node.vgpus(outcome.mode);
    labels.extend(vgpus::label(node.observed.labels, vgpus.as_ref()));
    let vgpu = match outcome.mode {
        Some(WorkloadMode::VmVgpu) => node.wish.layout(node.gpu_node.spec.vgpu.as_ref()),
        Some(WorkloadMode::Container | WorkloadMode::VmPassthrough) | None => None,
    };
    let spec = GPUNodeSpec {
        mode: outcome.mode,
        // Nobody but the operator writes here, and it decides by node in this version.
        gpus: Vec::new(),
        vgpu,
        advertise: outcome.advertise,
        aliases: node.observed.policy.aliases.clone(),
        disabled: node.disabled(),
        log_level: node.observed.policy.log_level.clone(),
        epoch: node.observed.epoch,
    };
    let order = Order {
        spec,
        desired: node.desired,
        serving: outcome.serving,
        phase: outcome.phase,
        readiness: outcome.readiness,
        complaint,
        vgpus,
        named,
    };
    Decision { labels, watch_pods, order: Some(order) }
}
