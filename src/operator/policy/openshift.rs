//! What an OpenShift cluster says of itself: its version, its proxy, and the images that can build a driver for a node.
//!
//! Objects of types that other clusters do not have: they are watched where the first of the types is there.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use futures::future::BoxFuture;
use kube::{
    Api, Client,
    api::DynamicObject,
    core::{ApiResource, GroupVersionKind},
    runtime::{reflector::Store, watcher},
};
use serde_json::Value;
use tokio::{sync::Notify, task::AbortHandle};

use super::validate::{OpenShift, Platform, Proxy};
use crate::operator::{
    kubevirt::crd::Crd,
    world::{filled, follow_as},
};

/// No other platform has it.
const CRD: &str = "clusterversions.config.openshift.io";

pub struct Watched {
    client: Client,
    crd: Crd,
    due: Arc<Notify>,
    objects: Mutex<Option<Objects>>,
}

struct Objects {
    version: Store<DynamicObject>,
    proxy: Store<DynamicObject>,
    toolkit: Store<DynamicObject>,
    tasks: Vec<AbortHandle>,
}

impl Drop for Objects {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Watched {
    /// And the work that knows whether this is OpenShift.
    pub fn new(client: &Client, due: &Arc<Notify>) -> (Self, BoxFuture<'static, ()>) {
        let touched = due.clone();
        let (crd, work) = Crd::new(client, CRD, move || touched.notify_one());
        (Self { client: client.clone(), crd, due: due.clone(), objects: Mutex::default() }, work)
    }

    /// Whether it is known if the cluster has the type.
    pub fn known(&self) -> bool {
        self.crd.absent().is_some()
    }

    pub fn platform(&self) -> Platform {
        let mut objects = self.objects.lock().expect("OpenShift lock should not be poisoned");
        match self.crd.absent() {
            None => return Platform::NotYet,
            Some(true) => {
                *objects = None;
                return Platform::Kubernetes;
            }
            Some(false) => {}
        }
        let objects = objects.get_or_insert_with(|| self.watch());
        let all = [&objects.version, &objects.proxy, &objects.toolkit];
        if !all.into_iter().all(filled) {
            return Platform::NotYet;
        }
        let [version, proxy, toolkit] = all.map(|store| store.state().first().map(|object| object.data.clone()));
        Platform::OpenShift(read(version.as_ref(), proxy.as_ref(), toolkit.as_ref()))
    }

    fn watch(&self) -> Objects {
        let mut tasks = Vec::new();
        let mut one = |group: &str, kind: &str, namespace: Option<&str>, name: &str| {
            let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind),
                None => Api::all_with(self.client.clone(), &kind),
            };
            let due = self.due.clone();
            let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
            let (store, work) = follow_as(kind, api, config, move |_| due.notify_one());
            tasks.push(tokio::spawn(work).abort_handle());
            store
        };
        let version = one("config.openshift.io", "ClusterVersion", None, "version");
        let proxy = one("config.openshift.io", "Proxy", None, "cluster");
        let toolkit = one("image.openshift.io", "ImageStream", Some("openshift"), "driver-toolkit");
        Objects { version, proxy, toolkit, tasks }
    }
}

/// Of the objects' content without their metadata.
fn read(version: Option<&Value>, proxy: Option<&Value>, toolkit: Option<&Value>) -> OpenShift {
    let completed = |entry: &&Value| entry["state"] == "Completed";
    let history = version.and_then(|version| version["status"]["history"].as_array());
    let version =
        history.and_then(|history| history.iter().find(completed)).and_then(|entry| entry["version"].as_str());
    let minor = version.map(|version| version.split('.').take(2).collect::<Vec<_>>().join("."));
    // The status has what is in force: the networks of the cluster itself are in its noProxy.
    let proxied = |name: &str| {
        let of = |part: &str| proxy?[part][name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        of("status").or_else(|| of("spec"))
    };
    let tags = toolkit.and_then(|stream| stream["spec"]["tags"].as_array()).map(Vec::as_slice).unwrap_or_default();
    let image = |tag: &Value| Some((tag["name"].as_str()?.to_owned(), tag["from"]["name"].as_str()?.to_owned()));
    let toolkits: BTreeMap<String, String> =
        tags.iter().filter_map(image).filter(|(name, _)| name != "latest").collect();
    OpenShift {
        version: minor.unwrap_or_default(),
        proxy: Proxy { http: proxied("httpProxy"), https: proxied("httpsProxy"), none: proxied("noProxy") },
        trusted_ca: proxy
            .is_some_and(|proxy| proxy["spec"]["trustedCA"]["name"].as_str().is_some_and(|n| !n.is_empty())),
        stream: toolkit.is_some(),
        toolkits,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_version_is_the_last_completed_one_and_the_proxy_the_one_in_force() {
        let version = json!({"status": {"history": [
            {"state": "Partial", "version": "4.17.1"}, {"state": "Completed", "version": "4.16.30"},
            {"state": "Completed", "version": "4.15.2"},
        ]}});
        let proxy = json!({
            "spec": {"httpProxy": "http://p:1", "noProxy": "own", "trustedCA": {"name": "user-ca-bundle"}},
            "status": {"httpProxy": "http://p:1", "noProxy": ".cluster.local,own"},
        });
        let toolkit = json!({"spec": {"tags": [
            {"name": "latest", "from": {"name": "r/x:1"}}, {"name": "416.94.1-0", "from": {"name": "r/dtk@sha256:ab"}},
        ]}});
        let read = read(Some(&version), Some(&proxy), Some(&toolkit));
        assert_eq!((read.version.as_str(), read.trusted_ca), ("4.16", true));
        assert_eq!(
            (read.proxy.http.as_deref(), read.proxy.none.as_deref()),
            (Some("http://p:1"), Some(".cluster.local,own"))
        );
        assert_eq!(read.toolkits, [("416.94.1-0".to_owned(), "r/dtk@sha256:ab".to_owned())].into());
    }

    #[test]
    fn a_cluster_without_a_proxy_has_none() {
        assert_eq!(read(None, Some(&json!({"spec": {"trustedCA": {"name": ""}}})), None), OpenShift::default());
    }
}
