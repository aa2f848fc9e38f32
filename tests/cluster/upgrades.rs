//! New drivers, node by node: on a real API server and its DaemonSet controller, with kubelets and agents that are played.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUTransition, GPUVirtConfig, NVIDIADriver, TransitionPhase as Phase, VgpuInstance, VgpuStatus},
};
use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod},
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::support::{
    agents::{Agent, qemu, t4},
    kubelets::Kubelets,
    nodes, policies,
    tape::{Tape, Written, version},
    turn::{ML, Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
const PAUSED: &str = labels::PAUSED_FOR_UPGRADE;

async fn policy(t: &Turn, upgrade: &Value) {
    let mut policy = policies::valid(POLICY);
    policy["spec"]["driver"]["upgradePolicy"] = upgrade.clone();
    policies::create(t, policy).await;
}

async fn to_version(t: &Turn, version: &str) {
    policies::patch(t, POLICY, &json!({"spec": {"driver": {"version": version}}})).await;
}

/// A container node whose driver serves, and is the newest.
async fn node(t: &Turn, name: &str) -> Agent {
    nodes::create(t, name, &[]).await;
    let agent = Agent::start(t, name, vec![t4("0000:18:00.0")]).await;
    agent.until_reason(t, true, "Serving").await;
    until_pod(t, name, "test").await;
    agent
}

/// The node's driver pod, once it is ready, is not ending, and has this version.
async fn until_pod(t: &Turn, node: &str, version: &str) -> Pod {
    let pods: Api<Pod> = t.ours();
    let drivers = ListParams::default()
        .labels("app.kubernetes.io/component in (nvidia-driver,nvidia-vgpu-manager,nvidia-vgpu-host-manager)")
        .fields(&format!("spec.nodeName={node}"));
    wait::eventually(&format!("{node} has driver {version}"), async || {
        let found = pods.list(&drivers).await.expect("pods should be listable").items;
        found.into_iter().find(|pod| {
            let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.clone()).unwrap_or_default();
            let conditions = pod.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
            let ready = conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True");
            pod.metadata.deletion_timestamp.is_none() && ready && image.contains(&format!(":{version}"))
        })
    })
    .await
}

async fn until_state(t: &Turn, node: &str, state: Option<&str>) -> Node {
    wait::until(&t.all(), node, &format!("upgrade state {state:?}"), |node: &Node| {
        node.labels().get(labels::UPGRADE_STATE).map(String::as_str) == state
    })
    .await
}

async fn until_phase(t: &Turn, node: &str, phase: Phase, reason: &str) -> GPUTransition {
    wait::until(&t.all(), node, &format!("{phase:?}, {reason:?}"), |object: &GPUTransition| {
        object.spec.driver.is_some()
            && object.status.as_ref().is_some_and(|s| s.phase == phase && (reason.is_empty() || s.reason == reason))
    })
    .await
}

async fn begun(t: &Turn, node: &str) -> bool {
    let all: Api<GPUTransition> = t.all();
    all.get_opt(node).await.expect("readable").is_some()
}

fn closed(node: &Node) -> bool {
    node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true))
}

/// A user's pod on the node, of no controller.
async fn user_pod(t: &Turn, node: &str, name: &str, resources: &Value) -> Pod {
    place(t, pod(node, name, resources)).await
}

fn pod(node: &str, name: &str, resources: &Value) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "localhost/train:1", "resources": {"limits": resources}}],
        },
    })
}

async fn place(t: &Turn, pod: Value) -> Pod {
    let namespaces: Api<Namespace> = t.all();
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": ML}})).expect("a Namespace");
    let _ = namespaces.create(&PostParams::default(), &namespace).await;
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
    let pod: Pod = serde_json::from_value(pod).expect("a Pod");
    let name = pod.name_any();
    let pod =
        wait::eventually("the namespace takes pods", async || pods.create(&PostParams::default(), &pod).await.ok())
            .await;
    // A budget counts only pods that run.
    let ready = json!({"type": "Ready", "status": "True"});
    let runs = Patch::Merge(json!({"status": {"phase": "Running", "conditions": [ready]}}));
    pods.patch_status(&name, &PatchParams::default(), &runs).await.expect("patchable");
    pod
}

