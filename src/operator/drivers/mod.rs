//! Which nodes have a driver pod that is not the newest of its DaemonSet.
//!
//! A driver's DaemonSet is `OnDelete`: a new revision reaches a node by a change of that node. While every set is current
//! nothing is watched; else the driver pods are, and compared with their set's newest `ControllerRevision`.

mod look;
mod report;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crds::{
    conditions::Verdict,
    labels,
    v1alpha1::{DriverRenewal, GPUTransition, TransitionPhase},
};
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, DaemonSet},
    core::v1::Pod,
};
use kube::{
    Api, Client, ResourceExt,
    api::ListParams,
    runtime::{reflector::Store, watcher},
};
use tokio::{sync::Notify, time::sleep};

pub use self::look::{NodeDriver, Old, Revision, Seen, Set, State, is_of, settled};
use self::look::{is_driver, newest, of_node, outdated, selects, set, slim};
use super::{
    pod::ready,
    pod_watches::PodWatches,
    policy::DRIVERS,
    selector,
    transition::Upgrades,
    world::{NodeWork, Wake, World},
};
const RETRY: Duration = Duration::from_secs(5);
/// All driver pods are one watch.
const KEY: &str = "drivers";

pub struct Drivers {
    revisions: Api<ControllerRevision>,
    sets: Store<DaemonSet>,
    world: World,
    pods: PodWatches,
    /// Counts what is heard of the pods.
    heard: Arc<AtomicU64>,
    by_node: Mutex<Option<(u64, Arc<ByNode>)>>,
    due: Arc<Notify>,
    wake: Wake,
    known: Mutex<Known>,
}

/// Driver pods, by the node that they are on.
type ByNode = HashMap<String, Vec<Arc<Pod>>>;

#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    /// Whether there is something to renew, or to watch; unset before the first look.
    watching: Option<bool>,
    /// By the set's name: of which generation, and the newest revision.
    revisions: BTreeMap<String, (Option<i64>, Revision)>,
}

impl Drivers {
    pub fn new(client: &Client, namespace: &str, world: &World, wake: &Wake) -> Self {
        Self {
            revisions: Api::namespaced(client.clone(), namespace),
            sets: world.daemon_sets.clone(),
            world: world.clone(),
            pods: PodWatches::new(client.clone(), namespace, slim),
            heard: Arc::default(),
            by_node: Mutex::default(),
            due: wake.drivers.clone(),
            wake: wake.clone(),
            known: Mutex::default(),
        }
    }

    /// Runs for as long as the process does.
    pub async fn run(&self) {
        loop {
            self.due.notified().await;
            while let Err(error) = self.look().await {
                tracing::warn!(%error, "revisions of drivers cannot be listed, trying again");
                sleep(RETRY).await;
            }
        }
    }

    /// Makes it look whether a node asks for its driver's renewal.
    pub fn wake(&self) {
        self.due.notify_one();
    }

    async fn look(&self) -> Result<(), kube::Error> {
        let sets = self.live();
        let under_way = self.world.transitions.state().iter().any(|object| object.0.as_ref().is_ok_and(renews));
        let asked = || self.world.nodes.state().iter().any(|node| !asked(node.annotations()).is_empty());
        let watching = under_way || !sets.iter().all(|set| settled(set)) || asked();
        let mut revisions = BTreeMap::new();
        for set in sets.iter().filter(|_| watching) {
            // What the controller has not seen has no revision yet; its status comes, and wakes us.
            let observed = set.status.as_ref().and_then(|status| status.observed_generation);
            if observed < set.metadata.generation {
                continue;
            }
            let known = self.known().revisions.get(&set.name_any()).cloned();
            let found = match known.filter(|(generation, _)| *generation == set.metadata.generation) {
                Some((_, newest)) => Some(newest),
                None => newest_of(&self.revisions, set).await?,
            };
            revisions.extend(found.map(|newest| (set.name_any(), (set.metadata.generation, newest))));
        }
        if watching {
            self.watch();
        } else {
            self.pods.forget(KEY);
            *self.index() = None;
        }
        let now = Known { watching: Some(watching), revisions };
        let changed = *self.known() != now;
        *self.known() = now;
        if changed {
            self.wake.node(NodeWork::All);
            self.wake.policy.notify_one();
        }
        Ok(())
    }

