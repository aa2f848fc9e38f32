//! The operator's metrics under the names of NVIDIA's GPU Operator (26.3, `gpu_operator_…`), so that its dashboards and
//! alerts go on. Nodes are counted when they are asked for; what rounds of the policy controller have found is kept here.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex},
};

use crds::{labels, v1::ClusterPolicySpec};
use k8s_openapi::{apimachinery::pkg::util::intstr::IntOrString, jiff::Timestamp};
use kube::ResourceExt;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

use super::super::validate::{Facts, Host, NVIDIADrivers, OpenShift, uses_objects};
use crate::{
    operator::{transition::rules::Share, world::World},
    telemetry::{Described, Unit},
};

/// In the order of the values in [`Peer::encode`].
pub(super) const GAUGES: &[Described] = &[
    Described::gauge("gpu_operator_gpu_nodes_total", &[], Unit::Count, "Nodes with GPUs"),
    Described::gauge(
        "gpu_operator_reconciliation_last_success_ts_seconds",
        &[],
        Unit::Time,
        "When the policy was last found ready",
    ),
    Described::gauge(
        "gpu_operator_reconciliation_status",
        &[],
        Unit::Code,
        "1 ready, 0 not ready, -1 no ClusterPolicy, -2 the last round failed or none has been",
    ),
    Described::gauge("gpu_operator_reconciliation_has_nfd_labels", &[], Unit::Flag, "1 if a node has labels of NFD"),
    Described::gauge(
        "gpu_operator_openshift_driver_toolkit_enabled",
        &[],
        Unit::Code,
        "1 if OpenShift's driver toolkit builds drivers, -1 if it is asked for and cannot, 0 if it is not asked for",
    ),
    Described::gauge(
        "gpu_operator_openshift_driver_toolkit_nfd_too_old",
        &[],
        Unit::Flag,
        "1 if it is asked for and NFD does not say a node's version of Red Hat CoreOS",
    ),
    Described::gauge(
        "gpu_operator_openshift_driver_toolkit_imagestream_missing",
        &[],
        Unit::Flag,
        "1 if it is asked for and its ImageStream is not there",
    ),
    Described::gauge(
        "gpu_operator_openshift_driver_toolkit_rhcos_tags_missing",
        &[],
        Unit::Flag,
        "1 if it is asked for and has no image for a node's version of Red Hat CoreOS",
    ),
    Described::gauge(
        "gpu_operator_openshift_driver_toolkit_imagestream_broken",
        &[],
        Unit::Flag,
        "1 if it is asked for and its ImageStream names no image",
    ),
    Described::gauge("gpu_operator_driver_auto_upgrade_enabled", &[], Unit::Flag, "1 if drivers are to be upgraded"),
    Described::gauge(
        "gpu_operator_nodes_upgrades_in_progress",
        &[],
        Unit::Count,
        "Nodes whose driver is being upgraded",
    ),
    Described::gauge("gpu_operator_nodes_upgrades_done", &[], Unit::Count, "Nodes whose driver is up to date"),
    Described::gauge("gpu_operator_nodes_upgrades_failed", &[], Unit::Count, "Nodes whose driver upgrade has failed"),
    Described::gauge(
        "gpu_operator_nodes_upgrades_available",
        &[],
        Unit::Count,
        "Nodes that could begin with their upgrade now",
    ),
    Described::gauge("gpu_operator_nodes_upgrades_pending", &[], Unit::Count, "Nodes that wait for their upgrade"),
];
pub(super) const COUNTERS: &[Described] = &[
    Described::counter("gpu_operator_reconciliation", &[], "Rounds of the policy controller"),
    Described::counter("gpu_operator_reconciliation_failed", &[], "Rounds that ended in an error"),
];

/// NFD's labels all begin with this.
const NFD: &str = "feature.node.kubernetes.io/";

/// What a round of the policy controller has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    Ready,
    NotReady,
    /// No ClusterPolicy, or none that decodes.
    NoPolicy,
    Failed,
}

