//! What goes wrong around a change: an operator that is killed in any phase, a mind that is changed, hints that come and go.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUNode, GPUTransition, TransitionPhase as Phase},
};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::json;

use crate::{
    support::{
        agents::{Agent, T4, operator, t4},
        kubelets::Kubelets,
        nodes, policies,
        program::Program,
        tape::{Tape, Written, version},
        turn::{LEASE, ML, Turn, turn},
        wait,
    },
    transitions::{annotate, container_node, gpu_pod, phases, to_passthrough, unschedulable, until_phase},
};

const POLICY: &str = "cluster-policy";

/// The next operator after a crash. Nobody waits for the old one's lease to run out.
async fn killed(t: &Turn, operator: Program, next: &str) -> Program {
    operator.kill().await;
    let leases: Api<Lease> = t.ours();
    let _ = leases.delete(LEASE, &DeleteParams::default()).await;
    let operator = t.operator(next).await;
    t.leads(next).await;
    operator
}

/// The change is, or has been, in the phase.
async fn until_seen(t: &Turn, node: &str, phase: Phase) -> GPUTransition {
    let promise = format!("the change is seen in phase {phase:?}");
    let is = |object: &GPUTransition| {
        let now = object.status.as_ref().map_or(Phase::Preflight, |status| status.phase);
        now == phase || phases(object).contains(&phase)
    };
    wait::until(&t.all(), node, &promise, is).await
}

fn closed(node: &Node) -> bool {
    node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true))
}

async fn free(t: &Turn, pod: &Pod) {
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
    let patch = json!({"metadata": {"finalizers": null}});
    pods.patch(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await.expect("free");
    wait::until_gone(&pods, pod, "it goes").await;
}

/// The phase is written before anything is asked of the pod.
async fn asked_to_leave(t: &Turn, pod: &Pod) {
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
    let leaves = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    wait::until(&pods, &pod.name_any(), "it is asked to leave", leaves).await;
}

/// A pod that takes its time to leave.
async fn slow_pod(t: &Turn, agent: &Agent) -> Pod {
    gpu_pod(t, agent, "train").await;
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
    let slow = json!({"metadata": {"finalizers": ["example.com/slow"]}});
    pods.patch("train", &PatchParams::default(), &Patch::Merge(&slow)).await.expect("a finalizer")
}

#[test]
fn an_operator_that_is_killed_in_any_phase_is_followed_by_one_that_goes_on_from_there() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        policies::config(t, json!({"evict": "Pods"})).await;
        let op = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let other = container_node(t, "n2").await;
        let agent = container_node(t, "n1").await;
        other.change(|host| host.obeys = false);
        to_passthrough(t, "n2").await;
        until_phase(t, "n2", Phase::Switch, "").await;

        annotate(t, "n1", labels::PAUSE, Some("true")).await;
        to_passthrough(t, "n1").await;
        let begun = until_seen(t, "n1", Phase::Preflight).await;
        let op = killed(t, op, "op-2").await;
        until_phase(t, "n1", Phase::Blocked, "Paused").await;
        let op = killed(t, op, "op-3").await;
        annotate(t, "n1", labels::PAUSE, None).await;
        until_phase(t, "n1", Phase::WaitForSlot, "WaitingForSlot").await;
        let op = killed(t, op, "op-4").await;
        let pod = slow_pod(t, &agent).await;
        agent
            .until(t, "the pod is seen", |node| {
                crate::support::agents::agent(node).is_some_and(|a| !a.gpus[0].holders.is_empty())
            })
            .await;
        other.change(|host| host.obeys = true);
        until_seen(t, "n1", Phase::Cordon).await;
        let op = killed(t, op, "op-5").await;
        until_seen(t, "n1", Phase::WaitForUsers).await;
        until_phase(t, "n1", Phase::Evict, "Evicting").await;
        let op = killed(t, op, "op-6").await;
        asked_to_leave(t, &pod).await;
        kubelets.hold_endings();
        agent.change(|host| host.gpus[0].holders.clear());
        free(t, &pod).await;
        until_phase(t, "n1", Phase::Quiesce, "Withdrawing").await;
        let op = killed(t, op, "op-7").await;
        agent.change(|host| host.obeys = false);
        kubelets.let_end();
        until_phase(t, "n1", Phase::Switch, "Switching").await;
        let op = killed(t, op, "op-8").await;
        agent.change(|host| {
            host.obeys = true;
            host.registers = false;
        });
        until_seen(t, "n1", Phase::Verify).await;
        until_phase(t, "n1", Phase::Advertise, "").await;
        let op = killed(t, op, "op-9").await;
        agent.change(|host| host.registers = true);
        until_seen(t, "n1", Phase::Uncordon).await;
        let _op = killed(t, op, "op-10").await;
        let done = until_phase(t, "n1", Phase::Done, "Serving").await;
        assert_eq!(done.uid(), begun.uid(), "it is one change");
        let all = phases(&done);
        assert!(all.windows(2).all(|two| two[0] != two[1]), "no phase twice: {all:?}");
        let count = |phase| all.iter().filter(|one| **one == phase).count();
        for phase in [Phase::Cordon, Phase::Evict, Phase::Quiesce, Phase::Switch, Phase::Verify, Phase::Advertise] {
            assert_eq!(count(phase), 1, "{phase:?} of {all:?}");
        }
        wait::until(&t.all(), "n1", "the node is open", |node: &Node| {
            !closed(node) && !node.annotations().contains_key(labels::CORDONED)
        })
        .await;
        let node = agent.until_reason(t, true, "Serving").await;
        assert_eq!(node.spec.mode, Some(WorkloadMode::VmPassthrough));
    });
}

