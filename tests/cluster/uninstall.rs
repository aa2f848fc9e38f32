//! `gpuvirt uninstall`, as the chart's hook runs it.

use crds::{
    labels,
    v1::{ClusterPolicy, PolicyState},
};
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, ResourceExt, api::ListParams};

use crate::{
    modes::PASSTHROUGH,
    support::{
        NAMESPACE,
        agents::{self, Agent, qemu},
        identity,
        kubelets::Kubelets,
        nodes::until_deployed,
        policies,
        program::Program,
        turn::{Turn, turn},
        wait,
    },
    teardown::{POLICY, nothing_is_left, serving_vms},
};

/// Its exit and its log.
async fn uninstall(t: &Turn, args: &[&str]) -> (bool, String) {
    let kubeconfig = identity::service_account(t, "gpuvirt-uninstall", None).await;
    let environment = [("KUBECONFIG", kubeconfig.as_os_str()), ("POD_NAMESPACE", NAMESPACE.as_ref())];
    let mut hook = Program::start(t, "uninstall", &[&["uninstall", "--timeout=30s"], args].concat(), &environment);
    let status = hook.ended().await;
    (status.success(), hook.log())
}

async fn in_use(t: &Turn, agent: &Agent) {
    agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
    agent.until(t, "the VM is seen", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 1)).await;
}

async fn nothing_has_happened(t: &Turn) {
    let policy = t.all::<ClusterPolicy>().get(POLICY).await.expect("the policy is there");
    assert_eq!(policy.metadata.deletion_timestamp, None);
    until_deployed(t, "n1", &PASSTHROUGH).await;
    let set = t.ours::<DaemonSet>().get("gpuvirt-agent").await.expect("the agent is there");
    assert_eq!(set.metadata.deletion_timestamp, None);
}

#[test]
fn it_brings_idle_nodes_back_and_leaves_nothing() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (_agent, policy) = serving_vms(t).await;
        let (done, log) = uninstall(t, &[]).await;
        assert!(done, "{log}");
        nothing_is_left(t, &policy).await;
        let (again, log) = uninstall(t, &[]).await;
        assert!(again && log.contains("nothing to bring back"), "{log}");
    });
}

#[test]
fn it_refuses_while_a_vm_has_a_gpu_and_changes_nothing_unless_forced() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (agent, policy) = serving_vms(t).await;
        in_use(t, &agent).await;
        let (done, log) = uninstall(t, &[]).await;
        assert!(!done, "{log}");
        for part in ["0000:18:00.0", "n1", "qemu-kvm", "4711", "force-teardown=true"] {
            assert!(log.contains(part), "{part} is not in: {log}");
        }
        nothing_has_happened(t).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;

        let (done, log) = uninstall(t, &["--force"]).await;
        assert!(done, "{log}");
        wait::until_gone(&t.all(), &policy, "the policy goes").await;
    });
}

#[test]
fn it_refuses_when_no_operator_lives_and_when_forced_says_what_is_left() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let operator = t.operator("op-1").await;
        let (_agent, policy) = serving_vms(t).await;
        operator.stop().await;
        let (done, log) = uninstall(t, &[]).await;
        assert!(!done && log.contains("the operator is not running") && log.contains("has no holder"), "{log}");
        nothing_has_happened(t).await;

        let (done, log) = uninstall(t, &["--force"]).await;
        assert!(done && log.contains("without the operator") && log.contains(labels::DEPLOY_PREFIX), "{log}");
        wait::until_gone(&t.all(), &policy, "the policy goes").await;
        wait::eventually("the operands go", async || {
            let ours = ListParams::default().labels(labels::POLICY);
            let sets: Api<DaemonSet> = t.ours();
            let left = sets.list(&ours).await.expect("listable").items;
            left.iter().map(ResourceExt::name_any).next().is_none().then_some(())
        })
        .await;
    });
}
