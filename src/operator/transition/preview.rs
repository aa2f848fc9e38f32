//! What a change would be, before anybody asks for it: the engine's own plan and its first look, on facts that were read
//! once. Nothing is written.

use crds::{
    WorkloadMode,
    v1alpha1::{GPUNode, GPUTransition, TransitionPhase, TransitionStage},
};
use k8s_openapi::{
    api::core::v1::Node,
    jiff::{SignedDuration, Timestamp},
};
use kube::{ResourceExt, core::PartialObjectMeta};
use serde::Serialize;

use super::{
    budget::{Budget, Fleet},
    errand::{addresses, affected},
    follow::{self, cordons},
    next::advance,
    plan::{Affected, Change, plan},
    record,
    rules::{Patience, Rules},
    state::{Gate, Observed, Transition},
    windows::Moment,
};
use crate::operator::node::{Blocked, decide::Standing};

/// How many GPU nodes there are, and how many of the others are out of service.
pub fn fleet(nodes: &[GPUNode], node: &str) -> Fleet {
    let others = nodes.iter().filter(|other| other.name_any() != node);
    Fleet { nodes: nodes.len(), ..follow::fleet(others) }
}

/// What a person has written on the node.
pub fn held(node: &PartialObjectMeta<Node>) -> Option<Blocked> {
    follow::held(node)
}

/// What is known of the node and of the others.
pub struct Facts<'a> {
    pub node: &'a str,
    pub now: Timestamp,
    /// `None`: the node has no GPU that a change could be of.
    pub standing: Option<&'a Standing>,
    pub rules: &'a Rules,
    /// What a person has written on the node.
    pub held: Option<Blocked>,
    /// All there are.
    pub transitions: &'a [GPUTransition],
    pub fleet: Fleet,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    pub node: String,
    pub from: Option<WorkloadMode>,
    pub to: WorkloadMode,
    pub steps: Vec<String>,
    /// `namespace/name`, as below.
    pub affected_pods: Vec<String>,
    #[serde(rename = "affectedVMs")]
    pub affected_vms: Vec<String>,
    /// Users that are neither, a sentence each.
    pub others: Vec<String>,
    /// What does not let it begin now.
    pub blocks: Vec<Reason>,
    /// Of the change that this node made last, or is making, for as long as it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<Last>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Last {
    pub from: WorkloadMode,
    pub to: WorkloadMode,
    pub phase: String,
    pub began: Timestamp,
    /// Until the node was touched, or until now.
    pub waited_seconds: i64,
    /// From then on, or 0.
    pub took_seconds: i64,
}

impl From<Blocked> for Reason {
    fn from(Blocked { reason, message }: Blocked) -> Self {
        Self { reason, message }
    }
}

/// `to`: the mode that is asked about.
pub fn preview(to: WorkloadMode, facts: &Facts<'_>) -> Preview {
    let Facts { node, standing, rules, .. } = facts;
    let users = standing.map(|standing| affected(&standing.findings.users)).unwrap_or_default();
    let from = standing.and_then(|standing| standing.serving);
    let change =
        Change { node, from: from.unwrap_or(to), to, driver: None, gpus: standing.map(addresses).unwrap_or_default() };
    let steps = match (standing, from) {
        (Some(_), Some(from)) if from != to => plan(&change, &users, cordons(rules, &users)).steps,
        (Some(_), None) => plan(&change, &users, false).steps.split_off(1),
        (Some(_) | None, _) => Vec::new(),
    };
    let blocks = match standing {
        None => vec![Reason {
            reason: "NoGPUs".to_owned(),
            message: format!("node {node} has no GPU whose mode could change, or its label keeps operands away"),
        }],
        Some(standing) if from != Some(to) => blocks(standing, &users, facts),
        Some(_) => Vec::new(),
    };
    let last = facts.transitions.iter().find(|object| object.spec.node == *node).and_then(|old| last(old, facts.now));
    Preview {
        node: (*node).to_owned(),
        from,
        to,
        steps,
        affected_pods: users.pods,
        affected_vms: users.vms,
        others: users.others,
        blocks,
        last,
    }
}

