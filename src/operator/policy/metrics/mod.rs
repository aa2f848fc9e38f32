//! What the operator counts of its operands; in [`peer`] the same under the names that dashboards of the peer ask for.

mod peer;

pub use self::peer::{Peer, Round};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::status::Judgement;
use crate::telemetry::{Described, Unit};

const DESIRED: Described =
    Described::gauge("gpuvirt_operand_pods_desired", &["operand"], Unit::Count, "Nodes that ask for the operand");
const UPDATED: Described = Described::gauge(
    "gpuvirt_operand_pods_updated",
    &["operand"],
    Unit::Count,
    "Pods of the operand's current revision",
);
const READY: Described =
    Described::gauge("gpuvirt_operand_pods_ready", &["operand"], Unit::Count, "Pods of the operand that are ready");
const NODES: Described =
    Described::gauge("gpuvirt_nodes", &["mode"], Unit::Count, "GPU nodes that are to be in the mode");
const NODES_READY: Described =
    Described::gauge("gpuvirt_nodes_ready", &["mode"], Unit::Count, "GPU nodes that serve the mode");
const POLICY_READY: Described =
    Described::gauge("gpuvirt_policy_ready", &[], Unit::Flag, "Whether the ClusterPolicy is ready");

/// For the reference.
#[cfg(test)]
pub(crate) const ALL: &[&[Described]] =
    &[&[DESIRED, UPDATED, READY, NODES, NODES_READY, POLICY_READY], peer::GAUGES, peer::COUNTERS];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operand {
    operand: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Mode {
    mode: &'static str,
}

#[derive(Clone, Default)]
pub struct Metrics {
    desired: Family<Operand, Gauge>,
    updated: Family<Operand, Gauge>,
    ready: Family<Operand, Gauge>,
    nodes: Family<Mode, Gauge>,
    nodes_ready: Family<Mode, Gauge>,
    policy_ready: Gauge,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        DESIRED.register(registry, &metrics.desired);
        UPDATED.register(registry, &metrics.updated);
        READY.register(registry, &metrics.ready);
        NODES.register(registry, &metrics.nodes);
        NODES_READY.register(registry, &metrics.nodes_ready);
        POLICY_READY.register(registry, &metrics.policy_ready);
        metrics
    }

    pub(super) fn measure(&self, judgement: &Judgement) {
        // What is asked for no more is not counted any more.
        for family in [&self.desired, &self.updated, &self.ready] {
            family.clear();
        }
        for family in [&self.nodes, &self.nodes_ready] {
            family.clear();
        }
        for operand in &judgement.operands {
            let of = Operand { operand: operand.name.clone() };
            self.desired.get_or_create(&of).set(operand.desired.into());
            self.updated.get_or_create(&of).set(operand.updated.into());
            self.ready.get_or_create(&of).set(operand.ready.into());
        }
        for mode in &judgement.modes {
            let of = Mode { mode: mode.mode.as_str() };
            self.nodes.get_or_create(&of).set(mode.nodes.into());
            self.nodes_ready.get_or_create(&of).set(mode.ready.into());
        }
        self.policy_ready.set(judgement.verdict.holds.into());
    }
}
