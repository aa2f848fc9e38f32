//! One node on its way from a mode to another, or from a driver to a newer one: a pure state machine.
//!
//! ```text
//! Preflight ─▶ WaitForSlot ─▶ Cordon ─▶ WaitForUsers ─▶ Evict ─┐
//!     ▲              └──────── nobody to evict ────────────────┼─▶ Quiesce ─▶ Switch ─▶ Verify ─▶ Advertise ─▶ Uncordon ─▶ Done
//!     └── Blocked ◀── something stands in the way, at any phase ┘                                      └─▶ Failed
//! ```
//! It gives the permission ([`Leave`]) and the order of a mode change, which the node controller keeps, does the rest. For a
//! driver it asks for the renewal of the pod itself, once nothing uses the driver ([`Progress::Replaceable`]).
//! Nothing has been done to the node before `Quiesce` but a cordon, so until then a change is taken back by forgetting it.

use crds::v1alpha1::{TransitionPhase as Phase, TransitionStage as Stage};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{
    plan::Affected,
    rules::{Patience, Rules},
};
use crate::operator::node::Blocked;

/// What is remembered of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    pub phase: Phase,
    /// When the phase was entered.
    pub since: Timestamp,
    /// When the phase is given up, or told about again.
    pub deadline: Option<Timestamp>,
    /// One CamelCase word: what it waits for, or why it ended.
    pub reason: String,
    /// A sentence for a person.
    pub message: String,
    /// The agent has been asked for the new mode: from here on a way back is a change of its own.
    pub switched: bool,
}

/// What there is to go by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed<'a> {
    pub now: Timestamp,
    pub rules: &'a Rules,
    /// The node is still to be in the new mode.
    pub wanted: bool,
    /// Why a person does not let it begin.
    pub held: Option<Blocked>,
    /// What stands in the way, users aside.
    pub obstacle: Option<Blocked>,
    pub affected: &'a Affected,
    /// Pods that are to come to their own end first.
    pub awaited: &'a [String],
    /// A person has agreed to this very plan.
    pub approved: bool,
    /// There is a place for this node in the budget, or it has one.
    pub slot: bool,
    /// Why no further node begins, whatever the budget says.
    pub halted: Option<Blocked>,
    pub gate: Gate,
    pub progress: Progress,
}

/// Whether new pods may come to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Open,
    /// Closed by a change of ours; the mark on the node says so.
    Ours,
    /// Closed by somebody else: not ours to open.
    Others,
}

/// How far the order of the change is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is not known yet whose the holders of the GPUs are.
    Looking,
    /// The old mode is there, whole or in part; what is left of it that has to go first.
    Old { waiting_for: String },
    /// Nothing uses the old driver any more: its pod can be renewed.
    Replaceable,
    /// The agent, or the new driver's pod, is at it.
    Switching { message: String },
    /// The agent, or a user who came meanwhile, does not let it.
    Refused(Blocked),
    /// It will not get there by itself.
    Broken(Blocked),
    /// The kernel shows the new mode on every GPU, or the new driver's pod is ready; `unready` is why it does not serve yet.
    Reached { unready: Option<Blocked> },
}

/// What to do now. Each is safe to be done twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Wait,
    Cordon,
    /// Ask the affected to leave.
    Evict,
    /// Delete the old driver's pod, so that a new one comes.
    Renew,
    Uncordon,
}

/// Whether the node may leave its mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    Free,
    /// Not yet: the change has its turn, or its users, to wait for.
    Waits(Blocked),
    /// Not until somebody does something.
    Refused(Blocked),
}

impl Transition {
    pub fn new(now: Timestamp, patience: &Patience) -> Self {
        Self {
            phase: Phase::Preflight,
            since: now,
            deadline: Some(now + patience.answer),
            reason: "Checking".to_owned(),
            message: "what the change needs is being looked at".to_owned(),
            switched: false,
        }
    }

    pub fn leave(&self) -> Leave {
        let why = || Blocked { reason: self.reason.clone(), message: self.message.clone() };
        match self.phase.stage() {
            Stage::Approach => Leave::Waits(why()),
            Stage::Passage => Leave::Free,
            Stage::Stopped | Stage::Ended if self.switched || self.phase == Phase::Done => Leave::Free,
            Stage::Stopped | Stage::Ended => Leave::Refused(why()),
        }
    }

    /// Whether it takes a place in the budget: a node that has been touched and does not serve again.
    pub fn occupies(&self) -> bool {
        match self.phase {
            Phase::Preflight | Phase::WaitForSlot | Phase::Done => false,
            Phase::Cordon
            | Phase::WaitForUsers
            | Phase::Evict
            | Phase::Quiesce
            | Phase::Switch
            | Phase::Verify
            | Phase::Advertise
            | Phase::Uncordon => true,
            Phase::Blocked | Phase::Failed => self.switched,
        }
    }

    pub(super) fn enter(&self, phase: Phase, now: Timestamp, patience: Option<SignedDuration>, why: Blocked) -> Self {
        // Said again in the same phase, it is the same stay.
        let since = if self.phase == phase { self.since } else { now };
        let deadline = patience.map(|patience| since + patience);
        Self { phase, since, deadline, reason: why.reason, message: why.message, ..self.clone() }
    }

    pub(super) fn late(&self, now: Timestamp) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }
}
