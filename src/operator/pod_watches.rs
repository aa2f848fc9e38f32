//! Pods that are watched only for as long as something about them is asked, by a key: never all of the cluster.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    runtime::{reflector::Store, watcher},
};
use tokio::task::AbortHandle;

use super::world::{filled, follow_projected};

pub struct PodWatches {
    pods: Api<Pod>,
    /// What is kept of each pod.
    project: fn(&mut Pod),
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

impl PodWatches {
    pub fn new(client: Client, namespace: &str, project: fn(&mut Pod)) -> Self {
        Self { pods: Api::namespaced(client, namespace), project, watched: Mutex::default() }
    }

    /// Of all namespaces.
    pub fn everywhere(client: Client, project: fn(&mut Pod)) -> Self {
        Self { pods: Api::all(client), project, watched: Mutex::default() }
    }

    /// The pods, if they are watched and have been listed: a store that is not filled yet looks as if there were none.
    pub fn get(&self, key: &str) -> Option<Vec<Arc<Pod>>> {
        let watched = self.watched.lock().expect("watches lock should not be poisoned");
        let store = &watched.get(key)?.store;
        filled(store).then(|| store.state())
    }

    /// Begins to watch, if it has not begun. `touched` hears of the list (`None`) and of each change.
    pub fn watch(&self, key: &str, which: watcher::Config, touched: impl Fn(Option<&Pod>) + Send + 'static) {
        let mut watched = self.watched.lock().expect("watches lock should not be poisoned");
        if watched.contains_key(key) {
            return;
        }
        let (store, work) = follow_projected((), self.pods.clone(), which, self.project, touched);
        let task = tokio::spawn(work).abort_handle();
        watched.insert(key.to_owned(), Watched { store, task });
    }

    pub fn forget(&self, key: &str) {
        self.watched.lock().expect("watches lock should not be poisoned").remove(key);
    }

    pub fn forget_others(&self, keys: &BTreeSet<&str>) {
        self.watched.lock().expect("watches lock should not be poisoned").retain(|key, _| keys.contains(key.as_str()));
    }
}
