//! Writes what was built, takes away what is built no more, and writes the statuses.

use crds::{
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{CONFIG_NAME, GPUVirtConfig},
};
use k8s_openapi::{api::core::v1::ObjectReference, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Resource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::reflector::ObjectRef,
};
use serde_json::json;

use super::{
    Context, Error,
    build::{MONITOR, Operands, ServiceMonitor},
    dereference::Dereferenced,
    status::{Judgement, READY, config_status, policy_status},
};
use crate::{
    cluster::{apply::Applier, events::Notice, gone},
    operator::{kubevirt::Wired, world::Guarded},
};

/// ConfigMaps go first, since pods mount them. What nobody asks for any more is pruned: live objects are those that carry
/// our label.
pub(super) async fn apply(applier: &Applier, operands: &Operands, live: &Dereferenced) -> Result<(), Error> {
    for wanted in &operands.config_maps {
        applier.apply(wanted, named(&live.config_maps, wanted)).await?;
    }
    for wanted in &operands.runtime_classes {
        let there = named(&live.runtime_classes, wanted);
        // An admin's own class of that name does the same, and its handler cannot be changed.
        if there.is_none_or(|class| class.labels().contains_key(labels::POLICY)) {
            applier.apply_cluster(wanted, there).await?;
        }
    }
    for wanted in &operands.services {
        applier.apply(wanted, named(&live.services, wanted)).await?;
    }
    for wanted in &operands.daemon_sets {
        applier.apply(wanted, named(&live.daemon_sets, wanted)).await?;
    }
    match &operands.monitor {
        Some(wanted) => applier.apply_unwatched(wanted).await?,
        None if live.service_monitors && !operands.kept.iter().any(|kept| kept == MONITOR) => {
            applier.absent::<ServiceMonitor>(MONITOR).await?;
        }
        None => {}
    }
    let kept = |name: String| operands.kept.contains(&name);
    let surplus = live.daemon_sets.iter().filter(|live| named(&operands.daemon_sets, live.as_ref()).is_none());
    for surplus in surplus.filter(|live| !kept(live.name_any())) {
        match operands.orphaned.contains(&surplus.name_any()) {
            true => applier.orphan(surplus.as_ref()).await?,
            false => applier.delete(surplus.as_ref()).await?,
        }
    }
    let surplus = live.services.iter().filter(|live| named(&operands.services, live.as_ref()).is_none());
    for surplus in surplus.filter(|live| !kept(live.name_any())) {
        applier.delete(surplus.as_ref()).await?;
    }
    for surplus in ours(&live.runtime_classes).filter(|live| named(&operands.runtime_classes, *live).is_none()) {
        applier.delete_cluster(surplus).await?;
    }
    // A pod that is still ending keeps its mounts: only a DaemonSet that has gone gives its ConfigMaps free.
    if live.daemon_sets.len() <= operands.daemon_sets.len() {
        let surplus = live.config_maps.iter().filter(|live| named(&operands.config_maps, live.as_ref()).is_none());
        for surplus in surplus.filter(|live| !kept(live.name_any())) {
            applier.delete(surplus.as_ref()).await?;
        }
    }
    Ok(())
}

/// Those that the operator has made.
pub(super) fn ours<K: ResourceExt>(objects: &[std::sync::Arc<K>]) -> impl Iterator<Item = &K> {
    objects.iter().map(AsRef::as_ref).filter(|object| object.labels().contains_key(labels::POLICY))
}

fn named<'a, K: ResourceExt, T: std::borrow::Borrow<K>>(objects: &'a [T], like: &K) -> Option<&'a K> {
    objects.iter().map(std::borrow::Borrow::borrow).find(|object: &&K| object.name_any() == like.name_any())
}

/// Written only when it differs from what the object shows. Conditions of the types `silenced` go.
pub(super) async fn write_policy_status(
    context: &Context,
    policy: &ClusterPolicy,
    state: PolicyState,
    verdicts: Vec<Verdict>,
    silenced: &[&str],
) -> Result<(), Error> {
    let name = policy.name_any();
    let old = policy.status.clone().unwrap_or_default();
    let news = verdicts.iter().find(|v| v.type_ == READY).and_then(|ready| news(ready, &old.conditions));
    let namespace = &context.installation.namespace;
    let status = policy_status(policy, namespace, state, verdicts, silenced, &Time(Timestamp::now()));
    if policy.status.as_ref() == Some(&status) {
        return Ok(());
    }
    // By merge patch: the list of conditions is replaced whole, also where the peer's schema has no list map.
    let api: Api<Guarded<ClusterPolicy>> = Api::all(context.client.clone());
    let patch = json!({"metadata": {"uid": policy.uid()}, "status": status});
    let params = PatchParams { field_manager: Some(labels::OPERATOR_MANAGER.to_owned()), ..PatchParams::default() };
    match api.patch_status(&name, &params, &Patch::Merge(&patch)).await {
        Ok(_) => {}
        Err(error) if gone(&error) => return Ok(()),
        Err(source) => return Err(Error::Status { kind: "ClusterPolicy", name, source: Box::new(source) }),
    }
    if let Some(notice) = news {
        context.events.publish(&notice, &reference(policy)).await;
    }
    Ok(())
}

/// An event when readiness or its reason changes; messages alone (pod counts) change too often.
fn news(ready: &Verdict, old: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition]) -> Option<Notice> {
    let status = if ready.holds { "True" } else { "False" };
    let same = old.iter().any(|c| c.type_ == READY && c.status == status && c.reason == ready.reason);
    match (same, ready.holds) {
        (true, _) => None,
        (false, true) => Some(Notice::normal(ready.reason, "Reconcile", ready.message.clone())),
        (false, false) => Some(Notice::warning(ready.reason, "Reconcile", ready.message.clone())),
    }
}

pub(super) fn reference(policy: &ClusterPolicy) -> ObjectReference {
    ObjectReference {
        api_version: Some(ClusterPolicy::api_version(&()).into_owned()),
        kind: Some(ClusterPolicy::kind(&()).into_owned()),
        name: Some(policy.name_any()),
        uid: policy.uid(),
        ..ObjectReference::default()
    }
}

/// The report per operand and mode, where the user has made the object that holds it.
pub(super) async fn write_config_status(context: &Context, judgement: &Judgement, wired: &Wired) -> Result<(), Error> {
    let Some(guarded) = context.world.configs.get(&ObjectRef::new(CONFIG_NAME)) else { return Ok(()) };
    let Ok(config) = &guarded.0 else { return Ok(()) };
    let now = Time(Timestamp::now());
    let status = config_status(config.status.as_ref(), config.metadata.generation, judgement, wired, &now);
    if config.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let api: Api<GPUVirtConfig> = Api::all(context.client.clone());
    let patch = json!({
        "apiVersion": GPUVirtConfig::api_version(&()),
        "kind": GPUVirtConfig::kind(&()),
        "metadata": {"name": CONFIG_NAME, "uid": config.uid()},
        "status": status,
    });
    let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
    match api.patch_status(CONFIG_NAME, &params, &Patch::Apply(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) if gone(&error) => Ok(()),
        Err(source) => {
            Err(Error::Status { kind: "GPUVirtConfig", name: CONFIG_NAME.to_owned(), source: Box::new(source) })
        }
    }
}
