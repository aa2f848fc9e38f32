//! The agent beside a real kubelet: this host is the node, its PCI devices are described.

mod chain;
mod health;
mod pods;
mod restarts;

use std::{path::Path, sync::OnceLock};

use crds::{
    WorkloadMode,
    labels::DEPLOY_OPERANDS,
    v1alpha1::{Advertise, GPUNode, GPUNodeSpec},
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use rustix::process::Signal;
use serde_json::json;
use vfio::testing;

use crate::support::{
    agents::{T4, agent},
    identity,
    machine::{Machine, NODE},
    nodes::label,
    program::Program,
    turn::{Turn, turn},
    wait,
};

static MACHINE: OnceLock<Result<Machine<'static>, String>> = OnceLock::new();

/// This host as a node, made so once. The operator's DaemonSets are kept off it.
async fn real_node(t: &Turn) -> &'static Machine<'static> {
    let machine = match MACHINE.get_or_init(|| Machine::start(t.cluster)) {
        Ok(machine) => machine,
        Err(error) => panic!("no node: {error}"),
    };
    let nodes: Api<Node> = t.all();
    wait::until(&nodes, NODE, "the node is Ready", is_ready).await;
    label(t, NODE, &[(DEPLOY_OPERANDS, Some("false"))]).await;
    machine
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Eight Tesla T4 on vfio-pci, and the kubelet of this host.
fn eight_t4() -> testing::Machine {
    let machine = testing::Machine::described("eight-t4");
    machine.symlink("/var/lib/kubelet", "/var/lib/kubelet");
    machine
}

/// `gpuvirt agent` with the token that its pod on the node would have.
async fn start_agent(t: &Turn, host: &Path) -> Program {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"},
        "spec": {
            "nodeName": NODE, "serviceAccountName": "gpuvirt-agent", "hostNetwork": true,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": "localhost/pause:test", "imagePullPolicy": "Never"}],
        },
    });
    let pods: Api<Pod> = t.ours();
    let pod = match pods.get_opt("agent").await.expect("readable") {
        Some(pod) => pod,
        None => pods.create(&PostParams::default(), &serde_json::from_value(pod).expect("a Pod")).await.expect("a pod"),
    };
    let kubeconfig = identity::service_account(t, "gpuvirt-agent", Some(&pod)).await;
    let root = format!("--host-root={}", host.display());
    Program::start(
        t,
        "agent",
        &["agent", &root, "--listen=127.0.0.1:0"],
        &[("KUBECONFIG", kubeconfig.as_os_str()), ("NODE_NAME", NODE.as_ref()), ("LOG_LEVEL", "info".as_ref())],
    )
}

/// Starts an agent that is to offer what the host has, and waits until the kubelet has `count` GPUs from it.
async fn offering(t: &Turn, host: &Path, count: usize) -> Program {
    let agent = start_agent(t, host).await;
    order(t, Advertise::Offered).await;
    serving(t, count).await;
    agent
}

/// As the operator would write it.
async fn order(t: &Turn, advertise: Advertise) {
    let nodes: Api<GPUNode> = t.all();
    wait::until(&nodes, NODE, "the agent makes its GPUNode", |_| true).await;
    let spec = GPUNodeSpec { mode: Some(WorkloadMode::VmPassthrough), advertise, epoch: 1, ..GPUNodeSpec::default() };
    let patch = json!({"spec": spec});
    nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a GPUNode should be patchable");
}

async fn allocatable(t: &Turn, count: &str) -> Node {
    let nodes: Api<Node> = t.all();
    wait::until(&nodes, NODE, &format!("allocatable {T4}: {count}"), |node: &Node| offered(node) == Some(count)).await
}

/// The agent of this test has them registered. The node's status alone may still tell of the last test's agent.
async fn serving(t: &Turn, count: usize) {
    until_report(t, "the kubelet has them from this agent", |a| {
        a.resources.iter().any(|r| r.name == T4 && r.registered && r.devices.len() == count)
    })
    .await;
    allocatable(t, &count.to_string()).await;
}

fn offered(node: &Node) -> Option<&str> {
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    allocatable.get(T4).map(|quantity| quantity.0.as_str())
}

/// Takes the resource out of the node's status: it comes back only if a kubelet that runs has it registered.
async fn forget_resource(t: &Turn) {
    let nodes: Api<Node> = t.all();
    let patch = json!({"status": {"allocatable": {T4: null}, "capacity": {T4: null}}});
    nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a Node should be patchable");
}

async fn until_report(t: &Turn, promise: &str, is: impl Fn(&crds::v1alpha1::AgentStatus) -> bool) -> GPUNode {
    wait::until(&t.all(), NODE, promise, |node: &GPUNode| agent(node).is_some_and(&is)).await
}

