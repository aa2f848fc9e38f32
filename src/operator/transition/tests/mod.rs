//! The state machine against a node that does what it is told; in [`properties`] against one that does anything.

mod drivers;
mod properties;

use crds::v1alpha1::{Evict, MaintenanceWindow, TransitionPhase as Phase};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{
    next::advance,
    plan::Affected,
    rules::{Cordon, Rules},
    state::{Action, Gate, Leave, Observed, Progress, Transition},
    windows::Windows,
};
use crate::operator::node::Blocked;

/// A node and its users, reduced to what the machine sees of them.
#[derive(Clone, Debug)]
struct World {
    now: Timestamp,
    rules: Rules,
    wanted: bool,
    held: Option<Blocked>,
    obstacle: Option<Blocked>,
    affected: Affected,
    awaited: Vec<String>,
    approved: bool,
    slot: bool,
    halted: Option<Blocked>,
    gate: Gate,
    progress: Progress,
}

fn why(reason: &str) -> Blocked {
    Blocked { reason: reason.to_owned(), message: format!("{reason} is why") }
}

fn old() -> Progress {
    Progress::Old { waiting_for: "pods driver-x".to_owned() }
}

fn pod() -> Affected {
    Affected { pods: vec!["ml/a".to_owned()], said: "GPU 0 is held by pod ml/a".to_owned(), ..Affected::default() }
}

fn vm() -> Affected {
    Affected { vms: vec!["vms/a".to_owned()], said: "GPU 0 is in use by VM vms/a".to_owned(), ..Affected::default() }
}

impl World {
    /// Nobody uses the node, and there is a place for it.
    fn idle() -> Self {
        Self {
            now: Timestamp::from_second(1_000_000).unwrap(),
            rules: Rules::default(),
            wanted: true,
            held: None,
            obstacle: None,
            affected: Affected::default(),
            awaited: Vec::new(),
            approved: false,
            slot: true,
            halted: None,
            gate: Gate::Open,
            progress: old(),
        }
    }

    fn used(affected: Affected, evict: Evict) -> Self {
        Self { affected, rules: Rules { evict, ..Rules::default() }, ..Self::idle() }
    }

    fn begin(&self) -> Transition {
        Transition::new(self.now, &self.rules.patience)
    }

    fn observed(&self) -> Observed<'_> {
        Observed {
            now: self.now,
            rules: &self.rules,
            wanted: self.wanted,
            held: self.held.clone(),
            obstacle: self.obstacle.clone(),
            affected: &self.affected,
            awaited: &self.awaited,
            approved: self.approved,
            slot: self.slot && self.halted.is_none(),
            halted: self.halted.clone(),
            gate: self.gate,
            progress: self.progress.clone(),
        }
    }

    /// One look; what it asks for is done.
    fn look(&mut self, at: &Transition) -> (Transition, Action) {
        let (path, action) = advance(at, &self.observed());
        match action {
            Action::Cordon if self.gate == Gate::Open => self.gate = Gate::Ours,
            Action::Wait | Action::Cordon => {}
            Action::Uncordon => {
                assert_eq!(self.gate, Gate::Ours, "a node that somebody else has closed is not ours to open");
                self.gate = Gate::Open;
            }
            Action::Evict => {
                self.affected.pods.clear();
                if self.approved {
                    self.affected.vms.clear();
                }
            }
            Action::Renew => {
                assert!(self.affected.is_empty(), "never under a user");
                self.progress = Progress::Switching { message: "the new pod comes".to_owned() };
            }
        }
        (path.last().cloned().unwrap(), action)
    }

    fn settle(&mut self, mut at: Transition) -> Transition {
        for _ in 0..20 {
            let (then, action) = self.look(&at);
            if then == at && action == Action::Wait {
                return at;
            }
            at = then;
        }
        panic!("it never comes to rest: {at:?}");
    }

    fn later(&mut self, by: SignedDuration) {
        self.now += by;
    }

    /// Brings a change to where the agent has been asked.
    fn asked(&mut self) -> Transition {
        let quiesces = self.settle(self.begin());
        assert_eq!(quiesces.phase, Phase::Quiesce);
        self.progress = Progress::Switching { message: "1 GPU".to_owned() };
        self.settle(quiesces)
    }
}

#[test]
fn a_node_that_nobody_uses_changes_without_being_cordoned() {
    let mut world = World::idle();
    let at = world.settle(world.begin());
    assert_eq!((at.phase, world.gate, at.leave()), (Phase::Quiesce, Gate::Open, Leave::Free));
    world.progress = Progress::Switching { message: "1 GPU".to_owned() };
    let at = world.settle(at);
    assert_eq!((at.phase, at.switched), (Phase::Switch, true));
    world.progress = Progress::Reached { unready: Some(why("NotRegistered")) };
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Advertise, "NotRegistered"));
    world.progress = Progress::Reached { unready: None };
    let at = world.settle(at);
    assert_eq!((at.phase, at.occupies()), (Phase::Done, false));
}

