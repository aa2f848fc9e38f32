//! One node's change, carried on at each look at the node.

use std::{sync::Arc, time::Duration};

use crds::{
    labels,
    v1alpha1::{DriverRenewal, GPUNode, GPUTransition, NodePhase, TransitionPhase},
};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{Client, Resource, ResourceExt, core::PartialObjectMeta, runtime::reflector::Store};

use super::{
    act,
    budget::{Budget, Fleet},
    errand::{Asks, Errand, Underway, addresses, affected, driver_first, of_driver, of_mode, over},
    metrics::Metrics,
    next::{advance, why},
    object::{self, Objects},
    plan::{Affected, Change, plan},
    record,
    rules::{Cordon, Limits, Patience, Rules, Share},
    state::{Action, Gate, Leave, Observed, Progress, Transition},
    tell::{self, HALTED, notice},
    upgrade::Upgrade,
    windows::Moment,
};
use crate::{
    cluster::events::Events,
    operator::{
        drivers::Drivers,
        node::{Blocked, reference, upgrade::Renewal},
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
    /// Of driver pods.
    namespace: String,
    objects: Objects,
    drivers: Arc<Drivers>,
    gpu_nodes: Store<Guarded<GPUNode>>,
    budget: Budget,
    events: Events,
    wake: Wake,
    metrics: Metrics,
}

/// What a look at a node's change has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the node may leave its mode.
    pub leave: Leave,
    /// What is done to its driver.
    pub upgrade: Option<Underway>,
    /// When to look again if nothing happens.
    pub again: Option<Duration>,
}

impl Step {
    const FREE: Self = Self::leaving(Leave::Free, None);

    const fn leaving(leave: Leave, again: Option<Duration>) -> Self {
        Self { leave, upgrade: None, again }
    }
}

impl Transitions {
    pub fn new(
        client: &Client,
        namespace: &str,
        world: &World,
        drivers: Arc<Drivers>,
        events: Events,
        wake: &Wake,
        metrics: Metrics,
    ) -> Self {
        let objects = Objects::new(client, world.transitions.clone());
        let budget = Budget::default();
        objects.for_each(|object| {
            if record::read(object, Timestamp::now(), &Patience::default()).occupies() {
                budget.occupy(&object.spec.node);
            }
        });
        Self {
            client: client.clone(),
            namespace: namespace.to_owned(),
            objects,
            gpu_nodes: world.gpu_nodes.clone(),
            drivers,
            budget,
            events,
            wake: wake.clone(),
            metrics,
        }
    }

    /// Carries the change of `node` on, begins one, or forgets one.
    pub async fn step(&self, node: &NodeMeta, asks: &Asks<'_>, rules: &Rules) -> Result<Step, Error> {
        let name = node.name_any();
        let known = match self.objects.get(&name) {
            Ok(known) => known,
            Err(invalid) => {
                tracing::warn!(node = name, error = %invalid, "GPUTransition does not decode: the node is left as it is");
                let message = format!("GPUTransition {name} does not decode: delete it, and the change begins anew");
                return Ok(Step::leaving(Leave::Refused(why("InvalidGPUTransition", message)), None));
            }
        };
        let object = match known {
            Some(object) if !over(&object, asks) => object,
            Some(object) if asks.any() => {
                self.forget(&object).await?;
                return Ok(Step::leaving(Leave::Waits(begins()), Some(Duration::ZERO)));
            }
            Some(object) => return self.keep(node, &object).await,
            None if asks.any() => match self.begin(node, asks, rules).await? {
                // A first look at it shows the node what begins.
                Some(object) if object.spec.driver.is_some() => {
                    return Ok(Step::leaving(Leave::Waits(begins()), Some(Duration::ZERO)));
                }
                Some(object) => object,
                None => return Ok(Step::leaving(Leave::Waits(begins()), Some(Duration::from_secs(1)))),
            },
            None => {
                if marked(node) {
                    act::uncordon(&self.client, &name, node.uid()).await?;
                }
                return Ok(Step::FREE);
            }
        };
        let before = record::read(&object, Timestamp::now(), &rules.patience);
        let Some(driver) = object.spec.driver.clone() else {
            let (_, step) = self.carry_on(node, &object, &before, &of_mode(&object, asks.mode, rules)).await?;
            return Ok(step);
        };
        let fallback = Upgrade::default();
        let Some(errand) = of_driver(&object, &driver, &before, asks, &fallback.rules) else {
            let leave = driver_first(&before);
            let upgrade = Some(Underway::new(before, &Progress::Looking, &driver, true));
            return Ok(Step { upgrade, ..Step::leaving(leave, None) });
        };
        let ((after, turn), step) = self.carry_on(node, &object, &before, &errand).await?;
        let leave = driver_first(&after);
        let upgrade = Some(Underway::new(after, &errand.progress, &driver, turn));
        Ok(Step { leave, upgrade, ..step })
    }

