//! What a change does to a node and its pods itself; everything else is the node controller's order.

use crds::labels;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, EvictParams, Patch, Preconditions},
    core::DynamicObject,
};
use serde_json::json;

use super::state::Gate;
use crate::{
    cluster::{gone, merges},
    operator::{drivers::Old, vmi},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("node {node} cannot be read")]
    ReadNode { node: String, source: Box<kube::Error> },
    #[error("node {node} cannot be cordoned, uncordoned or annotated")]
    Cordon { node: String, source: Box<kube::Error> },
    #[error("pod {pod} cannot be evicted")]
    Evict { pod: String, source: Box<kube::Error> },
    #[error("driver pod {pod} cannot be renewed")]
    Renew { pod: String, source: Box<kube::Error> },
    #[error("VM {vm} cannot be stopped")]
    Stop { vm: String, source: Box<kube::Error> },
}

/// Whether new pods may come: the mark is in the metadata that is watched, the rest is read when it counts.
pub async fn gate(client: &Client, node: &str, marked: bool) -> Result<Gate, Error> {
    let closed = live(client, node).await?.is_some_and(|node| closed(&node));
    Ok(match (closed, marked) {
        (false, _) => Gate::Open,
        (true, true) => Gate::Ours,
        (true, false) => Gate::Others,
    })
}

/// Closes the node and says in the same write that it was us. Somebody who closed it meanwhile is left to open it.
pub async fn cordon(client: &Client, node: &str, change: &str) -> Result<(), Error> {
    let Some(live) = live(client, node).await?.filter(|node| !closed(node)) else { return Ok(()) };
    let patch = json!({
        "metadata": {
            "uid": live.uid(),
            "resourceVersion": live.resource_version(),
            "annotations": {labels::CORDONED: change},
        },
        "spec": {"unschedulable": true},
    });
    write(client, node, &patch).await
}

pub async fn uncordon(client: &Client, node: &str, uid: Option<String>) -> Result<(), Error> {
    let patch = json!({
        "metadata": {"uid": uid, "annotations": {labels::CORDONED: null}},
        "spec": {"unschedulable": null},
    });
    write(client, node, &patch).await
}

async fn live(client: &Client, node: &str) -> Result<Option<Node>, Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.get_opt(node).await.map_err(|source| Error::ReadNode { node: node.to_owned(), source: Box::new(source) })
}

fn closed(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

async fn write(client: &Client, node: &str, patch: &serde_json::Value) -> Result<(), Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    match nodes.patch(node, &merges(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(Error::Cordon { node: node.to_owned(), source: Box::new(source) }),
    }
}

/// By the eviction API, so that disruption budgets hold. `Some` says why it has to be asked again.
pub async fn evict(client: &Client, pod: &str) -> Result<Option<String>, Error> {
    let Some((namespace, name)) = pod.split_once('/') else { return Ok(None) };
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    match pods.evict(name, &EvictParams::default()).await {
        Ok(_) => Ok(None),
        Err(error) if gone(&error) => Ok(None),
        Err(kube::Error::Api(status)) if status.code == 429 => Ok(Some(format!("pod {pod}: {}", status.message))),
        Err(source) => Err(Error::Evict { pod: pod.to_owned(), source: Box::new(source) }),
    }
}

/// Deletes this very pod, whose DaemonSet makes a new one. `Some` says who does not let it.
pub async fn renew(client: &Client, namespace: &str, old: &Old) -> Result<Option<String>, Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let same = Preconditions { uid: old.uid.clone(), resource_version: None };
    match pods.delete(&old.pod, &DeleteParams::default().preconditions(same)).await {
        Ok(_) => Ok(None),
        Err(error) if gone(&error) => Ok(None),
        // The admission policy of pods whose vGPUs VMs have.
        Err(kube::Error::Api(status)) if status.code == 422 || status.code == 403 => Ok(Some(status.message.clone())),
        Err(source) => Err(Error::Renew { pod: old.pod.clone(), source: Box::new(source) }),
    }
}

/// What asked for the renewal on the node has been followed.
pub async fn answer(client: &Client, node: &str, uid: Option<String>, keys: &[&str]) -> Result<(), Error> {
    if keys.is_empty() {
        return Ok(());
    }
    let annotations: serde_json::Map<String, serde_json::Value> =
        keys.iter().map(|key| ((*key).to_owned(), serde_json::Value::Null)).collect();
    write(client, node, &json!({"metadata": {"uid": uid, "annotations": annotations}})).await
}

/// Asks KubeVirt to stop the VM that an instance belongs to, as `virtctl stop` does. An instance is never deleted: one that
/// belongs to no VM is left to its owner, and `Some` says so.
pub async fn stop(client: &Client, instance: &str) -> Result<Option<String>, Error> {
    let Some((namespace, name)) = instance.split_once('/') else { return Ok(None) };
    let failed = |source| Error::Stop { vm: instance.to_owned(), source: Box::new(source) };
    let kind = vmi::resource();
    let instances: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    let Some(found) = instances.get_metadata_opt(name).await.map_err(failed)? else { return Ok(None) };
    if found.meta().deletion_timestamp.is_some() {
        return Ok(None);
    }
    let Some(vm) = found.owner_references().iter().find(|owner| owner.kind == "VirtualMachine") else {
        return Ok(Some(format!("instance {instance} belongs to no VirtualMachine: its owner has to delete it")));
    };
    let path = format!("/apis/subresources.kubevirt.io/v1/namespaces/{namespace}/virtualmachines/{}/stop", vm.name);
    let request = http::Request::put(path).header("content-type", "application/json").body(b"{}".to_vec());
    let request =
        request.map_err(|error| failed(kube::Error::BuildRequest(kube::core::request::Error::BuildRequest(error))))?;
    match client.request_text(request).await {
        Ok(_) => Ok(None),
        // It stops already, or is gone.
        Err(error) if gone(&error) => Ok(None),
        Err(source) => Err(failed(source)),
    }
}
