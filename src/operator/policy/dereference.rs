//! Everything that a policy's fate depends on, read once.

use std::{collections::BTreeMap, sync::Arc};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{CONFIG_NAME, GPUNode, GPUVirtConfigSpec},
};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Service},
    node::v1::RuntimeClass,
};
use kube::{ResourceExt, core::error_boundary::InvalidObject, runtime::reflector::ObjectRef};

use super::validate::{GPUNodeFacts, Host, LiveSet, OSTREE_VERSION};
use crate::operator::{named::Maps, world::World};

/// The oldest ClusterPolicy rules; the others are ignored.
pub struct Policies {
    pub active: Option<ClusterPolicy>,
    pub ignored: Vec<ClusterPolicy>,
    pub undecodable: Vec<InvalidObject>,
}

pub struct Dereferenced {
    pub config: Result<GPUVirtConfigSpec, String>,
    pub gpu_nodes: Vec<GPUNode>,
    /// No GPUNode is missing from them because it does not decode.
    pub all_read: bool,
    pub daemon_sets: Vec<Arc<DaemonSet>>,
    /// Ours alone.
    pub config_maps: Vec<Arc<ConfigMap>>,
    /// Ours alone.
    pub services: Vec<Arc<Service>>,
    /// All there are: one that is not ours is left alone.
    pub runtime_classes: Vec<Arc<RuntimeClass>>,
    pub service_monitors: bool,
    /// All of the operator's namespace.
    pub maps: Maps,
}

impl Dereferenced {
    /// What the nodes that have a GPU run. `labels` of a node by its name.
    pub fn nodes(&self, labels: impl Fn(&str) -> Option<BTreeMap<String, String>>) -> Vec<GPUNodeFacts> {
        let facts = |node: &GPUNode| {
            let host = &node.status.as_ref()?.agent.as_ref()?.host;
            let name = node.name_any();
            let labels = labels(&name)?;
            let rhcos = labels.get(OSTREE_VERSION).cloned();
            Some(GPUNodeFacts { name, host: Host { os: host.os.clone(), kernel: host.kernel.clone(), rhcos }, labels })
        };
        self.with_gpus().filter_map(facts).filter(|node| !node.host.os.is_empty()).collect()
    }

    /// DaemonSets of ours that bring a driver: whom they are for, and whether a node of these labels wants them.
    pub fn drivers(&self, nodes: &[&BTreeMap<String, String>]) -> BTreeMap<String, LiveSet> {
        let drivers = self.daemon_sets.iter().filter(|set| set.labels().contains_key(labels::OS));
        drivers.map(|set| (set.name_any(), live_set(set, nodes))).collect()
    }

    pub fn with_gpus(&self) -> impl Iterator<Item = &GPUNode> {
        self.gpu_nodes.iter().filter(|node| {
            node.status.as_ref().and_then(|status| status.agent.as_ref()).is_some_and(|agent| !agent.gpus.is_empty())
        })
    }
}

fn live_set(set: &DaemonSet, nodes: &[&BTreeMap<String, String>]) -> LiveSet {
    let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let selector = pod.and_then(|pod| pod.node_selector.clone()).unwrap_or_default();
    LiveSet {
        os: set.labels().get(labels::OS).cloned(),
        precompiled: set.labels().contains_key(labels::KERNEL),
        owner: set.labels().get(labels::NVIDIA_DRIVER).cloned(),
        wanted: nodes.iter().any(|node| selector.iter().all(|(key, value)| node.get(key) == Some(value))),
    }
}

pub fn policies(world: &World) -> Policies {
    let mut decoded = Vec::new();
    let mut undecodable = Vec::new();
    for guarded in world.policies.state() {
        match &guarded.0 {
            Ok(policy) => decoded.push(policy.clone()),
            Err(invalid) => undecodable.push(invalid.clone()),
        }
    }
    decoded.sort_by_key(|policy| (policy.creation_timestamp(), policy.name_any()));
    let mut decoded = decoded.into_iter();
    Policies { active: decoded.next(), ignored: decoded.collect(), undecodable }
}

/// Our own settings; without the object every default holds. An error says why it does not decode.
pub fn config(world: &World) -> Result<GPUVirtConfigSpec, String> {
    match world.configs.get(&ObjectRef::new(CONFIG_NAME)).as_deref().map(|guarded| &guarded.0) {
        None => Ok(GPUVirtConfigSpec::default()),
        Some(Ok(config)) => Ok(config.spec.clone()),
        Some(Err(invalid)) => Err(invalid.error.clone()),
    }
}

pub fn dereference(world: &World) -> Dereferenced {
    let guarded = world.gpu_nodes.state();
    let config_maps = world.config_maps.state();
    let gpu_nodes: Vec<GPUNode> = guarded.iter().filter_map(|guarded| guarded.0.as_ref().ok().cloned()).collect();
    Dereferenced {
        config: config(world),
        all_read: gpu_nodes.len() == guarded.len(),
        gpu_nodes,
        daemon_sets: world.daemon_sets.state(),
        services: world.services.state(),
        runtime_classes: world.runtime_classes.state(),
        service_monitors: world.service_monitor_crd.state().iter().any(|crd| crd.metadata.deletion_timestamp.is_none()),
        maps: maps(world),
        config_maps: config_maps.into_iter().filter(|map| map.labels().contains_key(labels::POLICY)).collect(),
    }
}

/// What the ConfigMaps of the operator's namespace hold.
pub fn maps(world: &World) -> Maps {
    Maps::of(world.config_maps.state().iter().map(Arc::as_ref))
}
