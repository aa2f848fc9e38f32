//! A node's driver that is to be renewed: what that meets, how far it is, and what the node says of it. Pure.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{DriverRenewal, TransitionPhase as Phase},
};

use super::{
    Blocked,
    course::Reported,
    decide::Observed,
    gates,
    lodgers::{self, Lodger},
    preflight::drivers_users,
};
use crate::operator::{
    drivers::{NodeDriver, Old, Seen, State, asked},
    transition::{
        Affected, DRAINING, EVICTION_TIMED_OUT, Progress, Transition, Underway, Upgrade, affected, rules::Cordon,
    },
};

/// What there is to do to a node's driver.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Not known yet: what is under way stays where it is.
    Unknown,
    Nothing,
    Renewal(Box<Renewal>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Renewal {
    pub mode: WorkloadMode,
    pub driver: DriverRenewal,
    /// PCI addresses of the GPUs that have the driver.
    pub gpus: Vec<String>,
    /// Something is out of date, and it may be renewed by itself.
    pub begins: bool,
    pub upgrade: Upgrade,
    pub affected: Affected,
    /// Beside them all that leave where the node is drained.
    pub drained: Affected,
    pub awaited: Vec<String>,
    /// The node's pods are known.
    pub looked: bool,
    pub progress: Progress,
    /// The pod that is to go.
    pub old: Option<Old>,
    /// Annotations of the node that ask for this.
    pub asked: Vec<&'static str>,
}

/// `annotations` of the node; `switched`: of a renewal whose pod has been told to go.
pub fn ask(
    observed: &Observed<'_>,
    driver: &NodeDriver,
    lodgers: Option<&[Lodger]>,
    annotations: &BTreeMap<String, String>,
    under_way: Option<&(DriverRenewal, bool)>,
) -> Ask {
    let seen = match driver {
        NodeDriver::Unknown => return Ask::Unknown,
        // Its own object makes that it is looked at again.
        NodeDriver::Settled { .. } if under_way.is_some() => return Ask::Unknown,
        NodeDriver::None | NodeDriver::Settled { .. } => return Ask::Nothing,
        NodeDriver::Seen(seen) => seen,
    };
    // Also where another mode is asked for meanwhile, the driver is that of the mode that is left.
    let serving = Reported::of(observed, WorkloadMode::default()).map(|node| node.serving);
    let Some(mode) = serving.map(|serving| serving.filter(|_| !observed.policy.teardown)) else { return Ask::Unknown };
    let Some(node) = mode.and_then(|mode| Reported::of(observed, mode)) else { return Ask::Nothing };
    let mode = node.desired;
    let asked = asked(annotations);
    let outdated = seen.old.as_ref().is_some_and(|old| !old.ending) || !asked.is_empty();
    let allowed = observed.policy.upgrades.of(&seen.set);
    let skipped = observed.labels.get(labels::UPGRADE_SKIP).is_some_and(|value| value == "true");
    let upgrade = allowed.cloned().unwrap_or_default();
    let same_driver = match under_way {
        Some((renewal, _)) => renewal.same_driver,
        None => seen.old.as_ref().is_some_and(|old| old.same_driver) && asked.is_empty(),
    };
    let mut renewal = Renewal {
        mode,
        driver: renewed(seen, same_driver),
        gpus: node.agent.gpus.iter().filter(|gpu| gpu.mode == Some(mode)).map(|gpu| gpu.address.clone()).collect(),
        begins: outdated && allowed.is_some() && !skipped,
        affected: Affected::default(),
        drained: Affected::default(),
        awaited: Vec::new(),
        looked: same_driver || (lodgers.is_some() && observed.pods.is_some() && !observed.users.unread),
        progress: Progress::Looking,
        old: seen.old.clone(),
        asked,
        upgrade,
    };
    if same_driver {
        renewal.upgrade.rules.cordon = Cordon::WhenInUse;
        renewal.upgrade.rules.drain = None;
    } else {
        let operands = observed.pods.map(|pods| pods.iter().map(|pod| pod.uid.clone()).collect());
        let seen = affected(&drivers_users(node.agent, mode, operands.as_ref(), observed.users));
        renewal.affected = lodgers::users(seen, lodgers.unwrap_or_default(), &renewal.upgrade);
        renewal.drained = lodgers::drained(&renewal.affected, lodgers.unwrap_or_default(), &renewal.upgrade);
        renewal.awaited = lodgers::awaited(lodgers.unwrap_or_default(), &renewal.upgrade);
    }
    renewal.progress = progress(&node, seen, &renewal, under_way.is_some_and(|(_, switched)| *switched));
    Ask::Renewal(Box::new(renewal))
}

fn renewed(seen: &Seen, same_driver: bool) -> DriverRenewal {
    DriverRenewal {
        daemon_set: seen.set.name.clone(),
        from: seen.old.as_ref().map_or_else(|| seen.newest.image.clone(), |old| old.image.clone()),
        to: seen.newest.image.clone(),
        revision: seen.newest.hash.clone(),
        same_driver,
    }
}

fn progress(node: &Reported<'_>, seen: &Seen, renewal: &Renewal, switched: bool) -> Progress {
    let message = |message: String| Progress::Switching { message };
    let why = |reason: &str, message: String| Blocked { reason: reason.to_owned(), message };
    match (&seen.old, renewal.asked.is_empty(), &seen.state) {
        (None, true, State::Ready { .. }) => Progress::Reached { unready: unready(node, renewal) },
        (None, true, State::Starting { pod }) => message(format!("pod {pod} of the new driver is not ready yet")),
        (None, true, State::Missing) => message(format!("the new pod of {} has not come yet", seen.set.name)),
        (None, true, State::Broken { pod, why: cause }) => Progress::Broken(why(
            "DriverBroken",
            format!("{cause}: see kubectl logs of {pod}, and correct the driver's version or settings"),
        )),
        (Some(old), _, _) if old.ending => message(format!("pod {} of the old driver is ending", old.pod)),
        (Some(_), _, _) | (None, false, _) => match (renewal.affected.is_empty(), still_there(node, renewal)) {
            _ if !renewal.looked => Progress::Looking,
            (false, _) if switched => Progress::Old { waiting_for: renewal.affected.names() },
            (false, _) => Progress::Refused(why("GPUInUse", renewal.affected.said.clone())),
            (true, Some(waiting_for)) => Progress::Old { waiting_for },
            (true, None) => Progress::Replaceable,
        },
    }
}

/// What still uses the old driver, users aside.
fn still_there(node: &Reported<'_>, renewal: &Renewal) -> Option<String> {
    if renewal.driver.same_driver {
        return None;
    }
    if renewal.mode == WorkloadMode::VmVgpu && !node.withdrawn() {
        return Some("the agent to withdraw its vGPUs from the kubelet".to_owned());
    }
    if gates::runs_what_pauses(node.observed.labels) {
        return Some("the operands' labels".to_owned());
    }
    let pods = node.observed.pods?;
    let leaving: Vec<&str> = pods
        .iter()
        .filter(|pod| pod.gates.iter().any(|gate| gates::pauses(gate)))
        .map(|pod| pod.name.as_str())
        .collect();
    (!leaving.is_empty()).then(|| format!("pods {}", leaving.join(", ")))
}

/// Why a node with its new driver does not serve yet.
fn unready(node: &Reported<'_>, renewal: &Renewal) -> Option<Blocked> {
    let why = |reason: &str, message: String| Some(Blocked { reason: reason.to_owned(), message });
    if gates::paused(node.observed.labels) {
        return why("OperandsPaused", "the operands are coming back".to_owned());
    }
    if !renewal.driver.same_driver {
        let Some(pods) = node.observed.pods else { return why("Checking", "looking at the operands' pods".to_owned()) };
        if let Some(pod) = pods.iter().find(|pod| !pod.gates.is_empty() && !pod.ready) {
            return why("OperandNotReady", format!("pod {} is not ready yet", pod.name));
        }
        let checked = node.observed.policy.checks && renewal.mode == WorkloadMode::Container;
        let gate_open = node.observed.labels.get(gates::VALIDATOR).is_some_and(|value| value == "true");
        if checked && gate_open && !pods.iter().any(|pod| pod.gates.contains(gates::VALIDATOR)) {
            return why("NotValidated", "the checks of this node have not begun yet".to_owned());
        }
    }
    let readiness = node.serving_readiness();
    (!readiness.ready).then_some(Blocked { reason: readiness.reason, message: readiness.message })
}

/// Words of NVIDIA's operator, which people's dashboards know.
fn word(at: &Transition) -> &'static str {
    match at.phase {
        Phase::Cordon => "cordon-required",
        Phase::WaitForUsers => "wait-for-jobs-required",
        Phase::Evict if at.reason == DRAINING => "drain-required",
        Phase::Evict => "pod-deletion-required",
        Phase::Quiesce | Phase::Switch => "pod-restart-required",
        Phase::Verify | Phase::Advertise => "validation-required",
        Phase::Uncordon => "uncordon-required",
        Phase::Done => "upgrade-done",
        Phase::Failed => "upgrade-failed",
        Phase::Blocked if at.switched || at.reason == EVICTION_TIMED_OUT => "upgrade-failed",
        Phase::Preflight | Phase::WaitForSlot | Phase::Blocked => "upgrade-required",
    }
}