impl Round {
    /// The peer's codes.
    fn code(self) -> i64 {
        match self {
            Self::Ready => 1,
            Self::NotReady => 0,
            Self::NoPolicy => -1,
            Self::Failed => -2,
        }
    }
}

#[derive(Clone)]
pub struct Peer {
    world: World,
    known: Arc<Mutex<Known>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Known {
    last: Option<Round>,
    /// Seconds since 1970.
    last_success: i64,
    rounds: u64,
    failed: u64,
    toolkit: Toolkit,
    upgrades: Option<Upgrades>,
}

/// How drivers may be upgraded.
#[derive(Clone, Debug, PartialEq)]
struct Upgrades {
    /// Nodes at once; 0 is no limit.
    parallel: u64,
    unavailable: IntOrString,
}

/// How OpenShift's driver toolkit is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Toolkit {
    #[default]
    NotAsked,
    Asked {
        lacks: BTreeSet<Lack>,
    },
}

/// What keeps it from building, as the peer counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lack {
    /// NFD does not say a node's version of Red Hat CoreOS.
    NfdTooOld,
    StreamMissing,
    /// It names no image.
    StreamBroken,
    /// It has no image for a node's version: its driver is built another way.
    Tags,
}

/// Nodes by how far they are with a driver upgrade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Nodes {
    in_progress: i64,
    done: i64,
    failed: i64,
    available: i64,
    pending: i64,
}

impl Peer {
    pub fn new(world: World) -> Self {
        Self { world, known: Arc::default() }
    }

    pub fn count(&self, round: Round) {
        let mut known = self.known.lock().expect("metrics lock should not be poisoned");
        known.last = Some(round);
        known.rounds += 1;
        match round {
            Round::Ready => known.last_success = Timestamp::now().as_second(),
            Round::Failed => known.failed += 1,
            Round::NotReady | Round::NoPolicy => {}
        }
    }

    pub fn learn(&self, spec: &ClusterPolicySpec, facts: &Facts) {
        let mut known = self.known.lock().expect("metrics lock should not be poisoned");
        known.upgrades = upgrades(spec, facts.nvidia_drivers.as_ref());
        known.toolkit = facts.openshift().map(|openshift| toolkit(spec, openshift, &facts.hosts)).unwrap_or_default();
    }
}

/// Of several objects that bring drivers the widest limits.
fn upgrades(spec: &ClusterPolicySpec, drivers: Option<&NVIDIADrivers>) -> Option<Upgrades> {
    if !uses_objects(spec) {
        let policy = &spec.driver.upgrade_policy;
        let limits =
            || Upgrades { parallel: policy.max_parallel_upgrades, unavailable: policy.max_unavailable.clone() };
        return policy.auto_upgrade.then(limits);
    }
    let policies = drivers?.all.iter().map(|driver| &driver.spec.upgrade_policy).filter(|policy| policy.auto_upgrade);
    let policy = policies.max_by_key(|policy| (policy.max_parallel_upgrades == 0, policy.max_parallel_upgrades))?;
    Some(Upgrades { parallel: policy.max_parallel_upgrades, unavailable: policy.max_unavailable.clone() })
}

fn toolkit(spec: &ClusterPolicySpec, openshift: &OpenShift, hosts: &BTreeSet<Host>) -> Toolkit {
    let requested = spec.operator.use_ocp_driver_toolkit.unwrap_or(false) && spec.driver.component.is_enabled(true);
    if !requested {
        return Toolkit::NotAsked;
    }
    let mut versions = hosts.iter().filter_map(|host| host.rhcos.as_ref());
    let lacks = [
        (Lack::NfdTooOld, hosts.iter().any(|host| host.rhcos.is_none())),
        (Lack::StreamMissing, !openshift.stream),
        (Lack::StreamBroken, openshift.stream && openshift.toolkits.is_empty()),
        (Lack::Tags, openshift.stream && versions.any(|version| !openshift.toolkits.contains_key(version))),
    ];
    Toolkit::Asked { lacks: lacks.into_iter().filter(|(_, is)| *is).map(|(lack, _)| lack).collect() }
}

