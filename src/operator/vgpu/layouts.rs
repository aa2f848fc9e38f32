//! The file that a policy's layouts are in: the user's ConfigMap, watched while it is named, or our own.

use std::sync::{Arc, Mutex, OnceLock};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt,
    runtime::{reflector::Store, watcher},
};
use tokio::task::AbortHandle;

use super::{
    config::{Config, Fault},
    defaults,
};
use crate::operator::world::{NodeWork, Wake, filled, follow};

/// Key of the file in a ConfigMap.
pub const KEY: &str = "config.yaml";
/// ConfigMap that shows our own layouts.
pub const OURS: &str = "default-vgpu-devices-config";

/// Where a policy has its layouts (`spec.vgpuDeviceManager.config`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSource {
    /// ConfigMap in the operator's namespace; `None`: our own layouts.
    pub config_map: Option<String>,
    /// Layout of nodes without the label.
    pub default: String,
}

/// Why no layout can be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFile {
    #[error(
        "there is no ConfigMap {name} in the operator's namespace: create it, or leave spec.vgpuDeviceManager.config.name empty"
    )]
    NotFound { name: String },
    #[error("ConfigMap {name} has no key {KEY}: it has {keys}")]
    NoKey { name: String, keys: String },
    #[error("ConfigMap {name}, {KEY}, {fault}")]
    Fault { name: String, fault: Fault },
}

impl BadFile {
    /// One CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "VGPUConfigMapNotFound",
            Self::NoKey { .. } => "VGPUConfigMapKeyMissing",
            Self::Fault { .. } => "VGPUConfigInvalid",
        }
    }
}

/// What a file says.
pub type File = Result<Config, BadFile>;

pub struct Layouts {
    client: Client,
    namespace: String,
    wake: Wake,
    ours: OnceLock<Arc<File>>,
    watched: Mutex<Option<Watched>>,
}

struct Watched {
    name: String,
    store: Store<ConfigMap>,
    /// Read once a version, for all nodes.
    read: Option<(Option<String>, Arc<File>)>,
    task: AbortHandle,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Layouts {
    pub fn new(client: Client, namespace: String, wake: Wake) -> Self {
        Self { client, namespace, wake, ours: OnceLock::new(), watched: Mutex::default() }
    }

    /// `None` while it has not been listed: all nodes are woken then, and at each change.
    pub fn get(&self, source: &LayoutSource) -> Option<Arc<File>> {
        let mut watched = self.watched.lock().expect("layouts lock should not be poisoned");
        let Some(name) = &source.config_map else {
            *watched = None;
            let ours = || Arc::new(Config::parse(&defaults::yaml()).map_err(|fault| fault_of(OURS, fault)));
            return Some(self.ours.get_or_init(ours).clone());
        };
        if watched.as_ref().is_none_or(|watched| watched.name != *name) {
            *watched = Some(self.watch(name));
        }
        watched.as_mut()?.read()
    }

    fn watch(&self, name: &str) -> Watched {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let wake = self.wake.clone();
        let (store, work) = follow(api, config, move |_| wake.node(NodeWork::All));
        Watched { name: name.to_owned(), store, read: None, task: tokio::spawn(work).abort_handle() }
    }
}

impl Watched {
    fn read(&mut self) -> Option<Arc<File>> {
        if !filled(&self.store) {
            return None;
        }
        let map = self.store.state().into_iter().next();
        let version = map.as_ref().and_then(|map| map.resource_version());
        if let Some((known, file)) = &self.read
            && *known == version
        {
            return Some(file.clone());
        }
        let file = Arc::new(file(&self.name, map.as_deref()));
        self.read = Some((version, file.clone()));
        Some(file)
    }
}

fn file(name: &str, map: Option<&ConfigMap>) -> File {
    let Some(map) = map.filter(|map| map.metadata.deletion_timestamp.is_none()) else {
        return Err(BadFile::NotFound { name: name.to_owned() });
    };
    let data = map.data.iter().flatten();
    let Some((_, text)) = data.clone().find(|(key, _)| *key == KEY) else {
        let keys: Vec<&str> = data.map(|(key, _)| key.as_str()).collect();
        let keys = if keys.is_empty() { "none".to_owned() } else { keys.join(", ") };
        return Err(BadFile::NoKey { name: name.to_owned(), keys });
    };
    Config::parse(text).map_err(|fault| fault_of(name, fault))
}

fn fault_of(name: &str, fault: Fault) -> BadFile {
    BadFile::Fault { name: name.to_owned(), fault }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(data: &serde_json::Value) -> ConfigMap {
        serde_json::from_value(json!({"metadata": {"name": "mine"}, "data": data})).expect("a ConfigMap")
    }

    #[test]
    fn the_file_is_read_from_its_key() {
        let good = map(&json!({KEY: "version: v1\nvgpu-configs: {a: [{devices: all, vgpu-devices: {}}]}"}));
        assert_eq!(file("mine", Some(&good)).expect("a file").names().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named_with_the_config_map() {
        let told = |map: Option<&ConfigMap>| {
            let error = file("mine", map).expect_err("an error");
            (error.reason(), error.to_string())
        };
        let (reason, message) = told(None);
        assert_eq!(reason, "VGPUConfigMapNotFound");
        assert!(message.contains("no ConfigMap mine"), "{message}");
        let (_, message) = told(Some(&map(&json!({"a": "", "b": ""}))));
        assert!(message.contains("mine has no key config.yaml: it has a, b"), "{message}");
        let (reason, message) = told(Some(&map(&json!({KEY: "version: v2"}))));
        assert_eq!(reason, "VGPUConfigInvalid");
        assert!(message.contains("mine, config.yaml, line 1, column 10: version v2"), "{message}");
    }
}
