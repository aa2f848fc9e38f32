//! The names of gpu-operator's node-status-exporter, on nodes for virtual machines, which it leaves out: what watches a
//! fleet of container nodes by them sees these nodes too.
//!
//! What VM nodes have no counterpart of (`toolkit_ready`, `cuda_ready`) is not there: 0 would be an alert.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use crds::WorkloadMode;
use k8s_openapi::jiff::Timestamp;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Registry};
use vfio::function::NVIDIA;

use super::{super::translate, NODE, Round};
use crate::{
    node_status::{BEGAN, PCI},
    telemetry::{Described, Unit},
};

const DRIVER: Described = Described::gauge(
    "gpu_operator_node_driver_ready",
    NODE,
    Unit::Flag,
    "On a VM node: whether every GPU is with the driver that its mode asks for",
);
const PLUGIN: Described = Described::gauge(
    "gpu_operator_node_plugin_ready",
    NODE,
    Unit::Flag,
    "On a VM node: whether the kubelet has accepted every resource that is offered",
);
const VALIDATION: Described = Described::gauge(
    "gpu_operator_node_driver_validation",
    NODE,
    Unit::Flag,
    "On a VM node: as gpu_operator_node_driver_ready",
);
const VALIDATED: Described = Described::gauge(
    "gpu_operator_node_driver_validation_last_success_ts_seconds",
    NODE,
    Unit::Time,
    "When that was so last, 0 for never",
);
const DEVICES: Described = Described::gauge(
    "gpu_operator_node_device_plugin_devices_total",
    NODE,
    Unit::Count,
    "On a VM node: GPUs and vGPUs that the kubelet may give out",
);
const OFFERED: Described = Described::gauge(
    "gpu_operator_node_device_plugin_validation_last_success_ts_seconds",
    NODE,
    Unit::Time,
    "When there were any last, 0 for never",
);

#[cfg(test)]
pub(super) const ALL: &[Described] = &[BEGAN, DRIVER, PLUGIN, VALIDATION, VALIDATED, DEVICES, OFFERED, PCI];

/// Times are seconds since 1970.
#[derive(Clone, Debug, Default)]
struct Shown {
    /// Whether the node is one for virtual machines: nothing is shown of others.
    vms: bool,
    began: i64,
    driver: bool,
    validated: i64,
    plugin: bool,
    devices: i64,
    offered: i64,
    functions: i64,
}

#[derive(Clone, Debug)]
pub(super) struct Peer(Arc<Mutex<Shown>>);

impl Peer {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let peer = Self(Arc::new(Mutex::new(Shown { began: now(), ..Shown::default() })));
        registry.register_collector(Box::new(peer.clone()));
        peer
    }

    pub(super) fn show(&self, round: &Round<'_>) {
        let observation = round.observation;
        let gpus = observation.inventory.gpus();
        let asked = gpus.iter().filter_map(|gpu| round.wish.mode(gpu.primary.address).map(|mode| (gpu, mode)));
        let mut vms = false;
        let mut driver = true;
        for (gpu, mode) in asked {
            vms |= match mode {
                WorkloadMode::VmPassthrough | WorkloadMode::VmVgpu => true,
                WorkloadMode::Container => false,
            };
            driver &= translate::mode(round.wish, observation, gpu) == Some(mode);
        }
        let given_out: usize = round.plugins.values().filter(|p| p.registered).map(|plugin| plugin.healthy).sum();
        let offers = !round.offered.offer.is_empty();
        let known = |name| round.plugins.get(name).is_some_and(|plugin| plugin.registered);
        let nvidias = observation.inventory.functions.values().filter(|f| f.vendor == NVIDIA).count();
        let mut shown = self.0.lock().expect("metrics lock should not be poisoned");
        shown.vms = vms;
        shown.driver = driver;
        shown.plugin = offers && round.offered.offer.keys().all(known);
        shown.devices = i64::try_from(given_out).unwrap_or(i64::MAX);
        shown.functions = i64::try_from(nvidias).unwrap_or(i64::MAX);
        if driver {
            shown.validated = now();
        }
        if given_out > 0 {
            shown.offered = now();
        }
    }
}

impl Collector for Peer {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let shown = self.0.lock().expect("metrics lock should not be poisoned").clone();
        if !shown.vms {
            return Ok(());
        }
        for (metric, value) in [
            (BEGAN, shown.began),
            (DRIVER, shown.driver.into()),
            (PLUGIN, shown.plugin.into()),
            (VALIDATION, shown.driver.into()),
            (VALIDATED, shown.validated),
            (DEVICES, shown.devices),
            (OFFERED, shown.offered),
            (PCI, shown.functions),
        ] {
            metric.encode(&mut encoder, value)?;
        }
        Ok(())
    }
}

fn now() -> i64 {
    Timestamp::now().as_second()
}
