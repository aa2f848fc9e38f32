//! The way back: NVIDIA's operator gets its cluster again, and no GPU changes its driver.

use std::collections::BTreeMap;

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUTransition},
};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::Node,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::wait::await_condition,
};
use serde_json::json;

use super::{
    Error, VFIO_MANAGER,
    act::{remove, until_stopped, written},
    look::{Found, Operand},
    plan::{Plan, node, vm},
    tell,
};
use crate::{
    cluster::{gone, lease, merges},
    operator::{LEASE, peer, policy::AGENT},
};

/// Set by us alone; NVIDIA's operator knows only `Ready` and `Error`.
const THEIRS: [&str; 2] = ["Ready", "Error"];

pub fn plan(found: &Found) -> Plan {
    let mut plan = Plan::default();
    let ours: Vec<&Operand> = given(found).collect();
    let mut first: Vec<String> = Vec::new();
    first.extend(found.ours.iter().map(|deployment| format!("Deployment {}: to 0 replicas", deployment.name_any())));
    first.push(format!("DaemonSet {AGENT}: deleted, and its pods waited for; VMs run on, and new ones wait"));
    first.push("GPUNodes and GPUTransitions: deleted".to_owned());
    plan.section("First", first);
    let mut back: Vec<String> = Vec::new();
    back.extend(
        found
            .policy
            .iter()
            .map(|policy| format!("ClusterPolicy {}: without gpuvirt's finalizer and conditions", policy.name_any())),
    );
    back.extend(ours.iter().map(|operand| format!("DaemonSet {}", operand.set.name_any())));
    plan.section("Given back", back);
    let count = replicas(found);
    plan.section(
        "Last",
        found.deployment.iter().map(|d| format!("Deployment {}: to {count} replica(s)", d.name_any())).collect(),
    );
    let mut stays: Vec<String> = found.launchers.iter().map(|pod| format!("{}: it runs on", vm(pod))).collect();
    stays.push("every GPU with the driver that it has".to_owned());
    stays.push(format!(
        "node labels {} and {}, until NVIDIA's operator has written its driver set",
        labels::OS,
        labels::KERNEL
    ));
    stays.push("KubeVirt's permittedHostDevices".to_owned());
    plan.section("Stays", stays);
    plan.stops = stops(found);
    plan
}

/// Sets that NVIDIA's operator will write again under the same names.
fn given(found: &Found) -> impl Iterator<Item = &Operand> {
    found.sets.iter().filter(|operand| operand.is_ours() && operand.set.name_any() != AGENT)
}

