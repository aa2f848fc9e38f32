//! From every phase, under every observation.

use crds::v1alpha1::{Evict, TransitionPhase as Phase, TransitionStage as Stage};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::{World, old, pod, vm, why};
use crate::operator::transition::{
    next::advance,
    plan::Affected,
    rules::{Cordon, Rules},
    state::{Action, Gate, Leave, Progress, Transition},
};

const PHASES: [Phase; 13] = [
    Phase::Preflight,
    Phase::WaitForSlot,
    Phase::Cordon,
    Phase::WaitForUsers,
    Phase::Evict,
    Phase::Quiesce,
    Phase::Switch,
    Phase::Verify,
    Phase::Advertise,
    Phase::Uncordon,
    Phase::Done,
    Phase::Blocked,
    Phase::Failed,
];

prop_compose! {
    fn worlds()(
        wanted in prop::bool::weighted(0.9),
        held in prop::option::weighted(0.1, Just(why("Paused"))),
        obstacle in prop::option::weighted(0.1, Just(why("IommuOff"))),
        affected in prop::sample::select(vec![
            Affected::default(), Affected::default(), pod(), vm(),
            Affected { others: vec!["nvtop".to_owned()], ..vm() },
        ]),
        awaited in prop::sample::select(vec![vec![], vec!["ml/job".to_owned()]]),
        evict in prop::sample::select(vec![Evict::Never, Evict::Pods, Evict::PodsAndVms]),
        cordon in prop::sample::select(vec![Cordon::WhenInUse, Cordon::Always]),
        completion in prop::option::of(Just(SignedDuration::from_mins(5))),
        drain in prop::option::of(Just(SignedDuration::from_mins(7))),
        approved: bool,
        slot: bool,
        halted in prop::option::weighted(0.1, Just(why("Halted"))),
        gate in prop::sample::select(vec![Gate::Open, Gate::Ours, Gate::Others]),
        progress in prop::sample::select(vec![
            Progress::Looking, old(), Progress::Switching { message: String::new() }, Progress::Refused(why("GPUInUse")),
            Progress::Replaceable, Progress::Broken(why("CrashLoopBackOff")),
            Progress::Reached { unready: None }, Progress::Reached { unready: Some(why("NotRegistered")) },
        ]),
        seconds in 0..200_000_i64,
    ) -> World {
        let rules = Rules { evict, cordon, completion, drain, ..Rules::default() };
        let now = Timestamp::from_second(1_000_000 + seconds).unwrap();
        World { now, rules, wanted, held, obstacle, affected, awaited, approved, slot, halted, gate, progress }
    }
}

prop_compose! {
    fn transitions()(
        phase in prop::sample::select(PHASES.to_vec()),
        switched: bool,
        since in 0..100_000_i64,
        patience in 0..100_000_i64,
        retry: bool,
        reason in prop::sample::select(vec!["GPUInUse", "EvictionTimedOut", "TakenBack", "Draining"]),
    ) -> Transition {
        let since = Timestamp::from_second(1_000_000 + since).unwrap();
        let waits = matches!(phase.stage(), Stage::Approach | Stage::Passage) || phase == Phase::Blocked && retry;
        let deadline = waits.then(|| since + SignedDuration::from_secs(patience));
        let touched = matches!(phase, Phase::Switch | Phase::Verify | Phase::Advertise);
        let may = matches!(phase, Phase::Blocked | Phase::Failed | Phase::Uncordon | Phase::Done | Phase::Quiesce);
        let switched = touched || may && switched;
        Transition { phase, since, deadline, reason: reason.to_owned(), message: String::new(), switched }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    /// From every phase under every observation.
    #[test]
    fn one_look_keeps_every_promise(at in transitions(), mut world in worlds()) {
        // Who has a place keeps it.
        if at.occupies() {
            world.slot = true;
            world.halted = None;
        }
        let observed = world.observed();
        let (path, action) = advance(&at, &observed);
        let after = path.last().unwrap();

        let users = !world.affected.pods.is_empty() || !world.affected.vms.is_empty() || !world.affected.others.is_empty();
        for (from, to) in path.iter().zip(path.iter().skip(1)) {
            let released = matches!(to.leave(), Leave::Free) && !matches!(from.leave(), Leave::Free);
            let done = matches!(to.phase, Phase::Uncordon | Phase::Done);
            if released && !done && !matches!(world.progress, Progress::Reached { .. }) {
                prop_assert!(!users, "{:?} let the node go under its users: {:?}", from.phase, world.affected);
                prop_assert!(world.slot, "and without a place");
                prop_assert!(world.obstacle.is_none());
            }
        }
        if action == Action::Evict {
            prop_assert!(world.rules.evict != Evict::Never);
            prop_assert!(world.affected.vms.is_empty() || world.rules.evict == Evict::PodsAndVms && world.approved);
            prop_assert!(world.affected.others.is_empty());
        }
        if action == Action::Uncordon {
            prop_assert_eq!(world.gate, Gate::Ours);
        }
        if action == Action::Cordon {
            prop_assert_eq!(world.gate, Gate::Open);
        }
        let ends = matches!(after.phase, Phase::Done | Phase::Blocked | Phase::Failed);
        if *after != at {
            prop_assert!(ends || after.deadline.is_some(), "{:?} has no deadline", after.phase);
        }
        prop_assert!(!after.reason.is_empty());
        prop_assert!(path.len() <= PHASES.len(), "it went in a circle: {:?}", path);
        if at.phase == Phase::Done {
            prop_assert_eq!(after, &at, "an end is an end");
        }
        if at.phase == Phase::Failed && after.phase != Phase::Failed {
            prop_assert!(world.progress == Progress::Reached { unready: None }, "only what serves has recovered");
        }
        if action == Action::Renew {
            prop_assert!(!users && after.switched && after.phase == Phase::Switch);
            prop_assert!(world.progress == Progress::Replaceable);
        }
        if after.phase == Phase::Cordon && at.phase == Phase::WaitForSlot {
            prop_assert!(world.halted.is_none(), "it began while others have failed");
        }
    }

    /// However it has begun, once the world is well and stays so, the change ends.
    #[test]
    fn every_path_ends_once_the_world_is_well(
        at in transitions(),
        mut seen in prop::collection::vec(worlds(), 0..6),
        renews: bool,
    ) {
        let mut at = at;
        let mut gate = Gate::Open;
        let mut now = Timestamp::from_second(1_300_000).unwrap();
        for world in &mut seen {
            world.gate = gate;
            world.now = now;
            at = world.look(&at).0;
            gate = world.gate;
            now += SignedDuration::from_mins(1);
        }
        let mut world = World { now, gate, ..World::idle() };
        if renews {
            world.rules.cordon = Cordon::Always;
        }
        for _ in 0..40 {
            if matches!(at.phase, Phase::Done | Phase::Failed) && world.gate == Gate::Open {
                break;
            }
            at = world.look(&at).0;
            world.later(SignedDuration::from_mins(5));
            world.progress = match (at.phase, at.switched) {
                (Phase::Quiesce, _) if renews => Progress::Replaceable,
                (Phase::Quiesce, _) => Progress::Switching { message: String::new() },
                (_, true) => Progress::Reached { unready: None },
                (_, false) => old(),
            };
        }
        prop_assert!(matches!(at.phase, Phase::Done | Phase::Failed), "{:?}", at);
        prop_assert_eq!(world.gate, Gate::Open, "{:?}", at);
    }
}