/// Where the engine would stop at its first look, and what else would be in its way then.
fn blocks(standing: &Standing, users: &Affected, facts: &Facts<'_>) -> Vec<Reason> {
    let budget = Budget::default();
    let patience = Patience::default();
    let others = facts.transitions.iter().filter(|object| object.spec.node != facts.node);
    for object in others.filter(|object| record::read(object, facts.now, &patience).occupies()) {
        budget.occupy(&object.spec.node);
    }
    let begun = Transition::new(facts.now, &patience);
    let look = |slot: bool| {
        let observed = Observed {
            now: facts.now,
            rules: facts.rules,
            wanted: true,
            held: facts.held.clone(),
            obstacle: standing.findings.obstacle.clone(),
            affected: users,
            awaited: &[],
            approved: false,
            slot,
            halted: None,
            gate: Gate::Open,
            progress: standing.progress.clone(),
        };
        let at = advance(&begun, &observed).0.pop().unwrap_or_else(|| begun.clone());
        (at, false)
    };
    let at = budget.with_place(facts.node, &facts.rules.limits, || facts.fleet, look);
    let stops = match at.phase.stage() {
        TransitionStage::Approach => at.phase == TransitionPhase::WaitForSlot,
        TransitionStage::Stopped | TransitionStage::Ended => true,
        TransitionStage::Passage => false,
    };
    let mut blocks: Vec<Reason> =
        stops.then_some(Reason { reason: at.reason, message: at.message }).into_iter().collect();
    if blocks.iter().any(|block| block.reason == "GPUInUse") {
        // Each of them, not only the first.
        blocks = standing.findings.users.iter().map(|user| in_use(&user.said)).collect();
    }
    let window = match facts.rules.windows.at(facts.now) {
        Moment::Open => None,
        Moment::Closed { said, .. } => Some(Blocked { reason: "OutsideMaintenanceWindow".to_owned(), message: said }),
    };
    for further in [facts.held.clone(), window].into_iter().flatten().map(Reason::from) {
        if blocks.iter().all(|block| block.reason != further.reason) {
            blocks.push(further);
        }
    }
    blocks
}

fn in_use(said: &str) -> Reason {
    Reason { reason: "GPUInUse".to_owned(), message: said.to_owned() }
}

