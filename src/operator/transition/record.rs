//! Between a [`Transition`] and the `GPUTransition` that remembers it.

use crds::v1alpha1::{
    GPUTransition, GPUTransitionSpec, GPUTransitionStatus, TransitionEvent, TransitionPhase, TransitionStage,
};
use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{OwnerReference, Time},
    jiff::Timestamp,
};

use super::{
    plan::{Affected, Change, Plan},
    rules::Patience,
    state::Transition,
};

/// Phases that are remembered; the oldest are forgotten first.
const HISTORY: usize = 40;

/// Its node and what has gone wrong there; `None`: nothing has, or nothing had been done to the node.
pub fn failure(object: &GPUTransition) -> Option<String> {
    let status = object.status.as_ref()?;
    let failed = status.phase == TransitionPhase::Failed || status.phase == TransitionPhase::Blocked && status.switched;
    failed.then(|| format!("{}: {}", object.spec.node, status.message))
}

/// The object of a change that begins, with the node's name: a node makes one change at a time.
pub fn begin(change: &Change<'_>, plan: &Plan, owner: Option<OwnerReference>) -> GPUTransition {
    let spec = GPUTransitionSpec {
        node: change.node.to_owned(),
        from: change.from,
        to: change.to,
        driver: change.driver.cloned(),
        plan_hash: plan.hash.clone(),
        approved: None,
    };
    let mut object = GPUTransition::new(change.node, spec);
    object.metadata.owner_references = owner.map(|owner| vec![owner]);
    object
}

/// What it remembers. One whose first status was never written has not begun.
pub fn read(object: &GPUTransition, now: Timestamp, patience: &Patience) -> Transition {
    let fresh = Transition::new(now, patience);
    match &object.status {
        None => fresh,
        Some(status) => Transition {
            phase: status.phase,
            since: status.since.as_ref().map_or(now, |since| since.0),
            deadline: status.deadline.as_ref().map(|deadline| deadline.0).or(match status.phase.stage() {
                TransitionStage::Approach | TransitionStage::Passage => fresh.deadline,
                TransitionStage::Stopped | TransitionStage::Ended => None,
            }),
            reason: status.reason.clone(),
            message: status.message.clone(),
            switched: status.switched,
        },
    }
}

/// The status after `path`, whose last is where the change is now.
pub fn status(object: &GPUTransition, path: &[Transition], plan: &Plan, affected: &Affected) -> GPUTransitionStatus {
    let old = object.status.clone().unwrap_or_default();
    let begun = object.status.is_some();
    let mut history = old.history;
    let mut phase = begun.then_some(old.phase);
    for step in path {
        if phase != Some(step.phase) {
            history.push(TransitionEvent { phase: step.phase, at: Time(step.since), message: step.message.clone() });
            phase = Some(step.phase);
        }
    }
    let forgotten = history.len().saturating_sub(HISTORY);
    history.drain(..forgotten);
    let Some(now) = path.last() else { return GPUTransitionStatus { history, ..old } };
    // Once the node is touched, what was planned and for whom is what was done.
    let open = !now.switched && !now.phase.is_final();
    GPUTransitionStatus {
        observed_generation: object.metadata.generation.unwrap_or_default(),
        phase: now.phase,
        since: Some(Time(now.since)),
        reason: now.reason.clone(),
        message: now.message.clone(),
        plan: if open { plan.steps.clone() } else { old.plan },
        affected_pods: if open { affected.pods.clone() } else { old.affected_pods },
        affected_vms: if open { affected.vms.clone() } else { old.affected_vms },
        switched: now.switched,
        deadline: now.deadline.map(Time),
        history,
        conditions: old.conditions,
    }
}

#[cfg(test)]
mod tests {
    use crds::{WorkloadMode, v1alpha1::TransitionPhase};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn object() -> GPUTransition {
        let change = Change {
            node: "n1",
            from: WorkloadMode::Container,
            to: WorkloadMode::VmVgpu,
            driver: None,
            gpus: Vec::new(),
        };
        begin(&change, &plan(), None)
    }

    fn plan() -> Plan {
        Plan { steps: vec!["withdraw".to_owned()], hash: "0123abcd".to_owned() }
    }

    #[test]
    fn what_is_written_is_what_is_read_after_a_restart() {
        let patience = Patience::default();
        let mut object = object();
        let first = read(&object, at(0), &patience);
        assert_eq!(first.phase, TransitionPhase::Preflight);
        let second = Transition {
            phase: TransitionPhase::Switch,
            since: at(7),
            deadline: Some(at(70)),
            reason: "Switching".to_owned(),
            message: "the agent is at it".to_owned(),
            switched: true,
        };
        let status = status(&object, &[first, second.clone()], &plan(), &Affected::default());
        let phases: Vec<_> = status.history.iter().map(|event| event.phase).collect();
        assert_eq!(phases, [TransitionPhase::Preflight, TransitionPhase::Switch]);
        object.status = Some(status);
        assert_eq!(read(&object, at(99), &patience), second);
    }

    #[test]
    fn a_phase_that_goes_on_is_one_entry_and_the_history_has_an_end() {
        let mut object = object();
        let mut there = Transition::new(at(0), &Patience::default());
        for second in 0..200 {
            there.since = at(second);
            there.phase = if second % 4 < 2 { TransitionPhase::Preflight } else { TransitionPhase::Blocked };
            object.status = Some(status(&object, &[there.clone()], &plan(), &Affected::default()));
        }
        let history = object.status.unwrap().history;
        assert_eq!(history.len(), HISTORY);
        assert!(history.windows(2).all(|two| two[0].phase != two[1].phase));
        assert_eq!(history[HISTORY - 1].at, Time(at(198)));
    }
}
