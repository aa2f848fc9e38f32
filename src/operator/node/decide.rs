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
    WorkloadMode, labels,
    v1alpha1::{Advertise, AgentFunction, AgentStatus, GPUNode, GPUNodeSpec, NodePhase},
};

use super::{
    super::owner,
    gates::{self, SandboxMode},
    mode::{Complaint, NodePolicy, effective},
    preflight::{Blocked, Preflight, preflight},
    readiness::{self, Readiness},
    users::Users,
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
    pub epoch: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperandPod {
    pub uid: String,
    pub name: String,
    /// The deploy keys that its DaemonSet selects nodes by.
    pub gates: BTreeSet<String>,
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
}

pub fn decide(observed: &Observed<'_>) -> Decision {
    let Some(gpu_node) = observed.gpu_node else {
        return without_gpu_node(observed);
    };
    let (desired, complaint) = match observed.policy.teardown {
        true => (WorkloadMode::Container, None),
        false => effective(observed.labels, observed.policy),
    };
    let status = gpu_node.status.as_ref();
    let serving = status.and_then(|s| s.operator.as_ref()).and_then(|o| o.serving);
    let Some(agent) = status.and_then(|s| s.agent.as_ref()) else {
        let waiting = Readiness::no("AgentStarting", "the agent on this node has not reported yet");
        let order = Order {
            spec: gpu_node.spec.clone(),
            desired,
            serving,
            phase: NodePhase::Steady,
            readiness: waiting,
            complaint,
        };
        return Decision { labels: present(observed.labels, true), order: Some(order), watch_pods: false };
    };
    let serving = serving.or_else(|| taken_over(observed, agent));
    let node = Reported { observed, gpu_node, agent, desired, serving };
    let course = node.course();
    node.decision(course, complaint)
}

/// A node that somebody else has run before us: the mode that the kernel shows, if the node's gates ask for its operands.
fn taken_over(observed: &Observed<'_>, agent: &AgentStatus) -> Option<WorkloadMode> {
    let mode = agent.gpus.first()?.mode?;
    let whole = agent.gpus.iter().all(|gpu| gpu.mode == Some(mode));
    let gate = gates::main_gate(mode);
    (whole && observed.labels.get(&gate).is_some_and(|value| value == "true")).then_some(mode)
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

/// What is done with a node now.
#[derive(Clone, Debug, PartialEq)]
enum Course {
    /// The agent sees no GPU.
    NoGPUs,
    /// The admin wants no operand here; what runs goes on as it is.
    OperandsDisabled,
    /// The mode is reached, or was, and the agent mends it.
    Serve,
    /// A GPU is held by a pod, and whose pod it is must be known before anything is touched.
    LookAtPods,
    /// The mode cannot change; the old one goes on.
    Hold(Blocked),
    /// Operands and advertisement of the old mode leave.
    Withdraw { waiting_for: String },
    /// They are gone: the agent may be asked for the new mode, or is at it.
    Switch,
}

/// What a course means for each object.
struct Outcome {
    mode: Option<WorkloadMode>,
    advertise: Advertise,
    deploy: Vec<String>,
    phase: NodePhase,
    serving: Option<WorkloadMode>,
    readiness: Readiness,
}

/// A node that has a report.
struct Reported<'a> {
    observed: &'a Observed<'a>,
    gpu_node: &'a GPUNode,
    agent: &'a AgentStatus,
    desired: WorkloadMode,
    serving: Option<WorkloadMode>,
}

impl Reported<'_> {
    fn course(&self) -> Course {
        if self.agent.gpus.is_empty() {
            return Course::NoGPUs;
        }
        if self.operands_disabled() && !self.observed.policy.teardown {
            return Course::OperandsDisabled;
        }
        let asked = self.gpu_node.spec.mode == Some(self.desired);
        if self.reached() || (asked && self.serving == Some(self.desired)) {
            return Course::Serve;
        }
        let operands = self.observed.pods.map(|pods| pods.iter().map(|p| p.uid.clone()).collect());
        match preflight(self.agent, self.desired, operands.as_ref(), self.observed.users) {
            Preflight::Blocked(blocked) => Course::Hold(blocked),
            Preflight::NeedsPods => Course::LookAtPods,
            Preflight::Clear if asked => Course::Switch,
            Preflight::Clear => match self.still_there() {
                Some(waiting_for) => Course::Withdraw { waiting_for },
                None => Course::Switch,
            },
        }
    }

    fn outcome(&self, course: Course) -> Outcome {
        let spec = &self.gpu_node.spec;
        match course {
            Course::NoGPUs => Outcome {
                mode: spec.mode,
                advertise: Advertise::Withdrawn,
                deploy: Vec::new(),
                phase: NodePhase::Steady,
                serving: None,
                readiness: Readiness::yes("NoGPUs", "the agent sees no NVIDIA GPU on this node"),
            },
            Course::OperandsDisabled => Outcome {
                mode: spec.mode,
                advertise: spec.advertise,
                deploy: Vec::new(),
                phase: NodePhase::Steady,
                serving: self.serving,
                readiness: Readiness::yes(
                    "OperandsDisabled",
                    format!("label {}=false keeps operands off this node", labels::DEPLOY_OPERANDS),
                ),
            },
            Course::Serve => Outcome {
                mode: Some(self.desired),
                phase: NodePhase::Steady,
                readiness: self.serving_readiness(),
                ..self.serve(Some(self.desired))
            },
            Course::LookAtPods => Outcome {
                phase: NodePhase::Steady,
                readiness: Readiness::no("Checking", format!("looking at who uses the GPUs before {}", self.desired)),
                ..self.serve(self.serving)
            },
            Course::Hold(blocked) => Outcome {
                phase: NodePhase::Refused,
                readiness: Readiness::no(blocked.reason, blocked.message),
                ..self.serve(self.serving)
            },
            Course::Withdraw { waiting_for } => Outcome {
                mode: spec.mode,
                advertise: Advertise::Withdrawn,
                deploy: if self.withdrawn() { Vec::new() } else { self.serve(self.serving).deploy },
                phase: NodePhase::Withdrawing,
                serving: self.serving,
                readiness: Readiness::no(
                    "Withdrawing",
                    format!("on the way to {}: waiting for {waiting_for}", self.desired),
                ),
            },
            Course::Switch => Outcome {
                mode: Some(self.desired),
                advertise: Advertise::Withdrawn,
                deploy: Vec::new(),
                phase: NodePhase::Switching,
                serving: self.serving,
                readiness: readiness::switching(self.agent, self.desired),
            },
        }
    }

    /// Everything that a node in this mode has; nothing for a node that has served no mode yet, or that is being left.
    fn serve(&self, mode: Option<WorkloadMode>) -> Outcome {
        let sandbox = self.observed.policy.sandbox.mode();
        let leaving = self.observed.policy.teardown;
        Outcome {
            mode,
            advertise: match (mode, leaving, sandbox) {
                (Some(_), false, SandboxMode::KubeVirt) => Advertise::Offered,
                // Kata's own device plugin offers what our agent has bound.
                (Some(_), false, SandboxMode::Kata) | (Some(_), true, _) | (None, _, _) => Advertise::Withdrawn,
            },
            deploy: match mode {
                Some(mode) if !leaving => gates::wanted(mode, sandbox, self.observed.labels),
                Some(_) | None => Vec::new(),
            },
            phase: NodePhase::Steady,
            serving: mode,
            readiness: Readiness::no("Unknown", ""),
        }
    }

    fn serving_readiness(&self) -> Readiness {
        if self.observed.policy.teardown {
            // Removal is done when nothing of ours is left on the node but the agent.
            return match self.still_there() {
                None => Readiness::yes(readiness::TORN_DOWN, "operands have left and GPUs are released"),
                Some(waiting_for) => Readiness::no("TearingDown", format!("waiting for {waiting_for}")),
            };
        }
        let advertise = self.serve(Some(self.desired)).advertise;
        if !self.answered() {
            return Readiness::no("AgentBehind", "the agent on this node has not answered the last order yet");
        }
        readiness::of(self.agent, self.desired, advertise, &self.disabled())
    }

    /// The kernel shows the mode on every GPU.
    fn reached(&self) -> bool {
        self.agent.gpus.iter().all(|gpu| gpu.mode == Some(self.desired))
    }

    /// What is left of the old mode. The agent comes first: without its answer nothing of the old mode is taken away.
    fn still_there(&self) -> Option<String> {
        if !self.withdrawn() {
            return Some(
                "the agent to withdraw its devices from the kubelet (is its pod, of gpuvirt-agent, running there?)"
                    .to_owned(),
            );
        }
        if !gates::patch(self.observed.labels, &[]).is_empty() {
            return Some("the old mode's deploy labels".to_owned());
        }
        let Some(pods) = self.observed.pods else {
            return Some("the list of this node's pods".to_owned());
        };
        let leaving: Vec<&str> = pods.iter().filter(|p| !p.gates.is_empty()).map(|p| p.name.as_str()).collect();
        (!leaving.is_empty()).then(|| format!("pods {}", leaving.join(", ")))
    }

    /// The agent has answered that it offers nothing any more.
    fn withdrawn(&self) -> bool {
        self.gpu_node.spec.advertise == Advertise::Withdrawn && self.answered() && self.agent.resources.is_empty()
    }

    /// Its report is about the order that is in force.
    fn answered(&self) -> bool {
        Some(self.agent.observed_generation) >= self.gpu_node.metadata.generation
    }

    fn disabled(&self) -> Vec<AgentFunction> {
        gates::disabled(self.observed.labels, &self.observed.policy.disabled)
    }

    fn operands_disabled(&self) -> bool {
        self.observed.labels.get(labels::DEPLOY_OPERANDS).is_some_and(|value| value == "false")
    }

    fn watch_pods(&self, course: &Course) -> bool {
        match course {
            Course::NoGPUs | Course::OperandsDisabled => false,
            Course::Serve => self.observed.policy.teardown,
            Course::LookAtPods | Course::Withdraw { .. } | Course::Switch => true,
            Course::Hold(_) => self.agent.gpus.iter().any(|gpu| gpu.holders.iter().any(|h| h.pod.is_some())),
        }
    }

    fn decision(&self, course: Course, complaint: Option<Complaint>) -> Decision {
        let watch_pods = self.watch_pods(&course);
        let outcome = self.outcome(course);
        let mut labels = gates::patch(self.observed.labels, &outcome.deploy);
        labels.extend(present(self.observed.labels, !self.agent.gpus.is_empty()));
        if !self.observed.policy.teardown {
            labels.extend(gates::host(self.observed.labels, &self.agent.host));
            labels.extend(owner::label(self.observed.labels, self.observed.policy.claims.as_deref()));
        }
        // Only a node that serves its mode has a MIG manager to do it.
        let layout = outcome.mode.filter(|_| !outcome.deploy.is_empty());
        let default = self.observed.policy.mig_default;
        labels.extend(layout.and_then(|mode| gates::mig_layout(mode, self.observed.labels, default)));
        let spec = GPUNodeSpec {
            mode: outcome.mode,
            // Nobody but the operator writes here, and it decides by node in this version.
            gpus: Vec::new(),
            vgpu: None,
            advertise: outcome.advertise,
            aliases: self.observed.policy.aliases.clone(),
            disabled: self.disabled(),
            epoch: self.observed.epoch,
        };
        let order = Order {
            spec,
            desired: self.desired,
            serving: outcome.serving,
            phase: outcome.phase,
            readiness: outcome.readiness,
            complaint,
        };
        Decision { labels, watch_pods, order: Some(order) }
    }
}
