//! What is to be done with a node now, and what that means for it. Pure.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{Advertise, AgentFunction, AgentStatus, GPUNode, GPUStatus, NodePhase},
};

use super::{
    decide::Observed,
    gates::{self, SandboxMode},
    preflight::{Blocked, Findings, Preflight, findings},
    readiness::{self, Readiness},
};
use crate::operator::{
    transition::{Leave, Progress},
    vgpu,
};

/// What is done with a node now.
#[derive(Clone, Debug, PartialEq)]
pub enum Course {
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
pub struct Outcome {
    pub mode: Option<WorkloadMode>,
    pub advertise: Advertise,
    pub deploy: Vec<String>,
    pub phase: NodePhase,
    pub serving: Option<WorkloadMode>,
    pub readiness: Readiness,
}

/// A node that has a report.
pub struct Reported<'a> {
    pub observed: &'a Observed<'a>,
    pub gpu_node: &'a GPUNode,
    pub agent: &'a AgentStatus,
    pub desired: WorkloadMode,
    pub serving: Option<WorkloadMode>,
    pub wish: vgpu::Wish,
}

impl<'a> Reported<'a> {
    pub fn of(observed: &'a Observed<'a>, desired: WorkloadMode) -> Option<Self> {
        let gpu_node = observed.gpu_node?;
        let status = gpu_node.status.as_ref()?;
        let agent = status.agent.as_ref()?;
        let serving = status.operator.as_ref().and_then(|operator| operator.serving);
        let serving = serving.or_else(|| taken_over(observed, agent));
        let source = observed.policy.vgpu.as_ref();
        let wish = vgpu::wish(observed.labels, source, observed.layouts, &agent.gpus);
        Some(Self { observed, gpu_node, agent, desired, serving, wish })
    }

    pub fn findings(&self) -> Findings {
        let operands = self.observed.pods.map(|pods| pods.iter().map(|p| p.uid.clone()).collect());
        findings(self.agent, self.desired, operands.as_ref(), self.observed.users)
    }

    /// Of a node whose agent may be asked, or has been.
    pub fn switching(&self) -> Progress {
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

    pub fn course(&self) -> Course {
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

    pub fn outcome(&self, course: Course) -> Outcome {
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

    pub fn serving_readiness(&self) -> Readiness {
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
    pub fn vgpus(&self, mode: Option<WorkloadMode>) -> Option<vgpu::Standing> {
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
    pub fn withdrawn(&self) -> bool {
        self.gpu_node.spec.advertise == Advertise::Withdrawn && self.answered() && self.agent.resources.is_empty()
    }

    /// Its report is about the order that is in force.
    fn answered(&self) -> bool {
        Some(self.agent.observed_generation) >= self.gpu_node.metadata.generation
    }

    pub fn disabled(&self) -> Vec<AgentFunction> {
        gates::disabled(self.observed.labels, &self.observed.policy.disabled)
    }

    fn operands_disabled(&self) -> bool {
        self.observed.labels.get(labels::DEPLOY_OPERANDS).is_some_and(|value| value == "false")
    }

    pub fn watch_pods(&self, course: &Course) -> bool {
        match course {
            Course::NoGPUs | Course::OperandsDisabled => false,
            Course::Serve => self.observed.policy.teardown,
            Course::LookAtPods | Course::Withdraw { .. } | Course::Switch => true,
            Course::Wait(_) | Course::Hold(_) => {
                self.agent.gpus.iter().any(|gpu| gpu.all_holders().any(|h| h.pod.is_some()))
            }
        }
    }
}

/// A node that somebody else has run before us: the mode that the kernel shows, if the node's gates ask for its operands.
fn taken_over(observed: &Observed<'_>, agent: &AgentStatus) -> Option<WorkloadMode> {
    let mode = agent.gpus.first()?.mode?;
    let whole = agent.gpus.iter().all(|gpu| gpu.mode == Some(mode));
    let gate = gates::main_gate(mode);
    let runs = |value: &String| value == "true" || value == gates::PRE_INSTALLED;
    (whole && observed.labels.get(&gate).is_some_and(runs)).then_some(mode)
}
