//! Phases in which nothing has been done to the node but a cordon and evictions: a change is taken back by forgetting it.

use crds::v1alpha1::TransitionPhase as Phase;

use super::{
    next::{DRAINING, EVICTION_TIMED_OUT, block, give_up, obstruction, take_back, why},
    passage::quiesced,
    rules::Cordon,
    state::{Action, Gate, Observed, Progress, Transition},
    windows::Moment,
};
use crate::operator::node::Blocked;

pub(super) fn preflight(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, .. } = observed;
    if !observed.wanted {
        return take_back(at, observed);
    }
    if observed.progress == Progress::Looking {
        return match at.late(*now) {
            true => {
                give_up(at, observed, why("UsersUnknown", "whose the holders of the GPUs are could not be found out"))
            }
            false => (at.clone(), Action::Wait),
        };
    }
    if let Progress::Reached { .. } = observed.progress {
        return quiesced(at, observed);
    }
    if let Some(cause) = obstruction(observed).or_else(|| observed.held.clone()) {
        return block(at, observed, cause);
    }
    (at.enter(Phase::WaitForSlot, *now, Some(rules.patience.reminder), waits_for_slot()), Action::Wait)
}

fn waits_for_slot() -> Blocked {
    why("WaitingForSlot", "other nodes change first: the budget is used up")
}

pub(super) fn wait_for_slot(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, affected, .. } = observed;
    if !observed.wanted {
        return take_back(at, observed);
    }
    if let Some(cause) = obstruction(observed).or_else(|| observed.held.clone()) {
        return block(at, observed, cause);
    }
    let stays = |why: Blocked| Transition { reason: why.reason, message: why.message, ..again(at, observed) };
    if let Moment::Closed { until, said } = rules.windows.at(*now) {
        let waits = stays(why("OutsideMaintenanceWindow", said));
        return (Transition { deadline: until.or(waits.deadline), ..waits }, Action::Wait);
    }
    if !observed.slot {
        return (stays(observed.halted.clone().unwrap_or_else(waits_for_slot)), Action::Wait);
    }
    if affected.is_empty() && observed.awaited.is_empty() && rules.cordon == Cordon::WhenInUse {
        return quiesced(at, observed);
    }
    let closes = why("Cordoning", "no new pod is to come to the node");
    (at.enter(Phase::Cordon, *now, Some(rules.patience.answer), closes), Action::Wait)
}

/// The same stay goes on, and is told about again.
pub(super) fn again(at: &Transition, observed: &Observed<'_>) -> Transition {
    let goes_on = at.deadline.filter(|_| !at.late(observed.now));
    let deadline = goes_on.or(Some(observed.now + observed.rules.patience.reminder));
    Transition { deadline, ..at.clone() }
}

pub(super) fn cordon(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    if let Some(cause) = obstruction(observed) {
        return block(at, observed, cause);
    }
    match observed.gate {
        Gate::Open if at.late(observed.now) => {
            give_up(at, observed, why("NotCordoned", "the node could not be cordoned: see the operator's log"))
        }
        Gate::Open => (at.clone(), Action::Cordon),
        Gate::Ours | Gate::Others => {
            let patience = observed.rules.completion.unwrap_or(observed.rules.patience.reminder);
            let waits = why("WaitingForUsers", "waiting for pods to come to their end");
            (at.enter(Phase::WaitForUsers, observed.now, Some(patience), waits), Action::Wait)
        }
    }
}

pub(super) fn wait_for_users(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    if let Some(cause) = obstruction(observed) {
        return block(at, observed, cause);
    }
    if !observed.awaited.is_empty() && (observed.rules.completion.is_none() || !at.late(observed.now)) {
        let message = format!("waiting for pods {} to come to their end", observed.awaited.join(", "));
        return (Transition { message, ..again(at, observed) }, Action::Wait);
    }
    if observed.affected.is_empty() {
        return quiesced(at, observed);
    }
    (evicting(at, observed), Action::Wait)
}

pub(super) fn evicting(at: &Transition, observed: &Observed<'_>) -> Transition {
    let asks = why("Evicting", format!("asked to leave: {}", observed.affected.names()));
    at.enter(Phase::Evict, observed.now, Some(observed.rules.patience.eviction), asks)
}

pub(super) fn evict(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    if let Some(cause) = obstruction(observed) {
        return block(at, observed, cause);
    }
    if observed.affected.is_empty() {
        return quiesced(at, observed);
    }
    let drain = observed.rules.drain.filter(|_| at.reason != DRAINING);
    match (at.late(observed.now), drain) {
        (true, Some(patience)) => {
            let names = observed.affected.names();
            let why = why(DRAINING, format!("still there: {names}; all pods of the node are asked to leave"));
            // A stay of its own: those that are asked now have their own time.
            let left = Transition { since: observed.now, ..at.clone() };
            (left.enter(Phase::Evict, observed.now, Some(patience), why), Action::Wait)
        }
        (true, None) => {
            let message = format!(
                "still there after {} minutes: {}; look at their disruption budgets and finalizers",
                at.since.duration_until(observed.now).as_mins(),
                observed.affected.names()
            );
            give_up(at, observed, why(EVICTION_TIMED_OUT, message))
        }
        (false, _) if at.reason == DRAINING => {
            let message = format!("asked to leave: {}", observed.affected.names());
            (Transition { message, ..at.clone() }, Action::Evict)
        }
        (false, _) => (evicting(at, observed), Action::Evict),
    }
}
