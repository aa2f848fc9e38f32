//! `gpuvirt uninstall`: the hook that runs before the chart is removed.
//!
//! It refuses while VMs use GPUs, before anything has changed; then it deletes the ClusterPolicies and waits until the
//! operator has brought the nodes back. With a dead operator nobody would do that, so it says so instead of waiting.

use std::{fmt::Write as _, time::Duration};

use crds::{WorkloadMode, labels, v1::ClusterPolicy, v1alpha1::GPUNode};
use k8s_openapi::api::{apps::v1::DaemonSet, coordination::v1::Lease};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::DeserializeGuard,
    runtime::wait::{await_condition, conditions},
};
use serde_json::json;
use tokio::time::timeout;

use crate::cluster::lease;

const GO_ON: &str = "kubectl annotate clusterpolicy --all gpuvirt.io/force-teardown=true";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the cluster cannot be reached, or refuses")]
    Api(#[from] kube::Error),
    #[error("virtual machines use GPUs: {0}; stop them, or go on under them: {GO_ON}")]
    InUse(String),
    #[error(
        "the operator is not running ({0}), so nobody would bring the nodes back: start it again, or go on without it: {GO_ON}"
    )]
    OperatorDead(String),
    #[error("not gone after {} s: {waiting}", waited.as_secs())]
    Timeout { waited: Duration, waiting: String },
}

pub struct Options {
    pub namespace: String,
    pub force: bool,
    pub timeout: Duration,
}

type Policy = DeserializeGuard<ClusterPolicy>;

pub async fn run(client: &Client, options: &Options) -> Result<(), Error> {
    let policies: Api<Policy> = Api::all(client.clone());
    let found = policies.list(&ListParams::default()).await?.items;
    if found.is_empty() {
        tracing::info!("no ClusterPolicy: nothing to bring back");
        return Ok(());
    }
    // `helm uninstall` takes no values: the annotation is how a person says it there.
    let force = options.force || found.iter().all(forced);
    let used = in_use(client).await?;
    if !used.is_empty() && !force {
        return Err(Error::InUse(used.join(", ")));
    }
    let dead = operator_dead(client, &options.namespace).await?;
    if let Some(why) = &dead
        && !force
    {
        return Err(Error::OperatorDead(why.clone()));
    }
    for policy in &found {
        let name = policy.name_any();
        if force {
            let patch = json!({"metadata": {"annotations": {labels::FORCE_TEARDOWN: "true"}}});
            policies.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        }
        policies.delete(&name, &DeleteParams::default()).await?;
        tracing::info!(policy = name, "deleted, waiting until its nodes are brought back");
    }
    if dead.is_some() {
        return without_operator(client, options, &found).await;
    }
    let gone = async {
        for policy in &found {
            let uid = policy.uid().unwrap_or_default();
            // An interrupted watch is begun anew; the timeout around this ends it.
            while await_condition(policies.clone(), &policy.name_any(), conditions::is_deleted(&uid)).await.is_err() {}
        }
    };
    match timeout(options.timeout, gone).await {
        Ok(()) => Ok(()),
        // It may have died since: then nobody is at it.
        Err(_elapsed) => Err(match operator_dead(client, &options.namespace).await? {
            Some(why) => Error::OperatorDead(why),
            None => Error::Timeout { waited: options.timeout, waiting: reasons(&policies).await? },
        }),
    }
}

fn forced(policy: &Policy) -> bool {
    policy.annotations().get(labels::FORCE_TEARDOWN).is_some_and(|value| value == "true")
}

/// What VMs hold, as the agents report it.
async fn in_use(client: &Client) -> Result<Vec<String>, Error> {
    let gpu_nodes: Api<DeserializeGuard<GPUNode>> = Api::all(client.clone());
    let mut used = Vec::new();
    for guarded in gpu_nodes.list(&ListParams::default()).await? {
        let Ok(gpu_node) = guarded.0 else { continue };
        let Some(agent) = gpu_node.status.as_ref().and_then(|s| s.agent.as_ref()) else { continue };
        for gpu in agent.gpus.iter().filter(|gpu| gpu.mode != Some(WorkloadMode::Container)) {
            for holder in gpu.all_holders() {
                used.push(format!(
                    "GPU {} of node {} is held by {} (pid {})",
                    gpu.address,
                    gpu_node.name_any(),
                    holder.command,
                    holder.pid
                ));
            }
        }
    }
    Ok(used)
}

async fn operator_dead(client: &Client, namespace: &str) -> Result<Option<String>, Error> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    Ok(lease::silence(super::LEASE, leases.get_opt(super::LEASE).await?.as_ref()))
}

/// Forced, and nobody there: operands go, GPUs stay as they are, and what is left is said.
async fn without_operator(client: &Client, options: &Options, found: &[Policy]) -> Result<(), Error> {
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), &options.namespace);
    let ours = ListParams::default().labels(labels::POLICY);
    daemon_sets.delete_collection(&DeleteParams::background(), &ours).await?;
    let policies: Api<Policy> = Api::all(client.clone());
    for policy in found {
        let keep: Vec<&String> = policy.finalizers().iter().filter(|f| *f != labels::TEARDOWN_FINALIZER).collect();
        let patch = json!({"metadata": {"finalizers": keep}});
        match policies.patch(&policy.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error.into()),
        }
    }
    tracing::warn!(
        "removed without the operator: GPUs keep the driver that they have, nodes keep their {}* labels, ConfigMaps, Services and RuntimeClasses with label {} stay, and KubeVirt keeps the permittedHostDevices that its annotation {} lists",
        labels::DEPLOY_PREFIX,
        labels::POLICY,
        labels::PERMITTED_HOST_DEVICES
    );
    Ok(())
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
