//! What the agent counts.

use std::time::Duration;

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

use super::{health::unfit, vfio_manager::Observation};

#[derive(Clone, Default)]
pub(super) struct Metrics {
    gpus: Gauge,
    in_use: Gauge,
    unhealthy: Gauge,
    round_milliseconds: Gauge,
    work_milliseconds: Gauge,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("gpuvirt_gpus", "GPUs on this node", metrics.gpus.clone());
        registry.register("gpuvirt_gpus_in_use", "GPUs that a process or a pod has", metrics.in_use.clone());
        registry.register(
            "gpuvirt_gpus_unhealthy",
            "GPUs that are not given out because of their health",
            metrics.unhealthy.clone(),
        );
        registry.register(
            "gpuvirt_round_milliseconds",
            "Duration of the last look at the host, work included",
            metrics.round_milliseconds.clone(),
        );
        registry.register(
            "gpuvirt_mode_change_milliseconds",
            "Duration of the last change of drivers, all GPUs together",
            metrics.work_milliseconds.clone(),
        );
        metrics
    }

    pub(super) fn measure(&self, observation: &Observation, took: Duration) {
        self.gpus.set(count(observation.inventory.gpus().len()));
        self.in_use.set(count(observation.holders.len()));
        self.unhealthy.set(count(observation.ailments.values().filter(|ailments| unfit(ailments).is_some()).count()));
        self.round_milliseconds.set(milliseconds(took));
        if let Some(worked) = observation.worked {
            self.work_milliseconds.set(milliseconds(worked));
        }
    }
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
