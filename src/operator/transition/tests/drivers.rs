//! Renewals of drivers.

use crds::v1alpha1::{Evict, TransitionPhase as Phase};
use k8s_openapi::jiff::SignedDuration;

use super::{World, pod, why};
use crate::operator::transition::{
    next::advance,
    rules::Cordon,
    state::{Action, Gate, Progress, Transition},
};

/// Brings a driver's renewal to where its pod is being renewed.
fn renewing(world: &mut World) -> Transition {
    world.rules.cordon = Cordon::Always;
    let quiesces = world.settle(world.begin());
    assert_eq!((quiesces.phase, world.gate), (Phase::Quiesce, Gate::Ours));
    world.progress = Progress::Replaceable;
    let (at, action) = world.look(&quiesces);
    assert_eq!((at.phase, at.switched, action), (Phase::Switch, true, Action::Renew));
    at
}

#[test]
fn a_drivers_pod_is_renewed_once_nothing_uses_it_and_the_node_is_opened_when_it_serves() {
    let mut world = World::idle();
    let at = renewing(&mut world);
    let at = world.settle(at);
    assert_eq!(at.phase, Phase::Switch, "until the new pod is ready");
    world.progress = Progress::Reached { unready: Some(why("NotValidated")) };
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Advertise, "NotValidated", Gate::Ours));
    world.progress = Progress::Reached { unready: None };
    let at = world.settle(at);
    assert_eq!((at.phase, world.gate), (Phase::Done, Gate::Open));
}

#[test]
fn a_user_who_comes_late_keeps_the_old_pod() {
    let mut world = World::idle();
    let at = renewing(&mut world);
    world.progress = Progress::Replaceable;
    world.affected = pod();
    assert_eq!(world.look(&at).1, Action::Wait);
}

#[test]
fn a_driver_that_is_broken_fails_at_once_keeps_the_node_closed_and_may_recover() {
    let mut world = World::idle();
    let at = renewing(&mut world);
    world.progress = Progress::Broken(why("DriverBroken"));
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Failed, "DriverBroken", Gate::Ours));
    assert!(at.occupies(), "and keeps its place");
    world.progress = Progress::Reached { unready: None };
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Done, "Recovered", Gate::Open));
}

#[test]
fn a_node_is_drained_when_those_with_a_gpu_do_not_leave_in_time_and_with_time_of_its_own() {
    let mut world = World::used(pod(), Evict::Pods);
    world.rules.drain = Some(SignedDuration::from_mins(3));
    let (closes, _) = world.look(&world.begin());
    let at = advance(&closes, &world.observed()).0.pop().unwrap();
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Evict, "Evicting"));
    world.later(world.rules.patience.eviction);
    let at = advance(&at, &world.observed()).0.pop().unwrap();
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Evict, "Draining"));
    assert_eq!(at.deadline, Some(world.now + SignedDuration::from_mins(3)));
    world.later(SignedDuration::from_mins(3));
    let at = advance(&at, &world.observed()).0.pop().unwrap();
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Blocked, "EvictionTimedOut"));
}

#[test]
fn a_halt_is_said_while_it_lasts() {
    let mut world = World::idle();
    world.halted = Some(why("Halted"));
    let at = world.settle(world.begin());
    assert_eq!((at.phase, at.reason.as_str()), (Phase::WaitForSlot, "Halted"));
    world.halted = None;
    world.slot = false;
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::WaitForSlot, "WaitingForSlot"));
    world.slot = true;
    assert_eq!(world.settle(at).phase, Phase::Quiesce);
}
