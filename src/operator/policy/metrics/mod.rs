//! What the operator counts of its operands; in [`peer`] the same under the names that dashboards of the peer ask for.

mod peer;

pub use self::peer::{Peer, Round};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use super::status::Judgement;

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
        registry.register("gpuvirt_operand_pods_desired", "Nodes that ask for the operand", metrics.desired.clone());
        registry.register(
            "gpuvirt_operand_pods_updated",
            "Pods of the operand's current revision",
            metrics.updated.clone(),
        );
        registry.register("gpuvirt_operand_pods_ready", "Pods of the operand that are ready", metrics.ready.clone());
        registry.register("gpuvirt_nodes", "GPU nodes that are to be in the mode", metrics.nodes.clone());
        registry.register("gpuvirt_nodes_ready", "GPU nodes that serve the mode", metrics.nodes_ready.clone());
        registry.register("gpuvirt_policy_ready", "1 while the ClusterPolicy is ready", metrics.policy_ready.clone());
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
