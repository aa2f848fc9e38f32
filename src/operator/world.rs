//! What the operator knows: one watch a kind, kept as a projection, and who is told when something moves.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUTransition, GPUVirtConfig},
};
use futures::{FutureExt, StreamExt, future::BoxFuture};
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{ConfigMap, Node, Service},
        node::v1::RuntimeClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::{
        WatchStreamExt,
        reflector::{self, Store, store::Writer},
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc};

use super::named;

/// Which node's work is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeWork {
    One(String),
    All,
}

/// Wakes the controllers.
#[derive(Clone)]
pub struct Wake {
    pub nodes: mpsc::UnboundedSender<NodeWork>,
    pub policy: Arc<Notify>,
    /// Whoever explains by what nodes have.
    pub gpu_nodes: Arc<Notify>,
    /// Whoever guards the pods of the vGPU host driver.
    pub guard: Arc<Notify>,
    /// Whoever looks which drivers are out of date.
    pub drivers: Arc<Notify>,
    /// Whoever renews agents.
    pub agents: Arc<Notify>,
}

impl Wake {
    pub fn node(&self, work: NodeWork) {
        // Without a receiver the process is ending.
        let _ = self.nodes.send(work);
    }
}

/// One undecodable object must not end the watch: it is an entry that says so.
pub type Guarded<K> = DeserializeGuard<K>;

#[derive(Clone)]
pub struct World {
    /// Metadata only: labels decide, and nothing else of a Node is needed.
    pub nodes: Store<PartialObjectMeta<Node>>,
    pub gpu_nodes: Store<Guarded<GPUNode>>,
    /// One a node, with its name, while it changes and a while after.
    pub transitions: Store<Guarded<GPUTransition>>,
    pub policies: Store<Guarded<ClusterPolicy>>,
    pub configs: Store<Guarded<GPUVirtConfig>>,
    /// Operands of ours, in the operator's namespace.
    pub daemon_sets: Store<DaemonSet>,
    /// All of the operator's namespace, ours and those that a policy names; of their values only names of MIG layouts are kept.
    pub config_maps: Store<ConfigMap>,
    pub services: Store<Service>,
    /// All, since one of somebody else may have the name that we would use.
    pub runtime_classes: Store<RuntimeClass>,
    /// The Prometheus operator's type, if it is there.
    pub service_monitor_crd: Store<PartialObjectMeta<CustomResourceDefinition>>,
}

const SERVICE_MONITOR_CRD: &str = "servicemonitors.monitoring.coreos.com";

