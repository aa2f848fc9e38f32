//! The node controller: one node's labels and its `GPUNode`, whenever either moves.
//!
//! [`decide`] says what to write; this file reads, writes and tells.

mod claims;
mod course;
pub mod decide;
pub mod gates;
pub mod lodgers;
pub mod mode;
pub mod pods;
mod preflight;
pub mod readiness;
mod report;
#[cfg(test)]
mod tests;
pub mod upgrade;
pub mod users;
mod vgpus;

pub use self::preflight::{Blocked, Findings, InUse, Who};

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crds::{
    labels,
    v1alpha1::{GPUNode, GPUNodeSpec, OperatorStatus},
};
use futures::{Stream, StreamExt, stream};
use k8s_openapi::{
    api::core::v1::{Node, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::{
        controller::{self, Action, ReconcileRequest, applier},
        reflector::ObjectRef,
    },
};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;

use self::{
    decide::{Decision, Observed, Order, decide, standing},
    lodgers::Lodgers,
    mode::NodePolicy,
    pods::NodePods,
    users::{UserNames, Users},
};
use super::{
    drivers::{Drivers, NodeDriver, asked},
    latest::Latest,
    transition::{self, Asks, Leave, Transitions, Underway},
    vgpu::Layouts,
    vmi::Instances,
    world::{NodeWork, World},
};
use crate::cluster::{events::Events, gone, merges};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("labels and annotations of node {node} cannot be patched")]
    PatchNode { node: String, source: Box<kube::Error> },
    #[error("GPUNode {node} cannot be applied")]
    ApplyGPUNode { node: String, source: Box<kube::Error> },
    #[error(transparent)]
    Transition(#[from] transition::Error),
}

/// Several nodes at a time, one piece of work a node.
const CONCURRENCY: u16 = 16;
const RETRY: Duration = Duration::from_secs(5);
/// Between two looks at claims that a change waits for: nothing tells of their end.
const CLAIMS: Duration = Duration::from_secs(10);

pub struct Context {
    pub client: Client,
    pub world: World,
    pub pods: NodePods,
    pub lodgers: Lodgers,
    pub drivers: Arc<Drivers>,
    pub users: UserNames,
    pub instances: Arc<Instances>,
    pub layouts: Layouts,
    pub transitions: Transitions,
    pub events: Events,
    /// What this controller wrote last.
    pub latest: Latest<GPUNode>,
    pub epoch: i64,
    /// The active policy; without one nodes are left alone.
    pub policy: watch::Receiver<Option<NodePolicy>>,
}

type NodeMeta = PartialObjectMeta<Node>;

/// Runs until the stream of work ends.
pub async fn run(context: Arc<Context>, work: mpsc::UnboundedReceiver<NodeWork>) {
    let store = context.world.nodes.clone();
    let config = controller::Config::default().concurrency(CONCURRENCY);
    let queue = queue(&context, work);
    let reconcile = |node, context| Box::pin(reconcile(node, context));
    applier(reconcile, retry, context, store, queue, config)
        .for_each(|result| async move {
            if let Err(error) = result {
                tracing::debug!(%error, "node not reconciled");
            }
        })
        .await;
}