    /// Writes down what is going to be done, and to whom, before anything is. A change of the mode goes first.
    async fn begin(&self, node: &NodeMeta, asks: &Asks<'_>, rules: &Rules) -> Result<Option<GPUTransition>, Error> {
        let name = node.name_any();
        let (change, affected, rules) = match (asks.mode(), asks.driver()) {
            (Some((from, standing)), _) => {
                let to = standing.desired;
                let change = Change { node: &name, from, to, driver: None, gpus: addresses(standing) };
                (change, affected(&standing.findings.users), rules)
            }
            (None, Some(Renewal { mode, driver, gpus, affected, upgrade, .. })) => {
                let gpus = gpus.iter().map(String::as_str).collect();
                let change = Change { node: &name, from: *mode, to: *mode, driver: Some(driver), gpus };
                (change, affected.clone(), &upgrade.rules)
            }
            (None, None) => return Ok(None),
        };
        let object = record::begin(&change, &plan(&change, &affected, cordons(rules, &affected)), node.owner_ref(&()));
        Ok(self.objects.create(&object).await?)
    }

    /// Where the change is now, and whether it has its turn.
    async fn carry_on(
        &self,
        node: &NodeMeta,
        object: &GPUTransition,
        before: &Transition,
        errand: &Errand<'_>,
    ) -> Result<((Transition, bool), Step), Error> {
        let name = node.name_any();
        let now = Timestamp::now();
        let Errand { rules, affected, wanted, .. } = errand;
        let stays = |turn: bool| ((before.clone(), turn), Step::leaving(before.leave(), None));
        if errand.blind(before.phase) {
            return Ok(stays(true));
        }
        let plan = plan(&errand.change, affected, cordons(rules, affected));
        let replan = *wanted && errand.looked && !before.switched && plan.hash != object.spec.plan_hash;
        let object = match replan {
            true => match self.objects.plan_anew(object, &plan).await? {
                Some(object) => object,
                None => return Ok(stays(true)),
            },
            false => object.clone(),
        };
        let gate = match (before.phase, marked(node)) {
            (TransitionPhase::Cordon, marked) => act::gate(&self.client, &name, marked).await?,
            (_, true) => Gate::Ours,
            // Whether somebody else has closed it counts only for who would close it.
            (_, false) => Gate::Open,
        };
        let held = held(node);
        let occupied = before.occupies();
        let halted = errand.renewal.filter(|_| !occupied).and_then(|renewal| self.halted(&name, renewal));
        let open = !matches!(rules.windows.at(now), Moment::Closed { .. });
        let look = |free: bool| {
            let slot = free && (halted.is_none() || occupied);
            // Its turn has come; who would be affected is found out first.
            if before.phase == TransitionPhase::WaitForSlot && slot && *wanted && !errand.looked && open {
                return ((vec![before.clone()], Action::Wait, true), false);
            }
            let observed = Observed {
                now,
                rules,
                wanted: *wanted,
                held: held.clone(),
                obstacle: errand.obstacle.clone(),
                affected,
                awaited: errand.awaited,
                approved: object.spec.is_approved(),
                slot: slot && errand.looked,
                halted: halted.clone(),
                gate,
                progress: errand.progress.clone(),
            };
            let (path, action) = advance(before, &observed);
            let takes = path.last().is_some_and(Transition::occupies);
            ((path, action, slot), takes)
        };
        let limits = self.limits(errand, occupied);
        let (path, action, turn) = self.budget.with_place(&name, &limits, || self.fleet(&name), look);
        let Some(after) = path.last().cloned() else { return Ok(stays(turn)) };
        let status = record::status(&object, &path, &plan, affected);
        if object.status.as_ref() != Some(&status) && self.objects.write(&object, &status).await?.is_none() {
            return Ok(stays(turn));
        }
        self.metrics.passed(&object, &path);
        tell::tell(&self.client, &self.events, &object, before, &after, affected).await;
        if let Some(notice) = notice(object.spec.driver.is_some(), before, &after) {
            self.events.publish(&notice, &reference(node)).await;
        }
        let gave_way = before.phase == TransitionPhase::WaitForSlot && after.phase != TransitionPhase::WaitForSlot;
        if gave_way || (occupied && !after.occupies()) {
            self.wake_next(&name);
        }
        // It may halt all of them, and they say so.
        if after.phase == TransitionPhase::Failed && before.phase != after.phase {
            self.waiting(&name).into_iter().for_each(|(.., node)| self.wake.node(NodeWork::One(node)));
        }
        // A refused eviction takes its time, and the node is to show before it what it is at.
        if errand.renewal.is_some() && action == Action::Evict && before.phase != after.phase {
            let leave = after.leave();
            return Ok(((after, turn), Step::leaving(leave, Some(Duration::ZERO))));
        }
        let asked = self.act(node, action, errand).await?;
        let due = after.deadline.map(|deadline| Duration::try_from(deadline - now).unwrap_or(Duration::ZERO));
        let again = if asked { Some(ASK_AGAIN) } else { due.map(|due| due + Duration::from_millis(1)) };
        let leave = after.leave();
        Ok(((after, turn), Step::leaving(leave, again)))
    }