#[test]
fn by_default_a_user_blocks_in_the_words_of_the_agent_and_its_end_is_enough() {
    for affected in [pod(), vm()] {
        let mut world = World::used(affected.clone(), Evict::Never);
        let at = world.settle(world.begin());
        assert_eq!((at.phase, &at.message), (Phase::Blocked, &affected.said));
        assert!(!at.occupies(), "a node that waits for its user keeps nobody else waiting");
        world.affected = Affected::default();
        assert_eq!(world.settle(at).phase, Phase::Quiesce);
    }
}

#[test]
fn pods_are_evicted_from_a_closed_node_that_is_opened_at_the_end() {
    let mut world = World::used(pod(), Evict::Pods);
    let (at, action) = world.look(&world.begin());
    assert_eq!((at.phase, action), (Phase::Cordon, Action::Cordon));
    let (at, action) = world.look(&at);
    assert_eq!((at.phase, action), (Phase::Evict, Action::Evict));
    let at = world.settle(at);
    assert_eq!((at.phase, world.gate), (Phase::Quiesce, Gate::Ours));
    world.progress = Progress::Reached { unready: None };
    let at = world.settle(at);
    assert_eq!((at.phase, world.gate), (Phase::Done, Gate::Open));
}

#[test]
fn a_node_that_an_admin_closed_stays_closed() {
    let mut world = World::used(pod(), Evict::Pods);
    world.gate = Gate::Others;
    let at = world.settle(world.begin());
    world.progress = Progress::Reached { unready: None };
    let at = world.settle(at);
    assert_eq!((at.phase, world.gate), (Phase::Done, Gate::Others));
}

#[test]
fn a_vm_is_stopped_only_where_the_policy_allows_it_and_a_person_has_approved_this_plan() {
    let mut world = World::used(vm(), Evict::Pods);
    world.approved = true;
    assert_eq!(world.settle(world.begin()).reason, "GPUInUse", "an approval is no policy");

    let mut world = World::used(vm(), Evict::PodsAndVms);
    let at = world.settle(world.begin());
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Blocked, "ApprovalNeeded", Gate::Open));
    world.approved = true;
    assert_eq!(world.settle(at).phase, Phase::Quiesce);
}

#[test]
fn an_approval_that_is_void_again_stops_the_eviction_and_opens_the_node() {
    let mut world = World::used(vm(), Evict::PodsAndVms);
    world.approved = true;
    let (at, _) = world.look(&world.begin());
    let (at, action) = world.look(&at);
    assert_eq!((at.phase, action), (Phase::Evict, Action::Evict));
    // Another VM has come, and with it another plan.
    world.affected = Affected { vms: vec!["vms/b".to_owned()], ..vm() };
    world.approved = false;
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Blocked, "ApprovalNeeded", Gate::Open));
}

#[test]
fn a_process_of_the_host_is_never_evicted() {
    let process =
        Affected { others: vec!["nvtop (pid 7)".to_owned()], said: "nvtop".to_owned(), ..Affected::default() };
    let mut world = World::used(process, Evict::PodsAndVms);
    world.approved = true;
    assert_eq!(world.settle(world.begin()).reason, "GPUInUse");
}

#[test]
fn an_obstacle_and_a_persons_hold_keep_a_change_from_beginning() {
    let mut world = World::idle();
    world.obstacle = Some(why("IommuOff"));
    world.held = Some(why("Paused"));
    let at = world.settle(world.begin());
    assert_eq!(at.reason, "IommuOff");
    world.obstacle = None;
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Blocked, "Paused"));
    world.held = None;
    assert_eq!(world.settle(at).phase, Phase::Quiesce);
}

#[test]
fn a_node_waits_for_its_place_and_takes_none_while_it_waits() {
    let mut world = World::idle();
    world.slot = false;
    let at = world.settle(world.begin());
    assert_eq!((at.phase, at.occupies()), (Phase::WaitForSlot, false));
    world.later(SignedDuration::from_hours(100));
    let at = world.settle(at);
    assert!(at.deadline.is_some_and(|deadline| deadline > world.now), "it is said again, and goes on waiting");
    world.slot = true;
    assert_eq!(world.settle(at).phase, Phase::Quiesce);
}

#[test]
fn outside_of_the_windows_no_change_begins_and_one_that_has_begun_goes_on() {
    let mut world = World::idle();
    // 1970-01-12T13:46:40Z.
    let window =
        MaintenanceWindow { schedule: "0 22 * * *".to_owned(), duration: "1h".to_owned(), time_zone: "UTC".to_owned() };
    world.rules.windows = Windows::read(&[window]).unwrap();
    let at = world.settle(world.begin());
    assert_eq!((at.phase, at.reason.as_str()), (Phase::WaitForSlot, "OutsideMaintenanceWindow"));
    assert!(at.message.contains("1970-01-12 at 22:00"), "{}", at.message);
    let opens = at.deadline.unwrap();
    assert_eq!(opens.to_string(), "1970-01-12T22:00:00Z", "the next look is when it opens");

    world.affected = vm();
    let at = world.settle(at);
    assert_eq!(at.reason, "GPUInUse", "what needs somebody is said at once");
    world.affected = Affected::default();
    let at = world.settle(at);
    assert_eq!(at.reason, "OutsideMaintenanceWindow");

    world.now = opens;
    world.slot = false;
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::WaitForSlot, "WaitingForSlot"));
    world.slot = true;
    let at = world.settle(at);
    assert_eq!(at.phase, Phase::Quiesce);
    world.later(SignedDuration::from_hours(1));
    world.progress = Progress::Reached { unready: None };
    assert_eq!(world.settle(at).phase, Phase::Done);
}

