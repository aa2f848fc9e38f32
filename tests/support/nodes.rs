//! Nodes without a machine behind them: the scheduler and the controllers take them for real.

use k8s_openapi::{
    api::core::v1::{Event as CoreEvent, Node},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{turn::Turn, wait};

/// A node that is Ready and takes pods.
pub async fn create(turn: &Turn, name: &str, labels: &[(&str, &str)]) -> Node {
    let node = serde_json::from_value(object(name, labels)).expect("a Node");
    let nodes: Api<Node> = turn.all();
    nodes.create(&PostParams::default(), &node).await.expect("a node should be creatable")
}

/// As its kubelet writes it.
pub fn object(name: &str, labels: &[(&str, &str)]) -> Value {
    let mut all = json!({"kubernetes.io/os": "linux", "kubernetes.io/hostname": name});
    for (key, value) in labels {
        all[*key] = json!(value);
    }
    let now = Time(Timestamp::now());
    let room = json!({"cpu": "64", "memory": "256Gi", "pods": "110"});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": all},
        "status": {
            "capacity": room,
            "allocatable": room,
            "nodeInfo": {
                "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "containerd://2.1.0",
                "kernelVersion": "6.8.0-45-generic", "kubeProxyVersion": "", "kubeletVersion": "v1.33.0", "machineID": "",
                "operatingSystem": "linux", "osImage": "Ubuntu 24.04", "systemUUID": "",
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played by a test",
                "lastHeartbeatTime": now, "lastTransitionTime": now,
            }],
        },
    })
}

/// As `kubectl label node`; `None` removes.
pub async fn label(turn: &Turn, name: &str, labels: &[(&str, Option<&str>)]) -> Node {
    let labels: serde_json::Map<String, Value> =
        labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    let patch = json!({"metadata": {"labels": labels}});
    let nodes: Api<Node> = turn.all();
    let done = nodes.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.expect("a node should be patchable")
}

/// Waits until the node's deploy labels are exactly these (suffixes), with the value `true`.
pub async fn until_deployed(turn: &Turn, name: &str, suffixes: &[&str]) -> Node {
    let exact = |node: &Node| deployed(node) == suffixes;
    wait::until(&turn.all(), name, &format!("deploy labels are {suffixes:?}"), exact).await
}

/// Suffixes of the deploy labels that are `true`, in order.
pub fn deployed(node: &Node) -> Vec<&str> {
    let own = node.labels().iter().filter(|(_, value)| *value == "true");
    own.filter_map(|(key, _)| key.strip_prefix(crds::labels::DEPLOY_PREFIX)).collect()
}

/// The event about this very object, once it is there.
pub async fn until_event(turn: &Turn, uid: Option<String>, reason: &str) -> CoreEvent {
    let events: Api<CoreEvent> = turn.all();
    let about = ListParams::default().fields(&format!("involvedObject.uid={}", uid.unwrap_or_default()));
    wait::eventually(&format!("an event {reason}"), async || {
        let found = events.list(&about).await.expect("events should be listable");
        found.items.into_iter().find(|event| event.reason.as_deref() == Some(reason))
    })
    .await
}
