//! Readiness: one world in which all is well, and one thing wrong with it at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crds::{
    WorkloadMode,
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, ClusterPolicySpec, PolicyState},
    v1alpha1::{AgentStatus, GPUNode, GPUNodeSpec, GPUNodeStatus, GPUStatus, OperatorStatus},
};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec, DaemonSetStatus},
        core::v1::{Pod, PodSpec, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};

use super::{
    build::Operands,
    status::{ERROR, Facts, READY, images_not_used, judge, policy_status},
    validate::Problem,
};

struct World {
    problems: Vec<Problem>,
    driver: DaemonSet,
    node: GPUNode,
    labels: BTreeMap<String, BTreeMap<String, String>>,
    pods: BTreeMap<String, Vec<Arc<Pod>>>,
    changing: BTreeSet<String>,
}

impl World {
    /// One container node whose driver runs.
    fn well() -> Self {
        let gate = format!("{}driver", labels::DEPLOY_PREFIX);
        let gated = |value: &str| [(gate.clone(), value.to_owned())].into();
        let driver = DaemonSet {
            metadata: ObjectMeta {
                name: Some("nvidia-driver-daemonset".to_owned()),
                generation: Some(2),
                ..ObjectMeta::default()
            },
            spec: Some(DaemonSetSpec {
                template: PodTemplateSpec {
                    spec: Some(PodSpec { node_selector: Some(gated("true")), ..PodSpec::default() }),
                    ..PodTemplateSpec::default()
                },
                ..DaemonSetSpec::default()
            }),
            status: Some(DaemonSetStatus {
                desired_number_scheduled: 1,
                updated_number_scheduled: Some(1),
                number_ready: 1,
                observed_generation: Some(2),
                ..DaemonSetStatus::default()
            }),
        };
        let mut node = GPUNode::new("n1", GPUNodeSpec::default());
        node.status = Some(GPUNodeStatus {
            agent: Some(AgentStatus { gpus: vec![GPUStatus::default()], ..AgentStatus::default() }),
            operator: Some(OperatorStatus {
                desired: Some(WorkloadMode::Container),
                ready: "True".to_owned(),
                ..OperatorStatus::default()
            }),
        });
        Self {
            problems: Vec::new(),
            driver,
            node,
            labels: [("n1".to_owned(), gated("true"))].into(),
            pods: BTreeMap::new(),
            changing: BTreeSet::new(),
        }
    }

    fn verdict(&self) -> Verdict {
        let wanted = Operands { daemon_sets: vec![self.driver.clone()], ..Operands::default() };
        let live = [Arc::new(self.driver.clone())];
        let nodes = [self.node.clone()];
        let facts = Facts {
            problems: &self.problems,
            wanted: &wanted,
            live: &live,
            gpu_nodes: &nodes,
            node_labels: &self.labels,
            pods: &self.pods,
            changing: &self.changing,
        };
        judge(&facts).verdict
    }

    fn driver_status(&mut self) -> &mut DaemonSetStatus {
        self.driver.status.as_mut().unwrap()
    }

    fn operator(&mut self) -> &mut OperatorStatus {
        self.node.status.as_mut().unwrap().operator.as_mut().unwrap()
    }
}

fn not_ready(world: &World) -> Verdict {
    let verdict = world.verdict();
    assert!(!verdict.holds, "ready although: {}", verdict.message);
    verdict
}

#[test]
fn all_is_well() {
    assert_eq!(World::well().verdict(), Verdict::yes(READY, "Reconciled", "1 GPU node(s) serve their modes"));
}

#[test]
fn a_pod_that_is_not_ready_counts() {
    let mut world = World::well();
    world.driver_status().number_ready = 0;
    assert_eq!(not_ready(&world).reason, "OperandNotReady");
}

#[test]
fn a_failing_pod_is_named_with_its_node_its_container_and_its_image() {
    let mut world = World::well();
    world.driver_status().number_ready = 0;
    let pod = serde_json::json!({
        "metadata": {"name": "nvidia-driver-daemonset-x"}, "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": "Pending", "containerStatuses": [{
            "name": "nvidia-driver-ctr", "image": "registry/driver:1", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
        }]},
    });
    let pod = Arc::new(serde_json::from_value(pod).unwrap());
    world.pods.insert("nvidia-driver-daemonset".to_owned(), vec![pod]);
    assert_eq!(
        not_ready(&world).message,
        "DaemonSet nvidia-driver-daemonset: 0 of 1 pod(s) ready, 1 up to date; on node n1 container nvidia-driver-ctr of nvidia-driver-daemonset-x (image registry/driver:1): ImagePullBackOff: not found"
    );
}

