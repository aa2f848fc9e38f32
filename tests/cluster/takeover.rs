//! A cluster of NVIDIA's operator: beside it ours touches nothing; it can be taken over and given back, and meanwhile no
//! driver pod restarts and no GPU is unbound.

mod peer;

use std::{collections::BTreeMap, fs};

use crds::{
    WorkloadMode, labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUStatus},
};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::{Node, Pod},
};
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

use crate::support::{
    agents::{Agent, qemu, t4},
    kubelets::Kubelets,
    nodes::until_event,
    policies,
    program::Program,
    tape::{Tape, Written},
    turn::{Turn, turn},
    wait,
};
use crate::uninstall::uninstall;

const POLICY: &str = "cluster-policy";
const PLAN: &str = "tests/fixtures/takeover-plan.txt";
const PLUGIN: &str = "nvidia-sandbox-device-plugin-daemonset";
const VFIO_MANAGER: &str = "nvidia-vfio-manager";

/// Its exit code and what it printed.
async fn takeover(t: &Turn, name: &str, args: &[&str]) -> (Option<i32>, String) {
    let kubeconfig = t.cluster.kubeconfig();
    let environment = [("KUBECONFIG", kubeconfig.as_os_str())];
    let mut program = Program::start(t, name, &[&["takeover"], args].concat(), &environment);
    let status = program.ended().await;
    (status.code(), program.log())
}

async fn sets(t: &Turn) -> BTreeMap<String, DaemonSet> {
    let all = t.ours::<DaemonSet>().list(&ListParams::default()).await.expect("listable").items;
    all.into_iter().map(|set| (set.name_any(), set)).collect()
}

/// Uid and generation: another generation is another template.
fn marks(set: &DaemonSet) -> (Option<String>, Option<i64>) {
    (set.uid(), set.metadata.generation)
}

/// The one pod of a set.
async fn pod_of(t: &Turn, prefix: &str) -> Pod {
    let pods = t.ours::<Pod>().list(&ListParams::default()).await.expect("listable").items;
    pods.into_iter().find(|pod| pod.name_any().starts_with(prefix)).unwrap_or_else(|| panic!("a pod of {prefix}"))
}

async fn refused(t: &Turn) -> ClusterPolicy {
    policies::until_condition(t, POLICY, "SoleManager", "PeerManages", "gpuvirt takeover --plan").await
}

#[test]
fn beside_nvidias_operator_nothing_is_touched_and_the_policy_says_why() {
    turn(async |t| {
        let _kubelets = Kubelets::of_all(t);
        peer::set_up(t).await;
        let before: BTreeMap<_, _> = sets(t).await.iter().map(|(name, set)| (name.clone(), marks(set))).collect();
        let node = t.all::<Node>().get("n1").await.expect("n1");
        let _operator = t.operator("op-1").await;
        let policy = refused(t).await;
        let conditions = &policy.status.as_ref().expect("a status").conditions;
        let told = conditions.iter().find(|c| c.type_ == "SoleManager").expect("the condition");
        for part in ["Deployment gpuvirt/gpu-operator has 1 replica(s)", "gpuvirt/nvidia-driver-daemonset"] {
            assert!(told.message.contains(part), "{part} is not in {}", told.message);
        }
        until_event(t, policy.uid(), "PeerManages").await;
        let after: BTreeMap<_, _> = sets(t).await.iter().map(|(name, set)| (name.clone(), marks(set))).collect();
        assert_eq!(before, after, "no operand is made, changed or removed");
        assert!(policy.finalizers().is_empty(), "{:?}", policy.finalizers());
        assert_eq!(t.all::<Node>().get("n1").await.expect("n1").labels(), node.labels());
    });
}