/// The change of the node's label, which is there only while upgrades are the operator's to make.
pub fn label(
    observed: &Observed<'_>,
    driver: &NodeDriver,
    ask: &Ask,
    underway: Option<&Underway>,
) -> Option<(String, Option<String>)> {
    let allowed = driver.set().map(|set| observed.policy.upgrades.of(set).is_some());
    let wanted = match (allowed, underway, ask) {
        _ if observed.policy.teardown => None,
        (None, None, _) if *driver == NodeDriver::Unknown => return None,
        (_, Some(underway), _)
            if !underway.transition.phase.is_final() || underway.transition.phase == Phase::Failed =>
        {
            Some(word(&underway.transition))
        }
        (None | Some(false), _, _) => None,
        (Some(true), _, Ask::Unknown) => return None,
        (Some(true), _, Ask::Nothing) => Some("upgrade-done"),
        (Some(true), _, Ask::Renewal(renewal)) => match (&renewal.old, renewal.asked.is_empty(), &renewal.progress) {
            (None, true, Progress::Reached { .. }) => Some("upgrade-done"),
            // A first driver is no upgrade.
            (None, true, _) => return None,
            (Some(_), _, _) | (None, false, _) => Some("upgrade-required"),
        },
    };
    let current = observed.labels.get(labels::UPGRADE_STATE).map(String::as_str);
    (current != wanted).then(|| (labels::UPGRADE_STATE.to_owned(), wanted.map(str::to_owned)))
}

/// The change of the node's annotation that says whether its driver's upgrades are the operator's to make. NVIDIA's operator
/// (26.7) withholds it wherever sandbox workloads are on, since it renews no driver there; ours does.
pub fn annotation(
    observed: &Observed<'_>,
    driver: &NodeDriver,
    annotations: &BTreeMap<String, String>,
) -> Option<(String, Option<String>)> {
    let allowed = driver.set().is_some_and(|set| observed.policy.upgrades.of(set).is_some());
    let wanted = match driver {
        _ if observed.policy.teardown => None,
        NodeDriver::Unknown => return None,
        NodeDriver::None | NodeDriver::Settled { .. } | NodeDriver::Seen(_) => allowed.then_some("true"),
    };
    let current = annotations.get(labels::UPGRADE_ENABLED).map(String::as_str);
    (current != wanted).then(|| (labels::UPGRADE_ENABLED.to_owned(), wanted.map(str::to_owned)))
}
