//! Whether KubeVirt is there, and which object has its configuration.
//!
//! The two CRDs are watched by name, as metadata; their objects only while the CRD exists. So a cluster without KubeVirt
//! costs two silent watches, and one that gets it later is noticed by an event.

use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams},
    runtime::{reflector::Store, watcher},
};
use tokio::{sync::Notify, task::AbortHandle};

use super::{
    Error,
    crd::{Crd, Served},
    dialect::{Dialect, Kind},
    mediated::Switch,
    permitted::Permitted,
};
use crate::operator::world::{filled, follow_as};

/// An object that has, or could have, entries of ours.
#[derive(Clone)]
pub struct Cr {
    pub dialect: Dialect,
    /// How it says that KubeVirt makes no mediated devices, as far as its CRD was read.
    pub switch: Option<Switch>,
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
    crd: Crd,
    objects: Mutex<Option<Objects>>,
}

struct Objects {
    dialect: Dialect,
    switch: Option<Switch>,
    /// Of the CRD that these were chosen by.
    generation: Option<i64>,
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
            let due = due.clone();
            let (crd, work) = Crd::new(client, kind.crd(), move || due.notify_one());
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
        Ok(Look::Seen { counts: counts(&all), all })
    }

    /// Until the next look no object is watched.
    pub fn rest(&self) {
        for watched in &self.kinds {
            *watched.objects.lock().expect("objects lock should not be poisoned") = None;
        }
    }

    /// The kind's objects; `None` while they are not known.
    async fn objects(&self, watched: &Watched) -> Result<Option<Vec<Cr>>, Error> {
        match watched.crd.absent() {
            None => return Ok(None),
            Some(true) => {
                *watched.objects.lock().expect("objects lock should not be poisoned") = None;
                return Ok(Some(Vec::new()));
            }
            Some(false) => {}
        }
        let generation = watched.crd.generation();
        if let Some(objects) = watched.objects.lock().expect("objects lock should not be poisoned").as_ref()
            && objects.generation == generation
        {
            return Ok(objects.list());
        }
        let crd = match watched.crd.served().await? {
            Served::NotYet | Served::Absent => return Ok(None),
            Served::Here(crd) => crd,
        };
        let dialect = watched.kind.dialect(&crd).ok_or(Error::NotServed { crd: watched.kind.crd() })?;
        if let Some(objects) = watched.objects.lock().expect("objects lock should not be poisoned").as_mut()
            && objects.dialect == dialect
        {
            objects.generation = generation;
            objects.switch = Switch::of(dialect, &crd);
            return Ok(objects.list());
        }
        let due = self.due.clone();
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &dialect.resource());
        let (store, work) = follow_as(dialect.resource(), api, watcher::Config::default(), move |_| due.notify_one());
        let task = tokio::spawn(work).abort_handle();
        let objects = Objects { dialect, switch: Switch::of(dialect, &crd), generation, store, task };
        *watched.objects.lock().expect("objects lock should not be poisoned") = Some(objects);
        Ok(None)
    }
}

fn counts(all: &[Cr]) -> Option<Cr> {
    let oldest = |kind: Kind| {
        let of_kind = all.iter().filter(move |cr| cr.dialect.kind() == kind);
        of_kind.min_by_key(|cr| (cr.object.creation_timestamp(), cr.object.name_any())).cloned()
    };
    oldest(Kind::HyperConverged).or_else(|| oldest(Kind::KubeVirt))
}

/// What the object that counts permits now, asked for once; `None` if there is none.
pub async fn permitted_now(client: &Client) -> Result<Option<Permitted>, Error> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for dialect in kind.dialects() {
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &dialect.resource());
            match api.list(&ListParams::default()).await {
                Ok(found) => {
                    let cr = |object| Cr { dialect: *dialect, switch: None, object: Arc::new(object) };
                    all.extend(found.items.into_iter().map(cr));
                    break;
                }
                // The kind, or this version of it, is not served.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(source) => return Err(Error::Read(format!("objects of CRD {}", kind.crd()), Box::new(source))),
            }
        }
    }
    all.retain(|cr| cr.object.metadata.deletion_timestamp.is_none());
    counts(&all).map(|cr| Ok(Permitted::read(cr.dialect, &cr.object)?)).transpose()
}

impl Objects {
    fn list(&self) -> Option<Vec<Cr>> {
        let of = |object| Cr { dialect: self.dialect, switch: self.switch.clone(), object };
        filled(&self.store).then(|| self.store.state().into_iter().map(of).collect())
    }
}
