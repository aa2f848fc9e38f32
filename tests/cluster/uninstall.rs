//! `gpuvirt uninstall`, as the chart's hook runs it.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode, labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{GPUNode, TORN_DOWN},
};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use vfio::testing;

use crate::{
    kubevirt::{nic, until_permitted, with_kubevirt},
    modes::PASSTHROUGH,
    support::{
        NAMESPACE,
        agents::{self, Agent, T4, qemu, t4},
        identity,
        kubelets::Kubelets,
        kubevirt,
        nodes::{self, until_deployed},
        policies,
        program::Program,
        tape::{Tape, Written},
        turn::{Turn, turn},
        wait,
    },
    teardown::{POLICY, nothing_is_left, serving_vms},
};

/// Its exit and its log.
pub async fn uninstall(t: &Turn, args: &[&str]) -> (bool, String) {
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
fn without_a_living_operator_it_brings_the_nodes_back_itself() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let operator = t.operator("op-1").await;
        let (agent, policy) = serving_vms(t).await;
        operator.stop().await;
        in_use(t, &agent).await;
        let (done, log) = uninstall(t, &[]).await;
        assert!(!done && log.contains("virtual machines use GPUs"), "{log}");
        nothing_has_happened(t).await;

        agent.change(|host| host.gpus[0].holders.clear());
        agent.until(t, "the VM has gone", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 0)).await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        let (done, log) = uninstall(t, &[]).await;
        assert!(done && log.contains("doing its work") && log.contains("has no holder"), "{log}");
        nothing_is_left(t, &policy).await;
        let released = written.ever(0, |w| {
            matches!(w, Written::Is(n) if agents::agent(n).is_some_and(|a| a.gpus[0].mode == Some(WorkloadMode::Container)))
        });
        assert!(released, "the GPU is released before its node is left");
    });
}

/// What a person could find in the cluster: names of all objects but events, and what of a node and of KubeVirt matters.
pub async fn found(t: &Turn) -> BTreeSet<String> {
    let kubectl = |args: &[&str]| t.cluster.kubectl(args).expect("readable");
    let kinds = kubectl(&["api-resources", "--verbs=list", "-o", "name"]);
    let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
    let names = kubectl(&["get", &kinds.join(","), "-A", "-o", "name", "--ignore-not-found"]);
    let mut found: BTreeSet<String> = names.lines().map(str::to_owned).collect();
    // Made again whenever it has gone, by the control plane.
    found.retain(|name| !name.starts_with("lease") && !name.contains("apiserver-"));
    for node in t.all::<Node>().list(&ListParams::default()).await.expect("listable") {
        let name = node.name_any();
        found.extend(node.labels().iter().map(|(key, value)| format!("node {name} label {key}={value}")));
        found.extend(node.annotations().iter().map(|(key, value)| format!("node {name} annotation {key}={value}")));
        let spec = node.spec.unwrap_or_default();
        found.insert(format!("node {name} unschedulable={:?} taints={:?}", spec.unschedulable, spec.taints));
        let status = node.status.unwrap_or_default();
        for (list, counts) in [("capacity", status.capacity), ("allocatable", status.allocatable)] {
            found.extend(counts.iter().flatten().map(|(key, count)| format!("node {name} {list} {key}={}", count.0)));
        }
    }
    // Without its type there is none.
    if let Ok(mut kubevirt) = kubevirt::api(&t.client).get(kubevirt::NAME).await {
        kubevirt.managed_fields_mut().clear();
        found.insert(format!("KubeVirt {} {:?}", kubevirt.data["spec"], kubevirt.annotations()));
    }
    found
}

