//! Pods that have GPUs while the kubelet or the agent comes and goes.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::DeleteParams, runtime::wait::await_condition};
use serde_json::json;

use super::{
    NODE, T4, allocatable, eight_t4, forget_resource, health::pod, offering, real_node, restarts::capacity,
    start_agent, until_report,
};
use crate::support::{
    agents::agent,
    cluster::{command, run},
    turn::{Turn, turn},
    wait,
};

/// What the container runtime looks for on this host when a pod has one of the described GPUs.
struct DeviceNodes(Vec<PathBuf>);

impl DeviceNodes {
    fn of(machine: &Path) -> Self {
        let groups = fs::read_dir(machine.join("dev/vfio")).expect("the described device nodes").flatten();
        let names = groups.map(|entry| entry.file_name()).filter(|name| name.to_string_lossy().parse::<u32>().is_ok());
        let nodes = names.chain(["vfio".into()]).map(|name| Path::new("/dev/vfio").join(name));
        fs::create_dir_all("/dev/vfio").expect("a directory for them");
        let made = nodes.filter(|node| !node.exists()).inspect(|node| {
            // As /dev/null: nobody opens them.
            let arguments = [node.as_os_str(), "c".as_ref(), "1".as_ref(), "3".as_ref()];
            run(&mut command("mknod", arguments)).expect("a device node");
        });
        Self(made.collect())
    }
}

impl Drop for DeviceNodes {
    fn drop(&mut self) {
        for node in &self.0 {
            let _ = fs::remove_file(node);
        }
        // Only if nothing else is there.
        let _ = fs::remove_dir("/dev/vfio");
    }
}

/// The pod, and addresses of its GPUs as its environment has them.
async fn running(t: &Turn, name: &str, gpus: u32) -> (Api<Pod>, Pod) {
    let pods = pod(t, name, gpus).await;
    let runs = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    let pod = wait::until(&pods, name, "it runs", runs).await;
    (pods, pod)
}

/// Who it is, and the container that runs in it, which would be another one if it had been started again.
fn identity(pod: &Pod) -> (Option<String>, Vec<(Option<String>, i32)>) {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    (pod.uid(), containers.map(|container| (container.container_id.clone(), container.restart_count)).collect())
}

/// GPUs that the kubelet says it has.
async fn gpus(t: &Turn, pod: &str, count: usize) -> BTreeSet<String> {
    let owner = format!("gpuvirt/{pod}");
    let of = |agent: &crds::v1alpha1::AgentStatus| -> BTreeSet<String> {
        let has = |gpu: &&crds::v1alpha1::GPUStatus| gpu.holders.iter().any(|h| h.pod.as_ref() == Some(&owner));
        agent.gpus.iter().filter(has).map(|gpu| gpu.address.clone()).collect()
    };
    let report = until_report(t, &format!("{pod} has {count} GPUs"), |agent| of(agent).len() == count).await;
    of(agent(&report).expect("a report"))
}

async fn delete(pods: &Api<Pod>, pod: &Pod) {
    pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.expect("deletable");
    wait::until_gone(pods, pod, "the pod goes").await;
}

/// Only a report of an agent that knew nothing before proves what the kubelet says now.
async fn fresh_report(t: &Turn) {
    let nodes: Api<crds::v1alpha1::GPUNode> = t.all();
    let gone = json!({"status": {"agent": null}});
    let patch = kube::api::Patch::Merge(&gone);
    nodes.patch_status(NODE, &kube::api::PatchParams::default(), &patch).await.expect("patchable");
}

#[test]
fn a_pod_keeps_its_gpus_through_a_restart_of_the_kubelet_and_nobody_else_gets_them() {
    turn(async |t| {
        let machine = real_node(t).await;
        let host = eight_t4();
        let _nodes = DeviceNodes::of(host.path());
        let first = offering(t, host.path(), 8).await;
        let (pods, before) = running(t, "keeper", 6).await;
        let kept = gpus(t, "keeper", 6).await;

        machine.stop_kubelet().expect("stoppable");
        forget_resource(t).await;
        machine.start_kubelet().expect("startable");
        allocatable(t, "8").await;
        first.kill().await;
        fresh_report(t).await;
        let _second = start_agent(t, host.path()).await;
        assert_eq!(gpus(t, "keeper", 6).await, kept, "the kubelet tells a new agent");
        allocatable(t, "8").await;

        let (_, other) = running(t, "other", 2).await;
        let left = gpus(t, "other", 2).await;
        assert!(left.is_disjoint(&kept), "{left:?} and {kept:?}");
        let none = pod(t, "none", 1).await;
        let refused = wait::until(&none, "none", "there is none for it", |pod: &Pod| {
            pod.status.as_ref().is_some_and(|status| status.phase.as_deref() == Some("Failed"))
        })
        .await;
        let status = refused.status.clone().unwrap_or_default();
        let message = status.message.unwrap_or_default();
        assert!(message.contains(T4) && message.contains("Available: 0"), "{message}");
        let after = pods.get("keeper").await.expect("the pod");
        assert_eq!(identity(&after), identity(&before), "nothing has happened to it");
        for pod in [after, other, refused] {
            delete(&pods, &pod).await;
        }
    });
}

/// The kubelet keeps a resource for this long after its plugin went (`pkg/kubelet/cm/devicemanager`: `endpointStopGracePeriod`).
const GRACE: Duration = Duration::from_secs(5 * 60);

#[test]
#[ignore = "six minutes: make soak"]
fn soak_beyond_the_kubelets_grace_the_resource_vanishes_and_comes_back_with_the_agent_and_a_pod_runs_on() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let _nodes = DeviceNodes::of(host.path());
        let agent = offering(t, host.path(), 8).await;
        let (pods, before) = running(t, "keeper", 6).await;
        let kept = gpus(t, "keeper", 6).await;

        agent.kill().await;
        let away = Instant::now();
        let node = allocatable(t, "0").await;
        assert_eq!(capacity(&node), Some("8"), "as long as it may come back");
        let nodes: Api<Node> = t.all();
        let vanished =
            await_condition(nodes, NODE, |node: Option<&Node>| node.is_some_and(|n| capacity(n) != Some("8")));
        let node = tokio::time::timeout(GRACE + wait::PATIENCE, vanished).await;
        let node = node.expect("in time").expect("a watch that lasts").expect("the node");
        let took = away.elapsed();
        eprintln!("capacity {:?} after {took:?}", capacity(&node));
        assert_eq!(capacity(&node).unwrap_or("0"), "0");
        assert!(took + Duration::from_secs(10) > GRACE, "not before its time: {took:?}");

        fresh_report(t).await;
        let _agent = start_agent(t, host.path()).await;
        let node = allocatable(t, "8").await;
        assert_eq!(capacity(&node), Some("8"));
        assert_eq!(gpus(t, "keeper", 6).await, kept, "they are the pod's still");
        let after = pods.get("keeper").await.expect("the pod");
        assert_eq!(identity(&after), identity(&before), "nothing has happened to it");
        delete(&pods, &after).await;
    });
}
