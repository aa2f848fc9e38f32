//! The node room: its own `GPUNode`, the kubelet, and the host through the crate `vfio`.
//!
//! ```text
//! GPUNode.spec ─┐
//! uevents, nodes┤          look → plan → execute → look again        ┌─▶ device plugins ─▶ kubelet
//! holders' ends ┼─▶ round ───────────(own thread)────────────────────┼─▶ GPUNode.status.agent
//! allocations ──┤                                                    └─▶ events
//! slow resync ──┤
//! glance ───────┘ (health, which makes no event: only if it differs)
//! ```
//! Ending the agent changes nothing on the host: the next one goes on from the journal.

mod checks;
mod conditions;
mod container_node;
mod desired;
mod dev_nodes;
pub mod device_plugin;
mod health;
mod holders;
mod leave;
pub mod library;
pub(crate) mod metrics;
mod news;
mod objections;
mod offer;
mod own_node;
mod patience;
mod pod_resources;
mod readable;
mod registrations;
mod report;
mod translate;
mod uevent;
pub mod vfio_manager;
mod vgpu_manager;
mod wish;
mod work;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use crds::v1alpha1::{Advertise, GPUNode};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::Client;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until},
};
use vfio::Root;

use self::{
    container_node::ContainerNode,
    desired::Desired,
    dev_nodes::DevNodes,
    device_plugin::{DevicePlugins, Offer},
    health::Ailment,
    holders::HolderEnds,
    metrics::{Metrics, Round},
    news::News,
    offer::Offered,
    own_node::Known,
    pod_resources::Allocations,
    registrations::{News as Registered, Registrations},
    report::Reporter,
    vfio_manager::{Observation, VfioManager},
    wish::Wish,
};
use crate::{
    cluster::events::Events,
    shutdown::Shutdown,
    telemetry::{Doors, Logs, ServeError, Telemetry},
};