/// The label is taken away: the change ends as if it had never begun, and the node serves what it served.
async fn taken_back(t: &Turn, agent: &Agent) {
    let node = agent.node.as_str();
    nodes::label(t, node, &[(labels::WORKLOAD_CONFIG, None)]).await;
    until_phase(t, node, Phase::Done, "TakenBack").await;
    nodes::until_deployed(t, node, &crate::modes::CONTAINER).await;
    let serves = agent.until_reason(t, true, "Serving").await;
    assert_eq!(serves.spec.mode, Some(WorkloadMode::Container));
    wait::until(&t.all(), node, "the node is open", |node: &Node| {
        !closed(node) && !node.annotations().contains_key(labels::CORDONED)
    })
    .await;
    let transitions: Api<GPUTransition> = t.all();
    transitions.delete(node, &DeleteParams::default()).await.expect("deleted");
}

#[test]
fn in_every_phase_before_the_agent_is_asked_a_change_is_taken_back_and_the_node_is_as_before() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        policies::config(t, json!({"evict": "Pods"})).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let watched = Tape::<GPUNode>::of(t.all(), "n1").await;
        let began = version(&nodes::label(t, "n1", &[]).await);

        annotate(t, "n1", labels::PAUSE, Some("true")).await;
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::Blocked, "Paused").await;
        taken_back(t, &agent).await;
        annotate(t, "n1", labels::PAUSE, None).await;

        let other = container_node(t, "n2").await;
        other.change(|host| host.obeys = false);
        to_passthrough(t, "n2").await;
        until_phase(t, "n2", Phase::Switch, "").await;
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::WaitForSlot, "WaitingForSlot").await;
        taken_back(t, &agent).await;
        other.change(|host| host.obeys = true);
        until_phase(t, "n2", Phase::Done, "Serving").await;

        let pod = slow_pod(t, &agent).await;
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::Evict, "Evicting").await;
        asked_to_leave(t, &pod).await;
        taken_back(t, &agent).await;
        agent.change(|host| host.gpus[0].holders.clear());
        free(t, &pod).await;

        kubelets.hold_endings();
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::Quiesce, "Withdrawing").await;
        wait::until(&t.all(), "n1", "its operands leave", |node: &Node| nodes::deployed(node).is_empty()).await;
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await;
        kubelets.let_end();
        taken_back(t, &agent).await;

        let asked = |node: &GPUNode| node.spec.mode == Some(WorkloadMode::VmPassthrough);
        assert!(!watched.ever(began, |written| matches!(written, Written::Is(node) if asked(node))));
        assert!(!unschedulable(t, "n1").await);
    });
}

async fn condition(t: &Turn, node: &str, ready: &str) {
    let conditions = json!({"status": {"conditions": [{"type": "Ready", "status": ready, "reason": "ByATest"}]}});
    let all: Api<Node> = t.all();
    let done = all.patch_status(node, &PatchParams::default(), &Patch::Strategic(&conditions)).await;
    done.expect("a node's status should be patchable");
}

