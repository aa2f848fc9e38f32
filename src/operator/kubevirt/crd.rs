//! One CRD, watched by name as metadata: whether its kind is served is an event, not a poll.

use futures::future::BoxFuture;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    core::PartialObjectMeta,
    runtime::{reflector::Store, watcher},
};

use super::Error;
use crate::operator::world::{filled, follow};

pub struct Crd {
    client: Client,
    name: &'static str,
    store: Store<PartialObjectMeta<CustomResourceDefinition>>,
}

pub enum Served {
    /// Not known yet, or not established yet: its next change tells.
    NotYet,
    Absent,
    Here(Box<CustomResourceDefinition>),
}

impl Crd {
    /// And the work that keeps it. `touched` hears of every change.
    pub fn new(
        client: &Client,
        name: &'static str,
        touched: impl Fn() + Send + 'static,
    ) -> (Self, BoxFuture<'static, ()>) {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let (store, work) = follow(Api::all(client.clone()), config, move |_| touched());
        (Self { client: client.clone(), name, store }, work)
    }

    /// Without a request, whether it is known that there is none.
    pub fn absent(&self) -> Option<bool> {
        filled(&self.store).then(|| self.store.state().iter().all(|crd| crd.metadata.deletion_timestamp.is_some()))
    }

    /// Changes when its versions do.
    pub fn generation(&self) -> Option<i64> {
        self.store.state().iter().find_map(|crd| crd.metadata.generation)
    }

    pub async fn served(&self) -> Result<Served, Error> {
        match self.absent() {
            None => return Ok(Served::NotYet),
            Some(true) => return Ok(Served::Absent),
            Some(false) => {}
        }
        let crds: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let found = crds.get_opt(self.name).await;
        let Some(crd) = found.map_err(|source| Error::Read(format!("CRD {}", self.name), Box::new(source)))? else {
            return Ok(Served::NotYet);
        };
        let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let established = conditions.into_iter().any(|c| c.type_ == "Established" && c.status == "True");
        Ok(if established { Served::Here(Box::new(crd)) } else { Served::NotYet })
    }
}
