//! How a policy leaves: first the nodes, in the order of a mode change, then operands, reports and labels.

use crds::{
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{GPUNode, GPUTransition},
};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::reflector::ObjectRef,
};
use serde_json::json;

use super::{Context, Error, apply, build, config, dereference::dereference, status};
use crate::{
    cluster::{gone, merges},
    operator::{
        kubevirt::Withdrawn,
        node::{gates, readiness::TORN_DOWN},
        world::Guarded,
    },
};

pub(super) async fn ensure_finalizer(context: &Context, policy: &ClusterPolicy) -> Result<(), Error> {
    if policy.finalizers().iter().any(|f| f == labels::TEARDOWN_FINALIZER) {
        return Ok(());
    }
    let mut finalizers = policy.finalizers().to_vec();
    finalizers.push(labels::TEARDOWN_FINALIZER.to_owned());
    set_finalizers(context, policy, &finalizers).await
}

pub(super) async fn drop_finalizer(context: &Context, policy: &ClusterPolicy) -> Result<(), Error> {
    let finalizers: Vec<String> =
        policy.finalizers().iter().filter(|f| *f != labels::TEARDOWN_FINALIZER).cloned().collect();
    set_finalizers(context, policy, &finalizers).await
}

async fn set_finalizers(context: &Context, policy: &ClusterPolicy, finalizers: &[String]) -> Result<(), Error> {
    let api: Api<Guarded<ClusterPolicy>> = Api::all(context.client.clone());
    let name = policy.name_any();
    // With the resource version: another controller's finalizer must not be lost.
    let patch = json!({"metadata": {
        "uid": policy.uid(),
        "resourceVersion": policy.resource_version(),
        "finalizers": finalizers,
    }});
    match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        // Someone else wrote meanwhile: the change is on its way to the cache and wakes us again.
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(Error::Finalizer { name, source: Box::new(source) }),
    }
}

/// One step of the removal; the node controller's progress wakes it again.
pub(super) async fn teardown(context: &Context, policy: &ClusterPolicy) -> Result<(), Error> {
    if policy.finalizers().iter().all(|f| f != labels::TEARDOWN_FINALIZER) {
        return Ok(());
    }
    let forced = policy.annotations().get(labels::FORCE_TEARDOWN).is_some_and(|v| v == "true");
    let dereferenced = dereference(&context.world);
    let waiting: Vec<String> = dereferenced.gpu_nodes.iter().filter_map(waits_for).collect();
    if !waiting.is_empty() && !forced {
        return waits(context, policy, &waiting.join("; ")).await;
    }
    for live in dereferenced.daemon_sets.iter().filter(|live| live.metadata.deletion_timestamp.is_none()) {
        context.applier.delete(live.as_ref()).await?;
    }
    // They go in the foreground, after their pods: an agent that still runs would make its GPUNode anew.
    if !dereferenced.daemon_sets.is_empty() && !forced {
        return Ok(());
    }
    for live in &dereferenced.config_maps {
        context.applier.delete(live.as_ref()).await?;
    }
    for live in &dereferenced.services {
        context.applier.delete(live.as_ref()).await?;
    }
    for live in apply::ours(&dereferenced.runtime_classes) {
        context.applier.delete_cluster(live).await?;
    }
    if dereferenced.service_monitors {
        for name in build::MONITORS {
            context.applier.absent::<build::ServiceMonitor>(name).await?;
        }
    }
    for gpu_node in &dereferenced.gpu_nodes {
        forget_node(context, policy, gpu_node).await?;
    }
    let mode = dereferenced.config.unwrap_or_default().kubevirt.mode;
    match context.kubevirt.withdraw(mode).await {
        Ok(Withdrawn::Done) => {}
        Ok(Withdrawn::NotYet) if !forced => return waits(context, policy, "KubeVirt's objects to be listed").await,
        Err(error) if !forced => {
            waits(context, policy, &format!("KubeVirt: {}", crate::chain(&error))).await?;
            return Err(error.into());
        }
        Ok(Withdrawn::NotYet) => tracing::warn!("KubeVirt's objects cannot be read: entries of ours may stay there"),
        Err(error) => tracing::warn!(error = crate::chain(&error), "entries of ours may stay in permittedHostDevices"),
    }
    config::withdraw(context).await?;
    tracing::info!(policy = policy.name_any(), forced, "torn down");
    drop_finalizer(context, policy).await
}

