//! The steps of a take-over. Each asks first what is so already.

use std::collections::BTreeMap;

use crds::{labels, v1::ClusterPolicy};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Node, Pod, ServiceAccount},
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    runtime::wait::{await_condition, conditions},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{
    Error, WITHDRAWN,
    look::{Fate, Found},
    tell,
};
use crate::{
    cluster::{gone, merges},
    operator::{peer, policy::host_of, selector},
};

/// By which Helm leaves an object alone that is no longer part of a release.
const HELM_KEEPS: (&str, &str) = ("helm.sh/resource-policy", "keep");

pub async fn take(client: &Client, found: &Found) -> Result<(), Error> {
    if let Some(deployment) = &found.deployment {
        stop(client, &found.namespace, deployment).await?;
    }
    let Some(policy) = &found.policy else { return Ok(()) };
    let api: Api<ClusterPolicy> = Api::all(client.clone());
    let kept = json!({"metadata": {"uid": policy.uid(), "annotations": BTreeMap::from([HELM_KEEPS])}});
    written(
        format!("ClusterPolicy {}", policy.name_any()),
        api.patch(&policy.name_any(), &merges(), &Patch::Merge(&kept)).await,
    )?;
    // Driver sets select nodes by these: a pod on a node without them would end.
    mark_nodes(client, &found.nodes).await?;
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), &found.namespace);
    for operand in found.sets.iter().filter(|operand| operand.fate == Fate::Orphaned) {
        delete(&sets, &operand.set, DeleteParams::orphan()).await?;
        tell(&format!("DaemonSet {} deleted; its pods stay", operand.set.name_any()))?;
    }
    let wishes = found.intended.sets.iter().map(|wish| (wish.name_any(), wish)).collect::<BTreeMap<_, _>>();
    for operand in &found.sets {
        let wish = wishes.get(&operand.set.name_any()).filter(|_| matches!(operand.fate, Fate::Adopted(_)));
        if let Some(wish) = wish {
            adopt_pods(client, &found.namespace, wish).await?;
            adopt(&sets, &operand.set, wish).await?;
        }
    }
    let namespace = &found.namespace;
    disown(&Api::<ServiceAccount>::namespaced(client.clone(), namespace)).await?;
    disown(&Api::<Role>::namespaced(client.clone(), namespace)).await?;
    disown(&Api::<RoleBinding>::namespaced(client.clone(), namespace)).await?;
    disown(&Api::<ClusterRole>::all(client.clone())).await?;
    disown(&Api::<ClusterRoleBinding>::all(client.clone())).await?;
    for operand in found.sets.iter().filter(|operand| operand.fate == Fate::Unknown && !operand.is_ours()) {
        remove(&sets, &operand.set).await?;
    }
    for name in WITHDRAWN {
        if let Some(operand) = found.sets.iter().find(|operand| operand.set.name_any() == name) {
            remove(&sets, &operand.set).await?;
        }
    }
    tell("taken over: gpuvirt's operator goes on by itself, see kubectl describe clusterpolicy")
}

pub fn written<T>(what: String, result: Result<T, kube::Error>) -> Result<(), Error> {
    result.map(drop).map_err(|source| Error::Write { what, source: Box::new(source) })
}

/// To nothing, and until nothing of it runs. How many there were is kept on it, for the way back.
async fn stop(client: &Client, namespace: &str, deployment: &Deployment) -> Result<(), Error> {
    let (name, replicas) = (deployment.name_any(), peer::replicas(deployment));
    if replicas == 0 {
        return Ok(());
    }
    let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let were = BTreeMap::from([(labels::TAKEN_OVER_REPLICAS, replicas.to_string())]);
    let nobody = json!({"metadata": {"annotations": were}, "spec": {"replicas": 0}});
    written(format!("Deployment {name}"), api.patch(&name, &merges(), &Patch::Merge(&nobody)).await)?;
    until_stopped(&api, &name).await;
    tell(&format!("Deployment {name}: {replicas} -> 0 replicas"))
}

pub async fn until_stopped(api: &Api<Deployment>, name: &str) {
    let seen = |d: &Deployment| d.status.as_ref().and_then(|s| s.observed_generation) >= d.metadata.generation;
    let stopped =
        |d: Option<&Deployment>| d.is_none_or(|deployment| seen(deployment) && peer::replicas(deployment) == 0);
    // An interrupted watch is begun anew; the caller's timeout ends it.
    while await_condition(api.clone(), name, stopped).await.is_err() {}
}

async fn mark_nodes(client: &Client, nodes: &[Node]) -> Result<(), Error> {
    let api: Api<Node> = Api::all(client.clone());
    for node in nodes {
        let Some(host) = host_of(node) else { continue };
        let marks: BTreeMap<&str, String> =
            host.labels().into_iter().filter(|(key, value)| node.labels().get(*key) != Some(value)).collect();
        if !marks.is_empty() {
            let patch = json!({"metadata": {"uid": node.uid(), "labels": marks}});
            let done = api.patch_metadata(&node.name_any(), &merges(), &Patch::Merge(&patch)).await;
            written(format!("Node {}", node.name_any()), done)?;
        }
    }
    tell(&format!("{} node(s) marked with {} and {}", nodes.len(), labels::OS, labels::KERNEL))
}