#[test]
fn three_nodes_get_a_new_driver_one_after_another_in_the_words_of_dashboards() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let (mut agents, mut tapes) = (Vec::new(), Vec::new());
        for name in ["n1", "n2", "n3"] {
            agents.push(node(t, name).await);
            until_state(t, name, Some("upgrade-done")).await;
            assert!(!begun(t, name).await, "a first driver is no upgrade");
            tapes.push((name, Tape::<Node>::of(t.all(), name).await));
        }
        to_version(t, "newer").await;
        let mut spans = Vec::new();
        for (name, tape) in &tapes {
            until_pod(t, name, "newer").await;
            let done = until_phase(t, name, Phase::Done, "Serving").await;
            let driver = done.spec.driver.clone().expect("a driver");
            assert!(driver.from.contains(":test") && driver.to.contains(":newer"), "{driver:?}");
            let settled = until_state(t, name, Some("upgrade-done")).await;
            assert!(!closed(&settled) && settled.labels().values().all(|value| value != PAUSED), "{settled:?}");

            let mut at = 0;
            for state in [
                "upgrade-required",
                "cordon-required",
                "pod-restart-required",
                "validation-required",
                "uncordon-required",
                "upgrade-done",
            ] {
                let is = |written: &Written<Node>| matches!(written, Written::Is(node) if node.labels().get(labels::UPGRADE_STATE).is_some_and(|s| s == state));
                at = tape.first(at, &format!("{name} is {state}"), is).await;
            }
            let paused = |written: &Written<Node>| matches!(written, Written::Is(node) if node.labels().get("nvidia.com/gpu.deploy.client").is_some_and(|v| v == PAUSED));
            assert!(tape.ever(0, paused), "what uses the driver was paused");
            let status = done.status.expect("a status");
            let entered = |phase| status.history.iter().find(|e| e.phase == phase).map(|e| e.at.0).expect("a phase");
            spans.push((entered(Phase::Cordon), entered(Phase::Done)));
        }
        spans.sort();
        assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0), "one at a time: {spans:?}");
    });
}

#[test]
fn a_driver_that_does_not_come_up_halts_the_others_until_it_does() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        // Enough places for all of them.
        policy(t, &json!({"autoUpgrade": true, "maxParallelUpgrades": 0, "maxUnavailable": "100%"})).await;
        let names = ["n1", "n2", "n3"];
        let mut agents = Vec::new();
        for name in names {
            agents.push(node(t, name).await);
        }
        kubelets.break_starts(&names);
        to_version(t, "broken").await;
        let failed = wait::eventually("one has failed", async || {
            let all: Api<GPUTransition> = t.all();
            let all = all.list(&ListParams::default()).await.expect("listable").items;
            all.into_iter().find(|object| object.status.as_ref().is_some_and(|s| s.phase == Phase::Failed))
        })
        .await;
        let first = failed.name_any();
        let message = failed.status.map(|status| status.message).unwrap_or_default();
        assert!(message.contains("restarted 11 times"), "{message}");
        let node = until_state(t, &first, Some("upgrade-failed")).await;
        assert!(closed(&node), "no pod comes to a node without a driver");
        nodes::until_event(t, node.uid(), "DriverUpgradeFailed").await;
        for name in names.into_iter().filter(|name| *name != first) {
            let halted = until_phase(t, name, Phase::WaitForSlot, "Halted").await;
            let message = halted.status.map(|status| status.message).unwrap_or_default();
            assert!(message.contains(&first), "{message}");
            let node = until_state(t, name, Some("upgrade-required")).await;
            assert!(!closed(&node));
            until_pod(t, name, "test").await;
        }
        policies::until_condition(t, POLICY, "DriversCurrent", "UpgradeHalted", &first).await;

        kubelets.let_start();
        for name in names {
            until_phase(t, name, Phase::Done, "").await;
            let node = until_state(t, name, Some("upgrade-done")).await;
            assert!(!closed(&node));
        }
        policies::until_condition(t, POLICY, "DriversCurrent", "AllCurrent", "").await;
    });
}

