//! What a change is told to those whom it is about: the change itself, and the virtual machines that it meets.

use crds::v1alpha1::{GPUTransition, TransitionPhase};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Api, Client, Resource, ResourceExt, api::DynamicObject};

use super::{plan::Affected, state::Transition};
use crate::{
    cluster::events::{Events, Notice},
    operator::vmi,
};

const ACTION: &str = "ChangeMode";

/// Only what is new: another phase, another reason, another user.
pub async fn tell(
    client: &Client,
    events: &Events,
    object: &GPUTransition,
    before: &Transition,
    after: &Transition,
    affected: &Affected,
) {
    if (before.phase, &before.reason) != (after.phase, &after.reason) || object.status.is_none() {
        events.publish(&of_change(after), &object.object_ref(&())).await;
    }
    let told = object.status.as_ref().map(|status| status.affected_vms.as_slice()).unwrap_or_default();
    let moved = before.phase != after.phase;
    for vm in affected.vms.iter().filter(|vm| moved || !told.contains(vm)) {
        let Some(notice) = of_vm(object, after) else { return };
        match instance(client, vm).await {
            Ok(Some(about)) => events.publish(&notice, &about).await,
            Ok(None) => {}
            Err(error) => tracing::warn!(vm, %error, "VM cannot be read: it is not told of its node's change"),
        }
    }
}

fn of_change(after: &Transition) -> Notice {
    let note = format!("{:?}: {}", after.phase, after.message);
    match after.phase {
        TransitionPhase::Blocked => Notice::warning("ChangeBlocked", ACTION, note),
        TransitionPhase::Failed => Notice::warning("ChangeFailed", ACTION, note),
        TransitionPhase::Done => Notice::normal("ChangeDone", ACTION, note),
        TransitionPhase::WaitForSlot | TransitionPhase::WaitForUsers => Notice::normal("ChangeWaits", ACTION, note),
        TransitionPhase::Preflight
        | TransitionPhase::Cordon
        | TransitionPhase::Evict
        | TransitionPhase::Quiesce
        | TransitionPhase::Switch
        | TransitionPhase::Verify
        | TransitionPhase::Advertise
        | TransitionPhase::Uncordon => Notice::normal("ChangeGoesOn", ACTION, note),
    }
}

/// What the change means for a machine that has a GPU of the node.
fn of_vm(object: &GPUTransition, after: &Transition) -> Option<Notice> {
    let node = &object.spec.node;
    let to = if object.spec.driver.is_some() { "a new driver" } else { object.spec.to.as_str() };
    match after.phase {
        TransitionPhase::Blocked => {
            let said = match after.reason.as_str() {
                "ApprovalNeeded" => {
                    format!(
                        "node {node} is asked for {to}: this VM goes on until it ends, or a person approves the plan that stops it (kubectl gpuvirt approve {node})"
                    )
                }
                _ => format!("node {node} is asked for {to} and waits for this VM, which goes on until it ends"),
            };
            Some(Notice::normal("NodeWaitsForVM", ACTION, said))
        }
        TransitionPhase::Evict => {
            let said = format!(
                "node {node} changes to {to}: this VM is asked to stop, by the plan {} that a person has approved",
                object.spec.plan_hash
            );
            Some(Notice::warning("NodeChangeStopsVM", ACTION, said))
        }
        TransitionPhase::Preflight
        | TransitionPhase::WaitForSlot
        | TransitionPhase::Cordon
        | TransitionPhase::WaitForUsers
        | TransitionPhase::Quiesce
        | TransitionPhase::Switch
        | TransitionPhase::Verify
        | TransitionPhase::Advertise
        | TransitionPhase::Uncordon
        | TransitionPhase::Done
        | TransitionPhase::Failed => None,
    }
}

/// Events are shown by the UID of what they are about.
async fn instance(client: &Client, name: &str) -> Result<Option<ObjectReference>, kube::Error> {
    let Some((namespace, name)) = name.split_once('/') else { return Ok(None) };
    let kind = vmi::resource();
    let instances: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    let found = instances.get_metadata_opt(name).await?;
    Ok(found.map(|found| ObjectReference {
        api_version: Some(kind.api_version.clone()),
        kind: Some(kind.kind.clone()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: found.uid(),
        ..ObjectReference::default()
    }))
}