fn replicas(found: &Found) -> i32 {
    let noted = found.deployment.as_ref().and_then(|d| d.annotations().get(labels::TAKEN_OVER_REPLICAS));
    noted.and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn stops(found: &Found) -> Vec<String> {
    let mut stops = Vec::new();
    if found.deployment.is_none() {
        stops.push(format!(
            "NVIDIA's Deployment {}/{} is gone: install its chart again, with --take-ownership and clusterPolicy.deployCR=false, and \
             operator.replicas or kubectl scale at 0; then come back",
            found.namespace,
            peer::DEPLOYMENT
        ));
    }
    // It would be a second driver beside the one that NVIDIA's operator brings.
    let more = given(found).filter(|operand| {
        let name = operand.set.name_any();
        let name = name
            .strip_prefix("nvidia-driver-daemonset-")
            .or_else(|| name.strip_prefix("nvidia-vgpu-manager-daemonset-"));
        name.is_some() && !operand.set.labels().contains_key(labels::KERNEL)
    });
    stops.extend(more.map(|operand| {
        format!(
            "DaemonSet {} serves nodes of a second operating system, which NVIDIA's operator brings no driver of its own for: \
             take those nodes' drivers away first (label {}driver=false)",
            operand.set.name_any(),
            labels::DEPLOY_PREFIX
        )
    }));
    let away = format!("{}vfio-manager", labels::DEPLOY_PREFIX);
    for pod in &found.launchers {
        let at = |other: &Node| other.name_any() == node(pod);
        let kept_away =
            found.nodes.iter().any(|n| at(n) && n.labels().get(&away).is_some_and(|value| value == "false"));
        let has_one = found.vfio_managers.iter().any(|manager| node(manager) == node(pod));
        if !kept_away && !has_one {
            stops.push(format!(
                "{} would lose its GPU: {VFIO_MANAGER} begins by unbinding all; stop the VM, or keep it away: kubectl label node {} \
                 --overwrite {away}=false",
                vm(pod),
                node(pod)
            ));
        }
    }
    stops
}

pub async fn give(client: &Client, found: &Found) -> Result<(), Error> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &found.namespace);
    if found.ours.is_some() {
        let nobody = json!({"spec": {"replicas": 0}});
        written(
            format!("Deployment {LEASE}"),
            deployments.patch(LEASE, &PatchParams::default(), &Patch::Merge(&nobody)).await,
        )?;
        until_stopped(&deployments, LEASE).await;
    }
    let leases = Api::namespaced(client.clone(), &found.namespace);
    while await_condition(leases.clone(), LEASE, |held: Option<&_>| lease::silence(LEASE, held).is_some())
        .await
        .is_err()
    {}
    tell("gpuvirt's operator has stopped")?;
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), &found.namespace);
    if let Some(agent) = found.sets.iter().find(|operand| operand.set.name_any() == AGENT) {
        remove(&sets, &agent.set).await?;
    }
    delete_all::<GPUNode>(client, "GPUNodes").await?;
    delete_all::<GPUTransition>(client, "GPUTransitions").await?;
    let Some(policy) = &found.policy else { return Ok(()) };
    release(client, policy).await?;
    for operand in given(found) {
        let name = operand.set.name_any();
        let owner = policy.controller_owner_ref(&());
        let ours = operand.set.labels().keys().filter(|key| key.starts_with("gpuvirt.io/"));
        let marks: BTreeMap<&String, Option<&str>> = ours.map(|key| (key, None)).collect();
        let patch = json!({"metadata": {"uid": operand.set.uid(), "labels": marks, "ownerReferences": owner.map(|owner| [owner])}});
        written(format!("DaemonSet {name}"), sets.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await)?;
        tell(&format!("DaemonSet {name} given back"))?;
    }
    let count = replicas(found);
    let marks = BTreeMap::from([(labels::TAKEN_OVER_REPLICAS, None::<&str>)]);
    let patch = json!({"metadata": {"annotations": marks}, "spec": {"replicas": count}});
    let done = deployments.patch(peer::DEPLOYMENT, &merges(), &Patch::Merge(&patch)).await;
    written(format!("Deployment {}", peer::DEPLOYMENT), done)?;
    tell(&format!("given back: Deployment {} has {count} replica(s)", peer::DEPLOYMENT))
}

/// No teardown when it is deleted, and no condition that nobody keeps.
async fn release(client: &Client, policy: &ClusterPolicy) -> Result<(), Error> {
    let api: Api<ClusterPolicy> = Api::all(client.clone());
    let (name, what) = (policy.name_any(), format!("ClusterPolicy {}", policy.name_any()));
    let live = api.get(&name).await.map_err(|source| Error::Write { what: what.clone(), source: Box::new(source) })?;
    let finalizers: Vec<&String> = live.finalizers().iter().filter(|f| *f != labels::TEARDOWN_FINALIZER).collect();
    let patch =
        json!({"metadata": {"uid": live.uid(), "resourceVersion": live.resource_version(), "finalizers": finalizers}});
    written(what.clone(), api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await)?;
    if let Some(status) = &live.status {
        let kept: Vec<_> = status.conditions.iter().filter(|c| THEIRS.contains(&c.type_.as_str())).collect();
        let patch = json!({"metadata": {"uid": live.uid()}, "status": {"conditions": kept}});
        written(what, api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&patch)).await)?;
    }
    Ok(())
}

async fn delete_all<K>(client: &Client, what: &'static str) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug,
{
    let api: Api<PartialObjectMeta<K>> = Api::all_with(client.clone(), &());
    let found = api.list_metadata(&ListParams::default()).await;
    let found = match found {
        Err(error) if gone(&error) => return Ok(()),
        other => other.map_err(|source| Error::Read { what, source: Box::new(source) })?,
    };
    for object in found.items {
        match api.delete(&object.name_any(), &DeleteParams::default()).await {
            Err(error) if !gone(&error) => return written(what.to_owned(), Err::<(), _>(error)),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}
