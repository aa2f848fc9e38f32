//! A `VirtualMachineInstance`, as far as its GPUs are concerned. Pure.
//!
//! Fields and condition texts as of KubeVirt 1.6 to 1.9 (`api/core/v1/types.go`, virt-controller's `renderresources.go`).

use std::collections::BTreeMap;

use kube::{
    ResourceExt,
    api::{ApiResource, GroupVersionKind, Object},
};
use serde::Deserialize;

/// CRD of the kind.
pub const CRD: &str = "virtualmachineinstances.kubevirt.io";

/// What is read of the object; the rest is dropped while it is decoded.
pub type Vmi = Object<Spec, Status>;

pub fn resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance"))
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    domain: Domain,
    eviction_strategy: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Domain {
    devices: Devices,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Devices {
    gpus: Vec<Device>,
    host_devices: Vec<Device>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Device {
    /// Empty for a device of a resource claim.
    device_name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    phase: String,
    node_name: Option<String>,
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    message: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub node: Option<String>,
    /// Resource names that it asks for by name, and how many of each.
    pub asks: BTreeMap<String, usize>,
    pub progress: Progress,
    /// A node's drain tries to migrate it, and waits for that. KubeVirt's webhook writes the cluster's default
    /// (`spec.configuration.evictionStrategy`) into every instance without a strategy of its own, on its creation
    /// (1.8: `pkg/defaults`), and what is there then counts for its whole life.
    pub live_migrate: bool,
}

/// How far KubeVirt has come with it, and what it says of what is in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// virt-controller makes no pod of it; its words.
    Refused(String),
    /// The scheduler finds no node for its pod; its words.
    Unschedulable(String),
    Starting,
    /// From the moment that its launcher runs.
    Runs,
    Failed,
    Succeeded,
}

impl Progress {
    pub fn waits(&self) -> bool {
        match self {
            Self::Refused(_) | Self::Unschedulable(_) | Self::Starting => true,
            Self::Runs | Self::Failed | Self::Succeeded => false,
        }
    }
}

impl Instance {
    pub fn of(vmi: &Vmi) -> Self {
        let devices = &vmi.spec.domain.devices;
        let mut asks = BTreeMap::new();
        for device in devices.gpus.iter().chain(&devices.host_devices).filter(|device| !device.device_name.is_empty()) {
            *asks.entry(device.device_name.clone()).or_default() += 1;
        }
        let status = vmi.status.clone().unwrap_or_default();
        Self {
            namespace: vmi.namespace().unwrap_or_default(),
            name: vmi.name_any(),
            uid: vmi.uid().unwrap_or_default(),
            node: status.node_name.clone().filter(|node| !node.is_empty()),
            asks,
            progress: progress(&status),
            // virt-api enters KubeVirt's default here when the object is made.
            live_migrate: vmi.spec.eviction_strategy.as_deref() == Some("LiveMigrate"),
        }
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

fn progress(status: &Status) -> Progress {
    match status.phase.as_str() {
        "Running" | "Scheduled" => return Progress::Runs,
        "Failed" => return Progress::Failed,
        "Succeeded" => return Progress::Succeeded,
        // Pending, Scheduling, WaitingForSync, and none yet.
        _ => {}
    }
    let says = |type_: &str| status.conditions.iter().find(|c| c.type_ == type_ && c.status == "False");
    if let Some(refused) = says("Synchronized") {
        return Progress::Refused(refused.message.clone());
    }
    match says("PodScheduled").filter(|c| !c.message.is_empty()) {
        Some(waits) => Progress::Unschedulable(waits.message.clone()),
        None => Progress::Starting,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi() -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"namespace": "vms", "name": "a", "uid": "1"},
            "spec": {"domain": {"devices": {
                "gpus": [{"name": "g1", "deviceName": "nvidia.com/A"}, {"name": "g2", "claimName": "claim"}],
                "hostDevices": [{"name": "h", "deviceName": "nvidia.com/A"}],
                "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
            }}},
            "status": {"phase": "Scheduling"},
        })
    }

    fn read(vmi: Value) -> Instance {
        Instance::of(&serde_json::from_value(vmi).expect("an instance"))
    }

    #[test]
    fn gpus_and_host_devices_of_one_name_are_counted_and_claims_are_not() {
        let instance = read(vmi());
        assert_eq!(instance.key(), "vms/a");
        assert_eq!(instance.asks, [("nvidia.com/A".to_owned(), 2)].into());
        assert_eq!(instance.progress, Progress::Starting);
        assert!(!instance.live_migrate);
    }

    #[test]
    fn what_kubevirt_refuses_and_what_the_scheduler_misses_are_told_apart() {
        let with = |type_: &str| {
            let mut vmi = vmi();
            vmi["status"]["conditions"] = json!([{"type": type_, "status": "False", "message": "why"}]);
            read(vmi).progress
        };
        assert_eq!(with("Synchronized"), Progress::Refused("why".to_owned()));
        assert_eq!(with("PodScheduled"), Progress::Unschedulable("why".to_owned()));
        assert_eq!(with("Ready"), Progress::Starting);
    }

    #[test]
    fn a_phase_that_is_reached_counts_more_than_a_condition_that_is_left() {
        let mut vmi = vmi();
        vmi["status"]["conditions"] = json!([{"type": "Synchronized", "status": "False", "message": "why"}]);
        for (phase, progress) in [("Scheduled", Progress::Runs), ("Failed", Progress::Failed)] {
            vmi["status"]["phase"] = json!(phase);
            assert_eq!(read(vmi.clone()).progress, progress);
        }
    }

    #[test]
    fn an_instance_without_devices_or_status_asks_for_nothing() {
        let bare = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "a"}, "spec": {"domain": {}, "evictionStrategy": "LiveMigrate"},
        });
        let instance = read(bare);
        assert!(instance.asks.is_empty() && instance.live_migrate);
    }
}
