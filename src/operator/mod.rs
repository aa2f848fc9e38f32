//! The cluster room: it talks to the API server only.
//!
//! ```text
//! Node labels ─┐                      ┌─▶ Node labels (deploy gates)
//! GPUNode ─────┼─▶ node controller ───┼─▶ GPUNode.spec, status.operator
//! operand pods ┤      ▲ mode policy   └─▶ events
//! vGPU layouts ┘      │
//! ClusterPolicy ─┐    │
//! GPUVirtConfig ─┼─▶ policy controller ─▶ DaemonSets, ConfigMaps, status
//! KubeVirt ──────┘          └─ kubevirt ─▶ permittedHostDevices
//! driver pods ─▶ drivers: which are not the newest ─▶ node controller, transition
//! agent pods ──▶ agents: which are not the newest ─▶ one after another
//! GPUNode ───▶ guard: the vGPU host driver's pods, while VMs have vGPUs ─▶ a label on the pod
//! VMIs ─────▶ vmi: why one with a GPU does not run ─▶ events
//! ```
//!
//! All of it waits while [`peer`] sees that NVIDIA's operator manages the same cluster.

mod agents;
pub mod definitions;
mod drivers;
mod guard;
mod host;
pub mod kubevirt;
mod latest;
mod named;
pub mod node;
mod owner;
pub mod peer;
mod pod;
mod pod_watches;
pub mod policy;
pub mod selector;
mod spelling;
pub mod transition;
pub mod uninstall;
pub mod vgpu;
pub mod vmi;
mod world;

use std::sync::Arc;

use futures::future::join_all;
use kube::Client;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{Notify, mpsc, watch};

use self::{
    agents::Agents,
    drivers::Drivers,
    guard::Guard,
    kubevirt::Wiring,
    latest::Latest,
    node::{lodgers::Lodgers, pods::NodePods, users::UserNames},
    policy::Installation,
    transition::Transitions,
    vgpu::Layouts,
    vmi::Explainer,
    world::{NodeWork, Wake, World},
};
use crate::{
    cluster::{apply::Applier, events::Events, lease},
    shutdown::Shutdown,
    telemetry::{Described, Doors, Logs, ServeError, Telemetry, Unit},
};

pub const LEASE: &str = "gpuvirt-operator";
const LEADING: Described =
    Described::gauge("gpuvirt_operator_leading", &[], Unit::Flag, "Whether this replica holds the lease");

/// For the reference.
#[cfg(test)]
pub(crate) const METRICS: &[&[Described]] = &[&[LEADING], transition::METRICS];

