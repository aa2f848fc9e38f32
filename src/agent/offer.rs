//! What may be handed out, under which name, and what is counted and withheld. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use crds::{
    WorkloadMode,
    v1alpha1::{Advertise, AgentFunction},
};
use vfio::{Binding, Function, Gpu, Inventory, ObserveError, PciAddress, deviations};

use super::{
    device_plugin::{Device, Egm, Health, Offer, ResourceName, names},
    health::{Ailment, Ailments, unfit},
    translate::shown,
    vfio_manager::Observation,
    wish::Wish,
};

mod vgpus;

pub use vgpus::vgpu_resource;

/// What the kubelet is told, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offered {
    pub offer: Offer,
    /// Why a GPU that is in its mode is given to nobody.
    pub withheld: BTreeMap<PciAddress, String>,
    /// What is wrong with GPUs, those included that were offered before and are not as they were.
    pub ailments: Ailments,
}

/// GPUs that are asked to be in passthrough, and are; and those of `before` that are not any more and should be: they
/// stay in the node's capacity, unhealthy, so that nobody takes a broken node for a smaller one.
pub fn offer(wish: &Wish, observation: &Observation, before: &Offer) -> Offered {
    let mut offered = Offered { ailments: observation.ailments.clone(), ..Offered::default() };
    if wish.spec.advertise == Advertise::Withdrawn || !wish.has(AgentFunction::SandboxDevicePlugin) {
        return offered;
    }
    let mut settled = BTreeSet::new();
    for gpu in observation.inventory.gpus() {
        let address = gpu.primary.address;
        let asked = wish.mode(address) == Some(WorkloadMode::VmPassthrough);
        if !asked || shown(&observation.inventory, &gpu) != Some(WorkloadMode::VmPassthrough) {
            continue;
        }
        settled.insert(address.to_string());
        if let Some(first) = leader(&gpu) {
            let why = format!("GPU {address} shares its IOMMU group with {first} and goes to whoever has that one");
            offered.withheld.insert(address, why);
            continue;
        }
        match resource_name(wish, gpu.primary) {
            Ok(name) => {
                let withheld = withheld(&gpu, &name, observation);
                offered.offer.entry(name).or_default().push(device(observation, &gpu, withheld.as_deref()));
                offered.withheld.extend(withheld.map(|why| (address, why)));
            }
            Err(error) => drop(offered.withheld.insert(address, error.to_string())),
        }
    }
    vgpus::add(&mut offered, wish, observation, before);
    let lost = before.iter().flat_map(|(name, devices)| devices.iter().map(move |device| (name, device)));
    for (name, device) in lost.filter(|(_, device)| device.partition.is_none() && !settled.contains(&device.id)) {
        let Ok(address) = device.id.parse::<PciAddress>() else { continue };
        if wish.mode(address) == Some(WorkloadMode::VmPassthrough) {
            offered.keep_lost(name, device, address, &observation.inventory);
        }
    }
    offered
}

impl Offered {
    fn keep_lost(&mut self, name: &ResourceName, device: &Device, gpu: PciAddress, inventory: &Inventory) {
        let ailments = self.ailments.entry(gpu).or_default();
        if unfit(ailments).is_none() {
            let still = deviations(inventory, gpu, Binding::Vfio);
            let how = still.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            let unread =
                |error: &ObserveError| matches!(error, ObserveError::Function { address, .. } if *address == gpu);
            let ailment = match inventory.gpu(gpu) {
                Some(_) => Ailment::Changed { gpu, how },
                None if inventory.errors.iter().any(unread) => Ailment::Silent { gpu },
                None => Ailment::Vanished { gpu },
            };
            ailments.insert(0, ailment);
        }
        self.withheld.extend(unfit(ailments).map(|ailment| (gpu, ailment.to_string())));
        self.offer.entry(name.clone()).or_default().push(Device { health: Health::Unhealthy, ..device.clone() });
    }
}

/// The GPU that stands for its group, if another one does: the first by address. As many are offered as there are
/// groups, since a group goes to one VM.
pub fn leader(gpu: &Gpu<'_>) -> Option<PciAddress> {
    gpu.shares_group_with.iter().copied().min().filter(|first| *first < gpu.primary.address)
}

/// The user's name for the device id, or the one that NVIDIA's rule makes.
pub fn resource_name(wish: &Wish, primary: &Function) -> Result<ResourceName, names::Error> {
    let id = format!("{:04x}:{:04x}", primary.vendor, primary.device);
    match wish.spec.aliases.iter().find(|alias| alias.selector == id) {
        Some(alias) => alias.name.parse(),
        None => names::resource_name(primary.vendor, primary.device),
    }
}

/// Why a GPU that is in its mode must not be given to a pod: it or one of its group is unfit, or somebody has it who did
/// not get it under this name.
fn withheld(gpu: &Gpu<'_>, name: &ResourceName, observation: &Observation) -> Option<String> {
    let address = gpu.primary.address;
    let members = gpu.shares_group_with.iter().chain([&address]);
    let unfit = members.filter_map(|member| observation.ailments.get(member)).find_map(|ailments| unfit(ailments));
    if let Some(ailment) = unfit {
        return Some(ailment.to_string());
    }
    let mut given = observation.allocations.get(&address.to_string()).into_iter().flatten();
    if let Some(other) = given.clone().find(|allocation| allocation.resource != name.as_str()) {
        return Some(format!("pod {} has it as {}: not given out as {name} until it ends", other.pod, other.resource));
    }
    let opened = observation.holders.get(&address).into_iter().flatten().find(|holder| holder.pid > 0);
    match (opened, given.next()) {
        (Some(holder), None) => {
            Some(format!("{holder}, which the kubelet did not give it to: not given out until it ends"))
        }
        (Some(_) | None, _) => None,
    }
}

/// Device nodes of a GPU: its group's first, then those of all that go along.
pub fn nodes(inventory: &Inventory, gpu: &Gpu<'_>) -> Vec<PathBuf> {
    let others = gpu.shares_group_with.iter().filter_map(|other| inventory.gpu(*other));
    let functions = std::iter::once(gpu.primary).chain(gpu.companions.iter().copied());
    let functions = functions.chain(others.map(|other| other.primary));
    let group = gpu.group.map(|group| PathBuf::from(format!("/dev/vfio/{group}")));
    let cdevs = functions.filter_map(|function| function.vfio_dev.as_ref());
    group.into_iter().chain(cdevs.map(|name| PathBuf::from(format!("/dev/vfio/devices/{name}")))).collect()
}

fn device(observation: &Observation, gpu: &Gpu<'_>, withheld: Option<&str>) -> Device {
    let inventory = &observation.inventory;
    let egm = observation.egm.iter().find(|(_, gpus)| gpus.contains(&gpu.primary.address));
    Device {
        id: gpu.primary.address.to_string(),
        health: if withheld.is_some() { Health::Unhealthy } else { Health::Healthy },
        numa_node: gpu.primary.numa_node,
        nodes: nodes(inventory, gpu),
        others: gpu.shares_group_with.iter().map(ToString::to_string).collect(),
        path: inventory.path(gpu.primary.address).iter().map(ToString::to_string).collect(),
        egm: egm.map(|(node, gpus)| Egm { node: node.clone(), gpus: gpus.iter().map(ToString::to_string).collect() }),
        partition: None,
    }
}

fn unfit_member(observation: &Observation, gpu: PciAddress) -> bool {
    observation.ailments.get(&gpu).is_some_and(|ailments| unfit(ailments).is_some())
}

#[cfg(test)]
#[path = "offer_tests.rs"]
mod tests;
