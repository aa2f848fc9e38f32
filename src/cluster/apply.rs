//! Server-side apply with one field manager, and pruning of what is applied no more.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Mutex,
};

use crds::labels;
use k8s_openapi::NamespaceResourceScope;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};

use super::gone;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{kind} {name} cannot be applied")]
    Apply { kind: String, name: String, source: Box<kube::Error> },
    #[error("{kind} {name} is no longer wanted and cannot be deleted")]
    Delete { kind: String, name: String, source: Box<kube::Error> },
}

/// Applies objects of one namespace, and remembers what it applied: an object is written only when the wish or the live
/// object has changed since.
pub struct Applier {
    client: Client,
    namespace: String,
    applied: Mutex<HashMap<(String, String), Applied>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Applied {
    wish: u64,
    /// The live object's generation after the apply.
    generation: Option<i64>,
}

impl Applier {
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace, applied: Mutex::default() }
    }

    /// Guarantees that the live object has every field of `wish`; `live` is what the cache knows of it.
    pub async fn apply<K>(&self, wish: &K, live: Option<&K>) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        let key = (K::kind(&()).into_owned(), wish.name_any());
        let failed = |source| Error::Apply { kind: key.0.clone(), name: key.1.clone(), source: Box::new(source) };
        let hash = fingerprint(wish);
        let now = Applied { wish: hash, generation: live.and_then(|live| live.meta().generation) };
        if live.is_some() && self.remembered(&key) == Some(now) {
            return Ok(());
        }
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
        let done = api.patch(&key.1, &params, &Patch::Apply(wish)).await.map_err(failed)?;
        tracing::info!(kind = key.0, name = key.1, "applied");
        self.remember(key, Applied { wish: hash, generation: done.meta().generation });
        Ok(())
    }

    /// Deletes an object that is wanted no more, if it is still the one that the cache knows. What it owns goes first.
    pub async fn delete<K>(&self, live: &K) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + std::fmt::Debug,
    {
        let key = (K::kind(&()).into_owned(), live.name_any());
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        let same = Preconditions { uid: live.uid(), resource_version: None };
        match api.delete(&key.1, &DeleteParams::foreground().preconditions(same)).await {
            Ok(_) => tracing::info!(kind = key.0, name = key.1, "deleted: no longer wanted"),
            Err(error) if gone(&error) => {}
            Err(source) => return Err(Error::Delete { kind: key.0, name: key.1, source: Box::new(source) }),
        }
        self.applied.lock().expect("applied lock should not be poisoned").remove(&key);
        Ok(())
    }

    fn remembered(&self, key: &(String, String)) -> Option<Applied> {
        self.applied.lock().expect("applied lock should not be poisoned").get(key).copied()
    }

    fn remember(&self, key: (String, String), applied: Applied) {
        self.applied.lock().expect("applied lock should not be poisoned").insert(key, applied);
    }
}

/// Only compared within this process.
fn fingerprint(wish: &impl Serialize) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(wish).expect("an API object should serialize").hash(&mut hasher);
    hasher.finish()
}
