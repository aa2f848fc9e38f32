//! The policy controller: dereference → validate → build → apply → status.
//!
//! There is one policy at a time, so this is a loop over one piece of work, not a queue.

mod apply;
mod build;
mod config;
mod dereference;
mod facts;
mod failing;
mod image;
mod metrics;
mod nvidia_drivers;
mod openshift;
mod preview;
mod schema;
mod status;
#[cfg(test)]
mod status_tests;
mod teardown;
mod validate;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crds::{
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, ClusterPolicySpec, PolicyState},
    v1alpha1::KubeVirtMode,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt, core::error_boundary::InvalidObject, runtime::watcher};
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};

pub(super) use self::apply::reference as reference_of;
#[cfg(test)]
pub(crate) use self::metrics::ALL as METRICS;
pub use self::{
    build::{AGENT, AgentMetrics, DRIVERS, Installation, VGPU_HOST_DRIVERS},
    config::LastWindows,
    facts::Runtimes,
    failing::{Rank, worst},
    metrics::{Metrics, Peer as PeerMetrics},
    nvidia_drivers::Watched as NVIDIADriverWatch,
    openshift::Watched as OpenShiftWatch,
    preview::{Intended, Seen, host_of, intended},
};
use self::{
    dereference::{Dereferenced, Policies, dereference, policies},
    metrics::Round,
    nvidia_drivers::Listed,
    status::{Facts, Judgement, judge},
    validate::validate,
};
use super::{
    agents::Agents,
    drivers::Drivers,
    kubevirt::{self, Wired, Wiring},
    named::named,
    node::mode::NodePolicy,
    peer,
    pod_watches::PodWatches,
    selector,
    world::World,
};
use crate::{
    cluster::{apply::Applier, events::Events},
    telemetry::Logs,
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Apply(#[from] crate::cluster::apply::Error),
    #[error("status of {kind} {name} cannot be written")]
    Status { kind: &'static str, name: String, source: Box<kube::Error> },
    #[error("Node {name} cannot be read")]
    Node { name: String, source: Box<kube::Error> },
    #[error("ClusterPolicy {name} cannot be given its finalizer")]
    Finalizer { name: String, source: Box<kube::Error> },
    #[error(transparent)]
    KubeVirt(#[from] kubevirt::Error),
    #[error("what is left of ClusterPolicy {policy} cannot be removed")]
    Teardown { policy: String, source: Box<kube::Error> },
}

pub struct Context {
    pub client: Client,
    pub world: World,
    pub applier: Applier,
    pub events: Events,
    pub installation: Installation,
    /// What the served schema lacks, found once at start.
    pub schema: Verdict,
    pub kubevirt: Wiring,
    pub runtimes: Runtimes,
    /// Pods of operands that are not ready.
    pub pods: PodWatches,
    pub drivers: Arc<Drivers>,
    pub agents: Arc<Agents>,
    /// This controller's own call.
    pub due: Arc<Notify>,
    pub metrics: Metrics,
    pub peer: PeerMetrics,
    /// Follow GPUVirtConfig.
    pub logs: Option<Logs>,
    /// Of the chart, if the operator was installed by it.
    pub release: Option<String>,
    pub nvidia_drivers: NVIDIADriverWatch,
    pub openshift: OpenShiftWatch,
    pub windows: LastWindows,
    /// Told to the node controller.
    pub node_policy: watch::Sender<Option<NodePolicy>>,
}

impl Context {
    pub async fn schema_verdict(client: &Client) -> Verdict {
        schema::verdict(client).await
    }

    /// What is looked at of the pods of operands that are not ready.
    pub fn pods(client: &Client, namespace: &str) -> PodWatches {
        PodWatches::new(client.clone(), namespace, failing::slim)
    }
}

/// Changes of one moment (twenty nodes that report at once) are one piece of work.
const SETTLE: Duration = Duration::from_millis(100);
const RETRY: Duration = Duration::from_secs(5);

/// Runs for as long as the process does.
pub async fn run(context: Arc<Context>, nodes_due: impl Fn()) {
    let due = context.due.clone();
    loop {
        let round = reconcile(&context, &nodes_due).await;
        match &round {
            Ok(None) => {}
            Ok(Some(round)) => context.peer.count(*round),
            Err(_) => context.peer.count(Round::Failed),
        }
        if let Err(error) = round {
            tracing::warn!(error = crate::chain(&error), "policy not reconciled, trying again");
            tokio::select! {
                () = sleep(RETRY) => {}
                () = due.notified() => sleep(SETTLE).await,
            }
            continue;
        }
        due.notified().await;
        sleep(SETTLE).await;
    }
}

/// `None`: it is not known yet what there is to go by.
async fn reconcile(context: &Context, nodes_due: &impl Fn()) -> Result<Option<Round>, Error> {
    // Whether a type is there is known a moment after the start, and wakes us then.
    if !(context.openshift.known() && context.nvidia_drivers.known()) {
        return Ok(None);
    }
    let Policies { active, ignored, undecodable } = policies(&context.world);
    for invalid in &undecodable {
        say_undecodable(context, invalid).await?;
    }
    for policy in &ignored {
        let oldest = active.as_ref().map(ResourceExt::name_any).unwrap_or_default();
        ignore(context, policy, &oldest).await?;
    }
    let config = dereference::config(&context.world);
    if let (Some(logs), Ok(config)) = (&context.logs, &config) {
        logs.set(config.logging.of_operator());
    }
    let listed = context.nvidia_drivers.list().await?;
    let drivers = listed.known();
    let node_policy = active.as_ref().map(|policy| {
        let known = config.clone().unwrap_or_default();
        let named = named(&policy.spec, &dereference::maps(&context.world), build::mig_layouts);
        let mut policy = NodePolicy { named, ..validate::node_policy(policy, &known, drivers.as_ref()) };
        context.windows.settle(&mut policy.rules.windows, config.is_ok());
        policy.upgrades.begin_in(&policy.rules.windows);
        policy
    });
    let changed = context.node_policy.send_if_modified(|current| {
        let differs = *current != node_policy;
        current.clone_from(&node_policy);
        differs
    });
    if changed {
        nodes_due();
    }
    match active {
        None => Ok(Some(Round::NoPolicy)),
        Some(policy) if policy.metadata.deletion_timestamp.is_some() => {
            teardown::teardown(context, &policy).await.map(|()| Some(Round::NotReady))
        }
        Some(policy) => serve(context, &policy, &listed).await.map(Some),
    }
}

async fn serve(context: &Context, policy: &ClusterPolicy, listed: &Listed) -> Result<Round, Error> {
    teardown::ensure_finalizer(context, policy).await?;
    let dereferenced = dereference(&context.world);
    let config = dereferenced.config.clone().unwrap_or_default();
    let facts = facts::facts(context, &dereferenced, listed).await?;
    context.peer.learn(&policy.spec, &facts);
    let mut validated = validate(policy, &config, &facts);
    let by_objects = validate::uses_objects(&policy.spec);
    validated.problems.extend(listed.problem(by_objects));
    if let Err(error) = &dereferenced.config {
        validated.problems.push(validate::Problem {
            reason: "InvalidGPUVirtConfig",
            message: format!("GPUVirtConfig default does not decode, its defaults are used: {error}"),
        });
    }
    let operands = build::build(&validated.settings, &context.installation);
    let changing = apply::apply(&context.applier, &operands, &dereferenced).await?;
    let judgement = judged(context, &validated.problems, &operands, &dereferenced, &changing);
    context.metrics.measure(&judgement);
    look_at_pods(context, &operands, &judgement);
    // A config that does not decode may say Off: others' objects are then left as they are.
    let mode = dereferenced.config.as_ref().map_or(KubeVirtMode::Report, |config| config.kubevirt.mode);
    let wiring = context.kubevirt.serve(&dereferenced.gpu_nodes, dereferenced.all_read, mode).await;
    let wired = match &wiring {
        Ok(wired) => wired.clone(),
        Err(error) => Wired::Is(Verdict::no(kubevirt::WIRED, "NotWritten", crate::chain(error))),
    };
    let upgrades = context.node_policy.borrow().as_ref().map(|policy| policy.upgrades.clone()).unwrap_or_default();
    let current = context.drivers.verdict(&upgrades);
    let mut verdicts = vec![judgement.verdict.clone(), status::images_not_used(policy), context.schema.clone()];
    let rollouts = [current, context.agents.verdict()];
    verdicts.extend(rollouts.clone());
    verdicts.extend(wired.verdict().cloned());
    let monitored = validate::monitored(&policy.spec, &facts);
    let unasked = monitored.is_none().then_some(validate::MONITORED);
    verdicts.extend(monitored);
    let silenced: Vec<&str> = wired.silenced().iter().copied().chain(unasked).chain([peer::SOLE]).collect();
    apply::write_policy_status(
        context,
        policy,
        match judgement.verdict.holds {
            true => PolicyState::Ready,
            false => PolicyState::NotReady,
        },
        verdicts,
        &silenced,
    )
    .await?;
    nvidia_drivers::write_statuses(context, listed, by_objects, &validated.asked, &judgement).await?;
    config::report(context, &judgement, &rollouts, &wired).await?;
    let round = if judgement.verdict.holds { Round::Ready } else { Round::NotReady };
    wiring.map(|_| round).map_err(Error::KubeVirt)
}

fn judged(
    context: &Context,
    problems: &[validate::Problem],
    operands: &build::Operands,
    dereferenced: &Dereferenced,
    changing: &BTreeSet<String>,
) -> Judgement {
    let node_labels = dereferenced
        .gpu_nodes
        .iter()
        .filter_map(|gpu_node| {
            let node = context.world.nodes.get(&kube::runtime::reflector::ObjectRef::new(&gpu_node.name_any()))?;
            Some((gpu_node.name_any(), node.labels().clone()))
        })
        .collect();
    let pods: BTreeMap<String, Vec<Arc<Pod>>> = operands
        .daemon_sets
        .iter()
        .filter_map(|set| Some((set.name_any(), context.pods.get(&set.name_any())?)))
        .collect();
    judge(&Facts {
        problems,
        wanted: operands,
        live: &dereferenced.daemon_sets,
        gpu_nodes: &dereferenced.gpu_nodes,
        node_labels: &node_labels,
        pods: &pods,
        changing,
    })
}

/// Only those of operands that are not ready, and only while they are not.
fn look_at_pods(context: &Context, operands: &build::Operands, judgement: &Judgement) {
    let waiting = judgement.operands.iter().filter(|operand| !operand.reason.is_empty() && operand.desired > 0);
    let waiting: BTreeSet<&str> = waiting.map(|operand| operand.name.as_str()).collect();
    for set in operands.daemon_sets.iter().filter(|set| waiting.contains(set.name_any().as_str())) {
        let due = context.due.clone();
        let config = watcher::Config::default().labels(&selector::of_set(set));
        context.pods.watch(&set.name_any(), config, move |_| due.notify_one());
    }
    context.pods.forget_others(&waiting);
}

async fn ignore(context: &Context, policy: &ClusterPolicy, oldest: &str) -> Result<(), Error> {
    if policy.metadata.deletion_timestamp.is_some()
        && policy.finalizers().iter().any(|f| f == labels::TEARDOWN_FINALIZER)
    {
        // It ruled nothing, so nothing has to leave with it.
        return teardown::drop_finalizer(context, policy).await;
    }
    let message = format!("ClusterPolicy {oldest} is older and counts; delete one of the two");
    let verdict = Verdict::no(status::READY, "OlderPolicyCounts", message);
    apply::write_policy_status(context, policy, PolicyState::Ignored, vec![verdict], &[kubevirt::WIRED]).await
}

async fn say_undecodable(context: &Context, invalid: &InvalidObject) -> Result<(), Error> {
    let name = invalid.metadata.name.clone().unwrap_or_default();
    tracing::warn!(name, error = invalid.error, "ClusterPolicy does not decode");
    let stand_in =
        ClusterPolicy { metadata: invalid.metadata.clone(), ..ClusterPolicy::new(&name, ClusterPolicySpec::default()) };
    let verdict = Verdict::no(
        status::READY,
        "Undecodable",
        format!("this ClusterPolicy does not decode and is left alone: {}", invalid.error),
    );
    apply::write_policy_status(context, &stand_in, PolicyState::NotReady, vec![verdict], &[]).await
}
