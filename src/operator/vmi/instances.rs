//! Every instance that asks for devices by name, kept as far as it is needed. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use super::{
    explain::blocks_drain,
    instance::{Instance, Progress},
};

/// By `namespace/name`.
#[derive(Debug, Default)]
pub struct Instances(Mutex<BTreeMap<String, Instance>>);

/// What a change of an instance is to others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// It may have to be explained, or no longer.
    pub explain: bool,
    /// What this node says of drains may have changed.
    pub node: Option<String>,
}

impl Instances {
    pub fn set(&self, instance: Instance) -> Effect {
        if instance.asks.is_empty() {
            return Effect::default();
        }
        let mut all = self.0.lock().expect("instances lock should not be poisoned");
        let key = instance.key();
        let new = instance.clone();
        let old = all.insert(key, instance);
        let blocked = old.as_ref().and_then(blocks_drain);
        Effect {
            explain: old.as_ref().is_none_or(|old| old.uid != new.uid || old.progress != new.progress),
            node: if blocked == blocks_drain(&new) { None } else { new.node.or(old.and_then(|old| old.node)) },
        }
    }

    pub fn remove(&self, key: &str) {
        self.0.lock().expect("instances lock should not be poisoned").remove(key);
    }

    /// Those that a list no longer has.
    pub fn keep(&self, listed: &BTreeSet<String>) {
        self.0.lock().expect("instances lock should not be poisoned").retain(|key, _| listed.contains(key));
    }

    pub fn get(&self, key: &str) -> Option<Instance> {
        self.0.lock().expect("instances lock should not be poisoned").get(key).cloned()
    }

    /// Those whose reason moves with the nodes. (KubeVirt itself tries a refused one again, and a failed one stays so.)
    pub fn waiting(&self) -> Vec<String> {
        let waits = |instance: &Instance| matches!(instance.progress, Progress::Unschedulable(_));
        let all = self.0.lock().expect("instances lock should not be poisoned");
        all.iter().filter(|(_, instance)| waits(instance)).map(|(key, _)| key.clone()).collect()
    }

    /// Why a drain would wait for this one.
    pub fn blocks_drain(&self, key: &str) -> Option<String> {
        self.get(key).as_ref().and_then(blocks_drain)
    }
}
