//! What a look at a node found there is to change, in the words of the state machine, whatever its kind. Pure.

use crds::v1alpha1::{DriverRenewal, GPUTransition, TransitionPhase as Phase, TransitionStage as Stage};

use super::{
    next::{DRAINING, why},
    plan::{Affected, Change},
    rules::Rules,
    state::{Leave, Progress, Transition},
};
use crate::operator::node::{
    Blocked, InUse, Who,
    decide::Standing,
    upgrade::{Ask, Renewal},
};

/// What there is to change.
pub struct Asks<'a> {
    pub mode: Option<&'a Standing>,
    pub driver: &'a Ask,
}

/// One change, as it is met now.
pub struct Errand<'a> {
    pub change: Change<'a>,
    pub rules: &'a Rules,
    pub wanted: bool,
    /// The node's pods are known, as far as they count.
    pub looked: bool,
    pub obstacle: Option<Blocked>,
    pub affected: Affected,
    pub awaited: &'a [String],
    pub progress: Progress,
    /// The driver's, where that is renewed.
    pub renewal: Option<&'a Renewal>,
}

/// A driver's renewal, as the node shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Underway {
    pub transition: Transition,
    pub pause: Pause,
    /// There is a place for it: the node's pods are looked at.
    pub turn: bool,
}

/// Whether the operands that use the driver are paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pause {
    #[default]
    Off,
    On,
    /// As they are: how far the renewal is, is not known yet.
    Keep,
}

impl Underway {
    pub fn new(transition: Transition, progress: &Progress, renewal: &DriverRenewal, turn: bool) -> Self {
        let pause = match (transition.phase, progress) {
            _ if renewal.same_driver => Pause::Off,
            (Phase::Quiesce | Phase::Switch, _) => Pause::On,
            (Phase::Blocked | Phase::Failed, Progress::Reached { .. }) => Pause::Off,
            (Phase::Blocked | Phase::Failed, Progress::Looking) if transition.switched => Pause::Keep,
            (Phase::Blocked | Phase::Failed, _) if transition.switched => Pause::On,
            (_, _) => Pause::Off,
        };
        Self { transition, pause, turn }
    }

    /// Whether the node's pods have to be known.
    pub fn looks(&self) -> bool {
        match self.transition.phase {
            Phase::Preflight | Phase::Done => false,
            Phase::WaitForSlot => self.turn,
            Phase::Cordon
            | Phase::WaitForUsers
            | Phase::Evict
            | Phase::Quiesce
            | Phase::Switch
            | Phase::Verify
            | Phase::Advertise
            | Phase::Uncordon
            | Phase::Blocked
            | Phase::Failed => true,
        }
    }

    /// Whether the node does not serve because of it.
    pub fn disturbs(&self) -> bool {
        match self.transition.phase.stage() {
            Stage::Approach => false,
            Stage::Passage => self.transition.phase != Phase::Uncordon,
            Stage::Stopped | Stage::Ended => self.transition.switched && self.transition.phase != Phase::Done,
        }
    }
}

impl Asks<'_> {
    /// The mode that the node serves, and what there is to do where it is to serve another one.
    pub fn mode(&self) -> Option<(crds::WorkloadMode, &Standing)> {
        let standing = self.mode?;
        Some((standing.serving.filter(|serving| *serving != standing.desired)?, standing))
    }

    /// A driver's renewal that may begin.
    pub fn driver(&self) -> Option<&Renewal> {
        match self.driver {
            Ask::Renewal(renewal) => Some(renewal).filter(|renewal| renewal.begins).map(|renewal| &**renewal),
            Ask::Unknown | Ask::Nothing => None,
        }
    }

    /// A change of the driver waits for one of the mode, which may need no driver.
    pub fn any(&self) -> bool {
        self.mode().is_some() || self.driver().is_some()
    }
}

/// A change of the mode. `desired` by the object that remembers it.
pub fn of_mode<'a>(object: &'a GPUTransition, standing: Option<&'a Standing>, rules: &'a Rules) -> Errand<'a> {
    let wanted = standing.filter(|standing| standing.desired == object.spec.to);
    Errand {
        change: Change {
            node: &object.spec.node,
            from: object.spec.from,
            to: object.spec.to,
            driver: None,
            gpus: standing.map(addresses).unwrap_or_default(),
        },
        rules,
        wanted: wanted.is_some(),
        // A holder that may be an operand, or pods that could not be listed: nobody is no answer yet.
        looked: standing.is_none_or(|standing| !standing.findings.needs_pods),
        obstacle: wanted.and_then(|standing| standing.findings.obstacle.clone()),
        affected: standing.map(|standing| affected(&standing.findings.users)).unwrap_or_default(),
        awaited: &[],
        progress: wanted.map_or(Progress::Looking, |standing| standing.progress.clone()),
        renewal: None,
    }
}

