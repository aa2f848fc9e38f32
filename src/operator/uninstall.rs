//! `gpuvirt uninstall`: the hook that runs before the chart is removed.
//!
//! It refuses while VMs use GPUs, before anything has changed; then it deletes the ClusterPolicies and waits until the
//! operator has brought the nodes back. Where no operator lives it takes the lease and is the operator for that long, so
//! that the order is the same: nodes first, and nothing under a running VM.

mod leftovers;

use std::{fmt::Write as _, time::Duration};

use crds::{WorkloadMode, labels, v1::ClusterPolicy, v1alpha1::GPUNode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::DeserializeGuard,
    runtime::wait::{await_condition, conditions},
};
use serde_json::json;
use tokio::time::timeout;

use super::{LEASE, peer};
use crate::{cluster::lease, shutdown::Shutdown, telemetry::Telemetry};

/// How often a living operator is asked whether it still lives: it may run on a node that is being drained.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
const GO_ON: &str = "kubectl annotate clusterpolicy --all gpuvirt.io/force-teardown=true";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the cluster cannot be reached, or refuses")]
    Api(#[from] kube::Error),
    #[error("virtual machines use GPUs: {0}; stop them, or go on under them: {GO_ON}")]
    InUse(String),
    #[error("this cannot do the operator's work any more")]
    Lease(#[from] lease::Error),
    #[error(transparent)]
    Operator(Box<super::Error>),
    #[error("not gone after {} s: {waiting}", waited.as_secs())]
    Timeout { waited: Duration, waiting: String },
}

pub struct Options {
    /// The operator's, for the case that none lives.
    pub operator: super::Config,
    pub force: bool,
    pub timeout: Duration,
}

type Policy = DeserializeGuard<ClusterPolicy>;

pub async fn run(client: &Client, options: Options) -> Result<(), Error> {
    let policies: Api<Policy> = Api::all(client.clone());
    let gpu_nodes: Api<DeserializeGuard<GPUNode>> = Api::all(client.clone());
    let mut found = policies.list(&ListParams::default()).await?.items;
    // What NVIDIA's operator manages and this one has never touched is none of ours.
    if !peer::look(client).await?.is_empty() {
        found.retain(|policy| policy.finalizers().iter().any(|finalizer| finalizer == labels::TEARDOWN_FINALIZER));
    }
    if found.is_empty() {
        tracing::info!("no ClusterPolicy of ours: nothing to bring back");
        return Ok(());
    }
    // `helm uninstall` takes no values: the annotation is how a person says it there.
    let force = options.force || found.iter().all(forced);
    let nodes: Vec<GPUNode> =
        gpu_nodes.list(&ListParams::default()).await?.into_iter().filter_map(|guarded| guarded.0.ok()).collect();
    let used: Vec<String> = nodes.iter().flat_map(in_use).collect();
    if !used.is_empty() && !force {
        return Err(Error::InUse(used.join(", ")));
    }
    let dead = operator_dead(client, &options.operator.installation.namespace).await?;
    for policy in &found {
        let name = policy.name_any();
        if force {
            let patch = json!({"metadata": {"annotations": {labels::FORCE_TEARDOWN: "true"}}});
            policies.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        }
        policies.delete(&name, &DeleteParams::default()).await?;
        tracing::info!(policy = name, "deleted, waiting until its nodes are brought back");
    }
    let gone = async {
        for policy in &found {
            let uid = policy.uid().unwrap_or_default();
            // An interrupted watch is begun anew; the timeout around this ends it.
            while await_condition(policies.clone(), &policy.name_any(), conditions::is_deleted(&uid)).await.is_err() {}
        }
    };
    let patience = options.timeout;
    let brought_back = async {
        tokio::pin!(gone);
        let mut silence = dead;
        while silence.is_none() {
            if timeout(LOOK_AGAIN, &mut gone).await.is_ok() {
                return Ok(());
            }
            silence = operator_dead(client, &options.operator.installation.namespace).await?;
        }
        tracing::warn!(why = silence, "no operator lives: doing its work until the nodes are brought back");
        in_its_place(client, options.operator, gone).await
    };
    match timeout(patience, brought_back).await {
        Ok(done) => done?,
        Err(_elapsed) => return Err(Error::Timeout { waited: patience, waiting: reasons(&policies).await? }),
    }
    leftovers::forget(client, &nodes).await;
    Ok(())
}

fn forced(policy: &Policy) -> bool {
    policy.annotations().get(labels::FORCE_TEARDOWN).is_some_and(|value| value == "true")
}

/// What VMs hold on a node, as its agent and the operator report it.
fn in_use(gpu_node: &GPUNode) -> Vec<String> {
    let status = gpu_node.status.clone().unwrap_or_default();
    let users = status.operator.map(|operator| operator.users).unwrap_or_default();
    let mut held = Vec::new();
    for gpu in status.agent.iter().flat_map(|agent| &agent.gpus) {
        if gpu.mode == Some(WorkloadMode::Container) {
            continue;
        }
        let user = users.iter().find(|user| user.gpus.contains(&gpu.address));
        let vm = user.and_then(|user| user.vmi.as_deref()).map(|vmi| format!("VM {vmi}, ")).unwrap_or_default();
        let (address, node) = (&gpu.address, gpu_node.name_any());
        held.extend(gpu.all_holders().map(|holder| {
            format!("GPU {address} of node {node} is held by {vm}{} (pid {})", holder.command, holder.pid)
        }));
        // Started, and the device not opened yet.
        if let Some(user) = user.filter(|_| gpu.all_holders().next().is_none()) {
            held.push(format!("GPU {address} of node {node} is given to {vm}pod {}", user.pod));
        }
    }
    held
}

async fn operator_dead(client: &Client, namespace: &str) -> Result<Option<String>, Error> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    Ok(lease::silence(LEASE, leases.get_opt(LEASE).await?.as_ref()))
}

/// The operator's work, until `gone`. By the same lease: one that comes to life meanwhile waits.
async fn in_its_place(client: &Client, config: super::Config, gone: impl Future<Output = ()>) -> Result<(), Error> {
    let (stop, stopped) = Shutdown::manual();
    let namespace = config.installation.namespace.clone();
    let held = lease::acquire(client, &namespace, LEASE, &config.identity, &stopped).await;
    let held = held.expect("nobody else should have the sender of this token");
    let epoch = held.epoch();
    let keep = held.keep(&stopped);
    tokio::pin!(keep);
    // Nobody asks it.
    let telemetry = Telemetry::default();
    tokio::select! {
        lost = &mut keep => return lost.map(drop).map_err(Error::Lease),
        done = super::lead(client, config, epoch, &telemetry) => return done.map_err(|error| Error::Operator(Box::new(error))),
        () = gone => {}
    }
    // The receiver is in `keep`.
    let _ = stop.send(true);
    Ok(keep.await?.release().await?)
}

async fn reasons(policies: &Api<Policy>) -> Result<String, Error> {
    let mut text = String::new();
    for policy in policies.list(&ListParams::default()).await? {
        let name = policy.name_any();
        let Ok(policy) = policy.0 else { continue };
        let conditions = policy.status.map(|status| status.conditions).unwrap_or_default();
        let message = conditions.iter().find(|c| c.type_ == "Ready").map(|c| c.message.as_str());
        // Writing to a string cannot fail.
        let _ = write!(text, "ClusterPolicy {name}: {} ", message.unwrap_or("no condition says why"));
    }
    Ok(text)
}