#[derive(Clone, Debug)]
pub struct Config {
    pub node: String,
    pub identity: String,
    /// Where the host's `/` is mounted.
    pub host_root: PathBuf,
    /// The kubelet's directory, as the host sees it.
    pub kubelet_root: PathBuf,
    /// Where a driver pod's root is, as the host sees it.
    pub driver_root: PathBuf,
    /// How often the host is looked at when nothing has asked for it; jitter is added.
    pub resync: Duration,
    pub doors: Doors,
    pub logs: Logs,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no connection to the API server can be configured")]
    Client(#[source] kube::Error),
    #[error(transparent)]
    Host(#[from] vfio_manager::Error),
    #[error("host root {root} cannot be opened: mount the host's file system there or set --host-root")]
    Root { root: PathBuf, source: std::io::Error },
    #[error("this program's own file cannot be named")]
    Executable(#[source] std::io::Error),
    #[error("kernel uevents cannot be followed")]
    Uevents(#[source] std::io::Error),
    #[error("device nodes cannot be followed")]
    DeviceNodes(#[source] std::io::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("the thread that works on the host has ended")]
    Worker,
}

/// Events come in bursts (eight GPUs, each unbound and bound): one look for all of them.
const SETTLE: Duration = Duration::from_millis(50);
/// After a boot, how long the API server may be silent before the last order is followed.
const PATIENCE: Duration = Duration::from_secs(30);
/// A pod opens its device some time after it was given it; these looks see it.
const AFTER_ALLOCATION: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(10), Duration::from_secs(30)];
const RETRY: Duration = Duration::from_secs(5);
/// A kubelet that was started anew lists no pod's devices until it has its pods from the API server. So long what pods
/// had before is theirs still, listed or not. (Less than the second of the looks above.)
const KUBELET_SETTLES: Duration = Duration::from_secs(8);
/// See [`only_allocated`]: how often the kubelet is asked, and how often it is looked whether the GPU was opened after all.
const ALLOCATION_POLL: Duration = Duration::from_secs(2);
const LATE_OPENING: Duration = Duration::from_secs(30);

/// Runs until shutdown, or until something ends that the agent cannot be without.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let client = Client::try_default().await.map_err(Error::Client)?;
    let telemetry = Telemetry::default();
    let serve = telemetry.clone().serve(config.doors.clone(), client.clone());
    let due = Arc::new(Notify::new());
    let uevents = uevent::Uevents::open().map_err(Error::Uevents)?;
    let (nodes, changes) = DevNodes::open(&config.host_root).map_err(Error::DeviceNodes)?;
    let agent = Agent::new(client.clone(), &config, due.clone(), nodes, telemetry, &shutdown)?;
    let (node_tx, node_rx) = watch::channel(None);
    tokio::select! {
        ended = agent.run(node_rx, shutdown.clone()) => ended,
        error = changes.notify(due.clone()) => Err(Error::DeviceNodes(error.err().unwrap_or_else(std::io::Error::last_os_error))),
        error = uevents.follow(due) => Err(Error::Uevents(error.err().unwrap_or_else(std::io::Error::last_os_error))),
        () = own_node::follow(client, &config.node, node_tx) => Err(Error::Worker),
        error = serve => Err(error.into()),
    }
}

struct Agent {
    manager: Option<VfioManager>,
    plugins: DevicePlugins,
    reporter: Reporter,
    news: News,
    desired: Desired,
    checks: checks::Files,
    ends: HolderEnds,
    nodes: DevNodes,
    due: Arc<Notify>,
    calls: Calls,
    /// What the kubelet was told last.
    offer: Offer,
    /// Somebody has a GPU and has not opened it, see [`only_allocated`].
    unopened: bool,
    registrations: Registrations,
    /// When there was another kubelet, last.
    reborn: Option<Instant>,
    telemetry: Telemetry,
    logs: Logs,
    metrics: Metrics,
    resync: Duration,
    host_root: PathBuf,
    /// The kubelet's pod-resources socket.
    kubelet: PathBuf,
}

/// What the kubelet does, as far as it lets itself be seen.
#[derive(Clone, Default)]
struct Calls {
    /// It asks for devices.
    allocated: Arc<Notify>,
    /// It has noted which pod has which.
    noted: Arc<Notify>,
}

impl Agent {
    fn new(
        client: Client,
        config: &Config,
        due: Arc<Notify>,
        nodes: DevNodes,
        telemetry: Telemetry,
        shutdown: &Shutdown,
    ) -> Result<Self, Error> {
        let helper = std::env::current_exe().map_err(Error::Executable)?;
        let library = library::NvmlChild::new(helper.clone().into_os_string(), &config.host_root, &config.driver_root);
        let manager = VfioManager::open(&config.host_root, helper, &config.node)?.with_library(Box::new(library));
        let calls = Calls::default();
        let plugins = plugins(config, &calls, &due, shutdown)?;
        let metrics = telemetry.register(|registry| Metrics::register(registry, &config.node));
        Ok(Self {
            manager: Some(manager),
            plugins,
            reporter: Reporter::new(client.clone(), config.node.clone()),
            news: News::new(Events::new(client, "gpuvirt-agent", &config.identity)),
            desired: Desired::below(&config.host_root),
            checks: checks::Files::below(&config.host_root),
            ends: HolderEnds::default(),
            nodes,
            due,
            calls,
            offer: Offer::new(),
            unopened: false,
            registrations: Registrations::default(),
            reborn: None,
            telemetry,
            logs: config.logs.clone(),
            metrics,
            resync: patience::jittered(config.resync, &config.node),
            host_root: config.host_root.clone(),
            kubelet: below(&config.host_root, &config.kubelet_root).join("pod-resources/kubelet.sock"),
        })
    }

    async fn run(mut self, mut node: watch::Receiver<Known>, shutdown: Shutdown) -> Result<(), Error> {
        let mut states = self.plugins.subscribe();
        let started = Instant::now();
        // When to look although nothing has happened.
        let mut next = started;
        let mut after_allocation: Vec<Instant> = Vec::new();
        let mut glances = interval_at(started + health::GLANCE, health::GLANCE);
        glances.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut polls = interval_at(started, ALLOCATION_POLL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let next_look = after_allocation.iter().copied().fold(next, Instant::min);
            tokio::select! {
                () = shutdown.begun() => break,
                changed = node.changed() => if changed.is_err() { return Err(Error::Worker) },
                // The device plugins hear of the shutdown, too, and may be the first to end.
                changed = states.changed() => if changed.is_err() { if shutdown.has_begun() { break } return Err(Error::Worker) },
                () = self.due.notified() => sleep(SETTLE).await,
                _ = glances.tick() => if !self.glance().await? { continue },
                () = self.calls.noted.notified() => if !self.given_anew().await { continue },
                _ = polls.tick(), if self.unopened => if !self.given_anew().await { continue },
                () = self.calls.allocated.notified() => {
                    after_allocation = AFTER_ALLOCATION.map(|after| Instant::now() + after).to_vec();
                    continue;
                }
                () = sleep_until(next_look) => {}
            }
            let known = node.borrow_and_update().clone();
            leave::tell(&known);
            match self.registrations.follow(&states.borrow_and_update()) {
                Registered::Nothing => {}
                news @ (Registered::Registered | Registered::Again) => {
                    after_allocation = AFTER_ALLOCATION.map(|after| Instant::now() + after).to_vec();
                    if news == Registered::Again {
                        self.reborn = Some(Instant::now());
                    }
                }
            }
            let wish = self.wish(known.as_ref(), started);
            let silent = known.is_none();
            let now = Instant::now();
            after_allocation.retain(|look| *look > now);
            next = self.round(known, wish).await?;
            if silent && started + PATIENCE > now {
                next = next.min(started + PATIENCE);
            }
        }
        self.plugins.stop().await;
        leave::at_the_end(&node.borrow(), &self.host_root, self.manager.as_mut(), &self.desired);
        Ok(())
    }

    /// The order in force. While the API server has said nothing since the start: none at first, then the last one.
    fn wish(&mut self, known: Option<&Option<GPUNode>>, started: Instant) -> Wish {
        match known {
            Some(Some(gpu_node)) => {
                self.logs.set(gpu_node.spec.log_level.as_deref());
                if let Err(error) = self.desired.keep(&gpu_node.spec) {
                    tracing::warn!(error = crate::chain(&error), "order not kept for the next boot");
                }
                Wish { spec: gpu_node.spec.clone() }
            }
            // It was deleted, or never was: what was asked for last holds until the operator has made the next order.
            Some(None) => Wish { spec: self.desired.kept().cloned().unwrap_or_default() },
            None if started.elapsed() < PATIENCE => Wish::default(),
            None => match self.desired.read() {
                Ok(Some(spec)) => {
                    tracing::warn!("API server is away: following the last order");
                    Wish { spec }
                }
                Ok(None) => Wish::default(),
                Err(error) => {
                    tracing::warn!(error = crate::chain(&error), "no last order");
                    Wish::default()
                }
            },
        }
    }

    /// One look and what follows from it. Returns when the next one is due at the latest.
    async fn round(&mut self, known: Known, wish: Wish) -> Result<Instant, Error> {
        // What is withdrawn is withdrawn before anything else happens.
        if wish.spec.advertise == Advertise::Withdrawn && known.is_some() {
            self.plugins.offer(Offer::new());
        }
        self.nodes.follow();
        let began = Instant::now();
        let observation = self.look(wish.clone()).await?;
        self.metrics.count(&observation, began.elapsed());
        let offered = offer::offer(&wish, &observation, &self.offer);
        // Before the first order nothing is said to the kubelet: a restarted agent must not take its resources away.
        if known.is_some() || wish.spec.advertise == Advertise::Offered {
            self.offer.clone_from(&offered.offer);
            self.plugins.offer(offered.offer.clone());
        }
        self.checks.keep(&wish, &observation);
        let plugins = self.plugins.subscribe().borrow().clone();
        let users = known.iter().flatten().flat_map(metrics::users);
        self.metrics
            .show(&Round { wish: &wish, observation: &observation, offered: &offered, plugins: &plugins }, users);
        let pids = observation.holders.values().flatten().map(|holder| holder.pid).filter(|pid| *pid > 0);
        self.ends.follow(pids, &self.due);
        let reported = match known {
            Some(Some(gpu_node)) => {
                self.news.tell(&observation.refusals, &offered.ailments, &gpu_node).await;
                self.report(&gpu_node, &wish, &observation, &offered).await
            }
            Some(None) if observation.inventory.gpus().is_empty() => Ok(()),
            Some(None) => self.reporter.create().await,
            None => Ok(()),
        };
        self.telemetry.set_ready();
        let mut next = Instant::now() + self.resync;
        if let Err(error) = reported {
            tracing::warn!(error = crate::chain(&error), "not reported, trying again; GPUs stay as they are");
            next = next.min(Instant::now() + RETRY);
        }
        // Nothing tells when a device's lock is let go.
        if offered.ailments.values().flatten().any(Ailment::is_passing) {
            next = next.min(Instant::now() + RETRY);
        }
        if let Some(again) = observation.again {
            next = next.min(again.into());
        }
        self.unopened = only_allocated(&observation);
        if self.unopened {
            next = next.min(Instant::now() + LATE_OPENING);
        }
        Ok(next)
    }

    /// The host is worked on by one thread at a time: the manager moves there and back.
    async fn look(&mut self, wish: Wish) -> Result<Observation, Error> {
        self.work(move |manager, allocations| manager.round(&wish, allocations)).await
    }

    /// Whether a round is due although nothing has called for one.
    async fn glance(&mut self) -> Result<bool, Error> {
        let (due, bus) = self.work(|manager, allocations| (manager.glance(&allocations), manager.bus())).await?;
        self.metrics.glanced(&bus);
        Ok(due)
    }

    /// Whether a round is due because pods have other GPUs than they had. Asks the kubelet only.
    async fn given_anew(&self) -> bool {
        let allocations = self.allocations().await;
        self.manager.as_ref().is_some_and(|manager| manager.given_anew(&allocations))
    }

    /// What pods have.
    async fn allocations(&self) -> Result<Allocations, String> {
        let listed = pod_resources::allocations(&self.kubelet).await.map_err(|error| crate::chain(&error))?;
        let settles = self.reborn.is_some_and(|since| since.elapsed() < KUBELET_SETTLES);
        Ok(match &self.manager {
            Some(manager) if settles => pod_resources::kept(manager.allocations(), listed),
            Some(_) | None => listed,
        })
    }

    async fn work<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut VfioManager, Result<Allocations, String>) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let allocations = self.allocations().await;
        let mut manager = self.manager.take().ok_or(Error::Worker)?;
        let span = tracing::Span::current();
        let worked = tokio::task::spawn_blocking(move || {
            let done = span.in_scope(|| work(&mut manager, allocations));
            (manager, done)
        });
        let (manager, done) = worked.await.map_err(|_| Error::Worker)?;
        self.manager = Some(manager);
        Ok(done)
    }

    async fn report(
        &self,
        gpu_node: &GPUNode,
        wish: &Wish,
        observation: &Observation,
        offered: &Offered,
    ) -> Result<(), report::Error> {
        let plugins = self.plugins.subscribe().borrow().clone();
        let status = translate::status(
            &translate::Report {
                wish,
                observation,
                plugins: &plugins,
                offered,
                container: &ContainerNode::look(&self.host_root),
                generation: gpu_node.metadata.generation.unwrap_or_default(),
                old: gpu_node.status.as_ref().and_then(|status| status.agent.as_ref()),
            },
            &Time(Timestamp::now()),
        );
        self.reporter.write(gpu_node, &status).await
    }
}

/// A GPU that a pod has and no process holds: the kubelet tells nobody when the pod is gone.
fn only_allocated(observation: &Observation) -> bool {
    observation.holders.values().any(|holders| holders.iter().all(|holder| holder.pid == 0))
}

fn below(host_root: &Path, path: &Path) -> PathBuf {
    host_root.join(path.strip_prefix("/").unwrap_or(path))
}

fn plugins(config: &Config, calls: &Calls, due: &Arc<Notify>, shutdown: &Shutdown) -> Result<DevicePlugins, Error> {
    let root = Root::new(&config.host_root).map_err(|source| Error::Root { root: config.host_root.clone(), source })?;
    let iommufd = vfio::Host::exists(&root, Path::new("/dev/iommu"));
    let (allocated, due) = (calls.allocated.clone(), due.clone());
    let recheck = move |devices: &[device_plugin::Device]| {
        allocated.notify_one();
        let objections = objections::objections(&root, devices);
        if !objections.is_empty() {
            // The list that the kubelet has is out of date.
            due.notify_one();
        }
        objections
    };
    let config = device_plugin::Config {
        socket_dir: below(&config.host_root, &config.kubelet_root).join("device-plugins"),
        iommufd,
        recheck: Arc::new(recheck),
        noted: calls.noted.clone(),
    };
    Ok(DevicePlugins::start(config, shutdown.receiver()))
}