/// Says what the removal waits for, and how to go on without it.
async fn waits(context: &Context, policy: &ClusterPolicy, reason: &str) -> Result<(), Error> {
    let message = format!(
        "waiting for {reason} (to give up on it: kubectl annotate clusterpolicy {} {}=true)",
        policy.name_any(),
        labels::FORCE_TEARDOWN
    );
    let verdict = Verdict::no(status::READY, "TearingDown", message);
    apply::write_policy_status(context, policy, PolicyState::NotReady, vec![verdict], &[]).await
}

/// Why a node is not left yet.
fn waits_for(gpu_node: &GPUNode) -> Option<String> {
    let status = gpu_node.status.as_ref();
    let no_gpus = status.and_then(|s| s.agent.as_ref()).is_some_and(|agent| agent.gpus.is_empty());
    match status.and_then(|s| s.operator.as_ref()) {
        _ if no_gpus => None,
        Some(operator) if operator.reason == TORN_DOWN => None,
        Some(operator) => Some(format!("node {}: {}", gpu_node.name_any(), operator.message)),
        None => Some(format!("node {}: not looked at yet", gpu_node.name_any())),
    }
}

/// Nothing of ours stays on a node: its reports, and every label and mark that the operator has set.
async fn forget_node(context: &Context, policy: &ClusterPolicy, gpu_node: &GPUNode) -> Result<(), Error> {
    let failed = |source| Error::Teardown { policy: policy.name_any(), source: Box::new(source) };
    let name = gpu_node.name_any();
    let gpu_nodes: Api<Guarded<GPUNode>> = Api::all(context.client.clone());
    ignore_missing(gpu_nodes.delete(&name, &DeleteParams::default()).await.map(drop)).map_err(failed)?;
    if context.world.transitions.get(&ObjectRef::new(&name)).is_some() {
        let transitions: Api<Guarded<GPUTransition>> = Api::all(context.client.clone());
        ignore_missing(transitions.delete(&name, &DeleteParams::default()).await.map(drop)).map_err(failed)?;
    }
    let nodes: Api<Node> = Api::all(context.client.clone());
    let Some(node) = nodes.get_metadata_opt(&name).await.map_err(failed)? else { return Ok(()) };
    let mut changes = gates::patch(node.labels(), &[]);
    let ours = [
        labels::GPU_PRESENT,
        labels::OS,
        labels::KERNEL,
        labels::DRIVER_OWNER,
        labels::VGPU_CONFIG_STATE,
        labels::UPGRADE_STATE,
    ];
    changes.extend(ours.map(|key| (key.to_owned(), None)));
    if set_by_us(&node, labels::MIG_CONFIG) {
        changes.insert(labels::MIG_CONFIG.to_owned(), None);
    }
    let patch = json!({"metadata": {"uid": node.uid(), "labels": changes, "annotations": {labels::CORDONED: null, labels::UPGRADE_ENABLED: null}}});
    ignore_missing(nodes.patch_metadata(&name, &merges(), &Patch::Merge(&patch)).await.map(drop)).map_err(failed)
}

/// The API server knows who has written a label last: a layout that an admin has chosen stays, the policy's default goes.
fn set_by_us(node: &PartialObjectMeta<Node>, label: &str) -> bool {
    let ours = node.managed_fields().iter().filter(|entry| entry.manager.as_deref() == Some(labels::OPERATOR_MANAGER));
    let field = format!("f:{label}");
    ours.filter_map(|entry| entry.fields_v1.as_ref())
        .any(|fields| !fields.0["f:metadata"]["f:labels"][field.as_str()].is_null())
}

fn ignore_missing(result: Result<(), kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if gone(&error) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_ours_while_nobody_else_has_written_it() {
        let by = |manager: &str| -> PartialObjectMeta<Node> {
            let fields = json!({"f:metadata": {"f:labels": {"f:nvidia.com/mig.config": {}}}});
            let entry = json!({"manager": manager, "operation": "Update", "fieldsV1": fields});
            let node =
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "managedFields": [entry]}});
            serde_json::from_value(node).expect("a node's metadata")
        };
        assert!(set_by_us(&by(labels::OPERATOR_MANAGER), labels::MIG_CONFIG));
        assert!(!set_by_us(&by("kubectl-label"), labels::MIG_CONFIG));
        assert!(!set_by_us(&by(labels::OPERATOR_MANAGER), labels::GPU_PRESENT));
    }
}