#[test]
fn eight_gpus_are_allocatable_until_they_are_withdrawn() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let _agent = start_agent(t, host.path()).await;
        until_report(t, "the agent sees them", |a| a.summary.gpus == 8 && a.summary.driver == "vfio-pci").await;
        order(t, Advertise::Offered).await;
        serving(t, 8).await;
        order(t, Advertise::Withdrawn).await;
        allocatable(t, "0").await;
        until_report(t, "nothing is registered", |a| a.resources.is_empty()).await;
        order(t, Advertise::Offered).await;
        serving(t, 8).await;
    });
}

#[test]
fn a_restarted_kubelet_has_the_resource_again() {
    turn(async |t| {
        let machine = real_node(t).await;
        let host = eight_t4();
        let mut agent = offering(t, host.path(), 8).await;
        machine.stop_kubelet().expect("stoppable");
        forget_resource(t).await;
        machine.start_kubelet().expect("startable");
        allocatable(t, "8").await;
        assert!(agent.lives(), "it is still the same agent");
    });
}

#[test]
fn an_agent_that_was_killed_serves_again_when_it_is_back() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let first = offering(t, host.path(), 8).await;
        first.kill().await;
        allocatable(t, "0").await;
        let _second = start_agent(t, host.path()).await;
        allocatable(t, "8").await;
        until_report(t, "it says so", |a| a.resources.iter().any(|r| r.registered && r.devices.len() == 8)).await;
    });
}

#[test]
fn an_agent_that_starts_before_the_kubelet_waits_and_says_so() {
    turn(async |t| {
        let machine = real_node(t).await;
        machine.stop_kubelet().expect("stoppable");
        let _ = std::fs::remove_file("/var/lib/kubelet/device-plugins/kubelet.sock");
        let host = eight_t4();
        let _agent = start_agent(t, host.path()).await;
        order(t, Advertise::Offered).await;
        let waiting = until_report(t, "it waits for the kubelet", |a| {
            a.conditions
                .iter()
                .any(|c| c.type_ == "Registered" && c.status == "False" && c.reason == "WaitingForKubelet")
        });
        let waiting = waiting.await;
        assert!(agent(&waiting).expect("a report").resources.iter().all(|resource| !resource.registered));
        forget_resource(t).await;
        machine.start_kubelet().expect("startable");
        allocatable(t, "8").await;
        until_report(t, "and is done waiting", |a| a.resources.iter().all(|resource| resource.registered)).await;
    });
}

#[test]
fn a_function_that_cannot_be_read_is_named_and_the_others_are_served() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        host.write("/sys/bus/pci/devices/0000:18:00.0/vendor", "rubbish\n");
        let _agent = offering(t, host.path(), 7).await;
        let report = until_report(t, "it is named", |a| a.errors.iter().any(|e| e.contains("0000:18:00.0"))).await;
        let report = agent(&report).expect("a report");
        assert_eq!((report.errors.len(), report.summary.gpus), (1, 7), "{:?}", report.errors);
        let observed = report.conditions.iter().find(|c| c.type_ == "Observed").expect("a condition");
        assert!(observed.status == "False" && observed.message.contains("0000:18:00.0"), "{observed:?}");
    });
}

#[test]
fn resources_stay_while_the_api_server_is_away() {
    turn(async |t| {
        let machine = real_node(t).await;
        let host = eight_t4();
        let mut agent = offering(t, host.path(), 8).await;
        machine.signal("kube-apiserver", Signal::STOP).expect("a signal should reach it");
        // The kubelet is born anew meanwhile, so that the agent has something to do without the API server.
        let restarted = machine.stop_kubelet().and_then(|()| {
            let _ = std::fs::remove_file(CHECKPOINT);
            machine.start_kubelet()
        });
        let kept = wait::eventually("the kubelet has them registered", async || registered().then_some(()));
        let kept = tokio::time::timeout(wait::PATIENCE / 2, kept).await;
        machine.signal("kube-apiserver", Signal::CONT).expect("a signal should reach it");
        restarted.expect("restartable");
        kept.expect("the kubelet should have the resources without the API server");
        assert!(agent.lives(), "it does not give up");
        allocatable(t, "8").await;
        until_report(t, "nothing has changed", |a| a.resources.iter().any(|r| r.registered && r.devices.len() == 8))
            .await;
        let pods: Api<Pod> = t.ours();
        let _ = pods.delete("agent", &DeleteParams::default().grace_period(0)).await;
    });
}

const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

/// What the kubelet itself has noted.
fn registered() -> bool {
    let noted = std::fs::read_to_string(CHECKPOINT);
    let noted: Option<serde_json::Value> = noted.ok().and_then(|text| serde_json::from_str(&text).ok());
    let devices = noted.and_then(|noted| noted["Data"]["RegisteredDevices"][T4].as_array().map(Vec::len));
    devices == Some(8)
}