/// Counts in a node's status, as a kubelet leaves them.
async fn leave_behind(t: &Turn, counts: &Value) {
    let patch = json!({"status": {"capacity": counts, "allocatable": counts}});
    t.all::<Node>().patch_status("n1", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patchable");
}

#[test]
fn the_cluster_is_after_it_as_it_was_before() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let own = [(labels::WORKLOAD_CONFIG, "vm-passthrough"), ("nvidia.com/mig.capable", "true"), ("team", "a")];
        nodes::create(t, "n1", &own).await;
        leave_behind(t, &json!({"nvidia.com/hostdev": "3", "amd.com/gpu": "0"})).await;
        let before = found(t).await;

        let operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["migManager"] = json!({"enabled": true, "repository": "localhost", "image": "mig", "version": "1", "config": {"default": "all-disabled"}});
        let policy = policies::create(t, policy).await;
        agent.until_reason(t, true, "Serving").await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        // A change, and what comes of it: its GPUTransition, and a MIG layout by the policy's default.
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await;
        let labelled = |node: &Node| node.labels().contains_key(labels::MIG_CONFIG);
        wait::until(&t.all(), "n1", "the default layout", labelled).await;
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
        leave_behind(t, &json!({T4: "0", "nvidia.com/gpu": "0"})).await;
        let during = found(t).await;
        let more =
            during.difference(&before).filter(|what| what.contains("gputransition") || what.contains("mig.config"));
        assert_eq!(more.count(), 2, "{:#?}", during.difference(&before).collect::<Vec<_>>());

        let (done, log) = uninstall(t, &[]).await;
        assert!(done && log.contains("removed from the node's status"), "{log}");
        wait::until_gone(&t.all(), &policy, "the policy goes").await;
        operator.stop().await;
        let after = found(t).await;
        let differs: Vec<_> = before.symmetric_difference(&after).collect();
        assert!(differs.is_empty(), "{differs:#?}");
    });
}

/// Whether a host has files of the agent.
fn files(host: &testing::Machine) -> [bool; 2] {
    ["run/gpuvirt/journal", "var/lib/gpuvirt/desired.json"].map(|file| host.path().join(file).exists())
}

#[test]
fn an_agent_takes_its_files_with_it_once_the_node_is_torn_down_and_at_no_other_end() {
    turn(async |t| {
        let host = testing::Machine::described("eight-t4");
        nodes::create(t, "n1", &[]).await;
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent-n1"},
            "spec": {"nodeName": "n1", "serviceAccountName": "gpuvirt-agent", "containers": [{"name": "c", "image": "c"}]},
        });
        let pods: Api<Pod> = t.ours();
        let pod = serde_json::from_value(pod).expect("a Pod");
        let pod = pods.create(&PostParams::default(), &pod).await.expect("a pod");
        let kubeconfig = identity::service_account(t, "gpuvirt-agent", Some(&pod)).await;
        let root = format!("--host-root={}", host.path().display());
        let start = |name: &str| {
            let environment = [("KUBECONFIG", kubeconfig.as_os_str()), ("NODE_NAME", "n1".as_ref())];
            Program::start(t, name, &["agent", &root, "--listen=127.0.0.1:0"], &environment)
        };
        let gpu_nodes: Api<GPUNode> = t.all();
        let reported = |asked: i64| {
            move |node: &GPUNode| agents::agent(node).is_some_and(|agent| agent.observed_generation >= asked)
        };

        let first = start("first");
        wait::until(&gpu_nodes, "n1", "it reports", reported(1)).await;
        let order = json!({"spec": {"mode": "container", "advertise": "Withdrawn", "epoch": 7}});
        let ordered = gpu_nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&order)).await.expect("patchable");
        let asked = ordered.metadata.generation.expect("a generation");
        wait::until(&gpu_nodes, "n1", "it answers the order", reported(asked)).await;
        first.stop().await;
        assert_eq!(files(&host), [true, true], "the next agent goes on from them");

        let mut second = start("second");
        let again = json!({"spec": {"epoch": 8, "advertise": "Offered"}});
        let ordered = gpu_nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&again)).await.expect("patchable");
        let asked = ordered.metadata.generation.expect("a generation");
        wait::until(&gpu_nodes, "n1", "the second one answers", reported(asked)).await;
        let left = json!({"status": {"operator": {"ready": "True", "reason": TORN_DOWN}}});
        gpu_nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&left)).await.expect("patchable");
        second.says("the operator has left this node").await;
        second.signal(Signal::TERM);
        assert!(second.ended().await.success(), "{}", second.log());
        assert_eq!(files(&host), [false, false], "{}", second.log());
        assert!(!host.path().join("run/gpuvirt").exists() && !host.path().join("var/lib/gpuvirt").exists());
    });
}