fn last(object: &GPUTransition, now: Timestamp) -> Option<Last> {
    let status = object.status.as_ref()?;
    let began = status.history.first()?.at.0;
    let touched = status.history.iter().find(|event| event.phase == TransitionPhase::Quiesce).map(|event| event.at.0);
    let ended = match status.phase.is_final() {
        true => status.history.last().map_or(now, |event| event.at.0),
        false => now,
    };
    let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).max(SignedDuration::ZERO).as_secs();
    Some(Last {
        from: object.spec.from,
        to: object.spec.to,
        phase: format!("{:?}", status.phase),
        began,
        waited_seconds: seconds(began, touched.unwrap_or(ended)),
        took_seconds: touched.map_or(0, |touched| seconds(touched, ended)),
    })
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{Evict, GPUTransitionSpec, GPUTransitionStatus, TransitionEvent};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::operator::{
        node::{Findings, InUse, Who},
        transition::{Progress, windows::Windows},
    };

    const FLEET: Fleet = Fleet { nodes: 4, unready: 0 };
    const TO: WorkloadMode = WorkloadMode::VmPassthrough;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn standing(users: &[(&str, Who)]) -> Standing {
        let users = users.iter().map(|(said, who)| InUse { who: who.clone(), said: (*said).to_owned() }).collect();
        Standing {
            desired: TO,
            serving: Some(WorkloadMode::Container),
            away: vec!["0000:18:00.0".to_owned()],
            findings: Findings { users, ..Findings::default() },
            progress: Progress::Old { waiting_for: "pods".to_owned() },
        }
    }

    fn change(node: &str, phases: &[(TransitionPhase, i64)]) -> GPUTransition {
        let mut object = GPUTransition::new(node, GPUTransitionSpec { node: node.to_owned(), ..Default::default() });
        let event = |(phase, second): &(TransitionPhase, i64)| TransitionEvent {
            phase: *phase,
            at: Time(at(*second)),
            message: String::new(),
        };
        object.status = Some(GPUTransitionStatus {
            phase: phases[phases.len() - 1].0,
            history: phases.iter().map(event).collect(),
            ..GPUTransitionStatus::default()
        });
        object
    }

    fn shown(standing: &Standing, rules: &Rules, held: Option<Blocked>, transitions: &[GPUTransition]) -> Preview {
        preview(
            TO,
            &Facts { node: "n1", now: at(1_000), standing: Some(standing), rules, held, transitions, fleet: FLEET },
        )
    }

    fn reasons(preview: &Preview) -> Vec<&str> {
        preview.blocks.iter().map(|block| block.reason.as_str()).collect()
    }

    #[test]
    fn an_idle_node_has_steps_and_nothing_in_the_way() {
        let shown = shown(&standing(&[]), &Rules::default(), None, &[]);
        assert_eq!(shown.steps.len(), 3, "{:?}", shown.steps);
        assert_eq!((reasons(&shown), &shown.last), (vec![], &None));
    }

    #[test]
    fn every_user_is_named_with_what_the_policy_does_to_it() {
        let users =
            standing(&[("pod a has it", Who::Pod("ml/a".to_owned())), ("VM b has it", Who::Vm("vms/b".to_owned()))]);
        let never = shown(&users, &Rules::default(), None, &[]);
        let said: Vec<&str> = never.blocks.iter().map(|block| block.message.as_str()).collect();
        assert_eq!(said, ["pod a has it", "VM b has it"]);
        let all = shown(&users, &Rules { evict: Evict::PodsAndVms, ..Rules::default() }, None, &[]);
        assert_eq!(reasons(&all), ["ApprovalNeeded"]);
        assert_eq!((all.affected_pods, all.affected_vms), (vec!["ml/a".to_owned()], vec!["vms/b".to_owned()]));
        assert!(all.steps.contains(&"stop VM vms/b".to_owned()), "{:?}", all.steps);
    }

    #[test]
    fn a_hold_a_window_and_the_budget_are_all_told() {
        let held = Blocked { reason: "Paused".to_owned(), message: "held".to_owned() };
        let rules = Rules { windows: Windows::Unknown, ..Rules::default() };
        let idle = standing(&[]);
        assert_eq!(reasons(&shown(&idle, &rules, Some(held), &[])), ["Paused", "OutsideMaintenanceWindow"]);
        let other = change("n2", &[(TransitionPhase::Quiesce, 5)]);
        assert_eq!(reasons(&shown(&idle, &Rules::default(), None, &[other])), ["WaitingForSlot"]);
    }

    #[test]
    fn the_last_change_tells_how_long_it_waited_and_how_long_it_took() {
        let done = [
            (TransitionPhase::Preflight, 100),
            (TransitionPhase::Blocked, 101),
            (TransitionPhase::Quiesce, 160),
            (TransitionPhase::Done, 190),
        ];
        let last = shown(&standing(&[]), &Rules::default(), None, &[change("n1", &done)]).last.unwrap();
        assert_eq!((last.waited_seconds, last.took_seconds, last.phase.as_str()), (60, 30, "Done"));
        let waits = shown(&standing(&[]), &Rules::default(), None, &[change("n1", &done[..2])]).last.unwrap();
        assert_eq!((waits.waited_seconds, waits.took_seconds), (900, 0), "it waits still");
    }

    #[test]
    fn a_node_that_is_there_already_has_nothing_to_do_and_one_without_gpus_says_so() {
        let there = Standing { serving: Some(TO), ..standing(&[("VM b has it", Who::Vm("vms/b".to_owned()))]) };
        let shown = shown(&there, &Rules::default(), None, &[]);
        assert_eq!((shown.steps.len(), reasons(&shown)), (0, vec![]));
        let rules = Rules::default();
        let nothing = Facts {
            node: "n1",
            now: at(1_000),
            standing: None,
            rules: &rules,
            held: None,
            transitions: &[],
            fleet: FLEET,
        };
        assert_eq!(reasons(&preview(TO, &nothing)), ["NoGPUs"]);
    }
}
