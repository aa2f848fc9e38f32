//! Phases in which the node is between its modes.

use crds::v1alpha1::TransitionPhase as Phase;

use super::{
    next::{block, give_up, open_again, take_back, why},
    rules::Cordon,
    state::{Action, Observed, Progress, Transition},
};
use crate::operator::node::Blocked;

pub(super) fn quiesced(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let leaves = why("Withdrawing", "what has to leave the node first is leaving");
    (at.enter(Phase::Quiesce, observed.now, Some(observed.rules.patience.quiesce), leaves), Action::Wait)
}

pub(super) fn quiesce(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Refused(cause) | Progress::Broken(cause) => block(at, observed, cause.clone()),
        Progress::Looking | Progress::Old { .. } if at.late(observed.now) => {
            let left = match &observed.progress {
                Progress::Old { waiting_for } => waiting_for.as_str(),
                Progress::Looking
                | Progress::Replaceable
                | Progress::Switching { .. }
                | Progress::Refused(_)
                | Progress::Broken(_)
                | Progress::Reached { .. } => "the list of this node's pods",
            };
            give_up(
                at,
                observed,
                why("QuiesceTimedOut", format!("what has to leave first does not: waiting for {left}")),
            )
        }
        Progress::Looking => (at.clone(), Action::Wait),
        Progress::Old { waiting_for } => {
            let leaves = why("Withdrawing", format!("waiting for {waiting_for}"));
            (at.enter(Phase::Quiesce, observed.now, Some(observed.rules.patience.quiesce), leaves), Action::Wait)
        }
        Progress::Replaceable => switches(at, observed, why("Renewing", "the driver's pod is being renewed")),
        Progress::Switching { .. } | Progress::Reached { .. } => {
            switches(at, observed, why("Switching", "the agent has been asked for the new mode"))
        }
    }
}

fn switches(at: &Transition, observed: &Observed<'_>, asked: Blocked) -> (Transition, Action) {
    let then = at.enter(Phase::Switch, observed.now, Some(observed.rules.patience.switch), asked);
    (Transition { switched: true, ..then }, Action::Wait)
}

pub(super) fn switch(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, .. } = observed;
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Refused(cause) => block(at, observed, cause.clone()),
        Progress::Broken(cause) => fail(at, observed, cause.clone()),
        Progress::Reached { .. } => {
            let shows = why("Verifying", "what was asked for is there: it is being checked");
            (at.enter(Phase::Verify, *now, Some(rules.patience.answer), shows), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } | Progress::Replaceable | Progress::Switching { .. }
            if at.late(*now) =>
        {
            let message =
                format!("it does not get there: {}; see GPUNode.status.agent and the log of the pod", at.message);
            give_up(at, observed, why("SwitchTimedOut", message))
        }
        // Asked for again until the old pod has gone; never under somebody.
        Progress::Replaceable if observed.affected.is_empty() => (at.clone(), Action::Renew),
        Progress::Switching { message } => {
            let asked = why("Switching", message.clone());
            (at.enter(Phase::Switch, *now, Some(rules.patience.switch), asked), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } | Progress::Replaceable => (at.clone(), Action::Wait),
    }
}

pub(super) fn verify(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    once_reached(at, observed, |_| {
        let appears = why("Advertising", "what the node runs is being deployed and advertised");
        let patience = observed.rules.patience.serve;
        (at.enter(Phase::Advertise, observed.now, Some(patience), appears), Action::Wait)
    })
}

/// `then`: of a node that shows what was asked for, by why it does not serve yet.
fn once_reached(
    at: &Transition,
    observed: &Observed<'_>,
    then: impl FnOnce(Option<&Blocked>) -> (Transition, Action),
) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Reached { unready } => then(unready.as_ref()),
        Progress::Broken(cause) => fail(at, observed, cause.clone()),
        Progress::Looking
        | Progress::Old { .. }
        | Progress::Replaceable
        | Progress::Switching { .. }
        | Progress::Refused(_) => fell_back(at, observed),
    }
}

/// The kernel does not show the new mode any more.
fn fell_back(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match at.late(observed.now) {
        true => fail(at, observed, why("ModeLost", "a GPU has left the new mode again: see GPUNode.status.agent")),
        false => (at.clone(), Action::Wait),
    }
}

pub(super) fn advertise(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, .. } = observed;
    once_reached(at, observed, |unready| match unready {
        None => {
            let serves = why("Serving", "the node serves");
            (at.enter(Phase::Uncordon, *now, Some(rules.patience.answer), serves), Action::Wait)
        }
        Some(cause) if at.late(*now) => fail(at, observed, cause.clone()),
        Some(cause) => (at.enter(Phase::Advertise, *now, Some(rules.patience.serve), cause.clone()), Action::Wait),
    })
}

pub(super) fn fail(at: &Transition, observed: &Observed<'_>, cause: Blocked) -> (Transition, Action) {
    let then = at.enter(Phase::Failed, observed.now, None, cause);
    let action = after_failure(&then, observed);
    (then, action)
}

/// A node without a working driver stays closed until it has one.
pub(super) fn after_failure(at: &Transition, observed: &Observed<'_>) -> Action {
    match observed.rules.cordon {
        Cordon::Always if at.switched && observed.wanted => Action::Wait,
        Cordon::Always | Cordon::WhenInUse => open_again(observed),
    }
}

pub(super) fn uncordon(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match open_again(observed) {
        Action::Uncordon if at.late(observed.now) => {
            let message = "the node serves and could not be uncordoned: kubectl uncordon opens it";
            (at.enter(Phase::Failed, observed.now, None, why("NotUncordoned", message)), Action::Wait)
        }
        Action::Uncordon => (at.clone(), Action::Uncordon),
        Action::Wait | Action::Cordon | Action::Evict | Action::Renew => {
            let end = why(&at.reason, at.message.clone());
            (at.enter(Phase::Done, observed.now, None, end), Action::Wait)
        }
    }
}
