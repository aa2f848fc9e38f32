//! vGPUs among what may be handed out.

use std::path::{Path, PathBuf};

use crds::WorkloadMode;
use vfio::{PciAddress, vgpu::Vgpu};

use super::{Offered, unfit_member};
use crate::agent::{
    device_plugin::{Device, Health, Offer, Partition, ResourceName, names},
    vfio_manager::Observation,
    vgpu_manager::{GpuVgpus, Progress},
    wish::Wish,
};

/// As `KubeVirt` and the peer's plugin name it: the kernel's name with `_` for white space.
pub fn vgpu_resource(vgpu: &Vgpu) -> Result<ResourceName, names::Error> {
    let name = vgpu.name.as_deref().unwrap_or_default();
    names::vgpu_resource_name(name)
}

/// vGPUs of GPUs that are asked to have some, once their layout is final; and those of `before` that are gone while their
/// GPU is not as it shall be: they stay in the node's capacity, unhealthy.
pub(super) fn add(offered: &mut Offered, wish: &Wish, observation: &Observation, before: &Offer) {
    for (gpu, found) in &observation.vgpus.gpus {
        if wish.mode(*gpu) != Some(WorkloadMode::VmVgpu) || !settled(observation, *gpu) {
            continue;
        }
        for vgpu in &found.instances {
            let Ok(name) = vgpu_resource(vgpu) else { continue };
            let device = device(observation, *gpu, found, vgpu, &name);
            offered.offer.entry(name).or_default().push(device);
        }
    }
    for (name, device) in before.iter().flat_map(|(name, all)| all.iter().map(move |device| (name, device))) {
        let Some(gpu) = device.partition.as_ref().and_then(|part| part.gpu.parse().ok()) else { continue };
        let there = offered.offer.values().flatten().any(|other| other.id == device.id);
        let done = matches!(observation.vgpus.progress.get(&gpu), Some(Progress::Done));
        if !there && !done && wish.mode(gpu) == Some(WorkloadMode::VmVgpu) {
            let lost = Device { health: Health::Unhealthy, ..device.clone() };
            offered.offer.entry(name.clone()).or_default().push(lost);
        }
    }
}

/// Nothing is offered before the layout is final; what a failed one has left is.
fn settled(observation: &Observation, gpu: PciAddress) -> bool {
    match observation.vgpus.progress.get(&gpu) {
        Some(Progress::Done | Progress::Failed(_)) => true,
        Some(Progress::Pending(_)) | None => false,
    }
}

fn device(observation: &Observation, gpu: PciAddress, found: &GpuVgpus, vgpu: &Vgpu, name: &ResourceName) -> Device {
    let inventory = &observation.inventory;
    let function = inventory.functions.get(&gpu);
    let group = vgpu.iommu_group.map(|group| PathBuf::from(format!("/dev/vfio/{group}")));
    let cdev = vgpu.vfio_dev.as_ref().map(|name| Path::new("/dev/vfio/devices").join(name));
    // vGPUs of one GPU are near to each other, and a request is filled from a GPU that is broken already.
    let path = inventory.path(gpu).into_iter().chain([gpu]).map(|port| port.to_string());
    Device {
        id: vgpu.id.clone(),
        health: if withheld(observation, gpu, found, vgpu, name) { Health::Unhealthy } else { Health::Healthy },
        numa_node: function.and_then(|function| function.numa_node),
        nodes: group.into_iter().chain(cdev).collect(),
        others: Vec::new(),
        path: path.collect(),
        egm: None,
        partition: Some(Partition { gpu: gpu.to_string(), mediated: vgpu.mediated }),
    }
}

/// Its GPU is unfit, no VM could open it, or somebody has it who did not get it under this name.
fn withheld(observation: &Observation, gpu: PciAddress, found: &GpuVgpus, vgpu: &Vgpu, name: &ResourceName) -> bool {
    let facts = &observation.inventory.facts;
    let openable = vgpu.iommu_group.is_some_and(|group| facts.vfio_groups.contains(&group))
        || vgpu.vfio_dev.as_ref().is_some_and(|name| facts.vfio_devices.contains(name));
    let given = observation.allocations.get(&vgpu.id).into_iter().flatten();
    let elsewhere = given.clone().any(|allocation| allocation.resource != name.as_str());
    let opened = found.holders.get(&vgpu.id).is_some_and(|holders| holders.iter().any(|holder| holder.pid > 0));
    unfit_member(observation, gpu) || !openable || elsewhere || (opened && given.count() == 0)
}
