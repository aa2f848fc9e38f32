//! Writes what was built, takes away what is built no more, and writes the statuses.

use std::collections::BTreeSet;

use crds::{
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, PolicyState},
};
use k8s_openapi::{
    api::{apps::v1::DaemonSet, core::v1::ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{Api, Resource, ResourceExt, api::Patch};
use serde_json::json;

use super::{
    Context, Error,
    build::{DEVICE_PLUGIN, MONITORS, MPS, Operands, ServiceMonitor, TOOLKIT},
    dereference::Dereferenced,
    status::{READY, policy_status},
};
use crate::{
    cluster::{apply::Applier, events::Notice, gone, merges},
    operator::world::Guarded,
};

/// Whose pods go through a restart of the container runtime, which a new toolkit brings: they change when it is done, so
/// that a node does not lose both at once.
const AFTER_TOOLKIT: [&str; 2] = [DEVICE_PLUGIN, MPS];

/// ConfigMaps go first, since pods mount them. What nobody asks for any more is pruned: live objects are those that carry
/// our label. Returns the names of DaemonSets whose pods have to follow now, or are held back.
pub(super) async fn apply(
    applier: &Applier,
    operands: &Operands,
    live: &Dereferenced,
) -> Result<BTreeSet<String>, Error> {
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
    let mut changing = BTreeSet::new();
    let mut toolkit = live.daemon_sets.iter().any(|set| set.name_any() == TOOLKIT && rolls(set));
    for wanted in &operands.daemon_sets {
        let (name, there) = (wanted.name_any(), named(&live.daemon_sets, wanted));
        if let Some(there) = there
            && toolkit
            && AFTER_TOOLKIT.contains(&name.as_str())
        {
            // Another pod template waits; nothing else of it can change.
            if applier.would_change(wanted, there) {
                tracing::info!(name, "waits for the rollout of {TOOLKIT}");
                changing.insert(name);
            }
            continue;
        }
        if applier.apply(wanted, there).await? && there.is_some() {
            toolkit = toolkit || name == TOOLKIT;
            changing.insert(name);
        }
    }
    for wanted in &operands.monitors {
        applier.apply_unwatched(wanted).await?;
    }
    let settled = |name: &str| {
        operands.monitors.iter().any(|wanted| wanted.name_any() == name)
            || operands.kept.iter().any(|kept| kept == name)
    };
    for name in MONITORS.into_iter().filter(|name| live.service_monitors && !settled(name)) {
        applier.absent::<ServiceMonitor>(name).await?;
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
    Ok(changing)
}

/// Whether its controller has not brought every pod to what was written last.
fn rolls(set: &DaemonSet) -> bool {
    let status = set.status.clone().unwrap_or_default();
    let desired = status.desired_number_scheduled;
    status.observed_generation < set.metadata.generation
        || status.updated_number_scheduled.unwrap_or(0) < desired
        // In a large cluster some node always has a trouble of its own.
        || status.number_ready < desired - desired / 10
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
    match api.patch_status(&name, &merges(), &Patch::Merge(&patch)).await {
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

pub(in crate::operator) fn reference(policy: &ClusterPolicy) -> ObjectReference {
    ObjectReference {
        api_version: Some(ClusterPolicy::api_version(&()).into_owned()),
        kind: Some(ClusterPolicy::kind(&()).into_owned()),
        name: Some(policy.name_any()),
        uid: policy.uid(),
        ..ObjectReference::default()
    }
}
