//! The policy controller: dereference → validate → build → apply → status.
//!
//! There is one policy at a time, so this is a loop over one piece of work, not a queue.

mod apply;
mod build;
mod dereference;
mod facts;
mod image;
mod nvidia_drivers;
mod openshift;
mod schema;
mod status;
#[cfg(test)]
mod status_tests;
mod teardown;
mod validate;

use std::{sync::Arc, time::Duration};

use crds::{
    conditions::Verdict,
    labels,
    v1::{ClusterPolicy, ClusterPolicySpec, PolicyState},
    v1alpha1::KubeVirtMode,
};
use kube::{Client, ResourceExt, core::error_boundary::InvalidObject};
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};

pub use self::{
    build::{AGENT, Installation, VGPU_HOST_DRIVERS},
    facts::Runtimes,
    nvidia_drivers::Watched as NVIDIADriverWatch,
    openshift::Watched as OpenShiftWatch,
};
use self::{
    dereference::{Dereferenced, Policies, dereference, policies},
    nvidia_drivers::Listed,
    status::{Facts, Judgement, judge},
    validate::validate,
};
use super::{
    kubevirt::{self, Wired, Wiring},
    node::mode::NodePolicy,
    world::World,
};
use crate::cluster::{apply::Applier, events::Events};

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
    pub nvidia_drivers: NVIDIADriverWatch,
    pub openshift: OpenShiftWatch,
    /// Told to the node controller.
    pub node_policy: watch::Sender<Option<NodePolicy>>,
}

impl Context {
    pub async fn schema_verdict(client: &Client) -> Verdict {
        schema::verdict(client).await
    }
}

/// Changes of one moment (twenty nodes that report at once) are one piece of work.
const SETTLE: Duration = Duration::from_millis(100);
const RETRY: Duration = Duration::from_secs(5);

/// Runs for as long as the process does.
pub async fn run(context: Arc<Context>, due: Arc<Notify>, nodes_due: impl Fn()) {
    loop {
        if let Err(error) = reconcile(&context, &nodes_due).await {
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

async fn reconcile(context: &Context, nodes_due: &impl Fn()) -> Result<(), Error> {
    // Whether a type is there is known a moment after the start, and wakes us then.
    if !(context.openshift.known() && context.nvidia_drivers.known()) {
        return Ok(());
    }
    let Policies { active, ignored, undecodable } = policies(&context.world);
    for invalid in &undecodable {
        say_undecodable(context, invalid).await?;
    }
    for policy in &ignored {
        let oldest = active.as_ref().map(ResourceExt::name_any).unwrap_or_default();
        ignore(context, policy, &oldest).await?;
    }
    let config = dereference::config(&context.world).unwrap_or_default();
    let listed = context.nvidia_drivers.list().await?;
    let drivers = listed.known();
    let node_policy = active.as_ref().map(|policy| validate::node_policy(policy, &config, drivers.as_ref()));
    let changed = context.node_policy.send_if_modified(|current| {
        let differs = *current != node_policy;
        current.clone_from(&node_policy);
        differs
    });
    if changed {
        nodes_due();
    }
    match active {
        None => Ok(()),
        Some(policy) if policy.metadata.deletion_timestamp.is_some() => teardown::teardown(context, &policy).await,
        Some(policy) => serve(context, &policy, &listed).await,
    }
}

async fn serve(context: &Context, policy: &ClusterPolicy, listed: &Listed) -> Result<(), Error> {
    teardown::ensure_finalizer(context, policy).await?;
    let dereferenced = dereference(&context.world);
    let config = dereferenced.config.clone().unwrap_or_default();
    let facts = facts::facts(context, &dereferenced, listed).await?;
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
    apply::apply(&context.applier, &operands, &dereferenced).await?;
    let judgement = judged(context, &validated.problems, &operands, &dereferenced);
    // A config that does not decode may say Off: others' objects are then left as they are.
    let mode = dereferenced.config.as_ref().map_or(KubeVirtMode::Report, |config| config.kubevirt.mode);
    let wiring = context.kubevirt.serve(&dereferenced.gpu_nodes, dereferenced.all_read, mode).await;
    let wired = match &wiring {
        Ok(wired) => wired.clone(),
        Err(error) => Wired::Is(Verdict::no(kubevirt::WIRED, "NotWritten", crate::chain(error))),
    };
    let mut verdicts = vec![judgement.verdict.clone(), status::images_not_used(policy), context.schema.clone()];
    verdicts.extend(wired.verdict().cloned());
    let monitored = validate::monitored(&policy.spec, &facts);
    let unasked = monitored.is_none().then_some(validate::MONITORED);
    verdicts.extend(monitored);
    let silenced: Vec<&str> = wired.silenced().iter().copied().chain(unasked).collect();
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
    apply::write_config_status(context, &judgement, &wired).await?;
    wiring.map(drop).map_err(Error::KubeVirt)
}

fn judged(
    context: &Context,
    problems: &[validate::Problem],
    operands: &build::Operands,
    dereferenced: &Dereferenced,
) -> Judgement {
    let node_labels = dereferenced
        .gpu_nodes
        .iter()
        .filter_map(|gpu_node| {
            let node = context.world.nodes.get(&kube::runtime::reflector::ObjectRef::new(&gpu_node.name_any()))?;
            Some((gpu_node.name_any(), node.labels().clone()))
        })
        .collect();
    judge(&Facts {
        problems,
        wanted: operands,
        live: &dereferenced.daemon_sets,
        gpu_nodes: &dereferenced.gpu_nodes,
        node_labels: &node_labels,
    })
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
