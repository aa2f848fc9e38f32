//! The operator's part of a `GPUNode`'s status, and the events that its changes are worth.

use crds::{
    conditions::{Verdict, merge},
    v1alpha1::{NodePhase, OperatorStatus},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{decide::Order, mode::Complaint, users::Users, vgpus};
use crate::{cluster::events::Notice, operator::named};

const READY: &str = "Ready";
const WORKLOAD_CONFIG_VALID: &str = "WorkloadConfigValid";
/// Condition: `kubectl drain` would not wait for a VM that cannot migrate.
const DRAINABLE: &str = "VMsDrainable";

pub fn status(
    old: Option<&OperatorStatus>,
    order: &Order,
    users: &Users,
    node: &str,
    generation: Option<i64>,
    now: &Time,
) -> OperatorStatus {
    let old = old.map(|o| o.conditions.as_slice()).unwrap_or_default();
    let readiness = &order.readiness;
    let ready = condition(READY, readiness.ready, &readiness.reason, &readiness.message, old, generation, now);
    let label = match &order.complaint {
        None => Verdict::yes(WORKLOAD_CONFIG_VALID, "Valid", format!("the node's mode is {}", order.desired)),
        Some(complaint) => verdict(complaint, node),
    };
    let mut verdicts = vec![label, drainable(users)];
    verdicts.extend(order.vgpus.as_ref().map(vgpus::verdict));
    verdicts.extend(order.named.iter().cloned());
    let mut conditions = merge(old, &verdicts, generation, now);
    // What there is nothing to say about any more is not said.
    let ours = |type_: &str| type_ == vgpus::CONDITION || named::is_condition(type_);
    let said = |type_: &str| verdicts.iter().any(|verdict| verdict.type_ == type_);
    conditions.retain(|c| c.type_ != READY && (!ours(&c.type_) || said(&c.type_)));
    conditions.insert(0, ready);
    OperatorStatus {
        desired: Some(order.desired),
        serving: order.serving,
        phase: order.phase,
        ready: if readiness.ready { "True" } else { "False" }.to_owned(),
        reason: readiness.reason.clone(),
        message: readiness.message.clone(),
        users: users.list.clone(),
        conditions,
    }
}

fn drainable(users: &Users) -> Verdict {
    match users.blockers.is_empty() {
        true => {
            Verdict::yes(DRAINABLE, "NoBlockers", "no VM with a GPU of this node makes a drain wait for a migration")
        }
        false => Verdict::no(DRAINABLE, "VMsCannotMigrate", users.blockers.join("; ")),
    }
}

/// Reasons that come from an agent are not known at compile time, which [`Verdict`] wants.
fn condition(
    type_: &str,
    holds: bool,
    reason: &str,
    message: &str,
    old: &[Condition],
    generation: Option<i64>,
    now: &Time,
) -> Condition {
    let status = if holds { "True" } else { "False" };
    let before = old.iter().find(|c| c.type_ == type_ && c.status == status);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: before.map_or_else(|| now.clone(), |c| c.last_transition_time.clone()),
        observed_generation: generation,
    }
}

/// Only what has changed since the last status is told, so that a steady node is silent.
pub fn notices(old: Option<&OperatorStatus>, order: &Order, node: &str) -> Vec<Notice> {
    let workload = order.complaint.as_ref().map(|complaint| verdict(complaint, node));
    let mut notices: Vec<Notice> =
        workload.iter().chain(&order.named).filter_map(|verdict| named::notice(old, verdict)).collect();
    notices.extend(order.vgpus.as_ref().and_then(|standing| vgpus::notice(old, standing)));
    let phase_before = old.map(|o| o.phase);
    let message = &order.readiness.message;
    let mode = order.desired;
    match order.phase {
        NodePhase::Refused if old.is_none_or(|o| o.phase != NodePhase::Refused || o.message != *message) => {
            notices.push(Notice::warning("ModeChangeRefused", "ChangeMode", format!("{mode} refused: {message}")));
        }
        NodePhase::Withdrawing if phase_before != Some(NodePhase::Withdrawing) => {
            notices.push(Notice::normal("ModeChangeStarted", "ChangeMode", format!("withdrawing for {mode}")));
        }
        NodePhase::Switching if phase_before != Some(NodePhase::Switching) => {
            notices.push(Notice::normal("ModeChangeSwitching", "ChangeMode", message.clone()));
        }
        NodePhase::Steady if order.serving.is_some() && old.and_then(|o| o.serving) != order.serving => {
            notices.push(Notice::normal("ModeReached", "ChangeMode", format!("the node's GPUs are in {mode}")));
        }
        NodePhase::Refused
        | NodePhase::Waiting
        | NodePhase::Withdrawing
        | NodePhase::Switching
        | NodePhase::Upgrading
        | NodePhase::Steady => {}
    }
    notices
}

fn verdict(complaint: &Complaint, node: &str) -> Verdict {
    Verdict::no(WORKLOAD_CONFIG_VALID, complaint.reason(), complaint.message(node))
}