#[test]
fn a_vm_keeps_the_driver_of_its_node_alone_until_it_has_ended() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let used = node(t, "n1").await;
        let _idle = node(t, "n2").await;
        let before = until_pod(t, "n1", "test").await;
        used.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        to_version(t, "newer").await;
        until_pod(t, "n2", "newer").await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        let message = blocked.status.map(|status| status.message).unwrap_or_default();
        assert!(message.contains("0000:18:00.0") && message.contains("4711"), "{message}");
        assert_eq!(until_pod(t, "n1", "test").await.uid(), before.uid());
        assert!(!closed(&until_state(t, "n1", Some("upgrade-required")).await));
        used.change(|host| host.gpus[0].holders.clear());
        until_pod(t, "n1", "newer").await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
    });
}

#[test]
fn a_node_that_is_skipped_and_a_policy_that_does_not_upgrade_leave_drivers_as_they_are() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": false})).await;
        let _agents = [node(t, "n1").await, node(t, "n2").await];
        nodes::label(t, "n1", &[(labels::UPGRADE_SKIP, Some("true")), (labels::UPGRADE_STATE, Some("upgrade-done"))])
            .await;
        until_state(t, "n1", None).await;
        to_version(t, "newer").await;
        policies::until_condition(t, POLICY, "DriversCurrent", "AutoUpgradeOff", "n1, n2").await;
        assert!(!begun(t, "n1").await && !begun(t, "n2").await);

        policies::patch(t, POLICY, &json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": true}}}})).await;
        until_state(t, "n2", Some("upgrade-done")).await;
        until_pod(t, "n2", "newer").await;
        until_state(t, "n1", Some("upgrade-required")).await;
        assert!(!begun(t, "n1").await);
        until_pod(t, "n1", "test").await;
        nodes::label(t, "n1", &[(labels::UPGRADE_SKIP, None)]).await;
        until_pod(t, "n1", "newer").await;
    });
}

/// The pod of this name is the last one of its disruption budget.
async fn guarded(t: &Turn, name: &str) -> Api<PodDisruptionBudget> {
    let guards: Api<PodDisruptionBudget> = Api::namespaced(t.client.clone(), ML);
    let spec = json!({"minAvailable": 1, "selector": {"matchLabels": {"app": name}}});
    let guard = json!({"metadata": {"name": name}, "spec": spec});
    guards.create(&PostParams::default(), &serde_json::from_value(guard).expect("a PDB")).await.expect("a PDB");
    wait::until(&guards, name, "it is observed", |g: &PodDisruptionBudget| {
        g.status.as_ref().is_some_and(|s| s.current_healthy == 1)
    })
    .await;
    guards
}

#[test]
fn a_node_is_drained_of_whom_the_selector_means_once_a_user_does_not_leave_in_time() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let drain =
            |empty: bool| json!({"enable": true, "force": true, "deleteEmptyDir": empty, "podSelector": "app!=kept"});
        let upgrade =
            |empty: bool| json!({"autoUpgrade": true, "podDeletion": {"timeoutSeconds": 1}, "drain": drain(empty)});
        policy(t, &upgrade(false)).await;
        let _agent = node(t, "n1").await;
        let mut train = pod("n1", "train", &json!({"nvidia.com/gpu": "1"}));
        train["spec"]["volumes"] = json!([{"name": "scratch", "emptyDir": {}}]);
        let train = place(t, train).await;
        let web = user_pod(t, "n1", "web", &json!({})).await;
        let kept = user_pod(t, "n1", "kept", &json!({})).await;
        let mut spared = pod("n1", "spared", &json!({}));
        spared["metadata"]["labels"][labels::UPGRADE_DRAIN_SKIP] = json!("true");
        let spared = place(t, spared).await;
        let guards = guarded(t, "train").await;
        to_version(t, "newer").await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        let message = blocked.status.map(|status| status.message).unwrap_or_default();
        assert!(message.contains("emptyDir") && message.contains("deleteEmptyDir"), "{message}");
        policies::patch(t, POLICY, &json!({"spec": {"driver": {"upgradePolicy": upgrade(true)}}})).await;
        let node = until_state(t, "n1", Some("drain-required")).await;
        assert!(closed(&node));
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        wait::until_gone(&pods, &web, "a pod without a GPU is drained").await;
        assert!(pods.get("train").await.expect("its budget holds").metadata.deletion_timestamp.is_none());
        until_pod(t, "n1", "test").await;
        guards.delete("train", &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&pods, &train, "it leaves").await;
        until_pod(t, "n1", "newer").await;
        assert!(!closed(&until_state(t, "n1", Some("upgrade-done")).await));
        for stays in [kept, spared] {
            let now = pods.get(&stays.name_any()).await.expect("it stays");
            assert_eq!((now.uid(), now.metadata.deletion_timestamp), (stays.uid(), None));
            pods.delete(&stays.name_any(), &DeleteParams::default().grace_period(0)).await.expect("deletable");
        }
    });
}