/// A node that changes its mode waits for pods that it finds by our labels: those that run already get them, too.
async fn adopt_pods(client: &Client, namespace: &str, wish: &DaemonSet) -> Result<(), Error> {
    let Some(spec) = &wish.spec else { return Ok(()) };
    let params = ListParams::default().labels(&selector::of_set(wish));
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let marks = spec.template.metadata.as_ref().and_then(|metadata| metadata.labels.clone()).unwrap_or_default();
    let found = pods.list(&params).await.map_err(|source| Error::Read { what: "Pods", source: Box::new(source) })?;
    for pod in found.items {
        if marks.iter().all(|(key, value)| pod.labels().get(key) == Some(value)) {
            continue;
        }
        let patch = json!({"metadata": {"uid": pod.uid(), "labels": marks}});
        match pods.patch_metadata(&pod.name_any(), &merges(), &Patch::Merge(&patch)).await {
            Err(error) if !gone(&error) => return written(format!("Pod {}", pod.name_any()), Err::<(), _>(error)),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Its metadata alone, so that nothing restarts: no owner, our labels (a driver set without that of its operating system
/// would be taken for one that no node wants), and every field that somebody wrote is ours from now
/// on, so that our next apply takes those away that we do not set.
async fn adopt(sets: &Api<DaemonSet>, set: &DaemonSet, wish: &DaemonSet) -> Result<(), Error> {
    let (name, mut set) = (set.name_any(), set.clone());
    while !set.labels().contains_key(labels::POLICY) || peer::owner(&set).is_some() {
        let patch = json!({"metadata": {
            "uid": set.uid(),
            "resourceVersion": set.resource_version(),
            "ownerReferences": null,
            "labels": wish.labels(),
            "managedFields": fields_as_ours(set.managed_fields()),
        }});
        match sets.patch(&name, &merges(), &Patch::Merge(&patch)).await {
            Ok(_) => return tell(&format!("DaemonSet {name} adopted")),
            // Its controller has written its status meanwhile.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                set = sets
                    .get(&name)
                    .await
                    .map_err(|source| Error::Read { what: "DaemonSets", source: Box::new(source) })?;
            }
            Err(error) => return written(format!("DaemonSet {name}"), Err::<(), _>(error)),
        }
    }
    Ok(())
}

/// One entry of ours in place of all but those of statuses.
fn fields_as_ours(entries: &[ManagedFieldsEntry]) -> Vec<ManagedFieldsEntry> {
    let (own, mut rest): (Vec<_>, Vec<_>) = entries.iter().cloned().partition(|entry| entry.subresource.is_none());
    let mut all = json!({});
    for entry in &own {
        if let Some(fields) = &entry.fields_v1 {
            unite(&mut all, &fields.0);
        }
    }
    if let Some(first) = own.into_iter().next() {
        rest.push(ManagedFieldsEntry {
            manager: Some(labels::OPERATOR_MANAGER.to_owned()),
            operation: Some("Apply".to_owned()),
            fields_v1: Some(FieldsV1(all)),
            ..first
        });
    }
    rest
}

fn unite(into: &mut Value, from: &Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        for (key, value) in from {
            unite(into.entry(key.clone()).or_insert_with(|| json!({})), value);
        }
    }
}

/// Accounts and roles that belong to our release must not go with the ClusterPolicy.
async fn disown<K>(api: &Api<K>) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + std::fmt::Debug,
{
    let kind = K::kind(&());
    let found = api.list_metadata(&ListParams::default()).await;
    let found = found.map_err(|source| Error::Read { what: "accounts and roles", source: Box::new(source) })?;
    for object in found.items.iter().filter(|object| peer::owner(*object).is_some()) {
        let patch = json!({"metadata": {"uid": object.uid(), "ownerReferences": null}});
        let done = api.patch_metadata(&object.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await;
        written(format!("{kind} {}", object.name_any()), done)?;
    }
    Ok(())
}

/// With its pods, which are waited for.
pub async fn remove(sets: &Api<DaemonSet>, set: &DaemonSet) -> Result<(), Error> {
    delete(sets, set, DeleteParams::foreground()).await?;
    let (name, uid) = (set.name_any(), set.uid().unwrap_or_default());
    while await_condition(sets.clone(), &name, conditions::is_deleted(&uid)).await.is_err() {}
    tell(&format!("DaemonSet {name} deleted, with its pods"))
}

async fn delete(sets: &Api<DaemonSet>, set: &DaemonSet, how: DeleteParams) -> Result<(), Error> {
    let same = Preconditions { uid: set.uid(), resource_version: None };
    match sets.delete(&set.name_any(), &how.preconditions(same)).await {
        Err(error) if !gone(&error) => written(format!("DaemonSet {}", set.name_any()), Err::<(), _>(error)),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_but_a_status_becomes_ours_in_one_entry() {
        let entry = |manager: &str, subresource: Option<&str>, fields: Value| {
            let entry = json!({"manager": manager, "operation": "Update", "apiVersion": "apps/v1", "fieldsType": "FieldsV1", "subresource": subresource, "fieldsV1": fields});
            serde_json::from_value::<ManagedFieldsEntry>(entry).expect("an entry")
        };
        let entries = [
            entry("gpu-operator", None, json!({"f:spec": {"f:a": {}}})),
            entry("kubectl-edit", None, json!({"f:spec": {"f:b": {}}})),
            entry("kube-controller-manager", Some("status"), json!({"f:status": {}})),
        ];
        let found = fields_as_ours(&entries);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], entries[2]);
        assert_eq!(
            (found[1].manager.as_deref(), found[1].operation.as_deref()),
            (Some(labels::OPERATOR_MANAGER), Some("Apply"))
        );
        let fields = found[1].fields_v1.as_ref().map(|fields| fields.0.clone());
        assert_eq!(fields, Some(json!({"f:spec": {"f:a": {}, "f:b": {}}})));
    }
}
