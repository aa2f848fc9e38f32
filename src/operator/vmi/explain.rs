//! Why an instance that asks for GPUs does not run, and the next step. Pure.

use std::collections::BTreeSet;

use crds::v1alpha1::GPUNode;
use kube::ResourceExt;
use serde::Serialize;

use super::{
    instance::{Instance, Progress},
    layouts,
    supply::{self, Standing},
};
use crate::operator::{
    kubevirt::{self, Permitted},
    spelling,
};

/// What is known when the question is asked.
pub struct Facts<'a> {
    pub instance: &'a Instance,
    pub gpu_nodes: &'a [GPUNode],
    /// What the object that counts permits; `None` if there is none, or it could not be read.
    pub permitted: Option<&'a Permitted>,
    /// What the operator says of permitting GPUs (`KubeVirtWired`), if it is not content.
    pub complaint: Option<&'a str>,
    pub launcher: Option<&'a Launcher>,
}

/// The instance's pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launcher {
    pub name: String,
    pub node: String,
    pub phase: String,
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Reason {
    Runs,
    Starting,
    Ended,
    NoGPURequested,
    GPUNotPermitted,
    GPUNameUnknown,
    NoNodeHasGPU,
    GPUInUse,
    NodeInTransition,
    GPUUnhealthy,
    /// A node was to have such vGPUs, and its layout failed.
    VGPULayoutFailed,
    /// The node's kubelet refused the pod, as a rule because the agent refused the device.
    RefusedByNode,
    /// Its GPUs are there: something else keeps it.
    NotTheGPU,
}

