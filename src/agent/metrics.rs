//! What the agent tells Prometheus: of its node's GPUs as the last round saw them, and what rounds have done since it began.
//!
//! A scrape reads nothing from the host. Families of GPUs are filled anew in each round, so what is gone is not shown.

mod gpus;
mod peer;

use std::{collections::BTreeMap, sync::atomic::AtomicU64, time::Duration};

use crds::v1alpha1::{GPUNode, GPUUser};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use vfio::{Binding, PciAddress};

use self::{gpus::Gpus, peer::Peer};
use super::{device_plugin::States, health::Bus, offer::Offered, vfio_manager::Observation, wish::Wish};
use crate::telemetry::{Described, Unit};

const NODE: &[&str] = &["node"];
const ROUND: Described = Described::histogram(
    "gpuvirt_round_duration_seconds",
    NODE,
    "Time of a look at the host with the work that followed",
);
const LAST_CHANGE: Described = Described::gauge(
    "gpuvirt_last_mode_change_duration_seconds",
    NODE,
    Unit::Seconds,
    "Time of the last change of drivers, all GPUs together",
);
const CHANGES: Described = Described::histogram(
    "gpuvirt_driver_change_duration_seconds",
    &["node", "to", "result"],
    "Time of one GPU's way, with the companions of its group, to VFIO (`to=\"vfio\"`) or back to the host's drivers (`host`)",
);
const REFUSALS: Described = Described::counter(
    "gpuvirt_refusals",
    &["node", "reason"],
    "Changes of a GPU that were refused or failed, each counted once until its reason changes or it is gone",
);

/// All of the agent's own, for the reference.
#[cfg(test)]
pub(crate) const ALL: &[&[Described]] = &[gpus::names::ALL, &[ROUND, LAST_CHANGE, CHANGES, REFUSALS], peer::ALL];

/// Seconds: writes to the kernel take milliseconds, a driver that lets go late takes longer, and 10 s is the deadline.
const CHANGE_BUCKETS: [f64; 9] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const ROUND_BUCKETS: [f64; 8] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Changed {
    to: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Because {
    reason: String,
}

pub(super) struct Metrics {
    gpus: Gpus,
    peer: Peer,
    rounds: Histogram,
    last_change: Gauge<f64, AtomicU64>,
    changes: Family<Changed, Histogram, fn() -> Histogram>,
    refusals: Family<Because, Counter>,
    /// Reasons that were counted.
    counted: BTreeMap<PciAddress, String>,
}

/// What a round has come to.
pub(super) struct Round<'a> {
    pub wish: &'a Wish,
    pub observation: &'a Observation,
    pub offered: &'a Offered,
    pub plugins: &'a States,
}

/// Who has GPUs of the node, as the operator has found their names.
pub(super) fn users(gpu_node: &GPUNode) -> &[GPUUser] {
    let operator = gpu_node.status.as_ref().and_then(|status| status.operator.as_ref());
    operator.map(|operator| operator.users.as_slice()).unwrap_or_default()
}

impl Metrics {
    /// Each sample has the node's name: Prometheus' own labels are the pod's.
    pub(super) fn register(registry: &mut Registry, node: &str) -> Self {
        let registry = registry.sub_registry_with_label(("node".into(), node.to_owned().into()));
        let metrics = Self {
            gpus: Gpus::register(registry),
            peer: Peer::register(registry),
            rounds: Histogram::new(ROUND_BUCKETS),
            last_change: Gauge::default(),
            changes: Family::new_with_constructor(|| Histogram::new(CHANGE_BUCKETS)),
            refusals: Family::default(),
            counted: BTreeMap::new(),
        };
        ROUND.register(registry, &metrics.rounds);
        LAST_CHANGE.register(registry, &metrics.last_change);
        CHANGES.register(registry, &metrics.changes);
        REFUSALS.register(registry, &metrics.refusals);
        metrics
    }

    /// What has happened in a round.
    pub(super) fn count(&mut self, observation: &Observation, took: Duration) {
        self.rounds.observe(took.as_secs_f64());
        if let Some(worked) = observation.worked {
            self.last_change.set(worked.as_secs_f64());
        }
        for change in &observation.changes {
            let to = match change.binding {
                Binding::Vfio => "vfio",
                Binding::Host => "host",
            };
            let result = if change.done { "done" } else { "failed" };
            self.changes.get_or_create(&Changed { to, result }).observe(change.took.as_secs_f64());
        }
        for (gpu, refusal) in &observation.refusals {
            if self.counted.get(gpu) != Some(&refusal.reason) {
                self.refusals.get_or_create(&Because { reason: refusal.reason.clone() }).inc();
            }
        }
        let reasons = observation.refusals.iter().map(|(gpu, refusal)| (*gpu, refusal.reason.clone()));
        self.counted = reasons.collect();
    }

    /// What is so after a round.
    pub(super) fn show<'a>(&self, round: &Round<'_>, users: impl Iterator<Item = &'a GPUUser>) {
        self.gpus.show(round, users);
        self.peer.show(round);
    }

    /// What changes without an event.
    pub(super) fn glanced(&self, bus: &Bus) {
        self.gpus.on_bus(bus);
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
