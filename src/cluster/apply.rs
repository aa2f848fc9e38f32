//! Server-side apply with one field manager, and pruning of what is applied no more.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Mutex,
};

use crds::labels;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
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

/// What can be applied: an object of a kind that is known when this is compiled.
pub trait Object: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + std::fmt::Debug {}

impl<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + std::fmt::Debug> Object for K {}

/// Applies objects of one namespace or of none, and remembers what it applied: an object is written only when the wish or the live
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

    /// Guarantees that the live object has every field of `wish`; `live` is what the cache knows of it. Says whether its spec
    /// is another one now.
    pub async fn apply<K>(&self, wish: &K, live: Option<&K>) -> Result<bool, Error>
    where
        K: Object<Scope = NamespaceResourceScope>,
    {
        self.apply_in(Api::namespaced(self.client.clone(), &self.namespace), wish, live).await
    }

    /// Whether [`Self::apply`] would write.
    pub fn would_change<K: Object>(&self, wish: &K, live: &K) -> bool {
        let now = Applied { wish: fingerprint(wish), generation: live.meta().generation };
        self.remembered(&(K::kind(&()).into_owned(), wish.name_any())) != Some(now)
    }

    /// [`Self::apply`], of an object whose kind is not watched: written once, and when the wish changes.
    pub async fn apply_unwatched<K>(&self, wish: &K) -> Result<(), Error>
    where
        K: Object<Scope = NamespaceResourceScope>,
    {
        let key = (K::kind(&()).into_owned(), wish.name_any());
        match self.remembered(&key).is_some_and(|applied| applied.wish == fingerprint(wish)) {
            true => Ok(()),
            false => self.apply(wish, None).await.map(drop),
        }
    }

    /// [`Self::apply`], of an object that is in no namespace.
    pub async fn apply_cluster<K>(&self, wish: &K, live: Option<&K>) -> Result<(), Error>
    where
        K: Object<Scope = ClusterResourceScope>,
    {
        self.apply_in(Api::all(self.client.clone()), wish, live).await.map(drop)
    }

    async fn apply_in<K: Object>(&self, api: Api<K>, wish: &K, live: Option<&K>) -> Result<bool, Error> {
        let key = (K::kind(&()).into_owned(), wish.name_any());
        let failed = |source| Error::Apply { kind: key.0.clone(), name: key.1.clone(), source: Box::new(source) };
        let hash = fingerprint(wish);
        let now = Applied { wish: hash, generation: live.and_then(|live| live.meta().generation) };
        if live.is_some() && self.remembered(&key) == Some(now) {
            return Ok(false);
        }
        let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
        let done = api.patch(&key.1, &params, &Patch::Apply(wish)).await.map_err(failed)?;
        tracing::info!(kind = key.0, name = key.1, "applied");
        let generation = done.meta().generation;
        self.remember(key, Applied { wish: hash, generation });
        Ok(generation != now.generation)
    }

    /// Deletes an object that is wanted no more, if it is still the one that the cache knows. What it owns goes first.
    pub async fn delete<K>(&self, live: &K) -> Result<(), Error>
    where
        K: Object<Scope = NamespaceResourceScope>,
    {
        self.delete_in(Api::namespaced(self.client.clone(), &self.namespace), live).await
    }

    /// [`Self::delete`], but what it owns stays.
    pub async fn orphan<K>(&self, live: &K) -> Result<(), Error>
    where
        K: Object<Scope = NamespaceResourceScope>,
    {
        self.delete_with(Api::namespaced(self.client.clone(), &self.namespace), live, DeleteParams::orphan()).await
    }

    /// [`Self::delete`], of an object that is in no namespace.
    pub async fn delete_cluster<K>(&self, live: &K) -> Result<(), Error>
    where
        K: Object<Scope = ClusterResourceScope>,
    {
        self.delete_in(Api::all(self.client.clone()), live).await
    }

    /// Sees to it that there is no object of ours of this name, without a watch on its kind: asked once, then remembered.
    pub async fn absent<K>(&self, name: &str) -> Result<(), Error>
    where
        K: Object<Scope = NamespaceResourceScope>,
    {
        let key = (K::kind(&()).into_owned(), name.to_owned());
        let absent = Applied { wish: 0, generation: None };
        if self.remembered(&key) == Some(absent) {
            return Ok(());
        }
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        let failed = |source| Error::Delete { kind: key.0.clone(), name: key.1.clone(), source: Box::new(source) };
        if let Some(live) = api.get_opt(name).await.map_err(failed)?
            && live.labels().contains_key(labels::POLICY)
        {
            self.delete_in(api, &live).await?;
        }
        self.remember(key, absent);
        Ok(())
    }

    async fn delete_in<K: Object>(&self, api: Api<K>, live: &K) -> Result<(), Error> {
        self.delete_with(api, live, DeleteParams::foreground()).await
    }

    async fn delete_with<K: Object>(&self, api: Api<K>, live: &K, how: DeleteParams) -> Result<(), Error> {
        let key = (K::kind(&()).into_owned(), live.name_any());
        let same = Preconditions { uid: live.uid(), resource_version: None };
        match api.delete(&key.1, &how.preconditions(same)).await {
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