    /// The first node that gets a new driver has to serve with it before others follow.
    fn limits(&self, errand: &Errand<'_>, occupied: bool) -> Limits {
        let limits = errand.rules.limits;
        let Some(renewal) = errand.renewal.filter(|_| !occupied) else { return limits };
        match self.drivers.proven(&renewal.driver, &self.budget.holders()) {
            true => limits,
            false => Limits { parallel: Share::Count(1), ..limits },
        }
    }

    /// Why no further node gets this driver.
    fn halted(&self, node: &str, renewal: &Renewal) -> Option<Blocked> {
        let mut failed = Vec::new();
        self.objects.for_each(|object| {
            let same = object.spec.driver.as_ref().is_some_and(|d| d.revision == renewal.driver.revision);
            if same && object.spec.node != node {
                failed.extend(record::failure(object));
            }
        });
        failed.sort();
        (failed.len() >= renewal.upgrade.halt_after).then(|| {
            let message = format!(
                "the upgrade has failed on {} node(s), and no further one begins: {}; mend them or choose another version (GPUVirtConfig budget.haltAfterFailures)",
                failed.len(),
                failed.iter().take(3).cloned().collect::<Vec<_>>().join("; ")
            );
            why(HALTED, message)
        })
    }

    /// Whether the action has to be asked for again.
    async fn act(&self, node: &NodeMeta, action: Action, errand: &Errand<'_>) -> Result<bool, Error> {
        let name = node.name_any();
        match action {
            Action::Wait => return Ok(false),
            Action::Renew => {
                let Some(renewal) = errand.renewal else { return Ok(false) };
                if let Some(old) = &renewal.old
                    && let Some(refusal) = act::renew(&self.client, &self.namespace, old).await?
                {
                    tracing::warn!(node = name, refusal, "driver pod not renewed");
                    return Ok(true);
                }
                act::answer(&self.client, &name, node.uid(), &renewal.asked).await?;
            }
            Action::Cordon => act::cordon(&self.client, &name, &name).await?,
            Action::Uncordon => act::uncordon(&self.client, &name, node.uid()).await?,
            Action::Evict => {
                for pod in &errand.affected.pods {
                    if let Some(refusal) = act::evict(&self.client, pod).await? {
                        tracing::info!(node = name, refusal, "eviction refused, asking again");
                    }
                }
                for vm in &errand.affected.vms {
                    if let Some(refusal) = act::stop(&self.client, vm).await? {
                        tracing::warn!(node = name, refusal, "VM not stopped");
                    }
                }
            }
        }
        Ok(true)
    }

