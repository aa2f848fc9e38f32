//! Changes of nodes that are in use, as people see them: in `GPUTransition`, on the node, and in what happens to its pods.

use std::path::Path;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUTransition, Holder, TransitionPhase as Phase},
};
use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod},
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    explain::held_by,
    kubevirt::{nic, offering, until_permitted, with_kubevirt},
    support::{
        agents::{Agent, T4, qemu, t4},
        cluster::{command, run},
        identity,
        kubelets::Kubelets,
        kubevirt::{self, VMS},
        nodes, policies,
        tape::{Tape, Written, version},
        turn::{ML, Turn, turn},
        wait,
    },
};

const POLICY: &str = "cluster-policy";

/// A container node that serves, and its agent.
pub async fn container_node(t: &Turn, name: &str) -> Agent {
    nodes::create(t, name, &[]).await;
    let agent = Agent::start(t, name, vec![t4("0000:18:00.0")]).await;
    agent.until_reason(t, true, "Serving").await;
    agent
}

pub async fn to_passthrough(t: &Turn, node: &str) -> u64 {
    version(&nodes::label(t, node, &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await)
}

pub async fn until_phase(t: &Turn, node: &str, phase: Phase, reason: &str) -> GPUTransition {
    let promise = format!("the change is in phase {phase:?}, reason {reason:?}");
    wait::until(&t.all(), node, &promise, |object: &GPUTransition| {
        object.status.as_ref().is_some_and(|s| s.phase == phase && (reason.is_empty() || s.reason == reason))
    })
    .await
}

pub fn phases(object: &GPUTransition) -> Vec<Phase> {
    object.status.iter().flat_map(|status| status.history.iter().map(|event| event.phase)).collect()
}

/// A pod of a user that the kubelet has given the node's GPU to.
pub async fn gpu_pod(t: &Turn, agent: &Agent, name: &str) -> Pod {
    let namespaces: Api<Namespace> = t.all();
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": ML}})).expect("a Namespace");
    let _ = namespaces.create(&PostParams::default(), &namespace).await;
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": agent.node, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "localhost/train:1"}],
        },
    });
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
    let pod = serde_json::from_value(pod).expect("a Pod");
    // An earlier test's, whose node has gone.
    let _ = pods.delete(name, &DeleteParams::default().grace_period(0)).await;
    let pod =
        wait::eventually("the namespace takes pods", async || pods.create(&PostParams::default(), &pod).await.ok())
            .await;
    // NVIDIA's device plugin gave it the GPU: the agent sees who has it open, and the pod's UID in its cgroup.
    let holder =
        Holder { pid: 4711, command: "python3".to_owned(), path: "/dev/nvidia0".to_owned(), pod: pod.uid(), vm: None };
    agent.change(|host| host.gpus[0].holders = vec![holder]);
    pod
}

pub async fn unschedulable(t: &Turn, node: &str) -> bool {
    let nodes: Api<Node> = t.all();
    nodes.get(node).await.expect("a node").spec.and_then(|spec| spec.unschedulable).unwrap_or(false)
}

pub async fn annotate(t: &Turn, node: &str, key: &str, value: Option<&str>) {
    let nodes: Api<Node> = t.all();
    let patch = json!({"metadata": {"annotations": {key: value}}});
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a node should be patchable");
}

#[test]
fn a_change_leaves_a_record_of_its_plan_and_of_each_phase_and_closes_no_idle_node() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let watched = Tape::<Node>::of(t.all(), "n1").await;
        let flip = to_passthrough(t, "n1").await;
        let done = until_phase(t, "n1", Phase::Done, "Serving").await;
        let expected = [
            Phase::Preflight,
            Phase::WaitForSlot,
            Phase::Quiesce,
            Phase::Switch,
            Phase::Verify,
            Phase::Advertise,
            Phase::Uncordon,
            Phase::Done,
        ];
        assert_eq!(phases(&done), expected);
        assert_eq!((done.spec.from, done.spec.to), (WorkloadMode::Container, WorkloadMode::VmPassthrough));
        let plan = done.status.as_ref().map(|status| status.plan.join("; ")).unwrap_or_default();
        assert!(plan.contains("bring GPU 0000:18:00.0 into vm-passthrough"), "{plan}");
        assert!(done.owner_references().iter().any(|owner| owner.kind == "Node" && owner.name == "n1"));
        agent.until_reason(t, true, "Serving").await;
        let closed = |node: &Node| node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true));
        assert!(!watched.ever(flip, |written| matches!(written, Written::Is(node) if closed(node))));

        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await;
        let back = wait::until(&t.all(), "n1", "the way back is a change of its own", |object: &GPUTransition| {
            object.spec.to == WorkloadMode::Container && object.status.as_ref().is_some_and(|s| s.phase == Phase::Done)
        })
        .await;
        assert_ne!(back.uid(), done.uid());
    });
}

