//! What the nodes' GPUs prove. Pure.

use std::collections::BTreeSet;

use crds::v1alpha1::{AgentStatus, GPUNode, GPUStatus, VgpuFramework, VgpuInstance};

use super::{
    dialect::List,
    permitted::{Device, Selector},
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// Registered by an agent's device plugin, with at least one device.
    pub offered: BTreeSet<Device>,
    /// Every GPU of every node, under the name that it would be offered as.
    pub known: BTreeSet<Device>,
    /// Ids of every GPU of every node.
    pub present: BTreeSet<Selector>,
    /// Types of mediated devices that a driver of any node could make, as in `A10-4Q`.
    pub kinds: BTreeSet<String>,
    /// Whether any node is asked to make mediated devices.
    pub mediated: bool,
    /// Offered vGPUs that are virtual functions.
    pub virtual_functions: BTreeSet<String>,
    /// Every GPUNode has been read and carries a report: only then absence means anything.
    pub complete: bool,
}

/// `all_read`: no GPUNode was left out because it does not decode.
pub fn offers(gpu_nodes: &[GPUNode], all_read: bool) -> Offers {
    let mut offers = Offers { complete: all_read, ..Offers::default() };
    for node in gpu_nodes {
        let Some(agent) = node.status.as_ref().and_then(|status| status.agent.as_ref()) else {
            offers.complete = false;
            continue;
        };
        for gpu in &agent.gpus {
            let id = Selector::pci(&gpu.id);
            offers.present.insert(id.clone());
            if let Some(name) = &gpu.resource {
                offers.add(Device::new(id, name), agent, &gpu.address);
            }
            offers.add_vgpus(agent, gpu);
            let mediated = gpu.vgpu.as_ref().is_some_and(|vgpu| vgpu.framework == VgpuFramework::Mdev);
            offers.mediated |= mediated && node.spec.vgpu.is_some();
        }
    }
    offers
}

impl Offers {
    /// Whether some GPU could be offered under this selector.
    pub fn could_have(&self, selector: &Selector) -> bool {
        match selector.list {
            List::Pci => self.present.contains(selector),
            List::Mediated => self.kinds.contains(selector.kind()),
        }
    }

    fn add(&mut self, device: Device, agent: &AgentStatus, id: &str) -> bool {
        let has = |devices: &[String]| devices.iter().any(|device| device == id);
        let offered = agent.resources.iter().any(|r| r.name == device.resource && has(&r.devices));
        if offered {
            self.offered.insert(device.clone());
        }
        self.known.insert(device);
        offered
    }

    fn add_vgpus(&mut self, agent: &AgentStatus, gpu: &GPUStatus) {
        let Some(vgpu) = &gpu.vgpu else { return };
        if vgpu.framework == VgpuFramework::Mdev {
            self.kinds.extend(vgpu.types.iter().map(|kind| kind.name.clone()));
        }
        for instance in &vgpu.instances {
            let Some(device) = device_of(vgpu.framework, gpu, instance) else { continue };
            let (resource, is_function) = (device.resource.clone(), device.selector.list == List::Pci);
            if self.add(device, agent, &instance.id) && is_function {
                self.virtual_functions.insert(resource);
            }
        }
    }
}

/// A virtual function has the device id of its GPU.
fn device_of(framework: VgpuFramework, gpu: &GPUStatus, instance: &VgpuInstance) -> Option<Device> {
    let resource = instance.resource.as_deref()?;
    let selector = match framework {
        VgpuFramework::Mdev => Selector::mediated(resource.split_once('/').map_or(resource, |(_, name)| name)),
        VgpuFramework::VendorVfio => Selector::pci(&gpu.id),
        VgpuFramework::None => return None,
    };
    Some(Device::new(selector, resource))
}

/// Everything that nodes have, as it would be permitted.
pub fn devices(gpu_nodes: &[GPUNode]) -> BTreeSet<Device> {
    offers(gpu_nodes, true).known
}