#[test]
fn an_operator_of_nvidias_that_comes_later_ends_ours_before_two_manage() {
    turn(async |t| {
        let _kubelets = Kubelets::of_all(t);
        let mut operator = t.operator("op-1").await;
        t.leads("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        wait::until(&t.ours::<DaemonSet>(), "gpuvirt-agent", "ours manages", |_| true).await;
        peer::start(t).await;
        assert!(!operator.ended().await.success());
        assert!(operator.log().contains("Deployment gpuvirt/gpu-operator has 1 replica(s)"), "{}", operator.log());
        let _again = t.operator("op-2").await;
        refused(t).await;
    });
}

#[test]
fn the_plan_says_what_is_found_adopted_rolled_withdrawn_kept_and_in_the_way() {
    turn(async |t| {
        let _kubelets = Kubelets::of_all(t);
        peer::set_up(t).await;
        let (code, text) = takeover(t, "without", &["--plan"]).await;
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("gpuvirt's operator does not run in namespace gpuvirt"), "{text}");
        let _operator = t.operator("op-1").await;
        refused(t).await;
        let (code, text) = takeover(t, "plan", &["--plan"]).await;
        assert_eq!(code, Some(2), "drivers would be renewed: {text}");
        // What is another one in each run and release.
        let pod = pod_of(t, VFIO_MANAGER).await.name_any();
        let text = text.replace(&pod, "nvidia-vfio-manager-POD").replace(env!("CARGO_PKG_VERSION"), "VERSION");
        if fs::read_to_string(PLAN).unwrap_or_default() != text {
            fs::write("target/takeover-plan.txt", &text).expect("a file");
            panic!(
                "the plan is another one than {PLAN}: diff it with target/takeover-plan.txt, and copy that if it is meant:\n{text}"
            );
        }
    });
}

fn for_vms(address: &str) -> GPUStatus {
    GPUStatus {
        mode: Some(WorkloadMode::VmPassthrough),
        driver: Some("vfio-pci".to_owned()),
        holders: vec![qemu(4711)],
        ..t4(address)
    }
}