    /// The driver's renewal that the node is at, and whether the old pod has been told to go.
    pub fn renewal(&self, node: &str) -> Option<(DriverRenewal, bool)> {
        let object = self.objects.get(node).ok()??;
        let status = object.status.unwrap_or_default();
        let done = status.phase == TransitionPhase::Done;
        object.spec.driver.filter(|_| !done).map(|driver| (driver, status.switched))
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
        Ok(Step::leaving(Leave::Free, Some(KEPT.saturating_sub(age))))
    }

    /// A node whose change ended, or that is well again, makes place for the one that has waited longest.
    pub fn wake_next(&self, but: &str) {
        let waiting = self.waiting(but);
        // Modes and drivers have limits of their own.
        for driver in [false, true] {
            if let Some((.., node)) = waiting.iter().filter(|(of_driver, ..)| *of_driver == driver).min() {
                self.wake.node(NodeWork::One(node.clone()));
            }
        }
    }

    /// Changes that wait for their turn: whether a driver's, since when, and the node.
    fn waiting(&self, but: &str) -> Vec<(bool, Option<Time>, String)> {
        let mut waiting = Vec::new();
        self.objects.for_each(|object| {
            let phase = object.status.as_ref().map(|status| status.phase);
            if phase == Some(TransitionPhase::WaitForSlot) && object.spec.node != but {
                let since = object.metadata.creation_timestamp.clone();
                waiting.push((object.spec.driver.is_some(), since, object.spec.node.clone()));
            }
        });
        waiting
    }

    /// As `node` meets it. One that is down itself makes no other one so by its change, which may be its cure.
    fn fleet(&self, node: &str) -> Fleet {
        let all = self.gpu_nodes.state();
        let nodes = || all.iter().filter_map(|guarded| guarded.0.as_ref().ok());
        Fleet { nodes: all.len(), ..fleet(nodes().filter(|other| other.name_any() != node)) }
    }
}

/// Of these GPU nodes.
pub(super) fn fleet<'a>(nodes: impl Iterator<Item = &'a GPUNode>) -> Fleet {
    let mut fleet = Fleet { nodes: 0, unready: 0 };
    for node in nodes {
        fleet.nodes += 1;
        let operator = node.status.as_ref().and_then(|status| status.operator.as_ref());
        let down = operator.is_some_and(|operator| {
            operator.phase == NodePhase::Steady && operator.ready != "True" && operator.desired == operator.serving
        });
        fleet.unready += usize::from(down);
    }
    fleet
}

pub(super) fn cordons(rules: &Rules, affected: &Affected) -> bool {
    rules.cordon == Cordon::Always || !affected.is_empty()
}

fn marked(node: &NodeMeta) -> bool {
    node.annotations().contains_key(labels::CORDONED)
}

/// What a person has written on the node.
pub(super) fn held(node: &NodeMeta) -> Option<Blocked> {
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
