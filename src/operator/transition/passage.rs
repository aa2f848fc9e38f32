//! Phases in which the node is between its modes.

use crds::v1alpha1::TransitionPhase as Phase;

use super::{
    next::{block, give_up, open_again, take_back, why},
    state::{Action, Observed, Progress, Transition},
};
use crate::operator::node::Blocked;

pub(super) fn quiesced(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let leaves = why("Withdrawing", "what the old mode has on the node is leaving");
    (at.enter(Phase::Quiesce, observed.now, Some(observed.rules.patience.quiesce), leaves), Action::Wait)
}

pub(super) fn quiesce(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Refused(cause) => block(at, observed, cause.clone()),
        Progress::Looking | Progress::Old { .. } if at.late(observed.now) => {
            let left = match &observed.progress {
                Progress::Old { waiting_for } => waiting_for.as_str(),
                Progress::Looking | Progress::Switching { .. } | Progress::Refused(_) | Progress::Reached { .. } => {
                    "the list of this node's pods"
                }
            };
            give_up(at, observed, why("QuiesceTimedOut", format!("the old mode does not leave: waiting for {left}")))
        }
        Progress::Looking => (at.clone(), Action::Wait),
        Progress::Old { waiting_for } => {
            let leaves = why("Withdrawing", format!("waiting for {waiting_for}"));
            (at.enter(Phase::Quiesce, observed.now, Some(observed.rules.patience.quiesce), leaves), Action::Wait)
        }
        Progress::Switching { .. } | Progress::Reached { .. } => {
            let asked = why("Switching", "the agent has been asked for the new mode");
            let patience = observed.rules.patience.switch;
            let then = at.enter(Phase::Switch, observed.now, Some(patience), asked);
            (Transition { switched: true, ..then }, Action::Wait)
        }
    }
}

pub(super) fn switch(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, .. } = observed;
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Refused(cause) => block(at, observed, cause.clone()),
        Progress::Reached { .. } => {
            let shows = why("Verifying", "the kernel shows the new mode on every GPU");
            (at.enter(Phase::Verify, *now, Some(rules.patience.answer), shows), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } | Progress::Switching { .. } if at.late(*now) => {
            let message = "the agent does not get there: see its log and GPUNode.status.agent";
            give_up(at, observed, why("SwitchTimedOut", message))
        }
        Progress::Switching { message } => {
            let asked = why("Switching", message.clone());
            (at.enter(Phase::Switch, *now, Some(rules.patience.switch), asked), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } => (at.clone(), Action::Wait),
    }
}

pub(super) fn verify(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Reached { .. } => {
            let appears = why("Advertising", "what the new mode has is being deployed and advertised");
            let patience = observed.rules.patience.serve;
            (at.enter(Phase::Advertise, observed.now, Some(patience), appears), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } | Progress::Switching { .. } | Progress::Refused(_) => {
            fell_back(at, observed)
        }
    }
}

/// The kernel does not show the new mode any more.
pub(super) fn fell_back(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match at.late(observed.now) {
        true => fail(at, observed, why("ModeLost", "a GPU has left the new mode again: see GPUNode.status.agent")),
        false => (at.clone(), Action::Wait),
    }
}

pub(super) fn advertise(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    let Observed { now, rules, .. } = observed;
    if !observed.wanted {
        return take_back(at, observed);
    }
    match &observed.progress {
        Progress::Reached { unready: None } => {
            let serves = why("Serving", "the node serves the new mode");
            (at.enter(Phase::Uncordon, *now, Some(rules.patience.answer), serves), Action::Wait)
        }
        Progress::Reached { unready: Some(cause) } if at.late(*now) => fail(at, observed, cause.clone()),
        Progress::Reached { unready: Some(cause) } => {
            (at.enter(Phase::Advertise, *now, Some(rules.patience.serve), cause.clone()), Action::Wait)
        }
        Progress::Looking | Progress::Old { .. } | Progress::Switching { .. } | Progress::Refused(_) => {
            fell_back(at, observed)
        }
    }
}

pub(super) fn fail(at: &Transition, observed: &Observed<'_>, cause: Blocked) -> (Transition, Action) {
    let then = at.enter(Phase::Failed, observed.now, None, cause);
    let action = open_again(observed);
    (then, action)
}

pub(super) fn uncordon(at: &Transition, observed: &Observed<'_>) -> (Transition, Action) {
    match open_again(observed) {
        Action::Uncordon if at.late(observed.now) => {
            let message = "the node serves and could not be uncordoned: kubectl uncordon opens it";
            (at.enter(Phase::Failed, observed.now, None, why("NotUncordoned", message)), Action::Wait)
        }
        Action::Uncordon => (at.clone(), Action::Uncordon),
        Action::Wait | Action::Cordon | Action::Evict => {
            let end = why(&at.reason, at.message.clone());
            (at.enter(Phase::Done, observed.now, None, end), Action::Wait)
        }
    }
}
