//! How long changes stay in each phase, which of them fail, and where those that are not done stand.

use std::fmt;

use crds::v1alpha1::{GPUTransition, TransitionPhase};
use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::Store;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::state::Transition;
use crate::{
    operator::world::Guarded,
    telemetry::{Described, Unit},
};

const DURATIONS: Described = Described::histogram(
    "gpuvirt_transition_phase_duration_seconds",
    &["phase", "kind"],
    "Time that changes of nodes spent in a phase that they have left; `kind` is `mode` or `driver`",
);
const FAILURES: Described =
    Described::counter("gpuvirt_transition_failures", &["reason", "kind"], "Changes that failed");
const PHASES: Described = Described::gauge(
    "gpuvirt_transitions",
    &["phase", "kind"],
    Unit::Count,
    "Changes of nodes that are not done, by phase",
);
const BLOCKED: Described = Described::gauge(
    "gpuvirt_transitions_blocked",
    &["reason", "kind"],
    Unit::Count,
    "Changes of nodes that something or somebody stands in the way of, by reason",
);
const SINCE: Described = Described::gauge(
    "gpuvirt_transition_phase_start_timestamp_seconds",
    &["node", "phase", "reason", "kind"],
    Unit::Time,
    "When a change of a node that is not done came to the phase that it is in",
);

/// For the reference.
#[cfg(test)]
pub(crate) const ALL: &[Described] = &[DURATIONS, FAILURES, PHASES, BLOCKED, SINCE];

/// Seconds. Most phases are passed at once, some take minutes, and users take the time that they take.
const BUCKETS: [f64; 11] = [0.5, 2.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 14_400.0, 86_400.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct At {
    phase: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Because {
    reason: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Standing {
    node: String,
    phase: String,
    reason: String,
    kind: &'static str,
}

/// What is counted as it happens.
#[derive(Clone, Debug)]
pub struct Metrics {
    durations: Family<At, Histogram, fn() -> Histogram>,
    failures: Family<Because, Counter>,
}

/// What a change is of.
fn kind(object: &GPUTransition) -> &'static str {
    if object.spec.driver.is_some() { "driver" } else { "mode" }
}

impl Metrics {
    /// `objects` are counted at each scrape, so a change that is gone is not shown any more.
    pub fn register(registry: &mut Registry, objects: Store<Guarded<GPUTransition>>) -> Self {
        let metrics =
            Self { durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)), failures: Family::default() };
        DURATIONS.register(registry, &metrics.durations);
        FAILURES.register(registry, &metrics.failures);
        registry.register_collector(Box::new(Census(objects)));
        metrics
    }

    /// One look's way, once it is written down.
    pub(super) fn passed(&self, object: &GPUTransition, path: &[Transition]) {
        let kind = kind(object);
        for (left, entered) in path.iter().zip(path.iter().skip(1)).filter(|(left, then)| left.phase != then.phase) {
            let stay = entered.since.duration_since(left.since).as_secs_f64();
            let of = At { phase: name(left.phase), kind };
            self.durations.get_or_create(&of).observe(stay.max(0.0));
            if entered.phase == TransitionPhase::Failed {
                self.failures.get_or_create(&Because { reason: entered.reason.clone(), kind }).inc();
            }
        }
    }
}

/// As the objects have it.
fn name(phase: TransitionPhase) -> String {
    format!("{phase:?}")
}

/// Where changes stand now.
struct Census(Store<Guarded<GPUTransition>>);

impl fmt::Debug for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Census").finish_non_exhaustive()
    }
}

impl Collector for Census {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let objects = self.0.state();
        let counts = Counts::of(objects.iter().filter_map(|guarded| guarded.0.as_ref().ok()));
        gauges(&mut encoder, PHASES, &counts.phases)?;
        gauges(&mut encoder, BLOCKED, &counts.blocked)?;
        gauges(&mut encoder, SINCE, &counts.since)
    }
}

fn gauges<S>(encoder: &mut DescriptorEncoder, of: Described, family: &Family<S, Gauge>) -> fmt::Result
where
    S: EncodeLabelSet + Clone + std::hash::Hash + Eq,
{
    family.encode(encoder.encode_descriptor(of.name, of.help, None, family.metric_type())?)
}

#[derive(Default)]
struct Counts {
    phases: Family<At, Gauge>,
    blocked: Family<Because, Gauge>,
    since: Family<Standing, Gauge>,
}