#[test]
fn a_pod_with_the_same_driver_is_renewed_under_whoever_uses_it() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let _agent = node(t, "n1").await;
        let first = until_pod(t, "n1", "test").await;
        let train = user_pod(t, "n1", "train", &json!({"nvidia.com/gpu": "1"})).await;
        let of_node = Tape::<Node>::of(t.all(), "n1").await;
        // Of the pod, not of the driver.
        let tolerations = json!([{"key": "example.com/gpus", "operator": "Exists"}]);
        policies::patch(t, POLICY, &json!({"spec": {"daemonsets": {"tolerations": tolerations}}})).await;
        let done = until_phase(t, "n1", Phase::Done, "Serving").await;
        assert!(done.spec.driver.as_ref().is_some_and(|driver| driver.same_driver), "{:?}", done.spec);
        assert_ne!(until_pod(t, "n1", "test").await.uid(), first.uid());
        until_state(t, "n1", Some("upgrade-done")).await;
        let state = |node: &Node| node.labels().get(labels::UPGRADE_STATE).cloned().unwrap_or_default();
        let is =
            |written: &Written<Node>| matches!(written, Written::Is(node) if state(node) == "pod-restart-required");
        assert!(of_node.ever(0, is), "it says what is done");
        let disturbs = |node: &Node| closed(node) || node.labels().values().any(|value| value == PAUSED);
        assert!(!of_node.ever(0, |written| matches!(written, Written::Is(node) if disturbs(node))));
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        let now = pods.get("train").await.expect("it runs on");
        assert_eq!((now.uid(), now.metadata.deletion_timestamp), (train.uid(), None));
        pods.delete("train", &DeleteParams::default().grace_period(0)).await.expect("deletable");
    });
}

#[test]
fn a_node_that_asks_by_annotation_is_freed_of_users_and_answered_with_its_driver_as_it_is() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true, "podDeletion": {"force": true}})).await;
        let _agent = node(t, "n1").await;
        let driver = until_pod(t, "n1", "test").await;
        let all: Api<Node> = t.all();
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        wait::until(&all, "n1", "whoever brings the driver up knows", |node: &Node| {
            node.annotations().get(labels::UPGRADE_ENABLED).is_some_and(|value| value == "true")
        })
        .await;
        // One that a driver's pod writes and waits for, and one that a person writes.
        let mut last = None;
        for key in [labels::UPGRADE_SAFE_LOAD, labels::UPGRADE_REQUESTED] {
            let train = user_pod(t, "n1", "train", &json!({"nvidia.com/gpu": "1"})).await;
            let of_node = Tape::<Node>::of(t.all(), "n1").await;
            let asks = Patch::Merge(json!({"metadata": {"annotations": {key: "true"}}}));
            let asked = all.patch("n1", &PatchParams::default(), &asks).await.expect("annotated");
            wait::until_gone(&pods, &train, "the user leaves").await;
            let answered =
                |written: &Written<Node>| matches!(written, Written::Is(node) if !node.annotations().contains_key(key));
            let at = of_node.first(version(&asked), "it is answered", answered).await;
            let on_closed = |written: &Written<Node>| matches!(written, Written::Is(node) if closed(node) && version(node) <= at && node.labels().get(labels::UPGRADE_STATE).is_some_and(|s| s == "pod-restart-required"));
            assert!(of_node.ever(version(&asked), on_closed), "only once the node is closed and idle");
            let done = |object: &GPUTransition| {
                object.uid() != last && object.status.as_ref().is_some_and(|s| s.phase == Phase::Done)
            };
            let object = wait::until(&t.all(), "n1", "done", done).await;
            last = object.uid();
            let node = until_state(t, "n1", Some("upgrade-done")).await;
            assert!(!closed(&node) && node.labels().values().all(|value| value != PAUSED));
            assert_eq!(until_pod(t, "n1", "test").await.uid(), driver.uid());
        }
        policies::patch(t, POLICY, &json!({"spec": {"driver": {"upgradePolicy": {"autoUpgrade": false}}}})).await;
        wait::until(&all, "n1", "upgrades are nobody's to make", |node: &Node| {
            !node.annotations().contains_key(labels::UPGRADE_ENABLED)
                && !node.labels().contains_key(labels::UPGRADE_STATE)
        })
        .await;
    });
}

