//! One node's change, carried on at each look at the node.

use std::time::Duration;

use crds::{
    labels,
    v1alpha1::{GPUNode, GPUTransition, NodePhase, TransitionPhase, TransitionStage},
};
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{Client, Resource, ResourceExt, core::PartialObjectMeta, runtime::reflector::Store};

use super::{
    act,
    budget::{Budget, Fleet},
    metrics::Metrics,
    next::{advance, why},
    object::{self, Objects},
    plan::{Affected, Change, plan},
    record,
    rules::{Cordon, Patience, Rules},
    state::{Action, Gate, Leave, Observed, Transition},
};
use crate::{
    cluster::events::{Events, Notice},
    operator::{
        node::{Blocked, InUse, Who, decide::Standing, reference},
        world::{Guarded, NodeWork, Wake, World},
    },
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Write(#[from] object::Error),
    #[error(transparent)]
    Act(#[from] act::Error),
}

/// How long a change is kept for people to read after its end.
const KEPT: Duration = Duration::from_secs(60 * 60);
/// Between two requests to leave that were refused.
const ASK_AGAIN: Duration = Duration::from_secs(10);

type NodeMeta = PartialObjectMeta<Node>;

pub struct Transitions {
    client: Client,
    objects: Objects,
    gpu_nodes: Store<Guarded<GPUNode>>,
    budget: Budget,
    events: Events,
    wake: Wake,
    metrics: Metrics,
}

/// What a look at a node's change has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub leave: Leave,
    /// When to look again if nothing happens.
    pub again: Option<Duration>,
}

impl Step {
    const FREE: Self = Self { leave: Leave::Free, again: None };
}

impl Transitions {
    pub fn new(client: &Client, world: &World, events: Events, wake: &Wake, metrics: Metrics) -> Self {
        let objects = Objects::new(client, world.transitions.clone());
        let budget = Budget::default();
        objects.for_each(|object| {
            if record::read(object, Timestamp::now(), &Patience::default()).occupies() {
                budget.occupy(&object.spec.node);
            }
        });
        Self {
            client: client.clone(),
            objects,
            gpu_nodes: world.gpu_nodes.clone(),
            budget,
            events,
            wake: wake.clone(),
            metrics,
        }
    }

    /// Carries the change of `node` on, begins one, or forgets one. `standing`: what there is to change there, if anything is.
    pub async fn step(&self, node: &NodeMeta, standing: Option<&Standing>, rules: &Rules) -> Result<Step, Error> {
        let name = node.name_any();
        let known = match self.objects.get(&name) {
            Ok(known) => known,
            Err(invalid) => {
                tracing::warn!(node = name, error = %invalid, "GPUTransition does not decode: the node is left as it is");
                let message = format!("GPUTransition {name} does not decode: delete it, and the change begins anew");
                return Ok(Step { leave: Leave::Refused(why("InvalidGPUTransition", message)), again: None });
            }
        };
        let wanted = standing.and_then(|standing| {
            let from = standing.serving.filter(|serving| *serving != standing.desired)?;
            Some((from, standing))
        });
        let object = match (known, wanted) {
            (Some(object), wanted) if !over(&object, wanted.map(|(_, standing)| standing)) => object,
            (Some(object), Some(_)) => {
                self.forget(&object).await?;
                return Ok(Step { leave: Leave::Waits(begins()), again: Some(Duration::ZERO) });
            }
            (Some(object), None) => return self.keep(node, &object).await,
            (None, Some((from, standing))) => match self.begin(node, from, standing, rules).await? {
                Some(object) => object,
                None => return Ok(Step { leave: Leave::Waits(begins()), again: Some(Duration::from_secs(1)) }),
            },
            (None, None) => {
                if marked(node) {
                    act::uncordon(&self.client, &name, node.uid()).await?;
                }
                return Ok(Step::FREE);
            }
        };
        self.carry_on(node, object, standing, rules).await
    }

    /// Writes down what is going to be done, and to whom, before anything is.
    async fn begin(
        &self,
        node: &NodeMeta,
        from: crds::WorkloadMode,
        standing: &Standing,
        rules: &Rules,
    ) -> Result<Option<GPUTransition>, Error> {
        let name = node.name_any();
        let affected = affected(&standing.findings.users);
        let change = Change { node: &name, from, to: standing.desired, gpus: addresses(standing) };
        let object = record::begin(&change, &plan(&change, &affected, cordons(rules, &affected)), node.owner_ref(&()));
        Ok(self.objects.create(&object).await?)
    }

    async fn carry_on(
        &self,
        node: &NodeMeta,
        object: GPUTransition,
        standing: Option<&Standing>,
        rules: &Rules,
    ) -> Result<Step, Error> {
        let name = node.name_any();
        let now = Timestamp::now();
        let before = record::read(&object, now, &rules.patience);
        let affected = standing.map(|standing| affected(&standing.findings.users)).unwrap_or_default();
        let change = Change {
            node: &name,
            from: object.spec.from,
            to: object.spec.to,
            gpus: standing.map(addresses).unwrap_or_default(),
        };
        let plan = plan(&change, &affected, cordons(rules, &affected));
        let wanted = standing.filter(|standing| standing.desired == object.spec.to);
        let object = match wanted.is_some() && !before.switched && plan.hash != object.spec.plan_hash {
            true => match self.objects.plan_anew(&object, &plan).await? {
                Some(object) => object,
                None => return Ok(Step { leave: before.leave(), again: None }),
            },
            false => object,
        };
        let gate = match (before.phase, marked(node)) {
            (TransitionPhase::Cordon, marked) => act::gate(&self.client, &name, marked).await?,
            (_, true) => Gate::Ours,
            // Whether somebody else has closed it counts only for who would close it.
            (_, false) => Gate::Open,
        };
        let held = held(node);
        let look = |slot: bool| {
            let observed = Observed {
                now,
                rules,
                wanted: wanted.is_some(),
                held: held.clone(),
                obstacle: wanted.and_then(|standing| standing.findings.obstacle.clone()),
                affected: &affected,
                awaited: &[],
                approved: object.spec.is_approved(),
                slot,
                gate,
                progress: wanted.map_or(super::Progress::Looking, |standing| standing.progress.clone()),
            };
            let (path, action) = advance(&before, &observed);
            let occupies = path.last().is_some_and(Transition::occupies);
            ((path, action), occupies)
        };
        let occupied = before.occupies();
        let (path, action) = self.budget.with_place(&name, &rules.limits, || self.fleet(), look);
        let Some(after) = path.last().cloned() else { return Ok(Step::FREE) };
        let status = record::status(&object, &path, &plan, &affected);
        if object.status.as_ref() != Some(&status) && self.objects.write(&object, &status).await?.is_none() {
            return Ok(Step { leave: before.leave(), again: None });
        }
        self.metrics.passed(&object, &path);
        self.tell(node, &before, &after).await;
        if occupied && !after.occupies() {
            self.wake_next(&name);
        }
        let asked = self.act(node, action, &affected).await?;
        let due = after.deadline.map(|deadline| Duration::try_from(deadline - now).unwrap_or(Duration::ZERO));
        let again = if asked { Some(ASK_AGAIN) } else { due.map(|due| due + Duration::from_millis(1)) };
        Ok(Step { leave: after.leave(), again })
    }

    /// Whether the action has to be asked for again.
    async fn act(&self, node: &NodeMeta, action: Action, affected: &Affected) -> Result<bool, Error> {
        let name = node.name_any();
        match action {
            Action::Wait => return Ok(false),
            Action::Cordon => act::cordon(&self.client, &name, &name).await?,
            Action::Uncordon => act::uncordon(&self.client, &name, node.uid()).await?,
            Action::Evict => {
                for pod in &affected.pods {
                    if let Some(refusal) = act::evict(&self.client, pod).await? {
                        tracing::info!(node = name, refusal, "eviction refused, asking again");
                    }
                }
                for vm in &affected.vms {
                    if let Some(refusal) = act::stop(&self.client, vm).await? {
                        tracing::warn!(node = name, refusal, "VM not stopped");
                    }
                }
            }
        }
        Ok(true)
    }

    async fn forget(&self, object: &GPUTransition) -> Result<(), Error> {
        self.objects.delete(object).await?;
        if self.budget.free(&object.spec.node) {
            self.wake_next(&object.spec.node);
        }
        Ok(())
    }

    /// One that is over stays for people to read, and then goes.
    async fn keep(&self, node: &NodeMeta, object: &GPUTransition) -> Result<Step, Error> {
        let now = Timestamp::now();
        let ended = object.status.as_ref().and_then(|status| status.since.as_ref()).map_or(now, |since| since.0);
        let age = Duration::try_from(now - ended).unwrap_or(Duration::ZERO);
        if age >= KEPT {
            self.forget(object).await?;
            return Ok(Step::FREE);
        }
        if marked(node) {
            act::uncordon(&self.client, &node.name_any(), node.uid()).await?;
        }
        Ok(Step { leave: Leave::Free, again: Some(KEPT.saturating_sub(age)) })
    }

    /// A node whose change ended, or that is well again, makes place for the one that has waited longest.
    pub fn wake_next(&self, but: &str) {
        let mut longest = None;
        self.objects.for_each(|object| {
            let phase = object.status.as_ref().map(|status| status.phase);
            if phase == Some(TransitionPhase::WaitForSlot) && object.spec.node != but {
                let since = (object.metadata.creation_timestamp.clone(), object.spec.node.clone());
                if longest.as_ref().is_none_or(|longest| since < *longest) {
                    longest = Some(since);
                }
            }
        });
        if let Some((_, node)) = longest {
            self.wake.node(NodeWork::One(node));
        }
    }

    fn fleet(&self) -> Fleet {
        let all = self.gpu_nodes.state();
        let operators = all.iter().filter_map(|guarded| guarded.0.as_ref().ok()?.status.as_ref()?.operator.as_ref());
        let down = |operator: &&crds::v1alpha1::OperatorStatus| {
            operator.phase == NodePhase::Steady && operator.ready != "True" && operator.desired == operator.serving
        };
        Fleet { nodes: all.len(), unready: operators.filter(down).count() }
    }

    async fn tell(&self, node: &NodeMeta, before: &Transition, after: &Transition) {
        if before.phase == after.phase {
            return;
        }
        let message = after.message.clone();
        let notice = match (after.phase, after.phase.stage()) {
            (TransitionPhase::WaitForSlot, _) => Notice::normal("ModeChangeWaiting", "ChangeMode", message),
            (TransitionPhase::Failed, _) => Notice::warning("ModeChangeFailed", "ChangeMode", message),
            (_, TransitionStage::Approach) if after.phase != TransitionPhase::Preflight => {
                Notice::normal("ModeChangeEvicting", "ChangeMode", message)
            }
            // The node controller tells of these.
            (
                _,
                TransitionStage::Approach
                | TransitionStage::Passage
                | TransitionStage::Stopped
                | TransitionStage::Ended,
            ) => {
                return;
            }
        };
        self.events.publish(&notice, &reference(node)).await;
    }
}

/// Whether the object is about something that is no more.
fn over(object: &GPUTransition, standing: Option<&Standing>) -> bool {
    let Some(status) = &object.status else { return false };
    let same = standing
        .is_some_and(|standing| (standing.serving, standing.desired) == (Some(object.spec.from), object.spec.to));
    match status.phase.stage() {
        // A node that failed goes on trying for as long as it is asked to.
        TransitionStage::Ended => status.phase == TransitionPhase::Done || !same,
        TransitionStage::Approach | TransitionStage::Passage | TransitionStage::Stopped => false,
    }
}

fn affected(users: &[InUse]) -> Affected {
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

fn addresses(standing: &Standing) -> Vec<&str> {
    standing.away.iter().map(String::as_str).collect()
}

fn cordons(rules: &Rules, affected: &Affected) -> bool {
    rules.cordon == Cordon::Always || !affected.is_empty()
}

fn marked(node: &NodeMeta) -> bool {
    node.annotations().contains_key(labels::CORDONED)
}

/// What a person has written on the node.
fn held(node: &NodeMeta) -> Option<Blocked> {
    let says = |key: &str| node.annotations().get(key).is_some_and(|value| value == "true");
    let held = |reason: &str, key: &str, what: &str| {
        let message = format!("annotation {key}=true on the node {what}; remove it, and the change goes on");
        Some(why(reason, message))
    };
    match (says(labels::DRY_RUN), says(labels::PAUSE)) {
        (true, _) => held("DryRun", labels::DRY_RUN, "asks for the plan only: see status.plan of its GPUTransition"),
        (false, true) => held("Paused", labels::PAUSE, "holds the change"),
        (false, false) => None,
    }
}

fn begins() -> Blocked {
    why("Checking", "the change is being written down")
}
