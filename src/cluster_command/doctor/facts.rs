//! What the checks look at, read with the rights of whoever asks.

use std::fmt::Debug;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Namespace, Node},
    },
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::{ReadError, fleet::Fleet};
use crate::operator::kubevirt::Dialect;

/// Else why it is not known.
pub type Seen<T> = Result<T, String>;

pub struct Facts {
    pub kubernetes: Seen<Info>,
    /// `None`: gpuvirt's types are not there.
    pub fleet: Seen<Option<Fleet>>,
    /// `None`: there is no KubeVirt.
    pub kubevirt: Seen<Option<DynamicObject>>,
    /// Where it is, it owns the KubeVirt object.
    pub hyperconverged: Seen<Option<(Dialect, DynamicObject)>>,
    pub nodes: Seen<Vec<Node>>,
    pub daemon_sets: Seen<Vec<DaemonSet>>,
    pub deployments: Seen<Vec<Deployment>>,
    /// Of the operator.
    pub namespace: Seen<Namespace>,
}

impl Facts {
    pub async fn read(client: &Client) -> Self {
        let fleet = match Fleet::read(client).await {
            Ok(fleet) => Ok(Some(fleet)),
            Err(ReadError::Absent { .. }) => Ok(None),
            Err(error) => Err(error.brief()),
        };
        let at = fleet.as_ref().ok().and_then(Option::as_ref).map_or_else(|| "gpuvirt".to_owned(), Fleet::namespace);
        let namespaces: Api<Namespace> = Api::all(client.clone());
        Self {
            kubernetes: client.apiserver_version().await.map_err(|error| crate::chain(&error)),
            fleet,
            kubevirt: first(client, Dialect::KubeVirt).await,
            hyperconverged: hyperconverged(client).await,
            nodes: list(client, "nodes").await,
            daemon_sets: list(client, "daemonsets.apps").await,
            deployments: list(client, "deployments.apps").await,
            namespace: namespaces.get(&at).await.map_err(|error| ReadError::of("namespaces")(error).brief()),
        }
    }

    /// The object that has KubeVirt's configuration, and what is below a path of it; `spec.configuration` of KubeVirt.
    pub fn configuration(&self) -> Option<&Value> {
        self.kubevirt.as_ref().ok()?.as_ref()?.data.pointer("/spec/configuration")
    }

    /// Once gpuvirt is there and may be read.
    pub fn fleet(&self) -> Seen<&Fleet> {
        match &self.fleet {
            Ok(Some(fleet)) => Ok(fleet),
            Ok(None) => Err("gpuvirt is not installed".to_owned()),
            Err(why) => Err(why.clone()),
        }
    }
}

async fn list<K>(client: &Client, what: &'static str) -> Seen<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let found = Api::<K>::all(client.clone()).list(&ListParams::default()).await;
    found.map(|found| found.items).map_err(|error| ReadError::of(what)(error).brief())
}

/// The oldest of its kind; `None` where the kind is not served.
async fn first(client: &Client, dialect: Dialect) -> Seen<Option<DynamicObject>> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &dialect.resource());
    match api.list(&ListParams::default()).await {
        Ok(found) => Ok(found.items.into_iter().min_by_key(|object| (object.creation_timestamp(), object.name_any()))),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        Err(error) => Err(ReadError::of(dialect.kind().crd())(error).brief()),
    }
}

async fn hyperconverged(client: &Client) -> Seen<Option<(Dialect, DynamicObject)>> {
    for dialect in [Dialect::HyperConvergedV1, Dialect::HyperConvergedV1Beta1] {
        if let Some(found) = first(client, dialect).await? {
            return Ok(Some((dialect, found)));
        }
    }
    Ok(None)
}
