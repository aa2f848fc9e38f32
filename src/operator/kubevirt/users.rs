//! Which devices virtual machines ask for.
//!
//! Asked only before the first entry, and watched only while one of them stands in its way.

use std::{collections::HashMap, sync::Arc};

use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::Value;
use tokio::{sync::Notify, task::AbortHandle};

/// One machine and one device that it asks for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Use {
    /// Kind, namespace and name, as in `VirtualMachineInstance default/vm-1`.
    pub by: String,
    /// Resource name, as in `nvidia.com/GA102GL_A10`.
    pub device: String,
}

/// Instances, and the machines that may be started again.
const KINDS: [(&str, &str); 2] =
    [("VirtualMachineInstance", "/spec/domain/devices"), ("VirtualMachine", "/spec/template/spec/domain/devices")];

fn resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind))
}

pub async fn list(client: &Client) -> Result<Vec<Use>, kube::Error> {
    let mut uses = Vec::new();
    for (kind, devices) in KINDS {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource(kind));
        match api.list(&ListParams::default()).await {
            Ok(found) => uses.extend(found.items.iter().flat_map(|object| of(kind, devices, object))),
            // KubeVirt's operator has not installed the kind yet, so there is none.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    uses.sort();
    uses.dedup();
    Ok(uses)
}

fn of(kind: &str, devices: &str, object: &DynamicObject) -> Vec<Use> {
    let phase = object.data.pointer("/status/phase").and_then(Value::as_str);
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let devices = object.data.pointer(devices);
    let listed = |key: &str| devices.and_then(|devices| devices.get(key)).and_then(Value::as_array).cloned();
    let all = ["gpus", "hostDevices"].into_iter().filter_map(listed).flatten();
    let names = all.filter_map(|device| device.get("deviceName").and_then(Value::as_str).map(str::to_owned));
    let by = format!("{kind} {}/{}", object.namespace().unwrap_or_default(), object.name_any());
    // A device of a resource claim has no name here, and is not checked.
    names.filter(|name| !name.is_empty()).map(|device| Use { by: by.clone(), device }).collect()
}

/// Tells `due` when a machine has gone or its spec has changed. Ends when it is dropped.
pub struct Watch(Vec<AbortHandle>);

impl Watch {
    pub fn start(client: &Client, due: &Arc<Notify>) -> Self {
        let watch = |kind| tokio::spawn(tell(client.clone(), kind, due.clone())).abort_handle();
        Self(KINDS.into_iter().map(|(kind, _)| watch(kind)).collect())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

/// Metadata only: what they ask for is listed when there is a reason to.
async fn tell(client: Client, kind: &'static str, due: Arc<Notify>) {
    let api: Api<kube::core::PartialObjectMeta<DynamicObject>> = Api::all_with(client, &resource(kind));
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    let mut specs: HashMap<Option<String>, Option<i64>> = HashMap::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::InitApply(object)) => drop(specs.insert(object.uid(), object.metadata.generation)),
            Ok(Event::Apply(object)) => {
                let generation = object.metadata.generation;
                if specs.insert(object.uid(), generation).is_some_and(|before| before != generation) {
                    due.notify_one();
                }
            }
            Ok(Event::Delete(object)) => {
                specs.remove(&object.uid());
                due.notify_one();
            }
            // One may have gone while nobody looked.
            Ok(Event::InitDone) => due.notify_one(),
            Ok(Event::Init) => specs.clear(),
            Err(error) => tracing::debug!(kind, %error, "watch interrupted, trying again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(data: Value) -> DynamicObject {
        DynamicObject::new("vm-1", &resource("VirtualMachineInstance")).within("default").data(data)
    }

    fn running() -> Value {
        json!({
            "spec": {"domain": {"devices": {
                "gpus": [{"name": "a", "deviceName": "nvidia.com/A"}, {"name": "claimed", "claimName": "c"}],
                "hostDevices": [{"name": "b", "deviceName": "example.com/nic"}],
            }}},
            "status": {"phase": "Running"},
        })
    }

    fn devices(kind: usize, data: Value) -> Vec<String> {
        let (kind, path) = KINDS[kind];
        of(kind, path, &object(data)).into_iter().map(|user| format!("{}: {}", user.by, user.device)).collect()
    }

    #[test]
    fn gpus_and_host_devices_count_and_claims_do_not() {
        let expected = ["nvidia.com/A", "example.com/nic"].map(|d| format!("VirtualMachineInstance default/vm-1: {d}"));
        assert_eq!(devices(0, running()), expected);
    }

    #[test]
    fn an_instance_that_has_ended_uses_nothing() {
        let mut ended = running();
        ended["status"]["phase"] = json!("Succeeded");
        assert!(devices(0, ended).is_empty());
    }

    #[test]
    fn a_machine_that_is_off_counts_by_its_template() {
        let off = json!({"spec": {"template": running()}, "status": {"printableStatus": "Stopped"}});
        assert_eq!(devices(1, off).len(), 2);
    }
}
