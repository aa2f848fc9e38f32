//! A node and an agent that do what they are told.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{
        Advertise, AgentStatus, GPUNode, GPUNodeSpec, GPUNodeStatus, GPUStatus, Holder, NodePhase, OperatorStatus,
        Refusal, ResourceStatus, VgpuProgress, VgpuState,
    },
};

use crate::operator::transition::Leave;
use crate::operator::{
    node::{
        decide::{Decision, Observed, OperandPod, decide},
        gates::SandboxMode,
        mode::{NodePolicy, Sandbox},
        users::Users,
    },
    vgpu,
};

pub(super) const GPU: &str = "0000:01:00.0";
pub(super) const VM_RESOURCE: &str = "nvidia.com/TU104GL_TESLA_T4";

/// One node, its kubelet and its agent, reduced to what the operator sees of them.
pub(super) struct Lab {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) gpu_node: GPUNode,
    pub(super) pods: Vec<OperandPod>,
    pub(super) pods_watched: bool,
    pub(super) policy: NodePolicy,
    /// What the agent answers to an order for another mode.
    pub(super) refusal: Option<Refusal>,
    /// The policy's vGPU layouts.
    pub(super) layouts: Option<vgpu::File>,
    /// Why the agent cannot follow a vGPU layout.
    pub(super) vgpu_failure: Option<String>,
    /// Everything that was decided, oldest first.
    pub(super) history: Vec<Decision>,
}

pub(super) fn layouts(text: &str) -> vgpu::Config {
    vgpu::Config::parse(text).expect("layouts")
}

pub(super) const LAYOUTS: &str = "version: v1
vgpu-configs:
  default: [{devices: all, vgpu-devices: {A10-12Q: 2}}]
  small: [{devices: all, vgpu-devices: {A10-4Q: 6}}]
";

impl Lab {
    /// A container node on which everything runs.
    pub(super) fn container() -> Self {
        let mut lab = Self::new();
        lab.settle();
        assert_eq!(lab.operator().phase, NodePhase::Steady);
        assert_eq!(lab.operator().ready, "True", "{}", lab.operator().message);
        lab
    }

    pub(super) fn new() -> Self {
        let gpu = GPUStatus { address: GPU.to_owned(), mode: Some(WorkloadMode::Container), ..GPUStatus::default() };
        let mut gpu_node = GPUNode::new("n1", GPUNodeSpec::default());
        gpu_node.metadata.generation = Some(1);
        gpu_node.status = Some(GPUNodeStatus {
            agent: Some(AgentStatus { gpus: vec![gpu], ..AgentStatus::default() }),
            operator: None,
        });
        let sandbox = Sandbox::On { default: WorkloadMode::Container, mode: SandboxMode::KubeVirt };
        Self {
            labels: BTreeMap::new(),
            gpu_node,
            pods: Vec::new(),
            pods_watched: false,
            policy: NodePolicy {
                vgpu: Some(vgpu::LayoutSource { config_map: None, default: vgpu::USUAL.to_owned() }),
                ..NodePolicy::new("cluster-policy".to_owned(), sandbox)
            },
            refusal: None,
            layouts: Some(Ok(layouts(LAYOUTS))),
            vgpu_failure: None,
            history: Vec::new(),
        }
    }

    /// Operator, DaemonSet controller, kubelet and agent take turns until nothing moves any more.
    pub(super) fn settle(&mut self) {
        for _ in 0..20 {
            let before = (self.labels.clone(), self.gpu_node.clone(), self.pods.clone(), self.pods_watched);
            self.operate();
            self.run_pods();
            self.run_agent();
            if before == (self.labels.clone(), self.gpu_node.clone(), self.pods.clone(), self.pods_watched) {
                return;
            }
        }
        panic!("the node never comes to rest: {:?}", self.operator());
    }

    pub(super) fn operate(&mut self) {
        let observed = Observed {
            name: "n1",
            labels: &self.labels,
            gpu_node: Some(&self.gpu_node),
            policy: &self.policy,
            pods: self.pods_watched.then_some(self.pods.as_slice()),
            users: &Users::default(),
            layouts: self.layouts.as_ref(),
            leave: &Leave::Free,
            upgrade: None,
            epoch: 7,
        };
        let decision = decide(&observed);
        self.history.push(decision.clone());
        for (key, value) in decision.labels {
            match value {
                Some(value) => self.labels.insert(key, value),
                None => self.labels.remove(&key),
            };
        }
        self.pods_watched = decision.watch_pods;
        let order = decision.order.expect("a node with a GPUNode should get an order");
        if self.gpu_node.spec != order.spec {
            self.gpu_node.spec = order.spec;
            self.gpu_node.metadata.generation = self.gpu_node.metadata.generation.map(|g| g + 1);
        }
        let status = self.gpu_node.status.as_mut().unwrap();
        status.operator = Some(OperatorStatus {
            desired: Some(order.desired),
            serving: order.serving,
            phase: order.phase,
            ready: if order.readiness.ready { "True" } else { "False" }.to_owned(),
            reason: order.readiness.reason,
            message: order.readiness.message,
            users: Vec::new(),
            conditions: Vec::new(),
        });
    }