#[test]
fn a_named_job_is_awaited_and_a_pod_with_a_gpu_leaves_by_its_disruption_budget() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let waits = json!({"podSelector": "app=job"});
        policy(t, &json!({"autoUpgrade": true, "waitForCompletion": waits, "podDeletion": {"force": true}})).await;
        let _agent = node(t, "n1").await;
        let job = user_pod(t, "n1", "job", &json!({})).await;
        let train = user_pod(t, "n1", "train", &json!({"nvidia.com/gpu": "1"})).await;
        let guards = guarded(t, "train").await;
        to_version(t, "newer").await;
        let node = until_state(t, "n1", Some("wait-for-jobs-required")).await;
        assert!(closed(&node));
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), ML);
        let at_once = DeleteParams::default().grace_period(0);
        pods.delete("job", &at_once).await.expect("deletable");
        wait::until_gone(&pods, &job, "it has ended").await;
        until_state(t, "n1", Some("pod-deletion-required")).await;
        let evicts = until_phase(t, "n1", Phase::Evict, "Evicting").await;
        assert_eq!(evicts.status.map(|s| s.affected_pods), Some(vec![format!("{ML}/train")]));
        assert!(pods.get("train").await.expect("its budget holds").metadata.deletion_timestamp.is_none());
        until_pod(t, "n1", "test").await;
        guards.delete("train", &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&pods, &train, "the pod is evicted").await;
        until_pod(t, "n1", "newer").await;
        assert!(!closed(&until_state(t, "n1", Some("upgrade-done")).await));
    });
}

#[test]
fn a_pod_that_nobody_would_make_again_is_not_evicted_unless_the_policy_says_so() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let _agent = node(t, "n1").await;
        let train = user_pod(t, "n1", "train", &json!({"nvidia.com/gpu": "1"})).await;
        to_version(t, "newer").await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        let message = blocked.status.map(|status| status.message).unwrap_or_default();
        assert!(message.contains("ml/train") && message.contains("podDeletion.force"), "{message}");
        let force = json!({"spec": {"driver": {"upgradePolicy": {"podDeletion": {"force": true}}}}});
        policies::patch(t, POLICY, &force).await;
        wait::until_gone(&Api::<Pod>::namespaced(t.client.clone(), ML), &train, "the pod is evicted").await;
        until_pod(t, "n1", "newer").await;
    });
}

