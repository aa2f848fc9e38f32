//! Each GPU as it is, and the sums of a node.

pub(super) mod names;

use std::sync::atomic::AtomicU64;

use crds::v1alpha1::{GPUUser, Severity};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use vfio::{Gpu, Holder};

use super::{
    super::{
        device_plugin::names::product,
        health::{Bus, bus, unfit},
        offer, translate,
    },
    Round,
};

/// What the kernel calls a power state; another word would be another series.
const POWER_STATES: [&str; 6] = ["D0", "D1", "D2", "D3hot", "D3cold", "unknown"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    gpu: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Info {
    gpu: String,
    id: String,
    product: &'static str,
    driver: String,
    mode: &'static str,
    resource: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ailing {
    gpu: String,
    reason: &'static str,
    severity: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refused {
    gpu: String,
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Made {
    gpu: String,
    r#type: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Errors {
    gpu: String,
    severity: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Power {
    gpu: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Vm {
    gpu: String,
    namespace: String,
    name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Launcher {
    gpu: String,
    namespace: String,
    pod: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Resource {
    resource: String,
}

#[derive(Default)]
pub(super) struct Gpus {
    all: Gauge,
    in_use: Gauge,
    unhealthy: Gauge,
    info: Family<Info, Gauge>,
    gpu_in_use: Family<Of, Gauge>,
    healthy: Family<Of, Gauge>,
    ailments: Family<Ailing, Gauge>,
    refused: Family<Refused, Gauge>,
    withheld: Family<Of, Gauge>,
    vgpus: Family<Made, Gauge>,
    lanes: Family<Of, Gauge>,
    lanes_max: Family<Of, Gauge>,
    speed: Family<Of, Gauge<f64, AtomicU64>>,
    speed_max: Family<Of, Gauge<f64, AtomicU64>>,
    errors: Family<Errors, Counter>,
    power: Family<Power, Gauge>,
    vms: Family<Vm, Gauge>,
    pods: Family<Launcher, Gauge>,
    devices: Family<Resource, Gauge>,
    devices_healthy: Family<Resource, Gauge>,
    registered: Family<Resource, Gauge>,
}

impl Gpus {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let gpus = Self::default();
        names::ALL_GPUS.register(registry, &gpus.all);
        names::IN_USE.register(registry, &gpus.in_use);
        names::UNHEALTHY.register(registry, &gpus.unhealthy);
        names::INFO.register(registry, &gpus.info);
        names::GPU_IN_USE.register(registry, &gpus.gpu_in_use);
        names::HEALTHY.register(registry, &gpus.healthy);
        names::AILMENT.register(registry, &gpus.ailments);
        names::REFUSED.register(registry, &gpus.refused);
        names::WITHHELD.register(registry, &gpus.withheld);
        names::VGPUS.register(registry, &gpus.vgpus);
        names::LINK_LANES.register(registry, &gpus.lanes);
        names::LINK_LANES_MAX.register(registry, &gpus.lanes_max);
        names::LINK_SPEED.register(registry, &gpus.speed);
        names::LINK_SPEED_MAX.register(registry, &gpus.speed_max);
        names::ERRORS.register(registry, &gpus.errors);
        names::POWER.register(registry, &gpus.power);
        names::VM.register(registry, &gpus.vms);
        names::POD.register(registry, &gpus.pods);
        names::DEVICES.register(registry, &gpus.devices);
        names::DEVICES_HEALTHY.register(registry, &gpus.devices_healthy);
        names::REGISTERED.register(registry, &gpus.registered);
        gpus
    }

    /// Nothing waits between the clearing and the filling, so no scrape sees a half.
    pub(super) fn show<'a>(&self, round: &Round<'_>, users: impl Iterator<Item = &'a GPUUser>) {
        self.clear();
        let inventory = &round.observation.inventory;
        let gpus = inventory.gpus();
        self.all.set(count(gpus.len()));
        for gpu in &gpus {
            self.show_gpu(round, gpu);
        }
        for user in users {
            for gpu in &user.gpus {
                self.user(gpu, Some(&user.pod), user.vmi.as_deref());
            }
        }
        for (name, state) in round.plugins {
            let of = Resource { resource: name.as_str().to_owned() };
            self.devices.get_or_create(&of).set(count(state.devices));
            self.devices_healthy.get_or_create(&of).set(count(state.healthy));
            self.registered.get_or_create(&of).set(state.registered.into());
        }
        self.on_bus(&bus(inventory));
    }

    fn show_gpu(&self, round: &Round<'_>, gpu: &Gpu<'_>) {
        let (observation, primary) = (round.observation, gpu.primary);
        let address = primary.address.to_string();
        let of = Of { gpu: address.clone() };
        self.info.get_or_create(&info(round, gpu)).set(1);
        let ailments = round.offered.ailments.get(&primary.address).map(Vec::as_slice).unwrap_or_default();
        let sick = unfit(ailments).is_some();
        self.healthy.get_or_create(&of).set((!sick).into());
        self.unhealthy.inc_by(sick.into());
        for ailment in ailments {
            let severity = match ailment.severity() {
                Severity::Unhealthy => "Unhealthy",
                Severity::Degraded => "Degraded",
            };
            let ailing = Ailing { gpu: address.clone(), reason: ailment.reason(), severity };
            self.ailments.get_or_create(&ailing).set(1);
        }
        if let Some(refusal) = observation.refusals.get(&primary.address) {
            self.refused.get_or_create(&Refused { gpu: address.clone(), reason: refusal.reason.clone() }).set(1);
        }
        self.withheld.get_or_create(&of).set(round.offered.withheld.contains_key(&primary.address).into());
        let made = observation.vgpus.gpus.get(&primary.address);
        for vgpu in made.into_iter().flat_map(|made| &made.instances) {
            let of = Made { gpu: address.clone(), r#type: vgpu.kind().unwrap_or("unknown").to_owned() };
            self.vgpus.get_or_create(&of).inc();
        }
        let of_vgpus = made.into_iter().flat_map(|made| made.holders.values().flatten());
        let holders = observation.holders.get(&primary.address).into_iter().flatten();
        let holders: Vec<&Holder> = holders.chain(of_vgpus).collect();
        self.gpu_in_use.get_or_create(&of).set((!holders.is_empty()).into());
        self.in_use.inc_by((!holders.is_empty()).into());
        for holder in holders {
            self.user(&address, holder.pod.as_deref(), holder.vm.as_deref());
        }
    }

    /// Only by names: a pod's UID and what a host's own hypervisor calls a machine are nothing to join by.
    fn user(&self, gpu: &str, pod: Option<&str>, vm: Option<&str>) {
        if let Some((namespace, name)) = vm.and_then(|vm| vm.split_once('/')) {
            let vm = Vm { gpu: gpu.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
            self.vms.get_or_create(&vm).set(1);
        }
        if let Some((namespace, pod)) = pod.and_then(|pod| pod.split_once('/')) {
            let pod = Launcher { gpu: gpu.to_owned(), namespace: namespace.to_owned(), pod: pod.to_owned() };
            self.pods.get_or_create(&pod).set(1);
        }
    }

    /// What changes without an event.
    pub(super) fn on_bus(&self, bus: &Bus) {
        for family in [&self.lanes, &self.lanes_max] {
            family.clear();
        }
        for family in [&self.speed, &self.speed_max] {
            family.clear();
        }
        self.errors.clear();
        self.power.clear();
        for (gpu, on_bus) in bus {
            let gpu = gpu.to_string();
            let of = Of { gpu: gpu.clone() };
            if let Some(link) = on_bus.link {
                self.lanes.get_or_create(&of).set(link.current.width.into());
                self.lanes_max.get_or_create(&of).set(link.maximum.width.into());
                for (family, state) in [(&self.speed, link.current), (&self.speed_max, link.maximum)] {
                    if let Some(mega) = state.speed {
                        family.get_or_create(&of).set(f64::from(mega) * 1e6);
                    }
                }
            }
            if let Some(aer) = on_bus.aer {
                for (severity, errors) in
                    [("correctable", aer.correctable), ("nonfatal", aer.nonfatal), ("fatal", aer.fatal)]
                {
                    self.errors.get_or_create(&Errors { gpu: gpu.clone(), severity }).inc_by(errors);
                }
            }
            if let Some(said) = &on_bus.power_state {
                let state = POWER_STATES.into_iter().find(|state| state == said).unwrap_or("unknown");
                self.power.get_or_create(&Power { gpu, state }).set(1);
            }
        }
    }

    fn clear(&self) {
        let Self {
            all,
            in_use,
            unhealthy,
            info,
            gpu_in_use,
            healthy,
            ailments,
            refused,
            withheld,
            vgpus,
            // Of the bus: on_bus.
            lanes: _,
            lanes_max: _,
            speed: _,
            speed_max: _,
            errors: _,
            power: _,
            vms,
            pods,
            devices,
            devices_healthy,
            registered,
        } = self;
        for sum in [all, in_use, unhealthy] {
            sum.set(0);
        }
        for family in [gpu_in_use, healthy, withheld] {
            family.clear();
        }
        for family in [devices, devices_healthy, registered] {
            family.clear();
        }
        info.clear();
        ailments.clear();
        refused.clear();
        vgpus.clear();
        vms.clear();
        pods.clear();
    }
}

fn info(round: &Round<'_>, gpu: &Gpu<'_>) -> Info {
    let primary = gpu.primary;
    let mode = translate::mode(round.wish, round.observation, gpu).map_or("none", |mode| mode.as_str());
    let resource = offer::resource_name(round.wish, primary).map(|name| name.as_str().to_owned());
    Info {
        gpu: primary.address.to_string(),
        id: format!("{:04x}:{:04x}", primary.vendor, primary.device),
        product: product(primary.vendor, primary.device).unwrap_or("unknown"),
        driver: primary.driver.clone().unwrap_or_else(|| "none".to_owned()),
        mode,
        resource: resource.unwrap_or_default(),
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