#[test]
fn hints_that_come_and_go_a_node_that_is_not_ready_and_a_reboot_start_no_change() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let hints = labels::NFD_HINTS.map(|hint| (hint, Some("true")));
        let gone = labels::NFD_HINTS.map(|hint| (hint, None));
        nodes::create(t, "n1", &labels::NFD_HINTS.map(|hint| (hint, "true"))).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        agent.until_reason(t, true, "Serving").await;
        to_passthrough(t, "n1").await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
        let serves = nodes::until_deployed(t, "n1", &crate::modes::PASSTHROUGH).await;
        let of_nodes = Tape::<Node>::of(t.all(), "n1").await;
        let of_changes = Tape::<GPUTransition>::of(t.all(), "n1").await;
        let since = version(&serves);

        for _ in 0..2 {
            nodes::label(t, "n1", &gone).await;
            condition(t, "n1", "Unknown").await;
            nodes::label(t, "n1", &[(labels::GPU_PRESENT, None)]).await;
            wait::until(&t.all(), "n1", "the proof is the agent's report", |node: &Node| {
                node.labels().get(labels::GPU_PRESENT).is_some_and(|value| value == "true")
            })
            .await;
            nodes::label(t, "n1", &hints).await;
            condition(t, "n1", "True").await;
        }
        // After a reboot the GPU is with the driver that the machine boots with, and nothing is offered.
        agent.change(|host| {
            host.obeys = false;
            host.gpus[0].mode = Some(WorkloadMode::Container);
            host.gpus[0].driver = Some("nvidia".to_owned());
        });
        let node = agent.until_reason(t, false, "GPUNotInMode").await;
        assert_eq!(node.spec.mode, Some(WorkloadMode::VmPassthrough), "the order stands");
        assert_eq!(crate::support::agents::agent(&node).map(|agent| agent.resources.len()), Some(0));
        assert_eq!(operator(&node).and_then(|o| o.serving), Some(WorkloadMode::VmPassthrough));
        agent.change(|host| host.obeys = true);
        let node = agent.until_reason(t, true, "Serving").await;
        let offers = crate::support::agents::agent(&node).map(|agent| agent.resources.clone()).unwrap_or_default();
        assert_eq!(offers.first().map(|resource| resource.name.as_str()), Some(T4));

        let flip = version(&nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await);
        let back = |written: &Written<GPUTransition>| matches!(written, Written::Is(object) if object.spec.to == WorkloadMode::Container);
        let first = of_changes.first(since, "the change that is asked for", back).await;
        assert!(first > flip, "and none before it");
        let lost = |node: &Node| nodes::deployed(node) != crate::modes::PASSTHROUGH;
        let earlier = of_nodes.first(
            since,
            "its labels go only for that change",
            |written| matches!(written, Written::Is(node) if lost(node)),
        );
        assert!(earlier.await > first);
    });
}

#[test]
fn pods_that_have_a_gpu_by_a_claim_or_a_request_are_users_of_their_node() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let pod = gpu_pod(t, &agent, "train").await;
        // NVIDIA's driver for claims gives it no device plugin's GPU, and nothing has opened it yet.
        agent.change(|host| host.gpus[0].holders.clear());
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"));
        let claims: Api<DynamicObject> = Api::namespaced_with(t.client.clone(), ML, &kind);
        let claim = json!({
            "metadata": {"name": "one-gpu"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
        });
        let claim = serde_json::from_value(claim).expect("a claim");
        claims.create(&PostParams::default(), &claim).await.expect("a claim should be creatable");
        let result = json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"});
        let reserved = json!([{"resource": "pods", "name": "train", "uid": pod.uid()}]);
        let status = json!({"status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": reserved}});
        claims.patch_status("one-gpu", &PatchParams::default(), &Patch::Merge(&status)).await.expect("allocated");

        let notebook = json!({
            "metadata": {"name": "notebook"},
            "spec": {
                "nodeName": "n1", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
                "containers": [{
                    "name": "c", "image": "localhost/notebook:1", "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }],
            },
        });
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        let notebook = serde_json::from_value(notebook).expect("a Pod");
        let notebook = pods.create(&PostParams::default(), &notebook).await.expect("a pod");
        to_passthrough(t, "n1").await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await.status.expect("a status");
        for part in ["gpu-0", "ResourceClaim ml/one-gpu", "pod ml/train"] {
            assert!(blocked.message.contains(part), "{part} is not in {}", blocked.message);
        }
        assert_eq!(blocked.affected_pods, ["ml/train", "ml/notebook"]);
        let node = agent
            .until(t, "the user is shown", |node| {
                operator(node).is_some_and(|o| o.users.iter().any(|u| u.pod == "ml/train"))
            })
            .await;
        assert_eq!(node.spec.mode, Some(WorkloadMode::Container));
        let unreserved = json!({"status": {"reservedFor": null, "allocation": null}});
        claims.patch_status("one-gpu", &PatchParams::default(), &Patch::Merge(&unreserved)).await.expect("free");
        let waits = |object: &GPUTransition| {
            object.status.as_ref().is_some_and(|status| {
                status.affected_pods == ["ml/notebook"]
                    && status.message.contains("1 nvidia.com/gpu is allocated to pod")
            })
        };
        wait::until(&t.all(), "n1", "one is left", waits).await;
        pods.delete("notebook", &DeleteParams::default().grace_period(0)).await.expect("deleted");
        wait::until_gone(&pods, &notebook, "it goes").await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
        claims.delete("one-gpu", &DeleteParams::default()).await.expect("deleted");
    });
}