#[test]
fn a_take_over_restarts_no_driver_unbinds_no_gpu_and_the_way_back_leads_back() {
    turn(async |t| {
        let _kubelets = Kubelets::of_all(t);
        peer::set_up(t).await;
        let operator = t.operator("op-1").await;
        refused(t).await;
        let before = sets(t).await;
        let (driver, manager) = (pod_of(t, "nvidia-driver-daemonset").await, pod_of(t, VFIO_MANAGER).await);

        let (code, text) = takeover(t, "refused", &["--apply"]).await;
        assert!(code == Some(1) && text.contains("autoUpgrade is true"), "{code:?} {text}");
        let deployment = t.ours::<Deployment>().get(peer::DEPLOYMENT).await.expect("its Deployment");
        assert_eq!(deployment.spec.and_then(|spec| spec.replicas), Some(1), "a refusal changes nothing");
        assert_eq!(marks(&sets(t).await["nvidia-driver-daemonset"]), marks(&before["nvidia-driver-daemonset"]));

        let tape: Tape<DaemonSet> = Tape::start(t.ours()).await;
        policies::patch(t, POLICY, &json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": false}}}})).await;
        let (code, text) = takeover(t, "apply", &["--apply"]).await;
        assert_eq!(code, Some(0), "{text}");
        let named = |written: &Written<DaemonSet>, name: &str| match written {
            Written::Is(set) => (set.name_any() == name, true),
            Written::Gone(set) => (set.name_any() == name, false),
        };
        let withdrawn =
            tape.first(0, "its device plugin for VMs has gone", |w| named(w, PLUGIN) == (true, false)).await;
        let begins = tape.first(0, "our agent begins", |w| named(w, "gpuvirt-agent") == (true, true)).await;
        assert!(withdrawn < begins, "a node never has two device plugins for one resource");

        let _container = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let vms = Agent::start(t, "n2", vec![for_vms("0000:3b:00.0")]).await;
        vms.until_reason(t, true, "Serving").await;
        let written = |set: &DaemonSet| {
            let template = set.spec.as_ref().and_then(|spec| spec.template.metadata.as_ref());
            template.is_some_and(|metadata| metadata.labels.iter().any(|labels| labels.contains_key(labels::POLICY)))
        };
        wait::eventually("every operand has our template", async || sets(t).await.values().all(written).then_some(()))
            .await;
        let driver_set = sets(t).await.remove("nvidia-driver-daemonset").expect("the driver's set");
        let pod = driver_set.spec.and_then(|spec| spec.template.spec).expect("a template");
        let inits: Vec<String> = pod.init_containers.into_iter().flatten().map(|container| container.name).collect();
        assert_eq!(inits, ["prepare-driver"], "nothing of the peer's template is left in it");
        let after = sets(t).await;
        for (name, set) in before.iter().filter(|(name, _)| after.contains_key(*name)) {
            assert_eq!(after[name].uid(), set.uid(), "{name} is the same object");
            assert!(
                after[name].owner_references().is_empty(),
                "{name} has no owner: {:?}",
                after[name].owner_references()
            );
        }
        let gone: Vec<&String> = before.keys().filter(|name| !after.contains_key(*name)).collect();
        let expected = [
            "nvidia-sandbox-device-plugin-daemonset",
            "nvidia-sandbox-validator",
            "nvidia-vfio-manager",
            "nvidia-vgpu-device-manager",
        ];
        assert_eq!(gone, expected);
        let same = async |pod: &Pod| {
            let live = t.ours::<Pod>().get(&pod.name_any()).await.expect("it is there");
            assert_eq!((live.uid(), live.metadata.deletion_timestamp), (pod.uid(), None));
        };
        same(&driver).await;
        same(&manager).await;

        let again = sets(t).await;
        let (code, text) = takeover(t, "again", &["--apply"]).await;
        assert_eq!(code, Some(0), "{text}");
        for (name, set) in &sets(t).await {
            assert_eq!(marks(set), marks(&again[name]), "{name} is written once");
        }
        back(t, operator, &before).await;
        same(&driver).await;
        same(&manager).await;
    });
}

async fn back(t: &Turn, operator: Program, before: &BTreeMap<String, DaemonSet>) {
    operator.stop().await;
    let (code, text) = takeover(t, "back", &["--back", "--apply"]).await;
    assert_eq!(code, Some(0), "{text}");
    let policy = t.all::<ClusterPolicy>().get(POLICY).await.expect("the policy stays");
    assert!(policy.finalizers().is_empty(), "{:?}", policy.finalizers());
    let deployment = t.ours::<Deployment>().get(peer::DEPLOYMENT).await.expect("its Deployment");
    assert_eq!(deployment.spec.and_then(|spec| spec.replicas), Some(1));
    let after = sets(t).await;
    assert!(!after.contains_key("gpuvirt-agent"));
    for (name, set) in &after {
        assert_eq!(set.uid(), before[name].uid(), "{name} is the same object");
        assert_eq!(set.owner_references().first().map(|owner| owner.kind.as_str()), Some("ClusterPolicy"), "{name}");
        assert!(!set.labels().contains_key(labels::POLICY), "{name}");
    }
    assert!(t.all::<GPUNode>().list(&ListParams::default()).await.expect("listable").items.is_empty());
    let gate = format!("{}vfio-manager", labels::DEPLOY_PREFIX);
    assert_eq!(t.all::<Node>().get("n2").await.expect("n2").labels().get(&gate).map(String::as_str), Some("true"));
    // Ours, started again, stays out of its way, and leaves the policy behind when it is removed.
    let _operator = t.operator("op-2").await;
    refused(t).await;
    let (done, log) = uninstall(t, &[]).await;
    assert!(done && log.contains("nothing to bring back"), "{log}");
    let policy = t.all::<ClusterPolicy>().get(POLICY).await.expect("the policy stays");
    assert_eq!(policy.metadata.deletion_timestamp, None);
}

#[test]
fn the_way_back_is_refused_where_the_peer_would_unbind_a_vms_gpu() {
    turn(async |t| {
        let _kubelets = Kubelets::of_all(t);
        peer::set_up(t).await;
        peer::virtual_machine(t, "n2").await;
        let (_, text) = takeover(t, "kept", &["--back", "--plan"]).await;
        assert!(!text.contains("would lose its GPU"), "its pod is still there: {text}");
        t.ours::<DaemonSet>().delete(VFIO_MANAGER, &DeleteParams::orphan()).await.expect("deletable");
        let manager = pod_of(t, VFIO_MANAGER).await;
        t.ours::<Pod>().delete(&manager.name_any(), &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&t.ours(), &manager, "the pod goes").await;
        let (code, text) = takeover(t, "lost", &["--back", "--apply"]).await;
        assert!(code == Some(1) && text.contains("VM ml/training on node n2 would lose its GPU"), "{code:?} {text}");
    });
}