impl World {
    /// The caches, and the work that keeps them: to be run for as long as they are used.
    pub fn new(client: &Client, namespace: &str, wake: &Wake) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let everything = watcher::Config::default();
        let ours = watcher::Config::default().labels(labels::POLICY);
        let (nodes, follow_nodes) = {
            let wake = wake.clone();
            follow(Api::<PartialObjectMeta<Node>>::all(client.clone()), everything.clone(), move |node| {
                wake.node(node.map_or(NodeWork::All, |node| NodeWork::One(node.name_any())));
            })
        };
        let (gpu_nodes, follow_gpu_nodes) = {
            let wake = wake.clone();
            follow(Api::<Guarded<GPUNode>>::all(client.clone()), everything.clone(), move |node| {
                wake.node(node.map_or(NodeWork::All, |node| NodeWork::One(node.name_any())));
                wake.policy.notify_one();
                wake.gpu_nodes.notify_one();
                wake.guard.notify_one();
            })
        };
        let (transitions, follow_transitions) = {
            let wake = wake.clone();
            follow(Api::<Guarded<GPUTransition>>::all(client.clone()), everything.clone(), move |transition| {
                wake.drivers.notify_one();
                wake.agents.notify_one();
                wake.policy.notify_one();
                if let Some(transition) = transition {
                    wake.node(NodeWork::One(transition.name_any()));
                }
            })
        };
        let policy_wake = |wake: &Wake| {
            let policy = wake.policy.clone();
            move || policy.notify_one()
        };
        let (policies, follow_policies) = {
            let touched = policy_wake(wake);
            follow(Api::<Guarded<ClusterPolicy>>::all(client.clone()), everything.clone(), move |_| touched())
        };
        let (configs, follow_configs) = {
            let touched = policy_wake(wake);
            follow(Api::<Guarded<GPUVirtConfig>>::all(client.clone()), everything, move |_| touched())
        };
        let (daemon_sets, follow_daemon_sets) = {
            let (touched, drivers, agents) = (policy_wake(wake), wake.drivers.clone(), wake.agents.clone());
            follow(Api::<DaemonSet>::namespaced(client.clone(), namespace), ours.clone(), move |_| {
                touched();
                drivers.notify_one();
                agents.notify_one();
            })
        };
        let (config_maps, follow_config_maps) = {
            let touched = policy_wake(wake);
            let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
            follow_projected((), api, watcher::Config::default(), named::project, move |_| touched())
        };
        let (services, follow_services) = {
            let touched = policy_wake(wake);
            follow(Api::<Service>::namespaced(client.clone(), namespace), ours, move |_| touched())
        };
        let (runtime_classes, follow_runtime_classes) = {
            let touched = policy_wake(wake);
            follow(Api::<RuntimeClass>::all(client.clone()), watcher::Config::default(), move |_| touched())
        };
        let (service_monitor_crd, follow_service_monitor_crd) = {
            let touched = policy_wake(wake);
            let config = watcher::Config::default().fields(&format!("metadata.name={SERVICE_MONITOR_CRD}"));
            let api = Api::<PartialObjectMeta<CustomResourceDefinition>>::all(client.clone());
            follow(api, config, move |_| touched())
        };
        let world = Self {
            nodes,
            gpu_nodes,
            transitions,
            policies,
            configs,
            daemon_sets,
            config_maps,
            services,
            runtime_classes,
            service_monitor_crd,
        };
        let follow = vec![
            follow_nodes,
            follow_gpu_nodes,
            follow_transitions,
            follow_policies,
            follow_configs,
            follow_daemon_sets,
            follow_config_maps,
            follow_services,
            follow_runtime_classes,
            follow_service_monitor_crd,
        ];
        (world, follow)
    }

    /// Until every cache has been filled once.
    pub async fn filled(&self) -> Result<(), reflector::store::WriterDropped> {
        self.nodes.wait_until_ready().await?;
        self.gpu_nodes.wait_until_ready().await?;
        self.transitions.wait_until_ready().await?;
        self.policies.wait_until_ready().await?;
        self.configs.wait_until_ready().await?;
        self.daemon_sets.wait_until_ready().await?;
        self.config_maps.wait_until_ready().await?;
        self.services.wait_until_ready().await?;
        self.runtime_classes.wait_until_ready().await?;
        self.service_monitor_crd.wait_until_ready().await
    }

    /// The newest order that any node has been given. A lease that was deleted counts from one again, and agents refuse
    /// an older epoch than they know.
    pub fn highest_epoch(&self) -> i64 {
        let decoded = self.gpu_nodes.state();
        decoded.iter().filter_map(|guarded| guarded.0.as_ref().ok()).map(|node| node.spec.epoch).max().unwrap_or(0)
    }

    pub fn gpu_node(&self, name: &str) -> Option<Arc<Guarded<GPUNode>>> {
        self.gpu_nodes.get(&reflector::ObjectRef::new(name))
    }
}

/// `touched` hears of each object that changed, and `None` after a (re)list, when anything may have gone unseen.
pub fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    touched: impl Fn(Option<&K>) + Send + 'static,
) -> (Store<K>, BoxFuture<'static, ()>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone + Send + Sync,
{
    follow_as(K::DynamicType::default(), api, config, touched)
}

/// [`follow`], of a kind that is known at run time.
pub fn follow_as<K>(
    kind: K::DynamicType,
    api: Api<K>,
    config: watcher::Config,
    touched: impl Fn(Option<&K>) + Send + 'static,
) -> (Store<K>, BoxFuture<'static, ()>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Send + Sync,
{
    follow_projected(kind, api, config, |_| {}, touched)
}

/// [`follow_as`], keeping only what `project` leaves.
pub fn follow_projected<K>(
    kind: K::DynamicType,
    api: Api<K>,
    config: watcher::Config,
    project: fn(&mut K),
    touched: impl Fn(Option<&K>) + Send + 'static,
) -> (Store<K>, BoxFuture<'static, ()>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Send + Sync,
{
    let name = K::kind(&kind).into_owned();
    let mut writer = Writer::<K>::new(kind);
    let store = writer.as_reader();
    let work = async move {
        let mut events = watcher(api, config)
            .modify(move |object| {
                object.managed_fields_mut().clear();
                project(object);
            })
            .default_backoff()
            .boxed();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    writer.apply_watcher_event(&event);
                    match &event {
                        Event::Apply(object) | Event::Delete(object) => touched(Some(object)),
                        Event::InitDone => touched(None),
                        Event::Init | Event::InitApply(_) => {}
                    }
                }
                Err(error) => tracing::warn!(kind = name, %error, "watch interrupted, trying again"),
            }
        }
    };
    (store, Box::pin(work))
}

/// A store that is not filled yet looks like a cluster without objects.
pub fn filled<K>(store: &Store<K>) -> bool
where
    K: reflector::Lookup + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    store.wait_until_ready().now_or_never().is_some_and(|ready| ready.is_ok())
}
