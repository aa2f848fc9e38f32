//! [`next`]: where a change is after one look.
//!
//! What may still be forgotten is in [`approach`], what happens to the node itself in [`passage`].

use crds::v1alpha1::{Evict, TransitionPhase as Phase};

use super::{
    approach::{cordon, evict, preflight, wait_for_slot, wait_for_users},
    passage::{advertise, after_failure, fail, quiesce, quiesced, switch, uncordon, verify},
    plan::Affected,
    state::{Action, Gate, Observed, Progress, Transition},
};
use crate::operator::node::Blocked;

/// More phases than there are are not passed in one look.
const LONGEST: usize = 13;

pub const EVICTION_TIMED_OUT: &str = "EvictionTimedOut";
/// Reason in `Evict` once all pods of the node are asked to leave.
pub const DRAINING: &str = "Draining";

pub(super) fn why(reason: &str, message: impl Into<String>) -> Blocked {
    Blocked { reason: reason.to_owned(), message: message.into() }
}

/// Where the change is after one look, and what to do. Pure; called again until it asks for an action or stays as it is.
pub fn next(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match at.phase {
        Phase::Preflight => preflight(at, observed),
        Phase::WaitForSlot => wait_for_slot(at, observed),
        Phase::Cordon => cordon(at, observed),
        Phase::WaitForUsers => wait_for_users(at, observed),
        Phase::Evict => evict(at, observed),
        Phase::Quiesce => quiesce(at, observed),
        Phase::Switch => switch(at, observed),
        Phase::Verify => verify(at, observed),
        Phase::Advertise => advertise(at, observed),
        Phase::Uncordon => uncordon(at, observed),
        Phase::Blocked => blocked(at, observed),
        Phase::Done => (at.clone(), open_again(observed)),
        Phase::Failed => failed(at, observed),
    }
}

/// [`next`], until there is something to do or to wait for.
pub fn advance(from: &Transition, observed: &Observed<'_>) -> (Vec<Transition>, Action) {
    let mut path = vec![from.clone()];
    loop {
        let at = &path[path.len() - 1];
        let (then, action) = next(at, observed);
        let moved = then.phase != at.phase;
        if then != *at {
            path.push(then);
        }
        // A circle would mean that two phases disagree about the same world.
        if !moved || action != Action::Wait || path.len() > LONGEST {
            return (path, action);
        }
    }
}

/// What does not let a change begin or go on before anything is touched.
pub(super) fn obstruction(observed: &Observed<'_>) -> Option<Blocked> {
    if let Some(obstacle) = &observed.obstacle {
        return Some(obstacle.clone());
    }
    let Affected { pods, vms, others, .. } = observed.affected;
    let in_use = || Some(why("GPUInUse", observed.affected.said.clone()));
    if !others.is_empty() {
        return in_use();
    }
    // The order would be stopped again at once, by something that is no user.
    if let Progress::Refused(cause) | Progress::Broken(cause) = &observed.progress
        && observed.affected.is_empty()
    {
        return Some(cause.clone());
    }
    match observed.rules.evict {
        Evict::Never if pods.is_empty() && vms.is_empty() => None,
        Evict::Pods if vms.is_empty() => None,
        Evict::Never | Evict::Pods => in_use(),
        Evict::PodsAndVms if vms.is_empty() || observed.approved => None,
        Evict::PodsAndVms => Some(why(
            "ApprovalNeeded",
            format!("VMs {} would be stopped: read the plan, then approve it", vms.join(", ")),
        )),
    }
}

pub(super) fn block(at: &Transition, observed: &Observed<'_>, cause: Blocked) -> (Transition, Action) {
    let then = at.enter(Phase::Blocked, observed.now, None, cause);
    let action = open_again(observed);
    (then, action)
}

/// Out of time: it is tried again later, or at once when the users have gone.
pub(super) fn give_up(at: &Transition, observed: &Observed<'_>, cause: Blocked) -> (Transition, Action) {
    let mut then = at.enter(Phase::Blocked, observed.now, None, cause);
    then.deadline = Some(observed.now + observed.rules.patience.retry);
    let action = open_again(observed);
    (then, action)
}

/// The label asks for something else again.
pub(super) fn take_back(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let message = match at.switched {
        true => "no longer asked for: the order of the way back is under way",
        false => "no longer asked for: the node stays as it was",
    };
    let then = at.enter(Phase::Uncordon, observed.now, Some(observed.rules.patience.answer), why("TakenBack", message));
    (then, Action::Wait)
}

/// A change that has ended, or waits for a person, gives the node back to its pods.
pub(super) fn open_again(observed: &Observed<'_>) -> Action {
    match observed.gate {
        Gate::Ours => Action::Uncordon,
        Gate::Open | Gate::Others => Action::Wait,
    }
}

/// What failed may still come to serve: then it is as good as done.
fn failed(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match &observed.progress {
        Progress::Reached { unready: None } if at.switched && observed.wanted => {
            let serves = why("Recovered", "it serves after all");
            let patience = observed.rules.patience.answer;
            (at.enter(Phase::Uncordon, observed.now, Some(patience), serves), Action::Wait)
        }
        Progress::Looking
        | Progress::Old { .. }
        | Progress::Replaceable
        | Progress::Switching { .. }
        | Progress::Refused(_)
        | Progress::Broken(_)
        | Progress::Reached { .. } => (at.clone(), after_failure(at, observed)),
    }
}

fn blocked(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    if at.switched {
        return match &observed.progress {
            Progress::Reached { .. } | Progress::Switching { .. } | Progress::Replaceable => quiesced(at, observed),
            Progress::Broken(cause) => fail(at, observed, cause.clone()),
            Progress::Refused(cause) => block(at, observed, cause.clone()),
            // The order has brought the old mode back: it is as if nothing had begun.
            Progress::Old { .. } | Progress::Looking => {
                (Transition { switched: false, ..at.clone() }, open_again(observed))
            }
        };
    }
    if let Some(cause) = obstruction(observed).or_else(|| observed.held.clone()) {
        return block(at, observed, cause);
    }
    let users_have_gone = at.reason == EVICTION_TIMED_OUT && observed.affected.is_empty();
    let waits_for_retry = at.deadline.is_some() && !at.late(observed.now) && !users_have_gone;
    if observed.gate == Gate::Ours || waits_for_retry {
        return (at.clone(), open_again(observed));
    }
    let checks = why("Checking", "what stood in the way has gone");
    (at.enter(Phase::Preflight, observed.now, Some(observed.rules.patience.answer), checks), Action::Wait)
}