#[test]
fn a_thousand_nodes_with_the_same_trouble_leave_a_small_status() {
    let mut world = World::well();
    let operator = world.operator();
    "False".clone_into(&mut operator.ready);
    "no driver".clone_into(&mut operator.message);
    let nodes: Vec<GPUNode> = (0..1000)
        .map(|number| {
            let mut node = world.node.clone();
            node.metadata.name = Some(format!("n{number}"));
            node
        })
        .collect();
    let facts = Facts {
        problems: &[],
        wanted: &Operands::default(),
        live: &[],
        gpu_nodes: &nodes,
        node_labels: &world.labels,
        pods: &world.pods,
        changing: &world.changing,
    };
    let mode = &judge(&facts).modes[0];
    assert_eq!((mode.nodes, mode.reasons.len()), (1000, 21));
    assert!(mode.reasons[20].contains("980 more"), "{}", mode.reasons[20]);
}

#[test]
fn a_pod_of_an_old_revision_counts() {
    let mut world = World::well();
    world.driver_status().updated_number_scheduled = Some(0);
    assert_eq!(not_ready(&world).reason, "OperandNotReady");
}

#[test]
fn a_status_of_an_old_generation_says_nothing() {
    let mut world = World::well();
    world.driver_status().observed_generation = Some(1);
    assert!(not_ready(&world).message.contains("rolled out"));
}

#[test]
fn a_set_that_was_written_just_now_is_not_ready_by_what_was_known_of_it_before() {
    let mut world = World::well();
    world.changing.insert("nvidia-driver-daemonset".to_owned());
    assert!(not_ready(&world).message.contains("rolled out"));
}

#[test]
fn nothing_scheduled_is_not_the_same_as_nothing_asked_for() {
    let mut world = World::well();
    *world.driver_status() = DaemonSetStatus {
        observed_generation: Some(2),
        updated_number_scheduled: Some(0),
        ..DaemonSetStatus::default()
    };
    assert!(not_ready(&world).message.contains("modes of 1 ask for it"));
    world.labels.clear();
    assert!(world.verdict().holds, "no node asks for the driver");
}

#[test]
fn an_operand_that_asks_for_more_than_its_gate_is_not_missed_where_a_node_has_only_the_gate() {
    let mut world = World::well();
    let pod = world.driver.spec.as_mut().unwrap().template.spec.as_mut().unwrap();
    pod.node_selector.as_mut().unwrap().insert("nvidia.com/mps.capable".to_owned(), "true".to_owned());
    *world.driver_status() = DaemonSetStatus {
        observed_generation: Some(2),
        updated_number_scheduled: Some(0),
        ..DaemonSetStatus::default()
    };
    assert!(world.verdict().holds, "no node is capable of MPS");
    let node = world.labels.get_mut("n1").unwrap();
    node.insert("nvidia.com/mps.capable".to_owned(), "true".to_owned());
    assert!(not_ready(&world).message.contains("modes of 1 ask for it"));
}

#[test]
fn a_node_that_does_not_serve_its_mode_gives_its_reason() {
    let mut world = World::well();
    let operator = world.operator();
    "False".clone_into(&mut operator.ready);
    "GPU 0000:01:00.0 is held".clone_into(&mut operator.message);
    let verdict = not_ready(&world);
    assert_eq!((verdict.reason, verdict.message.as_str()), ("GPUNodeNotReady", "node n1: GPU 0000:01:00.0 is held"));
}

#[test]
fn a_node_that_nobody_has_judged_counts() {
    let mut world = World::well();
    world.node.status.as_mut().unwrap().operator = None;
    assert_eq!(not_ready(&world).reason, "GPUNodeNotReady");
}

#[test]
fn a_problem_comes_first() {
    let mut world = World::well();
    world.problems = vec![Problem { reason: "InvalidImage", message: "spec.driver: no image".to_owned() }];
    assert_eq!(not_ready(&world).reason, "InvalidImage");
}

#[test]
fn a_cluster_without_gpus_is_ready_and_says_so() {
    let mut world = World::well();
    world.node.status.as_mut().unwrap().agent.as_mut().unwrap().gpus.clear();
    assert_eq!(world.verdict().reason, "NoGPUNodes");
}

#[test]
fn the_error_condition_is_the_peers_mirror_of_ready() {
    let policy = ClusterPolicy::new("p", ClusterPolicySpec::default());
    let now = Time(Timestamp::now());
    let verdict = Verdict::no(READY, "InvalidImage", "spec.driver");
    let status = policy_status(&policy, "gpuvirt", PolicyState::NotReady, vec![verdict], &[], &now);
    let error = status.conditions.iter().find(|c| c.type_ == ERROR).unwrap();
    assert_eq!((error.status.as_str(), error.message.as_str()), ("True", "spec.driver"));
}

#[test]
fn images_that_nobody_runs_are_named() {
    let mut policy = ClusterPolicy::new("p", ClusterPolicySpec::default());
    assert!(!images_not_used(&policy).holds);
    policy.spec.vfio_manager.component.container.image.image = Some("k8s-driver-manager".to_owned());
    let verdict = images_not_used(&policy);
    assert!(verdict.holds && verdict.message.contains("vfioManager"), "{}", verdict.message);
}