fn queue(
    context: &Arc<Context>,
    work: mpsc::UnboundedReceiver<NodeWork>,
) -> impl Stream<Item = Result<ReconcileRequest<NodeMeta>, std::convert::Infallible>> + use<> {
    let world = context.world.clone();
    UnboundedReceiverStream::new(work).flat_map(move |work| {
        let names: Vec<String> = match work {
            NodeWork::One(name) => vec![name],
            NodeWork::All => world.nodes.state().iter().map(|node| node.name_any()).collect(),
        };
        stream::iter(names.into_iter().map(|name| Ok(ObjectRef::<NodeMeta>::new(&name).into())))
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the applier's signature")]
fn retry(node: Arc<NodeMeta>, error: &Error, _: Arc<Context>) -> Action {
    tracing::warn!(node = node.name_any(), error = crate::chain(error), "node not reconciled, trying again");
    Action::requeue(RETRY)
}

async fn reconcile(node: Arc<NodeMeta>, context: Arc<Context>) -> Result<Action, Error> {
    let Some(policy) = context.policy.borrow().clone() else {
        return Ok(Action::await_change());
    };
    let name = node.name_any();
    let guarded = context.world.gpu_node(&name);
    let gpu_node = match guarded.as_deref().map(|guard| &guard.0) {
        None => None,
        Some(Ok(watched)) => context.latest.of(&name, Some(watched)),
        Some(Err(invalid)) => {
            tracing::warn!(node = name, error = %invalid, "GPUNode does not decode: the node is left alone");
            return Ok(Action::await_change());
        }
    };
    let gpu_node = gpu_node.as_deref();
    let pods = context.pods.get(&name);
    let changes = mode::changes(node.labels(), &policy, gpu_node) || context.transitions.renewal(&name).is_some();
    let (users, all_named) = users(&context, &name, gpu_node, changes).await;
    let layouts = policy.vgpu.as_ref().and_then(|source| context.layouts.get(source));
    let observed = Observed {
        name: &name,
        labels: node.labels(),
        gpu_node,
        policy: &policy,
        pods: pods.as_deref(),
        users: &users,
        layouts: layouts.as_deref(),
        leave: &Leave::Free,
        upgrade: None,
        epoch: context.epoch,
    };
    let driver = context.drivers.of(&name, node.labels());
    if matches!(driver, NodeDriver::Settled { .. }) && !asked(node.annotations()).is_empty() {
        context.drivers.wake();
    }
    let lodgers = context.lodgers.get(&name);
    let under_way = context.transitions.renewal(&name);
    let ask = upgrade::ask(&observed, &driver, lodgers.as_deref(), node.annotations(), under_way.as_ref());
    let standing = standing(&observed);
    let asks = Asks { mode: standing.as_ref(), driver: &ask };
    let step = context.transitions.step(&node, &asks, &policy.rules).await?;
    let annotation = upgrade::annotation(&observed, &driver, node.annotations());
    let state = upgrade::label(&observed, &driver, &ask, step.upgrade.as_ref());
    let observed = Observed { leave: &step.leave, upgrade: step.upgrade.as_ref(), ..observed };
    let Decision { mut labels, order, watch_pods } = decide(&observed);
    labels.extend(state);
    match step.upgrade.as_ref().is_some_and(Underway::looks) {
        true => context.lodgers.watch(&name),
        false => context.lodgers.forget(&name),
    }
    if watch_pods {
        context.pods.watch(&name);
    } else {
        context.pods.forget(&name);
    }
    patch(&context.client, &node, labels, annotation.into_iter().collect()).await?;
    if let (Some(gpu_node), Some(order)) = (gpu_node, order) {
        apply(&context, &node, gpu_node, order, &users).await?;
    }
    let claimed = (changes && !users.claims.is_empty()).then_some(CLAIMS);
    let again = [step.again, (!all_named).then_some(RETRY), claimed].into_iter().flatten().min();
    Ok(again.map_or_else(Action::await_change, Action::requeue))
}

/// And whether all pods have been asked for their VMs.
async fn users(context: &Context, node: &str, gpu_node: Option<&GPUNode>, all: bool) -> (Users, bool) {
    let Some(agent) = gpu_node.and_then(|node| node.status.as_ref()).and_then(|status| status.agent.as_ref()) else {
        return (Users::default(), true);
    };
    let (users, all_named) = context.users.of(node, agent, all).await;
    let blockers = users.list.iter().filter_map(|user| context.instances.blocks_drain(user.vmi.as_deref()?)).collect();
    (Users { blockers, ..users }, all_named)
}

/// What to set, and to remove (`None`).
type Changes = BTreeMap<String, Option<String>>;

/// By merge patch with the UID: an apply to a node that is gone would create it.
async fn patch(client: &Client, node: &NodeMeta, labels: Changes, annotations: Changes) -> Result<(), Error> {
    if labels.is_empty() && annotations.is_empty() {
        return Ok(());
    }
    let nodes: Api<NodeMeta> = Api::all(client.clone());
    let patch = json!({"metadata": {"uid": node.uid(), "labels": labels, "annotations": annotations}});
    match nodes.patch_metadata(&node.name_any(), &merges(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(Error::PatchNode { node: node.name_any(), source: Box::new(source) }),
    }
}

async fn apply(
    context: &Context,
    node: &NodeMeta,
    gpu_node: &GPUNode,
    order: Order,
    users: &Users,
) -> Result<(), Error> {
    let name = node.name_any();
    let api: Api<GPUNode> = Api::all(context.client.clone());
    let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
    let old = gpu_node.status.as_ref().and_then(|status| status.operator.as_ref());
    let now = Time(Timestamp::now());
    let status = report::status(old, &order, users, &name, gpu_node.metadata.generation, &now);
    let failed = |source| Error::ApplyGPUNode { node: name.clone(), source: Box::new(source) };

    // The status first: what it says of the mode that was served last must outlive a crash between the two writes.
    if old != Some(&status) {
        let patch = status_patch(gpu_node, &status);
        match api.patch_status(&name, &params, &Patch::Apply(&patch)).await {
            Ok(written) => context.latest.written(written),
            Err(error) if gone(&error) => return Ok(()),
            Err(source) => return Err(failed(source)),
        }
        if status.ready == "True" && old.is_none_or(|old| old.ready != status.ready) {
            context.transitions.wake_next(&name);
        }
        let about = reference(node);
        for notice in report::notices(old, &order, &name) {
            context.events.publish(&notice, &about).await;
        }
    }
    if same_order(&gpu_node.spec, &order.spec) && owned(gpu_node, node) {
        return Ok(());
    }
    let patch = spec_patch(gpu_node, node, &order.spec);
    match api.patch(&name, &params, &Patch::Apply(&patch)).await {
        Ok(written) => {
            context.latest.written(written);
            Ok(())
        }
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(failed(source)),
    }
}

/// A new epoch alone asks nothing of an agent.
fn same_order(old: &GPUNodeSpec, new: &GPUNodeSpec) -> bool {
    *old == GPUNodeSpec { epoch: old.epoch, ..new.clone() }
}

fn owned(gpu_node: &GPUNode, node: &NodeMeta) -> bool {
    gpu_node.owner_references().iter().any(|owner| Some(&owner.uid) == node.meta().uid.as_ref())
}

fn spec_patch(gpu_node: &GPUNode, node: &NodeMeta, spec: &GPUNodeSpec) -> serde_json::Value {
    json!({
        "apiVersion": GPUNode::api_version(&()),
        "kind": GPUNode::kind(&()),
        "metadata": {
            "name": node.name_any(),
            "uid": gpu_node.uid(),
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node.name_any(), "uid": node.uid()}],
        },
        "spec": spec,
    })
}

fn status_patch(gpu_node: &GPUNode, status: &OperatorStatus) -> serde_json::Value {
    json!({
        "apiVersion": GPUNode::api_version(&()),
        "kind": GPUNode::kind(&()),
        "metadata": {"name": gpu_node.name_any(), "uid": gpu_node.uid()},
        "status": {"operator": status},
    })
}

pub fn reference(node: &NodeMeta) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.name_any()),
        uid: node.uid(),
        ..ObjectReference::default()
    }
}
