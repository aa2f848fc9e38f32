//! What the policy's fate depends on beyond our own objects: how its nodes run containers.
//!
//! A node's runtime is in its status, which is not watched: it is read once for each node that gets a GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, ResourceExt, runtime::reflector::ObjectRef};

use super::{Context, Error, dereference::Dereferenced, nvidia_drivers::Listed, validate::Facts};
use crate::{cluster::gone, operator::world::World};

/// `containerRuntimeVersion` by node name and uid.
#[derive(Default)]
pub struct Runtimes(Mutex<BTreeMap<(String, String), String>>);

impl Runtimes {
    async fn of(&self, client: &Client, world: &World, found: &Dereferenced) -> Result<BTreeSet<String>, Error> {
        let nodes: Api<Node> = Api::all(client.clone());
        let mut versions = BTreeMap::new();
        for gpu_node in found.with_gpus() {
            let name = gpu_node.name_any();
            let Some(uid) = world.nodes.get(&ObjectRef::new(&name)).and_then(|node| node.uid()) else { continue };
            let key = (name.clone(), uid);
            let known = self.0.lock().expect("runtimes lock should not be poisoned").get(&key).cloned();
            let version = match known {
                Some(version) => version,
                None => match nodes.get(&name).await {
                    Ok(node) => {
                        node.status.and_then(|s| s.node_info).map(|i| i.container_runtime_version).unwrap_or_default()
                    }
                    Err(error) if gone(&error) => continue,
                    Err(source) => return Err(Error::Node { name, source: Box::new(source) }),
                },
            };
            versions.insert(key, version);
        }
        let distinct = versions.values().filter(|version| !version.is_empty()).cloned().collect();
        // Nodes that have gone are forgotten, and one whose kubelet has not said it is read again.
        versions.retain(|_, version| !version.is_empty());
        *self.0.lock().expect("runtimes lock should not be poisoned") = versions;
        Ok(distinct)
    }
}

pub(super) async fn facts(context: &Context, found: &Dereferenced, listed: &Listed) -> Result<Facts, Error> {
    let world = &context.world;
    let nodes = world.nodes.state();
    let node_labels: Vec<&BTreeMap<String, String>> = nodes.iter().map(|node| node.labels()).collect();
    let labels_of = |name: &str| world.nodes.get(&ObjectRef::new(name)).map(|node| node.labels().clone());
    let gpu_nodes = found.nodes(labels_of);
    Ok(Facts {
        hosts: gpu_nodes.iter().map(|node| node.host.clone()).collect(),
        nodes: gpu_nodes,
        nvidia_drivers: listed.known(),
        platform: context.openshift.platform(),
        live: found.drivers(&node_labels),
        runtimes: context.runtimes.of(&context.client, world, found).await?,
        config_maps: found.maps.keys.clone(),
        service_monitors: found.service_monitors,
        images: context.installation.images.clone(),
    })
}
