//! What became of a policy: `ready` only when it is. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crds::{
    WorkloadMode,
    conditions::{Verdict, merge},
    labels,
    v1::{ClusterPolicy, ClusterPolicyStatus, PolicyState},
    v1alpha1::{FailingPod, GPUNode, GPUVirtConfigStatus, ModeStatus, OperandStatus},
};
use k8s_openapi::{
    api::{apps::v1::DaemonSet, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::ResourceExt;

use super::{
    build::Operands,
    failing::{Rank, worst},
    validate::Problem,
};
use crate::operator::kubevirt::Wired;

pub const READY: &str = "Ready";
pub const ERROR: &str = "Error";
/// Images that the policy names and nobody runs.
pub const IMAGES_NOT_USED: &str = "ImagesNotUsed";
/// The served CRD would drop fields that we use.
pub const SCHEMA_COMPLETE: &str = "SchemaComplete";

/// Everything that readiness is judged by.
pub struct Facts<'a> {
    pub problems: &'a [Problem],
    pub wanted: &'a Operands,
    pub live: &'a [Arc<DaemonSet>],
    pub gpu_nodes: &'a [GPUNode],
    /// Labels of every node that has a `GPUNode`.
    pub node_labels: &'a BTreeMap<String, BTreeMap<String, String>>,
    /// Pods of operands that are not ready, as far as they have been looked at.
    pub pods: &'a BTreeMap<String, Vec<Arc<Pod>>>,
    /// DaemonSets that were written just now, or are held back: what the cache says of them is old.
    pub changing: &'a BTreeSet<String>,
}

/// Of many nodes with the same trouble so many are written down: a status has to stay small.
const REASONS: usize = 20;

pub struct Judgement {
    pub verdict: Verdict,
    pub operands: Vec<OperandStatus>,
    pub modes: Vec<ModeStatus>,
}

pub fn judge(facts: &Facts<'_>) -> Judgement {
    let operands: Vec<(Option<Rank>, OperandStatus)> =
        facts.wanted.daemon_sets.iter().map(|wanted| operand(wanted, facts)).collect();
    let modes = modes(facts.gpu_nodes);
    let verdict = verdict(facts, &operands, &modes);
    Judgement { verdict, operands: operands.into_iter().map(|(_, operand)| operand).collect(), modes }
}

fn verdict(facts: &Facts<'_>, operands: &[(Option<Rank>, OperandStatus)], modes: &[ModeStatus]) -> Verdict {
    if let Some(first) = facts.problems.first() {
        let all: Vec<&str> = facts.problems.iter().map(|p| p.message.as_str()).collect();
        return Verdict::no(READY, first.reason, all.join("; "));
    }
    // One that is broken before those that wait for it; of equals the one that others build upon, as they are listed.
    let mut waiting: Vec<_> = operands.iter().filter(|(_, operand)| !operand.reason.is_empty()).collect();
    waiting.sort_by_key(|(rank, _)| rank.unwrap_or(Rank::Waiting));
    if let [(_, first), others @ ..] = waiting.as_slice() {
        let others: Vec<&str> = others.iter().map(|(_, other)| other.name.as_str()).collect();
        let others = match others.is_empty() {
            true => String::new(),
            false => format!("; not ready either: {}", others.join(", ")),
        };
        return Verdict::no(READY, "OperandNotReady", format!("{}{others}", first.message));
    }
    let reasons: Vec<&str> = modes.iter().flat_map(|m| &m.reasons).map(String::as_str).collect();
    if !reasons.is_empty() {
        return Verdict::no(READY, "GPUNodeNotReady", reasons.join("; "));
    }
    let nodes: i32 = modes.iter().map(|m| m.nodes).sum();
    match nodes {
        0 => Verdict::yes(READY, "NoGPUNodes", "no node with an NVIDIA GPU has been found; the agents are watching"),
        _ => Verdict::yes(READY, "Reconciled", format!("{nodes} GPU node(s) serve their modes")),
    }
}

fn operand(wanted: &DaemonSet, facts: &Facts<'_>) -> (Option<Rank>, OperandStatus) {
    let name = wanted.name_any();
    let Some(live) = facts.live.iter().find(|live| live.name_any() == name) else {
        let message = format!("DaemonSet {name} has not been created yet");
        return (None, OperandStatus { name, reason: "NotReady".to_owned(), message, ..OperandStatus::default() });
    };
    let status = live.status.clone().unwrap_or_default();
    let asked = asking(wanted, facts.node_labels);
    let desired = status.desired_number_scheduled;
    let updated = status.updated_number_scheduled.unwrap_or(0);
    let ready = status.number_ready;
    let of = |message: String| OperandStatus {
        name: name.clone(),
        desired,
        updated,
        ready,
        reason: "NotReady".to_owned(),
        message,
        failing: None,
    };
    if status.observed_generation < live.metadata.generation || facts.changing.contains(&name) {
        return (None, of(format!("DaemonSet {name} is being rolled out")));
    }
    if let Some(asked) = asked
        && asked != desired
    {
        let message =
            format!("DaemonSet {name} is scheduled on {desired} node(s), and the modes of {asked} ask for it");
        return (None, of(message));
    }
    if updated == desired && ready == desired {
        return (None, OperandStatus { reason: String::new(), ..of(String::new()) });
    }
    let counts = format!("DaemonSet {name}: {ready} of {desired} pod(s) ready, {updated} up to date");
    match facts.pods.get(&name).and_then(|pods| worst(pods)) {
        None => (None, of(counts)),
        Some((rank, failing)) => {
            let message = format!("{counts}; {}", told(&failing));
            (Some(rank), OperandStatus { failing: Some(failing), ..of(message) })
        }
    }
}

fn told(failing: &FailingPod) -> String {
    let FailingPod { node, pod, container, image, reason, message } = failing;
    let whose = match container.is_empty() {
        true => format!("pod {pod}"),
        false => format!("container {container} of {pod} (image {image})"),
    };
    let message = if message.is_empty() { String::new() } else { format!(": {message}") };
    format!("on node {node} {whose}: {reason}{message}")
}

/// Nodes whose deploy labels ask for the operand; `None` for one that is not gated.
fn asking(wanted: &DaemonSet, nodes: &BTreeMap<String, BTreeMap<String, String>>) -> Option<i32> {
    let selector = wanted.spec.as_ref()?.template.spec.as_ref()?.node_selector.as_ref()?;
    if !selector.keys().any(|key| key.starts_with(labels::DEPLOY_PREFIX)) {
        return None;
    }
    // The whole selector: MPS asks for more than its gate.
    let asks = |node: &BTreeMap<String, String>| selector.iter().all(|(key, value)| node.get(key) == Some(value));
    i32::try_from(nodes.values().filter(|node| asks(node)).count()).ok()
}

fn modes(gpu_nodes: &[GPUNode]) -> Vec<ModeStatus> {
    WorkloadMode::ALL.into_iter().map(|mode| of_mode(mode, gpu_nodes)).filter(|status| status.nodes > 0).collect()
}

fn of_mode(mode: WorkloadMode, gpu_nodes: &[GPUNode]) -> ModeStatus {
    let mut status = ModeStatus { mode, nodes: 0, ready: 0, reasons: Vec::new() };
    for node in gpu_nodes {
        let operator = node.status.as_ref().and_then(|s| s.operator.as_ref());
        // A node that nobody has judged yet counts as one of the default mode, not ready.
        let (desired, ready, message) = operator
            .map_or((WorkloadMode::default(), false, "has not been looked at yet"), |o| {
                (o.desired.unwrap_or_default(), o.ready == "True", o.message.as_str())
            });
        let has_gpus = node.status.as_ref().and_then(|s| s.agent.as_ref()).is_none_or(|agent| !agent.gpus.is_empty());
        if desired != mode || !has_gpus {
            continue;
        }
        status.nodes += 1;
        match ready {
            true => status.ready += 1,
            false => status.reasons.push(format!("node {}: {message}", node.name_any())),
        }
    }
    let unsaid = status.reasons.len().saturating_sub(REASONS);
    if unsaid > 0 {
        status.reasons.truncate(REASONS);
        status.reasons.push(format!("and {unsaid} more node(s): kubectl get gpunodes"));
    }
    status
}

/// Sections of the policy whose work our agent does: their images are accepted and not run.
pub fn images_not_used(policy: &ClusterPolicy) -> Verdict {
    let spec = &policy.spec;
    let sections = [
        ("vfioManager", &spec.vfio_manager.component.container.image),
        ("sandboxDevicePlugin", &spec.sandbox_device_plugin.container.image),
        ("vgpuDeviceManager", &spec.vgpu_device_manager.component.container.image),
        ("nodeStatusExporter", &spec.node_status_exporter.container.image),
        ("validator", &spec.validator.container.image),
        ("driver.manager", &spec.driver.manager.image),
    ];
    let named: Vec<&str> = sections
        .into_iter()
        .filter(|(_, image)| image.image.as_ref().is_some_and(|i| !i.is_empty()))
        .map(|(section, _)| section)
        .collect();
    match named.is_empty() {
        true => Verdict::no(IMAGES_NOT_USED, "AllUsed", "every image that the policy names is used"),
        false => Verdict::yes(
            IMAGES_NOT_USED,
            "DoneByAgent",
            format!("gpuvirt's own image does the work of {}: their images are not used", named.join(", ")),
        ),
    }
}

/// The peer's pair of conditions, and ours.
pub fn policy_status(
    policy: &ClusterPolicy,
    namespace: &str,
    state: PolicyState,
    verdicts: Vec<Verdict>,
    silenced: &[&str],
    now: &Time,
) -> ClusterPolicyStatus {
    let mut old = policy.status.clone().unwrap_or_default();
    old.conditions.retain(|condition| !silenced.contains(&condition.type_.as_str()));
    let mut verdicts = verdicts;
    if let Some(ready) = verdicts.iter().find(|v| v.type_ == READY).cloned() {
        verdicts.push(match ready.holds {
            true => Verdict::no(ERROR, ready.reason, ""),
            false => Verdict::yes(ERROR, ready.reason, ready.message),
        });
    }
    ClusterPolicyStatus {
        state: Some(state),
        namespace: Some(namespace.to_owned()),
        conditions: merge(&old.conditions, &verdicts, policy.metadata.generation, now),
    }
}

pub fn config_status(
    old: Option<&GPUVirtConfigStatus>,
    generation: Option<i64>,
    judgement: &Judgement,
    rollouts: &[Verdict],
    wired: &Wired,
    now: &Time,
) -> GPUVirtConfigStatus {
    let mut old = old.map(|status| status.conditions.clone()).unwrap_or_default();
    old.retain(|condition| !wired.silenced().contains(&condition.type_.as_str()));
    let verdicts: Vec<Verdict> =
        [&judgement.verdict].into_iter().chain(rollouts).chain(wired.verdict()).cloned().collect();
    GPUVirtConfigStatus {
        observed_generation: generation.unwrap_or_default(),
        operands: judgement.operands.clone(),
        modes: judgement.modes.clone(),
        conditions: merge(&old, &verdicts, generation, now),
    }
}