impl Toolkit {
    /// 1 where it builds, -1 where it cannot.
    fn enabled(&self) -> i64 {
        match self {
            Self::NotAsked => 0,
            Self::Asked { lacks } if lacks.iter().all(|lack| *lack == Lack::Tags) => 1,
            Self::Asked { .. } => -1,
        }
    }

    fn lacks(&self, what: Lack) -> i64 {
        match self {
            Self::NotAsked => 0,
            Self::Asked { lacks } => lacks.contains(&what).into(),
        }
    }
}

/// From the values of the state label on nodes; `gpu_nodes` is what shares are of.
fn nodes<'a>(states: impl Iterator<Item = &'a str>, limits: Option<&Upgrades>, gpu_nodes: usize) -> Nodes {
    let mut nodes = Nodes::default();
    for state in states {
        match state {
            "upgrade-done" => nodes.done += 1,
            "upgrade-failed" => nodes.failed += 1,
            "upgrade-required" => nodes.pending += 1,
            "" => {}
            _under_way => nodes.in_progress += 1,
        }
    }
    let Some(limits) = limits else { return nodes };
    let free = |limit: usize| i64::try_from(limit).unwrap_or(i64::MAX) - nodes.in_progress;
    let parallel = match usize::try_from(limits.parallel) {
        Ok(0) | Err(_) => nodes.pending,
        Ok(limit) => free(limit),
    };
    // A failed node is out of service too.
    let unavailable = Share::try_from(&limits.unavailable).map_or(0, |share| free(share.of(gpu_nodes)) - nodes.failed);
    nodes.available = parallel.min(unavailable).clamp(0, nodes.pending);
    nodes
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").finish_non_exhaustive()
    }
}