#[test]
fn an_operator_that_is_killed_in_the_middle_is_followed_by_one_that_goes_on_from_there() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        let first = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let _agent = node(t, "n1").await;
        kubelets.hold_endings();
        to_version(t, "newer").await;
        // What is paused does not leave.
        let before = until_phase(t, "n1", Phase::Switch, "").await;
        first.kill().await;
        kubelets.let_end();
        let _second = t.operator("op-2").await;
        t.leads("op-2").await;
        let done = until_phase(t, "n1", Phase::Done, "Serving").await;
        assert_eq!(before.uid(), done.uid());
        let phases: Vec<Phase> = done.status.iter().flat_map(|s| s.history.iter().map(|e| e.phase)).collect();
        assert!(phases.windows(2).all(|two| two[0] != two[1]), "no phase twice: {phases:?}");
        let node = until_state(t, "n1", Some("upgrade-done")).await;
        assert!(!closed(&node) && node.labels().values().all(|value| value != PAUSED));
        until_pod(t, "n1", "newer").await;
    });
}

#[test]
fn a_node_that_an_admin_has_closed_stays_closed_and_a_change_of_its_mode_waits_its_turn() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policy(t, &json!({"autoUpgrade": true})).await;
        let agent = node(t, "n1").await;
        let all: Api<Node> = t.all();
        let close = Patch::Merge(json!({"spec": {"unschedulable": true}}));
        all.patch("n1", &PatchParams::default(), &close).await.expect("cordoned");
        kubelets.hold_endings();
        to_version(t, "newer").await;
        until_phase(t, "n1", Phase::Switch, "").await;
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        let waits = agent.until_reason(t, false, "DriverUpgrade").await;
        assert_eq!(waits.spec.mode, Some(WorkloadMode::Container));
        kubelets.let_end();
        agent.until(t, "it goes on to its mode", |node| node.spec.mode == Some(WorkloadMode::VmPassthrough)).await;
        agent.until_reason(t, true, "Serving").await;
        assert!(closed(&all.get("n1").await.expect("a node")));
    });
}

#[test]
fn the_driver_of_an_nvidiadriver_is_renewed_by_the_objects_own_policy() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let driver = json!({
            "apiVersion": "nvidia.com/v1alpha1", "kind": "NVIDIADriver", "metadata": {"name": "a"},
            "spec": {
                "driverType": "gpu", "default": true,
                "repository": "localhost", "image": "nvidia-driver", "version": "test",
            },
        });
        let drivers: Api<NVIDIADriver> = t.all();
        let driver = serde_json::from_value(driver).expect("an NVIDIADriver");
        drivers.create(&PostParams::default(), &driver).await.expect("creatable");
        let mut policy = policies::valid(POLICY);
        policy["spec"]["driver"]["useNvidiaDriverCRD"] = json!(true);
        policies::create(t, policy).await;
        let _agent = node(t, "n1").await;
        let newer = Patch::Merge(json!({"spec": {"version": "newer"}}));
        drivers.patch("a", &PatchParams::default(), &newer).await.expect("patchable");
        until_pod(t, "n1", "newer").await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
        until_state(t, "n1", Some("upgrade-done")).await;
    });
}

#[test]
fn a_vgpu_host_driver_is_renewed_once_no_vm_has_a_vgpu_of_its_node() {
    const VF: &str = "0000:18:00.4";
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["driver"]["upgradePolicy"] = json!({"autoUpgrade": true});
        policy["spec"]["vgpuManager"] =
            json!({"enabled": true, "repository": "localhost", "image": "vgpu-manager", "version": "test"});
        policy["spec"]["vgpuDeviceManager"] = json!({"enabled": false});
        policies::create(t, policy).await;
        nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-vgpu")]).await;
        let mut gpu = t4("0000:18:00.0");
        gpu.mode = Some(WorkloadMode::VmVgpu);
        let instance = VgpuInstance {
            id: VF.to_owned(),
            parent: VF.to_owned(),
            holders: vec![qemu(42)],
            ..VgpuInstance::default()
        };
        gpu.vgpu = Some(VgpuStatus { instances: vec![instance], ..VgpuStatus::default() });
        let agent = Agent::start(t, "n1", vec![gpu]).await;
        let before = until_pod(t, "n1", "test").await;
        policies::patch(t, POLICY, &json!({"spec": {"vgpuManager": {"version": "newer"}}})).await;
        let blocked = until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        let message = blocked.status.map(|status| status.message).unwrap_or_default();
        assert!(message.contains("qemu-kvm (pid 42"), "{message}");
        assert_eq!(until_pod(t, "n1", "test").await.uid(), before.uid());
        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders.clear());
        until_pod(t, "n1", "newer").await;
        until_phase(t, "n1", Phase::Done, "").await;
    });
}