#[test]
fn a_vm_blocks_its_node_in_words_and_the_change_goes_on_by_itself_once_it_has_ended() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        to_passthrough(t, "n1").await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        let message = blocked.status.as_ref().map(|s| s.message.clone()).unwrap_or_default();
        assert!(message.contains("0000:18:00.0") && message.contains("4711"), "{message}");
        let node = agent.until_reason(t, false, "GPUInUse").await;
        assert_eq!(node.spec.mode, Some(WorkloadMode::Container));
        agent.change(|host| host.gpus[0].holders.clear());
        until_phase(t, "n1", Phase::Done, "Serving").await;
    });
}

#[test]
fn nodes_change_one_after_another_unless_the_budget_says_otherwise() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let mut agents = Vec::new();
        for name in ["n1", "n2", "n3"] {
            agents.push(container_node(t, name).await);
        }
        let [first, second, third] = &agents[..] else { unreachable!("three agents") };
        first.change(|host| host.obeys = false);
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::Switch, "").await;
        to_passthrough(t, "n2").await;
        to_passthrough(t, "n3").await;
        for name in ["n2", "n3"] {
            until_phase(t, name, Phase::WaitForSlot, "WaitingForSlot").await;
        }
        let waits = second.until_reason(t, false, "WaitingForSlot").await;
        assert_eq!(waits.spec.mode, Some(WorkloadMode::Container));
        nodes::until_deployed(t, "n2", &crate::modes::CONTAINER).await;

        first.change(|host| host.obeys = true);
        for agent in [first, second, third] {
            until_phase(t, &agent.node, Phase::Done, "Serving").await;
        }
        let transitions: Api<GPUTransition> = t.all();
        let mut spans = Vec::new();
        for agent in &agents {
            let object = transitions.get(&agent.node).await.expect("a GPUTransition");
            let status = object.status.expect("a status");
            let at = |phase| status.history.iter().find(|e| e.phase == phase).map(|e| e.at.0).expect("a phase");
            spans.push((at(Phase::Quiesce), at(Phase::Done)));
        }
        spans.sort();
        assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0), "one at a time: {spans:?}");

        policies::config(t, json!({"budget": {"maxParallel": "100%", "maxUnavailable": "100%"}})).await;
        for agent in &agents {
            agent.change(|host| host.obeys = false);
            nodes::label(t, &agent.node, &[(labels::WORKLOAD_CONFIG, None)]).await;
        }
        for agent in &agents {
            wait::until(&t.all(), &agent.node, "all at once", |object: &GPUTransition| {
                object.spec.to == WorkloadMode::Container
                    && object.status.as_ref().is_some_and(|s| s.phase == Phase::Switch)
            })
            .await;
        }
    });
}

#[test]
fn a_pod_is_evicted_by_its_disruption_budget_from_a_closed_node_that_is_opened_again() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        policies::config(t, json!({"evict": "Pods"})).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let pod = gpu_pod(t, &agent, "train").await;
        let guards: Api<PodDisruptionBudget> = Api::namespaced(t.client.clone(), ML);
        let guard = json!({"metadata": {"name": "train"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "train"}}}});
        guards.create(&PostParams::default(), &serde_json::from_value(guard).expect("a PDB")).await.expect("a PDB");
        wait::until(&guards, "train", "it is observed", |g: &PodDisruptionBudget| {
            g.status.as_ref().is_some_and(|s| s.observed_generation.is_some())
        })
        .await;

        to_passthrough(t, "n1").await;
        let evicts = until_phase(t, "n1", Phase::Evict, "Evicting").await;
        assert_eq!(evicts.status.as_ref().map(|s| s.affected_pods.clone()), Some(vec!["ml/train".to_owned()]));
        wait::until(&t.all(), "n1", "the node is closed, and by whom is written on it", |node: &Node| {
            node.spec.as_ref().is_some_and(|s| s.unschedulable == Some(true))
                && node.annotations().contains_key(labels::CORDONED)
        })
        .await;
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        assert!(pods.get("train").await.expect("its budget holds").metadata.deletion_timestamp.is_none());

        guards.delete("train", &DeleteParams::default()).await.expect("deleted");
        wait::until_gone(&pods, &pod, "the pod is evicted").await;
        agent.change(|host| host.gpus[0].holders.clear());
        until_phase(t, "n1", Phase::Done, "Serving").await;
        assert!(!unschedulable(t, "n1").await, "and the node is open again");
    });
}

