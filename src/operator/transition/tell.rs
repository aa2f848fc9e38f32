//! What a change is told to those whom it is about: its node, the change itself, and the virtual machines that it meets.

use crds::v1alpha1::{GPUTransition, TransitionPhase as Phase};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Api, Client, Resource, ResourceExt, api::DynamicObject};

use super::{plan::Affected, state::Transition};
use crate::{
    cluster::events::{Events, Notice},
    operator::vmi,
};

const ACTION: &str = "ChangeMode";
/// Reason of a change that waits because others have failed.
pub const HALTED: &str = "Halted";

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
        Phase::Blocked => Notice::warning("ChangeBlocked", ACTION, note),
        Phase::Failed => Notice::warning("ChangeFailed", ACTION, note),
        Phase::Done => Notice::normal("ChangeDone", ACTION, note),
        Phase::WaitForSlot | Phase::WaitForUsers => Notice::normal("ChangeWaits", ACTION, note),
        Phase::Preflight
        | Phase::Cordon
        | Phase::Evict
        | Phase::Quiesce
        | Phase::Switch
        | Phase::Verify
        | Phase::Advertise
        | Phase::Uncordon => Notice::normal("ChangeGoesOn", ACTION, note),
    }
}

/// What the change means for a machine that has a GPU of the node.
fn of_vm(object: &GPUTransition, after: &Transition) -> Option<Notice> {
    let node = &object.spec.node;
    let to = if object.spec.driver.is_some() { "a new driver" } else { object.spec.to.as_str() };
    match after.phase {
        Phase::Blocked => {
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
        Phase::Evict => {
            let said = format!(
                "node {node} changes to {to}: this VM is asked to stop, by the plan {} that a person has approved",
                object.spec.plan_hash
            );
            Some(Notice::warning("NodeChangeStopsVM", ACTION, said))
        }
        Phase::Preflight
        | Phase::WaitForSlot
        | Phase::Cordon
        | Phase::WaitForUsers
        | Phase::Quiesce
        | Phase::Switch
        | Phase::Verify
        | Phase::Advertise
        | Phase::Uncordon
        | Phase::Done
        | Phase::Failed => None,
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

/// A phase that was entered, or a halt that began. The node controller tells of the rest of a mode change.
pub fn notice(driver: bool, before: &Transition, after: &Transition) -> Option<Notice> {
    let halts = after.reason == HALTED && before.reason != HALTED;
    if before.phase == after.phase && !halts {
        return None;
    }
    let message = after.message.clone();
    match (driver, after.phase) {
        (true, _) => of_driver(halts, after, &message),
        (false, Phase::WaitForSlot) => Some(Notice::normal("ModeChangeWaiting", ACTION, message)),
        (false, Phase::Failed) => Some(Notice::warning("ModeChangeFailed", ACTION, message)),
        (false, Phase::Cordon | Phase::WaitForUsers | Phase::Evict) => {
            Some(Notice::normal("ModeChangeEvicting", ACTION, message))
        }
        (
            false,
            Phase::Preflight
            | Phase::Quiesce
            | Phase::Switch
            | Phase::Verify
            | Phase::Advertise
            | Phase::Uncordon
            | Phase::Done
            | Phase::Blocked,
        ) => None,
    }
}

fn of_driver(halts: bool, after: &Transition, message: &str) -> Option<Notice> {
    let normal = |reason| Some(Notice::normal(reason, "UpgradeDriver", message));
    let warning = |reason| Some(Notice::warning(reason, "UpgradeDriver", message));
    match after.phase {
        Phase::WaitForSlot if halts => warning("DriverUpgradeHalted"),
        Phase::WaitForSlot => normal("DriverUpgradeWaiting"),
        Phase::Cordon | Phase::WaitForUsers | Phase::Evict => normal("DriverUpgradeEvicting"),
        Phase::Quiesce => normal("DriverUpgradeStarted"),
        Phase::Done if after.reason == "TakenBack" => normal("DriverUpgradeTakenBack"),
        Phase::Done => normal("DriverUpgraded"),
        Phase::Blocked => warning("DriverUpgradeBlocked"),
        Phase::Failed => warning("DriverUpgradeFailed"),
        Phase::Preflight | Phase::Switch | Phase::Verify | Phase::Advertise | Phase::Uncordon => None,
    }
}
