//! Our operands' pods on nodes that are changing: watched one node at a time, only while it changes.

use std::collections::BTreeSet;

use crds::labels;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt, runtime::watcher};

use super::decide::OperandPod;
use crate::operator::{
    pod::ready,
    pod_watches::PodWatches,
    world::{NodeWork, Wake},
};

pub struct NodePods {
    watches: PodWatches,
    wake: Wake,
}

impl NodePods {
    pub fn new(client: Client, namespace: &str, wake: Wake) -> Self {
        Self { watches: PodWatches::new(client, namespace, |_| {}), wake }
    }

    /// The node's operand pods, if they are watched and have been listed.
    pub fn get(&self, node: &str) -> Option<Vec<OperandPod>> {
        Some(self.watches.get(node)?.iter().map(|pod| operand(pod)).collect())
    }

    /// Begins to watch, if it has not begun: the node is woken when the list is there and at each change.
    pub fn watch(&self, node: &str) {
        let config = watcher::Config::default().labels(labels::POLICY).fields(&format!("spec.nodeName={node}"));
        let (wake, name) = (self.wake.clone(), node.to_owned());
        self.watches.watch(node, config, move |_| wake.node(NodeWork::One(name.clone())));
    }

    pub fn forget(&self, node: &str) {
        self.watches.forget(node);
    }
}

pub fn operand(pod: &Pod) -> OperandPod {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    let gates: BTreeSet<String> =
        selector.into_iter().flat_map(|s| s.keys()).filter(|k| k.starts_with(labels::DEPLOY_PREFIX)).cloned().collect();
    OperandPod { uid: pod.uid().unwrap_or_default(), name: pod.name_any(), gates, ready: ready(pod) }
}
