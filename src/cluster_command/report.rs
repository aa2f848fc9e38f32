//! What there is to say of a cluster and of each of its nodes, in the words of the objects' own statuses. Pure.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode, labels,
    v1::PolicyState,
    v1alpha1::{AgentStatus, GPUNode, GPUTransition, GPUUser, NodePhase, OperatorStatus, Severity, TransitionPhase},
};
use k8s_openapi::{
    api::core::v1::Node,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::ResourceExt;
use serde::Serialize;

use super::{
    fleet::Fleet,
    gpus::{GpuReport, State, of_gpu},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusReport {
    pub cluster: ClusterReport,
    pub nodes: Vec<NodeReport>,
    /// What could not be read: the answer is without it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterReport {
    pub ready: bool,
    /// Name of the `ClusterPolicy` that counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Of the operator and its operands.
    pub namespace: String,
    pub gpus: Count,
    pub nodes: NodeCount,
    /// What is wrong, the worst first.
    pub concerns: Vec<Concern>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCount {
    pub total: usize,
    pub ready: usize,
    /// On their way, or waiting for their turn.
    pub changing: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Count {
    pub total: usize,
    pub in_use: usize,
    pub unhealthy: usize,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Level {
    /// It does not do its work.
    Error,
    /// It waits for something, or has less than it could.
    Warning,
    /// It is on its way.
    Info,
}

/// Something that somebody may have to do something about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Concern {
    pub level: Level,
    /// One CamelCase word.
    pub reason: String,
    /// Object, cause, next step.
    pub message: String,
}

impl Concern {
    fn new(level: Level, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { level, reason: reason.into(), message: message.into() }
    }

    fn of(level: Level, condition: &Condition) -> Self {
        Self::new(level, condition.reason.clone(), condition.message.clone())
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub name: String,
    pub ready: bool,
    /// The mode that is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<WorkloadMode>,
    /// The modes that the kernel shows, of all its GPUs. Empty: none.
    pub real: BTreeSet<WorkloadMode>,
    pub phase: NodePhase,
    /// What changes there, or waits to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
    /// No new pod comes to it.
    pub cordoned: bool,
    pub gpus: Count,
    /// The driver of all GPUs, `none`, or `mixed`.
    pub driver: String,
    /// The version of NVIDIA's driver, where it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Its agent's version.
    pub agent: String,
    pub offers: Vec<Offer>,
    /// Why it is not as asked for, and what else is wrong with it, the most important first.
    pub concerns: Vec<Concern>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    pub kernel: String,
    pub os: String,
    pub architecture: String,
    pub iommu: bool,
}

/// A `GPUTransition` that has not ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    pub from: WorkloadMode,
    pub to: WorkloadMode,
    /// The image of the driver that it goes to, where that is what changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    pub phase: TransitionPhase,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
    pub approved: bool,
}

/// A resource that pods can ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Offer {
    pub name: String,
    /// What is advertised.
    pub count: i64,
    /// What the kubelet has in the node's allocatable. Unset: it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocatable: Option<i64>,
}

pub fn report(fleet: &Fleet) -> StatusReport {
    let nodes: Vec<NodeReport> = fleet.gpu_nodes.iter().map(|gpu_node| node(fleet, gpu_node)).collect();
    StatusReport { cluster: cluster(fleet, &nodes), nodes, remarks: fleet.remarks.clone() }
}

fn cluster(fleet: &Fleet, nodes: &[NodeReport]) -> ClusterReport {
    let mut concerns: Vec<Concern> = Vec::new();
    let policy = fleet.policy();
    if let Some(why) = &fleet.silence {
        let look = format!("the operator is not running: {why}; kubectl get pods -n {}", fleet.namespace());
        concerns.push(Concern::new(Level::Error, "OperatorSilent", look));
    }
    match policy {
        None => concerns.push(Concern::new(
            Level::Error,
            "NoClusterPolicy",
            "no ClusterPolicy counts: create one, or set clusterPolicy.deployCR in the chart's values",
        )),
        Some(policy) => {
            let status = policy.status.clone().unwrap_or_default();
            if status.state.is_none() {
                let said = format!("the operator has not looked at ClusterPolicy {} yet", policy.name_any());
                concerns.push(Concern::new(Level::Warning, "NotLookedAt", said));
            }
            concerns.extend(status.conditions.iter().filter_map(of_policy));
        }
    }
    let config = fleet.config.iter().filter_map(|config| config.status.as_ref());
    for condition in config.flat_map(|status| &status.conditions) {
        let told = concerns.iter().any(|concern| concern.reason == condition.reason);
        concerns.extend(of_policy(condition).filter(|_| !told));
    }
    // Nodes say themselves why they are not ready.
    concerns.retain(|concern| concern.reason != "GPUNodeNotReady");
    concerns.sort_by_key(|concern| concern.level);
    let count = NodeCount {
        total: nodes.len(),
        ready: nodes.iter().filter(|node| node.ready).count(),
        changing: nodes.iter().filter(|node| node.is_changing()).count(),
    };
    let sum = |of: fn(&Count) -> usize| nodes.iter().map(|node| of(&node.gpus)).sum();
    let state = policy.and_then(|policy| policy.status.as_ref()).and_then(|status| status.state);
    ClusterReport {
        ready: state == Some(PolicyState::Ready) && fleet.silence.is_none() && count.ready == count.total,
        policy: policy.map(ResourceExt::name_any),
        namespace: fleet.namespace(),
        gpus: Count { total: sum(|c| c.total), in_use: sum(|c| c.in_use), unhealthy: sum(|c| c.unhealthy) },
        nodes: count,
        concerns,
    }
}

/// What a condition of a policy or of our config complains of.
fn of_policy(condition: &Condition) -> Option<Concern> {
    match (condition.type_.as_str(), condition.status.as_str()) {
        ("Ready", "False") => Some(Concern::of(Level::Error, condition)),
        ("DriversCurrent", "False") if condition.reason == "Upgrading" => Some(Concern::of(Level::Info, condition)),
        // The pair of `Ready`, and what is only to be known.
        ("Error" | "ImagesNotUsed", _) => None,
        (_, "False") => Some(Concern::of(Level::Warning, condition)),
        _ => None,
    }
}

fn node(fleet: &Fleet, gpu_node: &GPUNode) -> NodeReport {
    let name = gpu_node.name_any();
    let status = gpu_node.status.clone().unwrap_or_default();
    let operator = status.operator.unwrap_or_default();
    let transition = fleet
        .transition(&name)
        .filter(|transition| !transition.status.as_ref().is_some_and(|status| status.phase.is_final()));
    let kubernetes = fleet.node(&name);
    let agent = status.agent.as_ref();
    let gpus = agent.map(|agent| agent.gpus.as_slice()).unwrap_or_default();
    let facts = agent.map(|agent| agent.host.clone());
    NodeReport {
        ready: operator.ready == "True",
        wanted: operator.desired,
        real: gpus.iter().filter_map(|gpu| gpu.mode).collect(),
        phase: operator.phase,
        change: transition.map(change),
        cordoned: kubernetes.and_then(|node| node.spec.as_ref()?.unschedulable).unwrap_or(false),
        gpus: agent.map(|agent| count(&name, agent, &operator.users)).unwrap_or_default(),
        driver: agent.map(|agent| agent.summary.driver.clone()).unwrap_or_default(),
        driver_version: facts.as_ref().and_then(|facts| facts.driver.clone()).map(|driver| driver.version),
        host: facts.map(|facts| Host {
            kernel: facts.kernel,
            os: facts.os,
            architecture: facts.architecture,
            iommu: facts.iommu,
        }),
        agent: agent.map(|agent| agent.version.clone()).unwrap_or_default(),
        offers: offers(agent, kubernetes),
        concerns: concerns(&name, &operator, agent, transition),
        name,
    }
}

fn change(transition: &GPUTransition) -> Change {
    let status = transition.status.clone().unwrap_or_default();
    let spec = &transition.spec;
    Change {
        from: spec.from,
        to: spec.to,
        driver: spec.driver.as_ref().map(|driver| driver.to.clone()),
        phase: status.phase,
        since: status.since,
        deadline: status.deadline,
        approved: spec.is_approved(),
    }
}

fn count(node: &str, agent: &AgentStatus, users: &[GPUUser]) -> Count {
    let gpus: Vec<GpuReport> = agent.gpus.iter().map(|gpu| of_gpu(node, gpu, users)).collect();
    Count {
        total: gpus.len(),
        in_use: gpus.iter().filter(|gpu| gpu.is_used()).count(),
        unhealthy: gpus.iter().filter(|gpu| gpu.state == State::Unhealthy).count(),
    }
}

/// What the agent offers, and of a container node what NVIDIA's device plugin does.
fn offers(agent: Option<&AgentStatus>, node: Option<&Node>) -> Vec<Offer> {
    let allocatable = node.and_then(|node| node.status.as_ref()?.allocatable.as_ref());
    let amount = |name: &str| allocatable.map(|all| all.get(name).and_then(|q| q.0.parse().ok()).unwrap_or(0));
    let ours = agent.map(|agent| agent.resources.as_slice()).unwrap_or_default();
    let mut offers: Vec<Offer> = ours
        .iter()
        .map(|resource| Offer {
            name: resource.name.clone(),
            count: i64::try_from(resource.devices.len()).unwrap_or(i64::MAX),
            allocatable: amount(&resource.name),
        })
        .collect();
    for (name, quantity) in allocatable.into_iter().flatten() {
        let count = quantity.0.parse().unwrap_or(0);
        if labels::is_container_resource(name) && count > 0 {
            offers.push(Offer { name: name.clone(), count, allocatable: Some(count) });
        }
    }
    offers
}

fn concerns(
    name: &str,
    operator: &OperatorStatus,
    agent: Option<&AgentStatus>,
    transition: Option<&GPUTransition>,
) -> Vec<Concern> {
    let mut all = Vec::new();
    if let Some(status) = transition.and_then(|transition| transition.status.as_ref()) {
        let level = match status.phase.stage() {
            crds::v1alpha1::TransitionStage::Stopped => Level::Error,
            crds::v1alpha1::TransitionStage::Approach => Level::Warning,
            crds::v1alpha1::TransitionStage::Passage | crds::v1alpha1::TransitionStage::Ended => Level::Info,
        };
        all.push(Concern::new(level, status.reason.clone(), status.message.clone()));
    }
    let Some(agent) = agent else {
        let look =
            format!("the agent has not reported: kubectl get pods -A -l app=gpuvirt-agent -o wide | grep {name}");
        all.push(Concern::new(Level::Error, "AgentSilent", look));
        return all;
    };
    let told = |all: &[Concern], message: &str| all.iter().any(|concern| concern.message == message);
    if operator.ready != "True" && !operator.reason.is_empty() && !told(&all, &operator.message) {
        let level = if transition.is_some() { Level::Warning } else { Level::Error };
        all.push(Concern::new(level, operator.reason.clone(), operator.message.clone()));
    }
    for gpu in &agent.gpus {
        for ailment in &gpu.ailments {
            let level = match ailment.severity {
                Severity::Unhealthy => Level::Error,
                Severity::Degraded => Level::Warning,
            };
            all.push(Concern::new(level, ailment.reason.clone(), ailment.message.clone()));
        }
    }
    // Health is told by each GPU, and checks and refusals by the operator's reason.
    let said = ["GPUsHealthy", "Ready", "ModesReached", "Registered", "VgpuManagerReady", "VgpuDevicesReady"];
    let conditions = operator.conditions.iter().chain(&agent.conditions);
    for condition in conditions.filter(|c| c.status == "False" && !said.contains(&c.type_.as_str())) {
        let chain = crds::conditions::CHAIN.contains(&condition.type_.as_str());
        if !chain && !told(&all, &condition.message) {
            all.push(Concern::of(Level::Warning, condition));
        }
    }
    all.sort_by_key(|concern| concern.level);
    all
}

impl NodeReport {
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
            || match self.phase {
                NodePhase::Steady | NodePhase::Refused => false,
                NodePhase::Waiting | NodePhase::Withdrawing | NodePhase::Switching | NodePhase::Upgrading => true,
            }
    }

    /// One word.
    pub fn state(&self) -> String {
        match (&self.change, self.ready) {
            (Some(change), _) => format!("{:?}", change.phase),
            (None, true) => "Ready".to_owned(),
            (None, false) if self.is_changing() => format!("{:?}", self.phase),
            (None, false) => "NotReady".to_owned(),
        }
    }

    /// Real, and wanted where that is another one.
    pub fn modes(&self) -> String {
        let real: Vec<&str> = self.real.iter().map(|mode| mode.as_str()).collect();
        let real = if real.is_empty() { "none".to_owned() } else { real.join("+") };
        match self.wanted {
            Some(wanted) if wanted.as_str() != real => format!("{real} → {wanted}"),
            Some(_) | None => real,
        }
    }
}