impl Counts {
    fn of<'a>(objects: impl Iterator<Item = &'a GPUTransition>) -> Self {
        let counts = Self::default();
        for object in objects {
            let status = object.status.clone().unwrap_or_default();
            let (phase, kind, reason) = (name(status.phase), kind(object), status.reason);
            match status.phase {
                TransitionPhase::Done => continue,
                TransitionPhase::Blocked => {
                    let _ = counts.blocked.get_or_create(&Because { reason: reason.clone(), kind }).inc();
                }
                TransitionPhase::Preflight
                | TransitionPhase::WaitForSlot
                | TransitionPhase::Cordon
                | TransitionPhase::WaitForUsers
                | TransitionPhase::Evict
                | TransitionPhase::Quiesce
                | TransitionPhase::Switch
                | TransitionPhase::Verify
                | TransitionPhase::Advertise
                | TransitionPhase::Uncordon
                | TransitionPhase::Failed => {}
            }
            counts.phases.get_or_create(&At { phase: phase.clone(), kind }).inc();
            let since = status.since.map(|since| since.0).or(object.metadata.creation_timestamp.as_ref().map(|t| t.0));
            let of = Standing { node: object.spec.node.clone(), phase, reason, kind };
            counts.since.get_or_create(&of).set(since.unwrap_or(Timestamp::UNIX_EPOCH).as_second());
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUTransitionSpec, GPUTransitionStatus};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::runtime::reflector::store;
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::operator::transition::rules::Patience;

    fn object(node: &str, phase: TransitionPhase, reason: &str) -> GPUTransition {
        let mut object =
            GPUTransition::new(node, GPUTransitionSpec { node: node.to_owned(), ..GPUTransitionSpec::default() });
        object.status = Some(GPUTransitionStatus {
            phase,
            reason: reason.to_owned(),
            since: Some(Time(Timestamp::from_second(1_700_000_000).unwrap())),
            ..GPUTransitionStatus::default()
        });
        object
    }

    fn text(counts: impl FnOnce(&mut Registry)) -> String {
        let mut registry = Registry::default();
        counts(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn each_phase_that_was_left_counts_once_with_its_time_and_a_failure_with_its_reason() {
        let said = text(|registry| {
            let metrics = Metrics::register(registry, store().0);
            let at = |second: i64, phase, reason: &str| Transition {
                phase,
                reason: reason.to_owned(),
                ..Transition::new(Timestamp::from_second(second).unwrap(), &Patience::default())
            };
            let path = [
                at(100, TransitionPhase::Switch, "Switching"),
                at(100, TransitionPhase::Switch, "Switching again"),
                at(107, TransitionPhase::Verify, "Verifying"),
                at(207, TransitionPhase::Failed, "ModeLost"),
            ];
            metrics.passed(&object("n1", TransitionPhase::Switch, ""), &path);
            metrics.passed(&object("n1", TransitionPhase::Failed, ""), &path[3..]);
        });
        for line in [
            r#"gpuvirt_transition_phase_duration_seconds_sum{phase="Switch",kind="mode"} 7.0"#,
            r#"gpuvirt_transition_phase_duration_seconds_count{phase="Switch",kind="mode"} 1"#,
            r#"gpuvirt_transition_phase_duration_seconds_bucket{le="2.0",phase="Switch",kind="mode"} 0"#,
            r#"gpuvirt_transition_phase_duration_seconds_bucket{le="10.0",phase="Switch",kind="mode"} 1"#,
            r#"gpuvirt_transition_phase_duration_seconds_sum{phase="Verify",kind="mode"} 100.0"#,
            r#"gpuvirt_transition_failures_total{reason="ModeLost",kind="mode"} 1"#,
        ] {
            assert!(said.contains(line), "{line} is not in {said}");
        }
        assert!(!said.contains(r#"duration_seconds_count{phase="Failed""#), "it is still there: {said}");
    }

    #[test]
    fn changes_that_are_not_done_are_counted_where_they_stand() {
        let said = text(|registry| {
            let objects = [
                object("n1", TransitionPhase::Blocked, "GPUInUse"),
                object("n2", TransitionPhase::Blocked, "GPUInUse"),
                object("n3", TransitionPhase::Blocked, "Paused"),
                object("n4", TransitionPhase::Switch, "Switching"),
                object("n5", TransitionPhase::Done, "Serving"),
            ];
            let Counts { phases, blocked, since } = Counts::of(objects.iter());
            registry.register("phases", "", phases);
            registry.register("blocked", "", blocked);
            registry.register("since", "", since);
        });
        for line in [
            r#"phases{phase="Blocked",kind="mode"} 3"#,
            r#"phases{phase="Switch",kind="mode"} 1"#,
            r#"blocked{reason="GPUInUse",kind="mode"} 2"#,
            r#"blocked{reason="Paused",kind="mode"} 1"#,
            r#"since{node="n4",phase="Switch",reason="Switching",kind="mode"} 1700000000"#,
        ] {
            assert!(said.contains(line), "{line} is not in {said}");
        }
        assert!(!said.contains("n5") && !said.contains("Done"), "{said}");
    }
}
