//! What the nodes' GPUs prove. Pure.

use std::collections::BTreeSet;

use crds::v1alpha1::GPUNode;

use super::permitted::{Device, Selector};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// Registered by an agent's device plugin, with at least one device.
    pub offered: BTreeSet<Device>,
    /// Every GPU of every node, under the name that it would be offered as.
    pub known: BTreeSet<Device>,
    /// Ids of every GPU of every node.
    pub present: BTreeSet<Selector>,
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
            offers.present.insert(Selector::new(&gpu.id));
            let Some(name) = &gpu.resource else { continue };
            let device = Device::new(&gpu.id, name);
            let offered = |r: &crds::v1alpha1::ResourceStatus| r.name == *name && r.devices.contains(&gpu.address);
            if agent.resources.iter().any(offered) {
                offers.offered.insert(device.clone());
            }
            offers.known.insert(device);
        }
    }
    offers
}
