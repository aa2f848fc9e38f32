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
    v1alpha1::{Advertise, AgentFunction, AgentStatus, GPUNode, GPUNodeSpec, GPUStatus, NodePhase},
};

use super::{
    gates::{self, SandboxMode},
    mode::{Complaint, NodePolicy, effective},
    preflight::{Blocked, Findings, Preflight, findings},
    readiness::{self, Readiness},
    users::Users,
    vgpus,
};
use crate::operator::{
    transition::{Leave, Progress},
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
    /// How far it is with its vGPU layout; `None` where it is to have none.
    pub vgpus: Option<vgpu::Standing>,
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
        };
        return Decision { labels: present(observed.labels, true), order: Some(order), watch_pods: false };
    };
    let course = node.course();
    node.decision(course, complaint)
}

/// A node that somebody else has run before us: the mode that the kernel shows, if the node's gates ask for its operands.
fn taken_over(observed: &Observed<'_>, agent: &AgentStatus) -> Option<WorkloadMode> {
    let mode = agent.gpus.first()?.mode?;
    let whole = agent.gpus.iter().all(|gpu| gpu.mode == Some(mode));
    let gate = gates::main_gate(mode);
    let runs = |value: &String| value == "true" || value == gates::PRE_INSTALLED;
    (whole && observed.labels.get(&gate).is_some_and(runs)).then_some(mode)
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
    /// The change has something to wait for; the old mode goes on.
    Wait(Blocked),
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
    wish: vgpu::Wish,
}

impl<'a> Reported<'a> {
    fn of(observed: &'a Observed<'a>, desired: WorkloadMode) -> Option<Self> {
        let gpu_node = observed.gpu_node?;
        let status = gpu_node.status.as_ref()?;
        let agent = status.agent.as_ref()?;
        let serving = status.operator.as_ref().and_then(|operator| operator.serving);
        let serving = serving.or_else(|| taken_over(observed, agent));
        let source = observed.policy.vgpu.as_ref();
        let wish = vgpu::wish(observed.labels, source, observed.layouts, &agent.gpus);
        Some(Self { observed, gpu_node, agent, desired, serving, wish })
    }

    fn findings(&self) -> Findings {
        let operands = self.observed.pods.map(|pods| pods.iter().map(|p| p.uid.clone()).collect());
        findings(self.agent, self.desired, operands.as_ref(), self.observed.users)
    }

    /// Of a node whose agent may be asked, or has been.
    fn switching(&self) -> Progress {
        let asked = self.gpu_node.spec.mode == Some(self.desired) && self.answered();
        let away = |gpu: &&GPUStatus| gpu.mode != Some(self.desired);
        let refusal = self.agent.gpus.iter().filter(away).find_map(|gpu| gpu.refusal.as_ref());
        match refusal.filter(|_| asked) {
            Some(refusal) => {
                Progress::Refused(Blocked { reason: refusal.reason.clone(), message: refusal.message.clone() })
            }
            None => Progress::Switching { message: readiness::switching(self.agent, self.desired).message },
        }
    }

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
        // A node that has served nothing yet has nobody to wait for.
        match (self.observed.leave, self.serving) {
            (Leave::Waits(why), Some(_)) => return Course::Wait(why.clone()),
            (Leave::Refused(why), Some(_)) => return Course::Hold(why.clone()),
            (Leave::Free, _) | (Leave::Waits(_) | Leave::Refused(_), None) => {}
        }
        match self.findings().verdict() {
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
            Course::Wait(why) => Outcome {
                phase: NodePhase::Waiting,
                readiness: Readiness::no(why.reason, why.message),
                ..self.serve(self.serving)
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
        let gate = self.observed.labels.get(gates::VALIDATOR);
        let checked = self.observed.policy.checks && gate.is_some_and(|value| value == "true");
        let vgpus = self.vgpus(Some(self.desired));
        readiness::of(self.agent, self.desired, advertise, &self.disabled(), vgpus.as_ref(), checked)
    }

    /// How far a node in this mode is with its vGPUs.
    fn vgpus(&self, mode: Option<WorkloadMode>) -> Option<vgpu::Standing> {
        match mode {
            Some(WorkloadMode::VmVgpu) => {
                vgpu::standing(&self.wish, self.gpu_node.spec.vgpu.as_ref(), self.agent, self.answered())
            }
            Some(WorkloadMode::Container | WorkloadMode::VmPassthrough) | None => None,
        }
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
            Course::Wait(_) | Course::Hold(_) => {
                self.agent.gpus.iter().any(|gpu| gpu.all_holders().any(|h| h.pod.is_some()))
            }
        }
    }

    fn decision(&self, course: Course, complaint: Option<Complaint>) -> Decision {
        let watch_pods = self.watch_pods(&course);
        let outcome = self.outcome(course);
        let mut labels = gates::patch(self.observed.labels, &outcome.deploy);
        if self.observed.policy.driver {
            let driver = self.agent.host.driver.as_ref().map(|driver| driver.origin);
            labels.extend(gates::preinstalled(self.observed.labels, &outcome.deploy, driver));
        }
        labels.extend(present(self.observed.labels, !self.agent.gpus.is_empty()));
        if !self.observed.policy.teardown {
            labels.extend(gates::host(self.observed.labels, &self.agent.host));
        }
        // Only a node that serves its mode has a MIG manager to do it.
        let layout = outcome.mode.filter(|_| !outcome.deploy.is_empty());
        let default = self.observed.policy.mig_default;
        labels.extend(layout.and_then(|mode| gates::mig_layout(mode, self.observed.labels, default)));
        let vgpus = self.vgpus(outcome.mode);
        labels.extend(vgpus::label(self.observed.labels, vgpus.as_ref()));
        let vgpu = match outcome.mode {
            Some(WorkloadMode::VmVgpu) => self.wish.layout(self.gpu_node.spec.vgpu.as_ref()),
            Some(WorkloadMode::Container | WorkloadMode::VmPassthrough) | None => None,
        };
        let spec = GPUNodeSpec {
            mode: outcome.mode,
            // Nobody but the operator writes here, and it decides by node in this version.
            gpus: Vec::new(),
            vgpu,
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
            vgpus,
        };
        Decision { labels, watch_pods, order: Some(order) }
    }
}