/// Agents' pods by node: the UID, and whether it is ready.
async fn agent_pods(t: &Turn) -> BTreeMap<String, (Option<String>, bool)> {
    let pods: Api<Pod> = t.ours();
    let found = pods.list(&ListParams::default().labels("app=gpuvirt-agent")).await.expect("listable").items;
    let here = found.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    let of = |pod: Pod| {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
        Some((pod.spec.as_ref()?.node_name.clone()?, (pod.uid(), ready)))
    };
    here.filter_map(of).collect()
}

/// Another setting, and so another revision of the agents' DaemonSet.
async fn change_agents(t: &Turn, seconds: u32) {
    let configs: Api<GPUVirtConfig> = t.all();
    let patch = Patch::Merge(json!({"spec": {"resyncSeconds": seconds}}));
    wait::eventually("the config is there", async || {
        configs.patch("default", &PatchParams::default(), &patch).await.ok()
    })
    .await;
}

#[test]
fn new_agents_come_one_first_halt_when_it_does_not_come_up_and_spare_a_node_that_changes() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        let first = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let mut agents = Vec::new();
        for name in ["n1", "n2", "n3"] {
            nodes::create(t, name, &[]).await;
            agents.push(Agent::start(t, name, vec![t4("0000:18:00.0")]).await);
        }
        let before = wait::eventually("all agents run", async || {
            let pods = agent_pods(t).await;
            ["n1", "n2", "n3"].iter().all(|node| pods.get(*node).is_some_and(|(_, ready)| *ready)).then_some(pods)
        })
        .await;
        policies::until_condition(t, POLICY, "AgentsCurrent", "AllCurrent", "").await;

        kubelets.break_starts(&["n1", "n2", "n3"]);
        change_agents(t, 77).await;
        let halted = policies::until_condition(t, POLICY, "AgentsCurrent", "RolloutHalted", "CrashLoopBackOff").await;
        let pods = agent_pods(t).await;
        let renewed = |pods: &BTreeMap<String, (Option<String>, bool)>| -> Vec<String> {
            pods.iter()
                .filter(|(node, (uid, _))| before.get(*node).is_some_and(|b| b.0 != *uid))
                .map(|(n, _)| n.clone())
                .collect()
        };
        let [broken] = &renewed(&pods)[..] else { panic!("one goes first: {pods:?}") };
        let said = serde_json::to_string(&halted.status).expect("JSON");
        assert!(said.contains(&format!("on node {broken}")), "{said}");

        // The next operator finds it as it is, while another node is in the middle of a change.
        first.kill().await;
        let busy = *["n1", "n2", "n3"].iter().find(|node| **node != broken).expect("another");
        let agent = agents.iter().find(|agent| agent.node == busy).expect("its agent");
        agent.change(|host| host.obeys = false);
        nodes::label(t, busy, &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        let _second = t.operator("op-2").await;
        t.leads("op-2").await;
        wait::until(&t.all(), busy, "its agent is asked", |object: &GPUTransition| {
            object.status.as_ref().is_some_and(|status| status.phase == Phase::Switch)
        })
        .await;
        assert_eq!(renewed(&agent_pods(t).await), std::slice::from_ref(broken), "halted still");
        kubelets.let_start();
        policies::until_condition(t, POLICY, "AgentsCurrent", "RollingOut", busy).await;
        wait::eventually("the others follow", async || (renewed(&agent_pods(t).await).len() == 2).then_some(())).await;
        assert!(!renewed(&agent_pods(t).await).contains(&busy.to_owned()), "not in the middle of a change");
        agent.change(|host| host.obeys = true);
        policies::until_condition(t, POLICY, "AgentsCurrent", "AllCurrent", "").await;
        assert_eq!(renewed(&agent_pods(t).await).len(), 3);
        agent.until_reason(t, true, "Serving").await;
    });
}
