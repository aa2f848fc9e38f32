//! How a ClusterPolicy leaves: nodes first, and never under a running VM.

use crds::{WorkloadMode, labels, v1::ClusterPolicy, v1::PolicyState, v1alpha1::GPUNode};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Node},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

use crate::{
    modes::{CONTAINER, PASSTHROUGH},
    support::{
        agents::{self, Agent, qemu, t4},
        kubelets::Kubelets,
        nodes::{self, until_deployed},
        policies,
        tape::{Tape, Written},
        turn::{Turn, turn},
        wait,
    },
};

pub const POLICY: &str = "cluster-policy";

/// `n1` serves VMs.
pub async fn serving_vms(t: &Turn) -> (Agent, ClusterPolicy) {
    nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
    let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
    let policy = policies::create(t, policies::valid(POLICY)).await;
    policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
    agent.until_reason(t, true, "Serving").await;
    until_deployed(t, "n1", &PASSTHROUGH).await;
    (agent, policy)
}

async fn delete(t: &Turn) {
    let policies: Api<ClusterPolicy> = t.all();
    policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
}

/// Nothing of ours but what the user wrote.
pub async fn nothing_is_left(t: &Turn, policy: &ClusterPolicy) {
    wait::until_gone(&t.all(), policy, "the policy goes").await;
    let ours = ListParams::default().labels(labels::POLICY);
    let gpu_nodes = t.all::<GPUNode>().list(&ListParams::default()).await.expect("listable").items;
    assert!(gpu_nodes.is_empty(), "{gpu_nodes:?}");
    let sets = t.ours::<DaemonSet>().list(&ours).await.expect("listable").items;
    assert!(sets.is_empty(), "{:?}", sets.iter().map(ResourceExt::name_any).collect::<Vec<_>>());
    let maps = t.ours::<ConfigMap>().list(&ours).await.expect("listable").items;
    assert!(maps.is_empty(), "{:?}", maps.iter().map(ResourceExt::name_any).collect::<Vec<_>>());
    let node = t.all::<Node>().get("n1").await.expect("n1");
    let own: Vec<&String> =
        node.labels().keys().filter(|key| key.contains("nvidia.com") || key.contains("gpuvirt")).collect();
    assert_eq!(own, [labels::WORKLOAD_CONFIG], "only the user's label stays");
}

#[test]
fn an_idle_node_is_released_and_nothing_is_left() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (_agent, policy) = serving_vms(t).await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        let sets = Tape::<DaemonSet>::start(t.ours()).await;
        delete(t).await;
        nothing_is_left(t, &policy).await;
        let released = written.first(0, "released", |w| {
            matches!(w, Written::Is(n) if agents::agent(n).is_some_and(|a| a.gpus[0].mode == Some(WorkloadMode::Container)))
        }).await;
        let agents_end = sets.first(0, "the agents' end", |w| {
            matches!(w, Written::Is(s) if s.name_any() == "gpuvirt-agent" && s.metadata.deletion_timestamp.is_some())
        }).await;
        assert!(released < agents_end, "the agent stays until GPUs are released: {released} {agents_end}");
    });
}

#[test]
fn containers_leave_before_their_node_does() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "container")]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let policy = policies::create(t, policies::valid(POLICY)).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        until_deployed(t, "n1", &CONTAINER).await;
        delete(t).await;
        nothing_is_left(t, &policy).await;
    });
}

#[test]
fn a_running_vm_holds_the_teardown_until_it_ends() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (agent, policy) = serving_vms(t).await;
        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        agent.until(t, "the VM is seen", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 1)).await;
        delete(t).await;
        let why = ["n1", "0000:18:00.0", "qemu-kvm", "4711", "kubectl annotate clusterpolicy cluster-policy"];
        policies::until(t, POLICY, PolicyState::NotReady, "TearingDown", &why).await;
        let held = agent.until(t, "the mode stays", |n| n.spec.mode == Some(WorkloadMode::VmPassthrough)).await;
        assert_eq!(agents::agent(&held).expect("a report").gpus[0].mode, Some(WorkloadMode::VmPassthrough));
        let set = t.ours::<DaemonSet>().get("gpuvirt-agent").await.expect("the agent stays");
        assert_eq!(set.metadata.deletion_timestamp, None);
        agent.change(|host| host.gpus[0].holders.clear());
        nothing_is_left(t, &policy).await;
    });
}

#[test]
fn a_forced_teardown_gives_up_on_the_vm() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (agent, policy) = serving_vms(t).await;
        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        agent.until(t, "the VM is seen", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 1)).await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        delete(t).await;
        policies::until(t, POLICY, PolicyState::NotReady, "TearingDown", &["qemu-kvm"]).await;
        policies::patch(t, POLICY, &json!({"metadata": {"annotations": {labels::FORCE_TEARDOWN: "true"}}})).await;
        nothing_is_left_but_ending_pods(t, &policy).await;
        let moved = written.ever(0, |w| {
            matches!(w, Written::Is(n) if agents::agent(n).is_some_and(|a| a.gpus[0].mode != Some(WorkloadMode::VmPassthrough)))
        });
        assert!(!moved, "the VM's GPU is left as it is");
    });
}

/// A forced teardown does not wait for the operands' pods.
async fn nothing_is_left_but_ending_pods(t: &Turn, policy: &ClusterPolicy) {
    wait::until_gone(&t.all(), policy, "the policy goes").await;
    wait::eventually("the operands go", async || {
        let ours = ListParams::default().labels(labels::POLICY);
        t.ours::<DaemonSet>().list(&ours).await.expect("listable").items.is_empty().then_some(())
    })
    .await;
    nothing_is_left(t, policy).await;
}