    fn watch(&self) {
        let components = format!("{} in ({})", labels::APP_COMPONENT, DRIVERS.join(","));
        let config = watcher::Config::default().labels(&components);
        let (wake, heard) = (self.wake.clone(), self.heard.clone());
        self.pods.watch(KEY, config, move |pod| {
            heard.fetch_add(1, Ordering::Relaxed);
            let node = pod.map(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.clone()));
            match node {
                None => wake.node(NodeWork::All),
                Some(Some(node)) => wake.node(NodeWork::One(node)),
                Some(None) => {}
            }
            wake.policy.notify_one();
        });
    }

    /// The driver of a node with these labels.
    pub fn of(&self, node: &str, labels: &BTreeMap<String, String>) -> NodeDriver {
        let live = self.live();
        let Some(own) = live.iter().find(|set| selects(set, labels)) else { return NodeDriver::None };
        let known = self.known();
        match known.watching {
            None => NodeDriver::Unknown,
            Some(false) => NodeDriver::Settled { set: set(own) },
            Some(true) => {
                let newest = known.revisions.get(&own.name_any()).map(|(_, revision)| revision.clone());
                match (newest, self.pods_by_node()) {
                    (Some(newest), Some(pods)) => {
                        let here = pods.get(node).map(Vec::as_slice).unwrap_or_default();
                        NodeDriver::Seen(Box::new(of_node(own, &newest, &live, here)))
                    }
                    (_, _) => NodeDriver::Unknown,
                }
            }
        }
    }

    /// Sorted once after each change, for the looks at all nodes. `None` while they have not been listed.
    fn pods_by_node(&self) -> Option<Arc<ByNode>> {
        // Before the pods: what is heard meanwhile makes the next look sort anew.
        let now = self.heard.load(Ordering::Relaxed);
        let mut index = self.index();
        if let Some((at, known)) = &*index
            && *at == now
        {
            return Some(known.clone());
        }
        let mut sorted = ByNode::new();
        for pod in self.pods.get(KEY)? {
            if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
                sorted.entry(node).or_default().push(pod);
            }
        }
        let sorted = Arc::new(sorted);
        *index = Some((now, sorted.clone()));
        Some(sorted)
    }

    fn index(&self) -> std::sync::MutexGuard<'_, Option<(u64, Arc<ByNode>)>> {
        self.by_node.lock().expect("index lock should not be poisoned")
    }

    /// Whether all nodes have their newest driver, and if not, why.
    pub fn verdict(&self, upgrades: &Upgrades) -> Verdict {
        let live = self.live();
        let changes = self.world.transitions.state();
        let changes: Vec<&GPUTransition> = changes.iter().filter_map(|object| object.0.as_ref().ok()).collect();
        let pods = self.pods.get(KEY).unwrap_or_default();
        let known = self.known();
        let newest = |set: &str| known.revisions.get(set).map(|(_, revision)| revision.hash.clone());
        report::verdict(&outdated(&live, newest, &pods), &changes, upgrades)
    }

    /// Whether the newest revision of a set has come to serve on a node that is not among `changing`.
    pub fn proven(&self, driver: &DriverRenewal, changing: &BTreeSet<String>) -> bool {
        let pods = self.pods.get(KEY).unwrap_or_default();
        pods.iter().any(|pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
            is_of(pod, &driver.daemon_set, &driver.revision) && ready(pod) && !changing.contains(node)
        })
    }

    fn live(&self) -> Vec<Arc<DaemonSet>> {
        self.sets.state().into_iter().filter(|set| is_driver(set)).collect()
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().expect("revisions lock should not be poisoned")
    }
}

/// A set's newest revision, once its controller has made it.
pub async fn newest_of(all: &Api<ControllerRevision>, set: &DaemonSet) -> Result<Option<Revision>, kube::Error> {
    let listed = all.list(&ListParams::default().labels(&selector::of_set(set))).await?;
    Ok(newest(set, &listed.items))
}

/// Annotations of a node that ask for its driver's renewal, whatever its age.
pub fn asked(annotations: &BTreeMap<String, String>) -> Vec<&'static str> {
    let set = |key: &&'static str| annotations.get(*key).is_some_and(|value| !value.is_empty() && value != "false");
    [labels::UPGRADE_SAFE_LOAD, labels::UPGRADE_REQUESTED].into_iter().filter(set).collect()
}

fn renews(object: &GPUTransition) -> bool {
    let phase = object.status.as_ref().map(|status| status.phase);
    object.spec.driver.is_some() && phase != Some(TransitionPhase::Done)
}
