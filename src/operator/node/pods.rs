//! Our operands' pods on nodes that are changing: watched one node at a time, only while it changes.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Mutex,
};

use crds::labels;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    runtime::{reflector::Store, watcher},
};
use tokio::task::AbortHandle;

use super::decide::OperandPod;
use crate::operator::world::{NodeWork, Wake, follow};

pub struct NodePods {
    client: Client,
    namespace: String,
    wake: Wake,
    watched: Mutex<HashMap<String, Watched>>,
}

struct Watched {
    store: Store<Pod>,
    task: AbortHandle,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl NodePods {
    pub fn new(client: Client, namespace: String, wake: Wake) -> Self {
        Self { client, namespace, wake, watched: Mutex::default() }
    }

    /// The node's operand pods, if they are watched and have been listed.
    pub fn get(&self, node: &str) -> Option<Vec<OperandPod>> {
        let watched = self.watched.lock().expect("pods lock should not be poisoned");
        let store = &watched.get(node)?.store;
        // A store that is not filled yet looks like a node without pods.
        let filled = futures::FutureExt::now_or_never(store.wait_until_ready())?;
        filled.ok()?;
        Some(store.state().iter().map(|pod| operand(pod)).collect())
    }

    /// Begins to watch, if it has not begun: the node is woken when the list is there and at each change.
    pub fn watch(&self, node: &str) {
        let mut watched = self.watched.lock().expect("pods lock should not be poisoned");
        if watched.contains_key(node) {
            return;
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let config = watcher::Config::default().labels(labels::POLICY).fields(&format!("spec.nodeName={node}"));
        let wake = self.wake.clone();
        let name = node.to_owned();
        let (store, work) = follow(api, config, move |_| wake.node(NodeWork::One(name.clone())));
        let task = tokio::spawn(work).abort_handle();
        watched.insert(node.to_owned(), Watched { store, task });
    }

    pub fn forget(&self, node: &str) {
        self.watched.lock().expect("pods lock should not be poisoned").remove(node);
    }
}

fn operand(pod: &Pod) -> OperandPod {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    let gates: BTreeSet<String> =
        selector.into_iter().flat_map(|s| s.keys()).filter(|k| k.starts_with(labels::DEPLOY_PREFIX)).cloned().collect();
    OperandPod { uid: pod.uid().unwrap_or_default(), name: pod.name_any(), gates }
}