    /// The drivers' DaemonSets, and with them the module.
    pub(super) fn run_pods(&mut self) {
        let drivers = ["driver", "vgpu-manager"].map(|name| (name, format!("{}{name}", labels::DEPLOY_PREFIX)));
        let wanted = |gate: &String| self.labels.get(gate).is_some_and(|value| value == "true");
        self.pods = drivers
            .into_iter()
            .filter(|(_, gate)| wanted(gate))
            .map(|(name, gate)| OperandPod {
                uid: name.to_owned(),
                name: format!("{name}-x"),
                gates: [gate].into(),
                ready: true,
            })
            .collect();
        let loaded = !self.pods.is_empty();
        let agent = self.agent();
        if loaded && agent.gpus[0].driver.is_none() {
            agent.gpus[0].driver = Some("nvidia".to_owned());
        }
        if !loaded && agent.gpus[0].driver.as_deref() == Some("nvidia") {
            agent.gpus[0].driver = None;
        }
    }

    pub(super) fn run_agent(&mut self) {
        let generation = self.gpu_node.metadata.generation.unwrap();
        let spec = self.gpu_node.spec.clone();
        let refusal = self.refusal.clone();
        let makes_vgpus = self.pods.iter().any(|pod| pod.name == "vgpu-manager-x");
        let failure = self.vgpu_failure.clone();
        let agent = self.agent();
        agent.observed_generation = generation;
        agent.gpus[0].refusal = None;
        if spec.mode.is_some() && agent.gpus[0].mode != spec.mode {
            agent.gpus[0].refusal = refusal;
            if agent.gpus[0].refusal.is_none() {
                agent.gpus[0].mode = spec.mode;
                let vfio = spec.mode == Some(WorkloadMode::VmPassthrough);
                agent.gpus[0].driver = vfio.then(|| "vfio-pci".to_owned());
            }
        }
        agent.vgpu = spec.vgpu.as_ref().map(|layout| VgpuState {
            config: layout.name.clone(),
            state: match (&failure, makes_vgpus) {
                (Some(_), _) => VgpuProgress::Failed,
                (None, true) => VgpuProgress::Success,
                (None, false) => VgpuProgress::Pending,
            },
            message: failure.unwrap_or_default(),
        });
        let offered = spec.advertise == Advertise::Offered && agent.gpus[0].mode == Some(WorkloadMode::VmPassthrough);
        agent.resources = match offered {
            true => {
                vec![ResourceStatus { name: VM_RESOURCE.to_owned(), devices: vec![GPU.to_owned()], registered: true }]
            }
            false => Vec::new(),
        };
    }

    pub(super) fn label(&mut self, value: &str) {
        self.labels.insert(labels::WORKLOAD_CONFIG.to_owned(), value.to_owned());
    }

    pub(super) fn hold(&mut self, pod: Option<&str>) {
        let holder = Holder {
            pid: 4711,
            command: "qemu-system-x86".to_owned(),
            path: "/dev/vfio/1".to_owned(),
            pod: pod.map(str::to_owned),
            vm: None,
        };
        self.agent().gpus[0].holders = vec![holder];
    }

    pub(super) fn agent(&mut self) -> &mut AgentStatus {
        self.gpu_node.status.as_mut().unwrap().agent.as_mut().unwrap()
    }

    pub(super) fn operator(&self) -> &OperatorStatus {
        self.gpu_node.status.as_ref().unwrap().operator.as_ref().unwrap()
    }

    pub(super) fn deploys(&self, suffix: &str) -> bool {
        self.labels.get(&format!("{}{suffix}", labels::DEPLOY_PREFIX)).is_some_and(|value| value == "true")
    }

    pub(super) fn modes_asked(&self) -> BTreeSet<&'static str> {
        let modes = self.history.iter().filter_map(|decision| decision.order.as_ref()?.spec.mode);
        modes.map(WorkloadMode::as_str).collect()
    }
}