impl Collector for Peer {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let known = self.known.lock().expect("metrics lock should not be poisoned").clone();
        let objects = self.world.gpu_nodes.state();
        let agents = objects.iter().filter_map(|guarded| guarded.0.as_ref().ok()?.status.as_ref()?.agent.as_ref());
        let gpu_nodes = agents.filter(|agent| !agent.gpus.is_empty()).count();
        let all = self.world.nodes.state();
        let has_nfd = all.iter().any(|node| node.labels().keys().any(|key| key.starts_with(NFD)));
        let states = all.iter().filter_map(|node| node.labels().get(labels::UPGRADE_STATE).map(String::as_str));
        let nodes = nodes(states, known.upgrades.as_ref(), gpu_nodes);
        let values = [
            i64::try_from(gpu_nodes).unwrap_or(i64::MAX),
            known.last_success,
            known.last.unwrap_or(Round::Failed).code(),
            has_nfd.into(),
            known.toolkit.enabled(),
            known.toolkit.lacks(Lack::NfdTooOld),
            known.toolkit.lacks(Lack::StreamMissing),
            known.toolkit.lacks(Lack::Tags),
            known.toolkit.lacks(Lack::StreamBroken),
            known.upgrades.is_some().into(),
            nodes.in_progress,
            nodes.done,
            nodes.failed,
            nodes.available,
            nodes.pending,
        ];
        for (metric, value) in GAUGES.iter().zip(values) {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(metric.name, metric.help, None, gauge.metric_type())?)?;
        }
        for (metric, value) in COUNTERS.iter().zip([known.rounds, known.failed]) {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(metric.name, metric.help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crds::v1::ClusterPolicy;
    use serde_json::{Value, json};

    use super::*;

    fn spec(spec: &Value) -> ClusterPolicySpec {
        let policy: ClusterPolicy = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
        policy.spec
    }

    fn limits(parallel: u64, unavailable: &str) -> Upgrades {
        Upgrades { parallel, unavailable: IntOrString::String(unavailable.to_owned()) }
    }

    #[test]
    fn nodes_are_counted_by_their_label_and_those_that_could_begin_by_the_limits() {
        let states = ["upgrade-done", "upgrade-required", "upgrade-required", "upgrade-required", "drain-required"];
        let count = |limits: Option<&Upgrades>| nodes(states.into_iter(), limits, 8);
        let expected = Nodes { in_progress: 1, done: 1, failed: 0, available: 0, pending: 3 };
        assert_eq!(count(None), expected, "nothing is upgraded by itself");
        assert_eq!(count(Some(&limits(1, "100%"))), expected);
        assert_eq!(count(Some(&limits(3, "100%"))).available, 2);
        assert_eq!(count(Some(&limits(0, "100%"))).available, 3, "no limit but the nodes themselves");
        assert_eq!(count(Some(&limits(0, "25%"))).available, 1, "one of two is unavailable already");
        let failed = ["upgrade-failed", "upgrade-required"];
        assert_eq!(nodes(failed.into_iter(), Some(&limits(2, "1")), 8).available, 0);
    }

    #[test]
    fn upgrades_are_on_where_the_policy_or_one_of_the_objects_in_its_place_says_so() {
        let on = json!({"driver": {"upgradePolicy": {"autoUpgrade": true, "maxParallelUpgrades": 3}}});
        assert_eq!(upgrades(&spec(&on), None).map(|limits| limits.parallel), Some(3));
        assert_eq!(upgrades(&spec(&json!({})), None), None);
        let by_objects = spec(&json!({"driver": {"useNvidiaDriverCRD": true, "upgradePolicy": {"autoUpgrade": true}}}));
        assert_eq!(upgrades(&by_objects, Some(&NVIDIADrivers::default())), None);
        let driver = |on: bool, parallel: u64| {
            let policy = json!({"autoUpgrade": on, "maxParallelUpgrades": parallel});
            serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"driverType": "gpu", "image": "i", "upgradePolicy": policy}})).unwrap()
        };
        let drivers =
            NVIDIADrivers { all: vec![driver(true, 2), driver(true, 4), driver(false, 9)], ..NVIDIADrivers::default() };
        assert_eq!(upgrades(&by_objects, Some(&drivers)).map(|limits| limits.parallel), Some(4));
    }

    #[test]
    fn the_toolkit_is_enabled_where_it_can_build_and_otherwise_says_what_is_missing() {
        let asks = spec(&json!({"operator": {"use_ocp_driver_toolkit": true}}));
        let host = |rhcos: Option<&str>| Host { rhcos: rhcos.map(str::to_owned), ..Host::default() };
        let hosts: BTreeSet<Host> = [host(Some("416.94.1-0"))].into();
        let toolkits = [("416.94.1-0".to_owned(), "r/dtk@sha256:ab".to_owned())].into();
        let there = OpenShift { stream: true, toolkits, ..OpenShift::default() };
        let lacks = |openshift: &OpenShift, hosts: &BTreeSet<Host>| {
            let toolkit = toolkit(&asks, openshift, hosts);
            let all = [Lack::NfdTooOld, Lack::StreamMissing, Lack::StreamBroken, Lack::Tags];
            (toolkit.enabled(), all.map(|lack| toolkit.lacks(lack)))
        };
        assert_eq!(lacks(&there, &hosts), (1, [0, 0, 0, 0]));
        assert_eq!(toolkit(&spec(&json!({})), &there, &hosts), Toolkit::NotAsked);
        assert_eq!(lacks(&there, &[host(None)].into()), (-1, [1, 0, 0, 0]));
        assert_eq!(lacks(&OpenShift::default(), &hosts), (-1, [0, 1, 0, 0]));
        assert_eq!(lacks(&OpenShift { stream: true, ..OpenShift::default() }, &hosts), (-1, [0, 0, 1, 1]));
        assert_eq!(lacks(&there, &[host(Some("417.1-0"))].into()), (1, [0, 0, 0, 1]));
    }
}
