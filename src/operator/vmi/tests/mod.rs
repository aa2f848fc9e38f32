//! One cluster in which a VM could start, and one thing wrong with it in each test.

mod refused;
mod scarce;
mod vgpus;

use crds::{
    WorkloadMode,
    v1alpha1::{
        AgentStatus, GPUNode, GPUNodeSpec, GPUNodeStatus, GPUStatus, GPUUser, Holder, OperatorStatus, ResourceStatus,
    },
};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

use super::{
    explain::{Explanation, Facts, Launcher, Reason, blocks_drain, explain},
    instance::{Instance, Progress},
};
use crate::operator::kubevirt::{Dialect, Permitted};

const T4: &str = "nvidia.com/TU104GL_TESLA_T4";
const A10: &str = "nvidia.com/GA102GL_A10";
const FIRST: &str = "0000:43:00.0";
const SECOND: &str = "0000:44:00.0";

struct Cluster {
    instance: Instance,
    nodes: Vec<GPUNode>,
    permitted: Option<Value>,
    complaint: Option<&'static str>,
    launcher: Option<Launcher>,
}

/// `node` offers two T4 to VMs; the scheduler has not found them for `vms/a`.
fn cluster() -> Cluster {
    Cluster {
        instance: Instance {
            namespace: "vms".to_owned(),
            name: "a".to_owned(),
            uid: "1".to_owned(),
            node: None,
            asks: [(T4.to_owned(), 1)].into(),
            progress: Progress::Unschedulable(format!("0/1 nodes are available: 1 Insufficient {T4}.")),
            live_migrate: false,
        },
        nodes: vec![node("node", T4, "10de:1eb8", &[FIRST, SECOND])],
        permitted: None,
        complaint: None,
        launcher: None,
    }
}

fn node(name: &str, resource: &str, id: &str, addresses: &[&str]) -> GPUNode {
    let gpu = |address: &&str| GPUStatus {
        address: (*address).to_owned(),
        id: id.to_owned(),
        mode: Some(WorkloadMode::VmPassthrough),
        resource: Some(resource.to_owned()),
        ..GPUStatus::default()
    };
    let devices = addresses.iter().map(|address| (*address).to_owned()).collect();
    let mut node = GPUNode::new(name, GPUNodeSpec::default());
    node.spec.mode = Some(WorkloadMode::VmPassthrough);
    node.status = Some(GPUNodeStatus {
        agent: Some(AgentStatus {
            gpus: addresses.iter().map(gpu).collect(),
            resources: vec![ResourceStatus { name: resource.to_owned(), devices, registered: true }],
            ..AgentStatus::default()
        }),
        operator: Some(OperatorStatus { serving: Some(WorkloadMode::VmPassthrough), ..OperatorStatus::default() }),
    });
    node
}

impl Cluster {
    fn agent(&mut self) -> &mut AgentStatus {
        self.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap()
    }

    fn operator(&mut self) -> &mut OperatorStatus {
        self.nodes[0].status.as_mut().unwrap().operator.as_mut().unwrap()
    }

    /// The kubelet has given a GPU to a pod, which is the launcher of a VM, or is not.
    fn give(&mut self, gpu: usize, pod: &str, vmi: Option<&str>) {
        let gpu = &mut self.agent().gpus[gpu];
        gpu.holders = vec![Holder { pod: Some(pod.to_owned()), ..Holder::default() }];
        let gpus = vec![gpu.address.clone()];
        self.operator().users.push(GPUUser { pod: pod.to_owned(), vmi: vmi.map(str::to_owned), gpus });
    }

    fn explain(&self) -> Explanation {
        let permitted = self.permitted.as_ref().map(|field| {
            let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", "KubeVirt"));
            let object = DynamicObject::new("kubevirt", &kind).within("kubevirt");
            let object = object.data(json!({"spec": {"configuration": {"permittedHostDevices": field}}}));
            Permitted::read(Dialect::KubeVirt, &object).expect("readable")
        });
        explain(&Facts {
            instance: &self.instance,
            gpu_nodes: &self.nodes,
            permitted: permitted.as_ref(),
            complaint: self.complaint,
            launcher: self.launcher.as_ref(),
        })
    }

    #[track_caller]
    fn says(&self, reason: Reason, words: &[&str]) {
        let said = self.explain();
        assert_eq!(said.reason, reason, "{}", said.message);
        for word in words {
            assert!(said.message.contains(word), "{word:?} in {}", said.message);
        }
    }
}

#[test]
fn a_vm_that_runs_is_not_a_riddle() {
    let mut cluster = cluster();
    cluster.instance.progress = Progress::Runs;
    cluster.instance.node = Some("node".to_owned());
    cluster.says(Reason::Runs, &["node"]);
    assert_eq!(cluster.explain().blocks_drain, None);
}

#[test]
fn a_pod_that_the_node_refused_is_told_with_the_nodes_words() {
    let mut cluster = cluster();
    cluster.instance.progress = Progress::Failed;
    cluster.launcher = Some(Launcher {
        name: "virt-launcher-a-x".to_owned(),
        node: "node".to_owned(),
        phase: "Failed".to_owned(),
        reason: "UnexpectedAdmissionError".to_owned(),
        message: "Allocate failed due to rpc error: GPU 0000:43:00.0 is unhealthy".to_owned(),
    });
    cluster.says(Reason::RefusedByNode, &["node node refused", "virt-launcher-a-x", "0000:43:00.0 is unhealthy"]);
}

#[test]
fn another_failure_is_no_matter_of_gpus() {
    let mut cluster = cluster();
    cluster.instance.progress = Progress::Failed;
    cluster.says(Reason::Ended, &["its pod has gone"]);
    let launcher = Launcher { name: "p".to_owned(), reason: "Evicted".to_owned(), ..Launcher::default() };
    cluster.launcher = Some(launcher);
    cluster.says(Reason::Ended, &["Evicted"]);
}

#[test]
fn a_vm_that_is_to_migrate_and_cannot_blocks_a_drain_while_it_runs() {
    let mut cluster = cluster();
    cluster.instance.live_migrate = true;
    assert_eq!(blocks_drain(&cluster.instance), None, "it is on no node");
    cluster.instance.progress = Progress::Runs;
    let why = cluster.explain().blocks_drain.expect("a blocker");
    assert!(why.contains("vms/a") && why.contains("evictionStrategy: None"), "{why}");
    cluster.instance.asks.clear();
    assert_eq!(blocks_drain(&cluster.instance), None, "without a GPU it migrates");
}
