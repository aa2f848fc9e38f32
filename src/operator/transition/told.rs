//! What of a change is worth an event on its node. Pure.

use crds::v1alpha1::TransitionPhase as Phase;

use super::state::Transition;
use crate::cluster::events::Notice;

/// Reason of a change that waits because others have failed.
pub const HALTED: &str = "Halted";

/// A phase that was entered, or a halt that began. The node controller tells of the rest of a mode change.
pub fn notice(driver: bool, before: &Transition, after: &Transition) -> Option<Notice> {
    let halts = after.reason == HALTED && before.reason != HALTED;
    if before.phase == after.phase && !halts {
        return None;
    }
    let message = after.message.clone();
    match (driver, after.phase) {
        (true, _) => of_driver(halts, after, &message),
        (false, Phase::WaitForSlot) => Some(Notice::normal("ModeChangeWaiting", "ChangeMode", message)),
        (false, Phase::Failed) => Some(Notice::warning("ModeChangeFailed", "ChangeMode", message)),
        (false, Phase::Cordon | Phase::WaitForUsers | Phase::Evict) => {
            Some(Notice::normal("ModeChangeEvicting", "ChangeMode", message))
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
