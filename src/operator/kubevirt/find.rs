//! Whether KubeVirt is there, and which object has its configuration.
//!
//! The two CRDs are watched by name, as metadata; their objects only while the CRD exists. So a cluster without KubeVirt
//! costs two silent watches, and one that gets it later is noticed by an event.

use std::sync::{Arc, Mutex};

use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::DynamicObject,
    core::PartialObjectMeta,
    runtime::{reflector::Store, watcher},
};
use tokio::{sync::Notify, task::AbortHandle};

use super::{
    Error,
    dialect::{Dialect, Kind},
};
use crate::operator::world::{follow, follow_as};

/// An object that has, or could have, entries of ours.
#[derive(Clone)]
pub struct Cr {
    pub dialect: Dialect,
    pub object: Arc<DynamicObject>,
}

pub enum Look {
    /// A first list is on its way; `due` is told when it is there.
    NotYet,
    Seen {
        /// The one that counts: HyperConverged where there is one, since it overwrites KubeVirt's object.
        counts: Option<Cr>,
        all: Vec<Cr>,
    },
}

pub struct Finder {
    client: Client,
    due: Arc<Notify>,
    kinds: Vec<Watched>,
}

struct Watched {
    kind: Kind,
    crd: Store<PartialObjectMeta<CustomResourceDefinition>>,
    objects: Mutex<Option<Objects>>,
}

struct Objects {
    dialect: Dialect,
    store: Store<DynamicObject>,
    task: AbortHandle,
}

impl Drop for Objects {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Finder {
    /// And the work that keeps it: to be run for as long as it is used.
    pub fn new(client: &Client, due: &Arc<Notify>) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let watch = |kind: Kind| {
            let config = watcher::Config::default().fields(&format!("metadata.name={}", kind.crd()));
            let due = due.clone();
            let (crd, work) = follow(Api::all(client.clone()), config, move |_| due.notify_one());
            (Watched { kind, crd, objects: Mutex::default() }, work)
        };
        let (kinds, work) = Kind::ALL.into_iter().map(watch).unzip();
        (Self { client: client.clone(), due: due.clone(), kinds }, work)
    }

    pub async fn look(&self) -> Result<Look, Error> {
        let mut all = Vec::new();
        for watched in &self.kinds {
            match self.objects(watched).await? {
                None => return Ok(Look::NotYet),
                Some(found) => all.extend(found),
            }
        }
        // One that is being deleted takes its entries along.
        all.retain(|cr| cr.object.metadata.deletion_timestamp.is_none());
        let oldest = |kind: Kind| {
            let of_kind = all.iter().filter(move |cr| cr.dialect.kind() == kind);
            of_kind.min_by_key(|cr| (cr.object.creation_timestamp(), cr.object.name_any())).cloned()
        };
        let counts = oldest(Kind::HyperConverged).or_else(|| oldest(Kind::KubeVirt));
        Ok(Look::Seen { counts, all })
    }

    /// Until the next look no object is watched.
    pub fn rest(&self) {
        for watched in &self.kinds {
            *watched.objects.lock().expect("objects lock should not be poisoned") = None;
        }
    }

    /// The kind's objects; `None` while they are not known.
    async fn objects(&self, watched: &Watched) -> Result<Option<Vec<Cr>>, Error> {
        if !filled(&watched.crd) {
            return Ok(None);
        }
        if watched.crd.state().iter().all(|crd| crd.metadata.deletion_timestamp.is_some()) {
            *watched.objects.lock().expect("objects lock should not be poisoned") = None;
            return Ok(Some(Vec::new()));
        }
        if let Some(objects) = watched.objects.lock().expect("objects lock should not be poisoned").as_ref() {
            return Ok(objects.list());
        }
        let Some(dialect) = self.served(watched.kind).await? else { return Ok(None) };
        let due = self.due.clone();
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &dialect.resource());
        let (store, work) = follow_as(dialect.resource(), api, watcher::Config::default(), move |_| due.notify_one());
        let task = tokio::spawn(work).abort_handle();
        let objects = Objects { dialect, store, task };
        *watched.objects.lock().expect("objects lock should not be poisoned") = Some(objects);
        Ok(None)
    }

    /// `None` while the CRD is too new: its next change, which tells, makes it established.
    async fn served(&self, kind: Kind) -> Result<Option<Dialect>, Error> {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let found = crds.get_opt(kind.crd()).await;
        let Some(crd) = found.map_err(|source| Error::Read(format!("CRD {}", kind.crd()), Box::new(source)))? else {
            return Ok(None);
        };
        let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
        if !conditions.into_iter().any(|c| c.type_ == "Established" && c.status == "True") {
            return Ok(None);
        }
        let served = |version: &str| crd.spec.versions.iter().any(|v| v.served && v.name == version);
        let dialect = kind.dialects().iter().find(|dialect| served(&dialect.gvk().version));
        dialect.copied().map(Some).ok_or(Error::NotServed { crd: kind.crd() })
    }
}

impl Objects {
    fn list(&self) -> Option<Vec<Cr>> {
        let of = |object| Cr { dialect: self.dialect, object };
        filled(&self.store).then(|| self.store.state().into_iter().map(of).collect())
    }
}

/// A store that is not filled yet looks like a cluster without objects.
fn filled<K>(store: &Store<K>) -> bool
where
    K: kube::runtime::reflector::Lookup + Clone + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone,
{
    store.wait_until_ready().now_or_never().is_some_and(|ready| ready.is_ok())
}