#[test]
fn before_the_agent_is_asked_a_change_is_taken_back_by_forgetting_it() {
    let mut world = World::used(pod(), Evict::Pods);
    let (at, _) = world.look(&world.begin());
    assert_eq!((at.phase, world.gate), (Phase::Cordon, Gate::Ours));
    world.wanted = false;
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), at.switched), (Phase::Done, "TakenBack", false));
    assert_eq!(world.gate, Gate::Open);
}

#[test]
fn a_refusal_of_the_agent_blocks_and_is_left_when_the_agent_gets_there_after_all() {
    let mut world = World::idle();
    let at = world.asked();
    world.progress = Progress::Refused(why("NeedsReboot"));
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Blocked, "NeedsReboot"));
    assert_eq!(at.leave(), Leave::Free, "the agent has been asked and goes on trying");
    assert!(at.occupies(), "it is out of service");
    world.progress = Progress::Reached { unready: None };
    assert_eq!(world.settle(at).phase, Phase::Done);
}

#[test]
fn a_user_who_comes_during_the_switch_brings_the_change_back_to_its_beginning() {
    let mut world = World::idle();
    let at = world.asked();
    world.progress = Progress::Refused(why("GPUInUse"));
    world.affected = vm();
    let at = world.settle(at);
    assert_eq!(at.phase, Phase::Blocked);
    // The order has the old mode back.
    world.progress = old();
    let at = world.settle(at);
    assert_eq!((at.phase, at.switched), (Phase::Blocked, false));
    assert!(matches!(at.leave(), Leave::Refused(_)));
}

#[test]
fn whoever_is_late_blocks_the_change_which_is_tried_again_later() {
    let mut world = World::idle();
    let at = world.settle(world.begin());
    world.later(world.rules.patience.quiesce);
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str()), (Phase::Blocked, "QuiesceTimedOut"));
    assert!(at.message.contains("driver-x"), "{}", at.message);
    assert!(matches!(at.leave(), Leave::Refused(_)), "the old mode comes back");
    world.later(world.rules.patience.retry);
    assert_eq!(world.settle(at).phase, Phase::Quiesce);
}

#[test]
fn a_pod_that_does_not_leave_is_named_and_the_node_is_open_meanwhile() {
    let mut world = World::used(pod(), Evict::Pods);
    let (at, _) = world.look(&world.begin());
    let (mut at, _) = world.look(&at);
    world.affected = pod();
    world.later(world.rules.patience.eviction);
    for _ in 0..3 {
        (at, _) = world.look(&at);
    }
    assert_eq!((at.phase, at.reason.as_str(), world.gate), (Phase::Blocked, "EvictionTimedOut", Gate::Open));
    assert!(at.message.contains("ml/a"), "{}", at.message);
    world.affected = Affected::default();
    assert_eq!(world.settle(at).phase, Phase::Quiesce, "once it has gone, nothing is waited for");
}

#[test]
fn a_mode_that_does_not_come_to_serve_fails_with_its_reason() {
    let mut world = World::idle();
    let at = world.asked();
    world.progress = Progress::Reached { unready: Some(why("DriverNotLoaded")) };
    let at = world.settle(at);
    world.later(world.rules.patience.serve);
    let at = world.settle(at);
    assert_eq!((at.phase, at.reason.as_str(), at.occupies()), (Phase::Failed, "DriverNotLoaded", true));
}

#[test]
fn pods_that_were_named_may_come_to_their_own_end_first() {
    let mut world = World::used(pod(), Evict::Pods);
    world.awaited = vec!["ml/job".to_owned()];
    let at = world.settle(world.begin());
    assert_eq!(at.phase, Phase::WaitForUsers);
    world.later(SignedDuration::from_hours(1000));
    assert_eq!(world.settle(at.clone()).phase, Phase::WaitForUsers, "without a limit they have all the time");
    world.rules.completion = Some(SignedDuration::from_mins(5));
    let waits = world.settle(Transition { phase: Phase::Cordon, ..at });
    world.later(SignedDuration::from_mins(5));
    assert_ne!(world.settle(waits).phase, Phase::WaitForUsers);
}

#[test]
fn a_driver_upgrade_closes_the_node_even_if_nobody_uses_it() {
    let mut world = World::idle();
    world.rules.cordon = Cordon::Always;
    let at = world.settle(world.begin());
    assert_eq!((at.phase, world.gate), (Phase::Quiesce, Gate::Ours));
}