/// A driver's. `None`: nothing can be said of it yet.
pub fn of_driver<'a>(
    object: &'a GPUTransition,
    driver: &'a DriverRenewal,
    at: &Transition,
    asks: &'a Asks<'a>,
    fallback: &'a Rules,
) -> Option<Errand<'a>> {
    let renewal = match asks.driver {
        Ask::Unknown => return None,
        Ask::Nothing => None,
        Ask::Renewal(renewal) => Some(&**renewal),
    };
    let same = |renewal: &Renewal| renewal.driver.revision == driver.revision;
    // What is begun is brought to its end; what is not makes way.
    let begun = at.switched || at.phase.stage() == Stage::Passage;
    let wanted = renewal.is_some_and(|r| begun || r.begins && same(r) && asks.mode().is_none());
    let draining = at.phase == Phase::Evict && at.reason == DRAINING;
    let affected = renewal.map(|renewal| if draining { &renewal.drained } else { &renewal.affected });
    let looked = renewal.is_none_or(|renewal| renewal.looked);
    let progress = renewal.map_or(Progress::Looking, |renewal| renewal.progress.clone());
    Some(Errand {
        change: Change {
            node: &object.spec.node,
            from: object.spec.from,
            to: object.spec.to,
            driver: Some(driver),
            gpus: renewal.map(|r| r.gpus.iter().map(String::as_str).collect()).unwrap_or_default(),
        },
        rules: renewal.map_or(fallback, |renewal| &renewal.upgrade.rules),
        wanted,
        looked,
        obstacle: None,
        affected: affected.cloned().unwrap_or_default(),
        awaited: renewal.map(|renewal| renewal.awaited.as_slice()).unwrap_or_default(),
        // Before its turn the node's pods are not looked at.
        progress: match (at.phase, progress) {
            (Phase::Preflight, Progress::Looking) => Progress::Old { waiting_for: "its turn".to_owned() },
            (_, progress) => progress,
        },
        renewal,
    })
}

impl Errand<'_> {
    /// Whether the next step depends on pods that are not known yet.
    pub fn blind(&self, phase: Phase) -> bool {
        let counts = matches!(phase, Phase::Cordon | Phase::WaitForUsers | Phase::Evict | Phase::Blocked);
        self.wanted && !self.looked && counts
    }
}

/// Whether the object is about something that is no more.
pub fn over(object: &GPUTransition, asks: &Asks<'_>) -> bool {
    let Some(status) = &object.status else { return false };
    let same = match (&object.spec.driver, asks.driver) {
        (None, _) => asks
            .mode
            .is_some_and(|standing| (standing.serving, standing.desired) == (Some(object.spec.from), object.spec.to)),
        (Some(_), Ask::Unknown) => true,
        (Some(_), Ask::Nothing) => false,
        // Another revision may do better, and another mode may do without.
        (Some(driver), Ask::Renewal(now)) => driver.revision == now.driver.revision && asks.mode().is_none(),
    };
    match status.phase.stage() {
        // A node that failed goes on trying for as long as it is asked to.
        Stage::Ended => status.phase == Phase::Done || !same,
        Stage::Approach | Stage::Passage | Stage::Stopped => false,
    }
}

/// What a change of the mode waits for while the driver is renewed.
pub fn driver_first(at: &Transition) -> Leave {
    match at.phase.is_final() {
        true => Leave::Free,
        false => Leave::Waits(why("DriverUpgrade", format!("the node's driver is renewed first: {}", at.message))),
    }
}

pub fn affected(users: &[InUse]) -> Affected {
    let mut affected = Affected::default();
    for InUse { who, said } in users {
        let (list, name) = match who {
            Who::Vm(vm) => (&mut affected.vms, vm),
            Who::Pod(pod) => (&mut affected.pods, pod),
            Who::Process => (&mut affected.others, said),
        };
        if !list.contains(name) {
            list.push(name.clone());
        }
        if affected.said.is_empty() {
            affected.said.clone_from(said);
        }
    }
    affected
}

pub fn addresses(standing: &Standing) -> Vec<&str> {
    standing.away.iter().map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use crds::WorkloadMode;

    use super::*;
    use crate::operator::{
        node::Findings,
        transition::{plan::plan, record},
    };

    #[test]
    fn while_it_is_not_known_whose_a_gpus_holders_are_nobody_is_taken_for_gone() {
        let of = |needs_pods: bool| Standing {
            desired: WorkloadMode::VmPassthrough,
            serving: Some(WorkloadMode::Container),
            away: Vec::new(),
            findings: Findings { needs_pods, ..Findings::default() },
            progress: Progress::Looking,
        };
        let (from, to) = (WorkloadMode::Container, WorkloadMode::VmPassthrough);
        let change = Change { node: "n1", from, to, driver: None, gpus: Vec::new() };
        let object = record::begin(&change, &plan(&change, &Affected::default(), false), None);
        let rules = Rules::default();
        for phase in [Phase::Cordon, Phase::WaitForUsers, Phase::Evict, Phase::Blocked] {
            assert!(of_mode(&object, Some(&of(true)), &rules).blind(phase), "{phase:?}");
            assert!(!of_mode(&object, Some(&of(false)), &rules).blind(phase), "{phase:?}");
        }
    }
}