impl Reason {
    /// One CamelCase word, as events have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Runs => "Runs",
            Self::Starting => "Starting",
            Self::Ended => "Ended",
            Self::NoGPURequested => "NoGPURequested",
            Self::GPUNotPermitted => "GPUNotPermitted",
            Self::GPUNameUnknown => "GPUNameUnknown",
            Self::NoNodeHasGPU => "NoNodeHasGPU",
            Self::GPUInUse => "GPUInUse",
            Self::NodeInTransition => "NodeInTransition",
            Self::GPUUnhealthy => "GPUUnhealthy",
            Self::VGPULayoutFailed => "VGPULayoutFailed",
            Self::RefusedByNode => "RefusedByNode",
            Self::NotTheGPU => "NotTheGPU",
        }
    }

    /// Whether a GPU keeps the instance from running.
    pub fn is_about_gpus(self) -> bool {
        match self {
            Self::GPUNotPermitted
            | Self::GPUNameUnknown
            | Self::NoNodeHasGPU
            | Self::GPUInUse
            | Self::NodeInTransition
            | Self::GPUUnhealthy
            | Self::VGPULayoutFailed
            | Self::RefusedByNode => true,
            Self::Runs | Self::Starting | Self::Ended | Self::NoGPURequested | Self::NotTheGPU => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// `namespace/name`.
    pub vmi: String,
    pub reason: Reason,
    /// What is so, and the next step.
    pub message: String,
    pub requests: Vec<Request>,
    /// Why a drain of its node would wait for it without end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks_drain: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    pub resource: String,
    pub count: usize,
    /// Nodes that have GPUs of this name.
    pub nodes: Vec<NodeSupply>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSupply {
    pub node: String,
    pub mode: String,
    pub free: usize,
    pub all: usize,
    /// `0000:43:00.0 by VM vms/a`.
    pub users: Vec<String>,
}

/// The kubelet's word for a pod that a device plugin refused, among others (`pkg/kubelet/lifecycle`).
const REFUSED: &str = "UnexpectedAdmissionError";
/// Nodes in one message; all are in the table.
const NAMED: usize = 5;

pub fn explain(facts: &Facts<'_>) -> Explanation {
    let instance = facts.instance;
    let (reason, message) = why(facts);
    Explanation {
        vmi: instance.key(),
        reason,
        message,
        requests: instance.asks.iter().map(|(resource, count)| request(facts, resource, *count)).collect(),
        blocks_drain: blocks_drain(instance),
    }
}

/// Whether an instance asks for something that is ours to explain.
pub fn concerns_us(instance: &Instance, names: &BTreeSet<&str>) -> bool {
    instance.asks.keys().any(|resource| is_ours(resource, names))
}

fn is_ours(resource: &str, names: &BTreeSet<&str>) -> bool {
    names.contains(resource)
        || resource.starts_with("nvidia.com/")
        || spelling::nearest(resource, names.iter().copied()).is_some()
}

/// A VM with a passthrough GPU never migrates (KubeVirt: `HostDeviceNotLiveMigratable`).
pub fn blocks_drain(instance: &Instance) -> Option<String> {
    let waits = instance.live_migrate && !instance.asks.is_empty() && instance.progress == Progress::Runs;
    waits.then(|| {
        format!(
            "VM {} has evictionStrategy LiveMigrate and a GPU, with which it cannot migrate: a drain of its node waits until the VM is stopped; set evictionStrategy: None on the VM (without a strategy of its own it starts with KubeVirt's spec.configuration.evictionStrategy) and start it anew, and a drain shuts it down",
            instance.key()
        )
    })
}

fn why(facts: &Facts<'_>) -> (Reason, String) {
    let instance = facts.instance;
    if instance.asks.is_empty() {
        return (Reason::NoGPURequested, "it asks for no GPU and no host device by name".to_owned());
    }
    if !concerns_us(instance, &supply::names(facts.gpu_nodes)) && instance.progress.waits() {
        let devices: Vec<&str> = instance.asks.keys().map(String::as_str).collect();
        return (Reason::NotTheGPU, format!("it asks for {}, which is no GPU of gpuvirt", devices.join(", ")));
    }
    if let Some(launcher) = facts.launcher.filter(|launcher| launcher.reason == REFUSED) {
        return (Reason::RefusedByNode, refused_by_node(launcher));
    }
    match &instance.progress {
        Progress::Runs => (Reason::Runs, format!("it runs on {}", instance.node.as_deref().unwrap_or("a node"))),
        Progress::Succeeded => (Reason::Ended, "it has ended".to_owned()),
        Progress::Failed => (Reason::Ended, failed(facts.launcher)),
        Progress::Starting => (Reason::Starting, starting(facts.launcher)),
        Progress::Refused(words) => refused(facts, words),
        Progress::Unschedulable(words) => unschedulable(facts, words),
    }
}

fn refused_by_node(launcher: &Launcher) -> String {
    format!(
        "node {} refused its pod {}: {}; delete this instance once that is solved (a VirtualMachine with runStrategy Always makes the next one by itself)",
        launcher.node, launcher.name, launcher.message
    )
}

fn failed(launcher: Option<&Launcher>) -> String {
    match launcher {
        Some(launcher) => {
            let why = [launcher.reason.as_str(), launcher.message.as_str()].join(" ");
            format!(
                "it has failed; its pod {} says: {}",
                launcher.name,
                if why.trim().is_empty() { "nothing" } else { why.trim() }
            )
        }
        None => "it has failed, and its pod has gone: kubectl describe vmi shows its events".to_owned(),
    }
}

fn starting(launcher: Option<&Launcher>) -> String {
    match launcher {
        Some(launcher) => format!("its pod {} is {} on {}", launcher.name, launcher.phase, launcher.node),
        None => "KubeVirt has made no pod of it yet".to_owned(),
    }
}

/// virt-controller has refused to make the pod.
fn refused(facts: &Facts<'_>, words: &str) -> (Reason, String) {
    let of = |resource: &&String| words.contains(&format!("{resource} is not permitted in permittedHostDevices"));
    let Some(resource) = facts.instance.asks.keys().find(of) else {
        return (Reason::NotTheGPU, format!("KubeVirt makes no pod of it: {words}"));
    };
    if let Some(unknown) = unknown(facts, resource) {
        return unknown;
    }
    let message = match (facts.permitted, facts.complaint) {
        (Some(permitted), _) if permits(permitted, resource) => {
            format!("{resource} is permitted by now, and KubeVirt tries again by itself within minutes")
        }
        (_, Some(complaint)) => format!("{resource} is not permitted in KubeVirt, because {complaint}"),
        (permitted, None) => {
            let offered = facts.gpu_nodes.iter().any(|node| supply::offers(node, resource));
            match (offered, permitted) {
                (false, _) => format!(
                    "{resource} is permitted in KubeVirt once a node offers it: {}",
                    nodes(facts, facts.instance).1
                ),
                (true, Some(permitted)) => to_permit(facts, permitted, resource),
                (true, None) => format!(
                    "{resource} is not permitted: enter it in permittedHostDevices of the KubeVirt or HyperConverged object"
                ),
            }
        }
    };
    (Reason::GPUNotPermitted, message)
}

fn permits(permitted: &Permitted, resource: &str) -> bool {
    permitted.unset
        || permitted.entries.iter().any(|entry| !entry.disabled && entry.device.resource == resource)
        || permitted.others.iter().any(|other| other.resource == resource)
}

fn to_permit(facts: &Facts<'_>, permitted: &Permitted, resource: &str) -> String {
    let place = &permitted.place;
    let known = kubevirt::devices(facts.gpu_nodes);
    let entries = known.iter().filter(|device| device.resource == resource);
    let entries =
        entries.map(|device| format!("{} to {}", device.entry(place.dialect), place.list(device.selector.list)));
    let entries: Vec<String> = entries.collect();
    format!("{place} does not permit {resource}: add {}", entries.join(" and "))
}

/// A resource that no GPU is known by.
fn unknown(facts: &Facts<'_>, resource: &str) -> Option<(Reason, String)> {
    let names = supply::names(facts.gpu_nodes);
    if names.contains(resource) || layouts::is_known(facts.gpu_nodes, resource) {
        return None;
    }
    let why = if let Some(meant) = spelling::nearest(resource, names.iter().copied()) {
        format!("no GPU is called {resource}: did you mean {meant}? Change deviceName in the VM's spec")
    } else if names.is_empty() {
        format!("no node has a GPU that VMs could get, so none is called {resource}: see kubectl get gpunodes")
    } else {
        let names: Vec<&str> = names.into_iter().collect();
        format!("no GPU is called {resource}; there are {}", names.join(", "))
    };
    Some((Reason::GPUNameUnknown, why))
}

/// The scheduler finds no node.
fn unschedulable(facts: &Facts<'_>, words: &str) -> (Reason, String) {
    let names = supply::names(facts.gpu_nodes);
    let unknown_one = facts.instance.asks.keys().filter(|r| is_ours(r, &names)).find_map(|r| unknown(facts, r));
    if let Some(unknown) = unknown_one {
        return unknown;
    }
    let (best, message) = nodes(facts, facts.instance);
    let reason = match best {
        Standing::Fits => {
            // Pods that are not started yet have GPUs in the scheduler's books only.
            let counts = facts.instance.asks.keys().any(|resource| words.contains(&format!("Insufficient {resource}")));
            let so = if counts { "which the scheduler does not count as free (yet)" } else { "so it is not the GPU" };
            return (Reason::NotTheGPU, format!("{message}, {so}; the scheduler says: {words}"));
        }
        Standing::InTransition(_) => Reason::NodeInTransition,
        Standing::InUse(_) => Reason::GPUInUse,
        Standing::Unhealthy(_) => Reason::GPUUnhealthy,
        Standing::LayoutFailed(_) => Reason::VGPULayoutFailed,
        Standing::OtherLayout(_) | Standing::OtherMode(_) | Standing::TooFew(_) | Standing::Lacks => {
            Reason::NoNodeHasGPU
        }
    };
    (reason, message)
}

/// The best that any node has to say, and a sentence of those that have something to say.
fn nodes(facts: &Facts<'_>, instance: &Instance) -> (Standing, String) {
    let names = supply::names(facts.gpu_nodes);
    // What is not ours is somebody else's to explain.
    let asks = instance.asks.iter().filter(|(resource, _)| is_ours(resource, &names));
    let asks = asks.map(|(resource, count)| (resource.clone(), *count)).collect();
    let mut standings: Vec<Standing> = facts.gpu_nodes.iter().map(|node| supply::standing(node, &asks)).collect();
    standings.sort();
    let wanted: Vec<String> = asks.iter().map(|(resource, count)| format!("{count} {resource}")).collect();
    let wanted = wanted.join(" and ");
    let mut said: Vec<&str> = standings.iter().filter_map(words).collect();
    let more = said.len().saturating_sub(NAMED);
    said.truncate(NAMED);
    let more = if more > 0 { format!(" … and {more} more nodes") } else { String::new() };
    let said = said.join("; ") + &more;
    let best = standings.into_iter().next().unwrap_or(Standing::Lacks);
    let message = match &best {
        Standing::Fits => {
            let fits = facts.gpu_nodes.iter().filter(|node| supply::standing(node, &asks) == Standing::Fits);
            let fits: Vec<String> = fits.take(NAMED).map(ResourceExt::name_any).collect();
            format!("{wanted} are free on {}", fits.join(", "))
        }
        Standing::InTransition(_) => format!("{wanted}, and the node that has them changes: {said}"),
        Standing::InUse(_) => format!("{wanted}, and too few are free: {said}; one of those VMs has to end first"),
        Standing::Unhealthy(_) => format!("{wanted}, and too few can be given out: {said}"),
        Standing::LayoutFailed(_) => format!("{wanted} could not be made: {said}"),
        Standing::OtherLayout(_) | Standing::OtherMode(_) => format!("no node gives {wanted} to VMs: {said}"),
        Standing::TooFew(_) => format!("no node has {wanted}: {said}"),
        Standing::Lacks => format!("no node has {wanted} together"),
    };
    (best, message)
}

fn words(standing: &Standing) -> Option<&str> {
    match standing {
        Standing::InTransition(words)
        | Standing::InUse(words)
        | Standing::Unhealthy(words)
        | Standing::LayoutFailed(words)
        | Standing::OtherLayout(words)
        | Standing::OtherMode(words)
        | Standing::TooFew(words) => Some(words),
        Standing::Fits | Standing::Lacks => None,
    }
}

fn request(facts: &Facts<'_>, resource: &str, count: usize) -> Request {
    let nodes = facts.gpu_nodes.iter().filter_map(|node| {
        let supply = supply::count(node, resource);
        (supply.all > 0).then(|| NodeSupply {
            node: node.name_any(),
            mode: supply::mode(node).map_or("none", crds::WorkloadMode::as_str).to_owned(),
            free: supply.free,
            all: supply.all,
            users: supply::users(node, resource),
        })
    });
    Request { resource: resource.to_owned(), count, nodes: nodes.collect() }
}