#[test]
fn a_node_that_an_admin_has_closed_stays_closed() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        policies::config(t, json!({"evict": "Pods"})).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let all: Api<Node> = t.all();
        all.patch("n1", &PatchParams::default(), &Patch::Merge(&json!({"spec": {"unschedulable": true}})))
            .await
            .expect("cordoned");
        let pod = gpu_pod(t, &agent, "train").await;
        to_passthrough(t, "n1").await;
        wait::until_gone(&Api::<Pod>::namespaced(t.client.clone(), ML), &pod, "the pod is evicted").await;
        agent.change(|host| host.gpus[0].holders.clear());
        until_phase(t, "n1", Phase::Done, "Serving").await;
        assert!(unschedulable(t, "n1").await);
    });
}

#[test]
fn a_person_can_ask_for_the_plan_alone_and_hold_a_change() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let _agent = container_node(t, "n1").await;
        annotate(t, "n1", labels::DRY_RUN, Some("true")).await;
        annotate(t, "n1", labels::PAUSE, Some("true")).await;
        to_passthrough(t, "n1").await;
        let planned = until_phase(t, "n1", Phase::Blocked, "DryRun").await;
        let shown =
            run(command(env!("CARGO_BIN_EXE_gpuvirt"), ["approve", "n1"]).env("KUBECONFIG", t.cluster.kubeconfig()));
        let shown = shown.expect("the plan");
        assert!(shown.contains("bring GPU 0000:18:00.0 into vm-passthrough"), "{shown}");
        assert!(shown.contains(&planned.spec.plan_hash), "{shown}");
        nodes::until_deployed(t, "n1", &crate::modes::CONTAINER).await;
        annotate(t, "n1", labels::DRY_RUN, None).await;
        until_phase(t, "n1", Phase::Blocked, "Paused").await;
        annotate(t, "n1", labels::PAUSE, None).await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
    });
}

fn approve(kubeconfig: &Path, plan: &str) -> Result<String, String> {
    let arguments = ["approve", "n1", "--plan", plan];
    run(command(env!("CARGO_BIN_EXE_gpuvirt"), arguments).env("KUBECONFIG", kubeconfig))
}

#[test]
fn a_vm_is_stopped_only_by_the_approval_of_the_plan_that_names_it() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        policies::config(t, json!({"evict": "PodsAndVMs"})).await;
        let _operator = t.operator("op-1").await;
        let agent = offering(t).await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        kubevirt::start_machine(&t.client, "vm-1", &[T4]).await;
        let launcher = kubevirt::until_launcher(&t.client, "vm-1").await.name_any();
        agent.change(|host| host.gpus[0].holders = held_by(&format!("{VMS}/{launcher}")));
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await;

        let asks = until_phase(t, "n1", Phase::Blocked, "ApprovalNeeded").await;
        let plan = asks.spec.plan_hash.clone();
        assert_eq!(asks.status.as_ref().map(|s| s.affected_vms.clone()), Some(vec!["vms/vm-1".to_owned()]));
        assert!(!unschedulable(t, "n1").await, "nothing has begun");
        let instance = kubevirt::instances(&t.client).get("vm-1").await.expect("the instance").uid();
        let waits = nodes::until_event(t, instance.clone(), "NodeWaitsForVM").await;
        assert!(waits.message.is_some_and(|said| said.contains("gpuvirt approve n1")));
        let says = nodes::until_event(t, asks.uid(), "ChangeBlocked").await;
        assert!(says.message.is_some_and(|said| said.contains("vms/vm-1")));
        let operator = identity::service_account(t, "gpuvirt-operator", None).await;
        let refused = approve(&operator, &plan).expect_err("the operator does not approve its own plans");
        assert!(refused.contains("gpuvirt-approver"), "{refused}");
        let refused = approve(&t.cluster.kubeconfig(), "0123456789abcdef").expect_err("another plan");
        assert!(refused.contains(&plan), "{refused}");

        let said = approve(&t.cluster.kubeconfig(), &plan).expect("this very plan");
        assert!(said.contains(&plan), "{said}");
        kubevirt::until(&kubevirt::machines(&t.client), "vm-1", "it is stopped and not deleted", |vm| {
            vm.data.pointer("/spec/runStrategy").and_then(Value::as_str) == Some("Halted")
        })
        .await;
        assert!(unschedulable(t, "n1").await);
        nodes::until_event(t, instance, "NodeChangeStopsVM").await;
        agent.change(|host| host.gpus[0].holders.clear());
        until_phase(t, "n1", Phase::Done, "Serving").await;
        assert!(!unschedulable(t, "n1").await);
    });
}