#[derive(Clone, Debug)]
pub struct Config {
    pub installation: Installation,
    /// Distinguishes replicas: the pod's name.
    pub identity: String,
    /// The chart's release, if the chart has installed it.
    pub release: Option<String>,
    pub doors: Doors,
    /// What GPUVirtConfig changes; `None`: somebody else's logs.
    pub logs: Option<Logs>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no connection to the API server can be configured")]
    Client(#[source] kube::Error),
    #[error(transparent)]
    Lease(#[from] lease::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("NVIDIA's GPU Operator has come: {0}; nothing is managed by two, so this one starts anew and waits")]
    Peer(String),
}

/// Runs until shutdown, or until the lease is lost: then the process must exit, since another one writes.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let client = client().await.map_err(Error::Client)?;
    let telemetry = Telemetry::default();
    let leading = telemetry.register(|registry| {
        let leading: Gauge = Gauge::default();
        LEADING.register(registry, &leading);
        leading
    });
    // A replica that waits for the lease is healthy.
    telemetry.set_ready();
    let work = async {
        let namespace = config.installation.namespace.clone();
        let Some(held) = lease::acquire(&client, &namespace, LEASE, &config.identity, &shutdown).await else {
            return Ok(());
        };
        leading.set(1);
        let epoch = held.epoch();
        let held = tokio::select! {
            kept = held.keep(&shutdown) => kept?,
            done = lead(&client, config.clone(), epoch, &telemetry) => return done,
        };
        // Nothing of ours writes any more, so the next holder may.
        held.release().await.map_err(Error::Lease)
    };
    tokio::select! {
        done = work => done,
        error = telemetry.clone().serve(config.doors.clone(), client.clone()) => Err(error.into()),
    }
}

/// Without retries of its own: whoever asks here asks again by itself, and a disruption budget that does not let a pod go
/// (429) is an answer, which must not hold its node's work for minutes.
async fn client() -> Result<Client, kube::Error> {
    let mut config = kube::Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.default_retry = false;
    Client::try_from(config)
}

/// Everything that writes, while the lease is held and nobody else manages the cluster.
async fn lead(client: &Client, config: Config, epoch: i64, telemetry: &Telemetry) -> Result<(), Error> {
    let events = Events::new(client.clone(), "gpuvirt-operator", &config.identity);
    let (sight, follow) = peer::Sight::new(client);
    let work = async {
        sight.until_absent(client, &events).await;
        tokio::select! {
            found = sight.until_present() => Err(Error::Peer(found.join("; "))),
            () = manage(client, config, epoch, telemetry, events.clone()) => Ok(()),
        }
    };
    tokio::select! {
        done = work => done,
        _ = join_all(follow) => Ok(()),
    }
}

async fn manage(client: &Client, config: Config, epoch: i64, telemetry: &Telemetry, events: Events) {
    let (nodes_tx, nodes_rx) = mpsc::unbounded_channel();
    let wake = Wake {
        nodes: nodes_tx,
        policy: Arc::new(Notify::new()),
        gpu_nodes: Arc::new(Notify::new()),
        guard: Arc::new(Notify::new()),
        drivers: Arc::new(Notify::new()),
        agents: Arc::new(Notify::new()),
    };
    let (world, mut follow) = World::new(client, &config.installation.namespace, &wake);
    let (wiring, follow_kubevirt) = Wiring::new(client, events.clone(), &wake.policy);
    follow.extend(follow_kubevirt);
    let (nvidia_drivers, follow_drivers) = policy::NVIDIADriverWatch::new(client, &wake.policy);
    follow.push(follow_drivers);
    let (openshift, follow_openshift) = policy::OpenShiftWatch::new(client, &wake.policy);
    follow.push(follow_openshift);
    let instances = Arc::default();
    let (explainer, follow_instances) = Explainer::new(client, &world, events.clone(), &wake, &instances);
    follow.push(follow_instances);
    let (guard, follow_host_drivers) = Guard::new(client, &config.installation.namespace, &world, &wake);
    follow.push(follow_host_drivers);
    let mut follow = join_all(follow);
    // Before the first list nothing is known, and "nothing there" would be acted upon.
    tokio::select! {
        filled = world.filled() => if filled.is_err() { return },
        _ = &mut follow => return,
    }
    let metrics = telemetry.register(policy::Metrics::register);
    let peer = policy::PeerMetrics::new(world.clone());
    let of_transitions = telemetry.register(|registry| {
        registry.register_collector(Box::new(peer.clone()));
        transition::Metrics::register(registry, world.transitions.clone())
    });
    let epoch = epoch.max(world.highest_epoch() + 1);
    let (policy_tx, policy_rx) = watch::channel(None);
    let namespace = config.installation.namespace.as_str();
    let drivers = Arc::new(Drivers::new(client, namespace, &world, &wake));
    let agents = Arc::new(Agents::new(client, namespace, &world, &wake));
    let node_context = Arc::new(node::Context {
        client: client.clone(),
        world: world.clone(),
        pods: NodePods::new(client.clone(), namespace, wake.clone()),
        lodgers: Lodgers::new(client.clone(), wake.clone()),
        drivers: drivers.clone(),
        users: UserNames::new(client.clone()),
        instances,
        layouts: Layouts::new(client.clone(), config.installation.namespace.clone(), wake.clone()),
        transitions: Transitions::new(
            client,
            namespace,
            &world,
            drivers.clone(),
            events.clone(),
            &wake,
            of_transitions,
        ),
        events: events.clone(),
        latest: Latest::default(),
        epoch,
        policy: policy_rx,
    });
    let policy_context = Arc::new(policy::Context {
        client: client.clone(),
        world: world.clone(),
        applier: Applier::new(client.clone(), config.installation.namespace.clone()),
        events,
        pods: policy::Context::pods(client, &config.installation.namespace),
        drivers: drivers.clone(),
        agents: agents.clone(),
        due: wake.policy.clone(),
        metrics,
        peer,
        release: config.release,
        logs: config.logs,
        installation: config.installation,
        schema: policy::Context::schema_verdict(client).await,
        kubevirt: wiring,
        runtimes: policy::Runtimes::default(),
        nvidia_drivers,
        openshift,
        windows: policy::LastWindows::default(),
        node_policy: policy_tx,
    });
    wake.policy.notify_one();
    wake.drivers.notify_one();
    wake.agents.notify_one();
    tokio::join!(
        follow,
        policy::run(policy_context, || wake.node(NodeWork::All)),
        node::run(node_context, nodes_rx),
        explainer.run(),
        guard.run(),
        drivers.run(),
        agents.run(),
    );
}
