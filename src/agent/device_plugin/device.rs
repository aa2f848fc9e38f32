//! What the agent offers to the kubelet.

use std::{collections::BTreeMap, path::PathBuf};

use super::names::ResourceName;

/// Everything that this node offers. The same device must not be under two names.
pub type Offer = BTreeMap<ResourceName, Vec<Device>>;

/// Device nodes of VFIO's own character devices (kernel `drivers/vfio/device_cdev.c`), usable only through iommufd.
const CDEV_DIR: &str = "/dev/vfio/devices/";

/// One thing that a VM can be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// PCI address, e.g. `0000:3b:00.0`; this is what the VM's launcher finds in its environment.
    pub id: String,
    pub health: Health,
    /// `None` where the kernel says -1: the kubelet then gets no topology hint, rather than a made-up node 0.
    pub numa_node: Option<u16>,
    /// Device nodes to hand over, as the host sees them, e.g. `/dev/vfio/35` and `/dev/vfio/devices/vfio3`.
    pub nodes: Vec<PathBuf>,
    /// IOMMU group. Devices of one group go to one container, or to none.
    pub group: Option<u32>,
    /// Names of the ports and bridges above it, the root port first. Devices below one port are near to each other.
    pub path: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    Healthy,
    /// Counted in the node's capacity, given to nobody.
    Unhealthy,
}

impl Health {
    /// The kubelet's word for it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "Healthy",
            Self::Unhealthy => "Unhealthy",
        }
    }
}

/// Whether a device node works through iommufd only.
pub(super) fn is_cdev(node: &std::path::Path) -> bool {
    node.starts_with(CDEV_DIR)
}

/// A device of the same IOMMU group that is offered under another name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elsewhere {
    pub resource: ResourceName,
    pub id: String,
}

/// The part of an offer that one plugin serves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Share {
    pub devices: Vec<Device>,
    /// By IOMMU group: groups that reach into another resource.
    pub elsewhere: BTreeMap<u32, Elsewhere>,
}

impl Share {
    pub(super) fn find(&self, id: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.id == id)
    }

    pub(super) fn healthy(&self) -> usize {
        self.devices.iter().filter(|device| device.health == Health::Healthy).count()
    }
}

/// Cuts an offer into what each plugin has to know.
pub(super) fn shares(offer: Offer) -> BTreeMap<ResourceName, Share> {
    let mut members: BTreeMap<u32, Vec<Elsewhere>> = BTreeMap::new();
    for (resource, devices) in &offer {
        for device in devices {
            if let Some(group) = device.group {
                let member = Elsewhere { resource: resource.clone(), id: device.id.clone() };
                members.entry(group).or_default().push(member);
            }
        }
    }
    let elsewhere = |resource: &ResourceName, devices: &[Device]| {
        let groups = devices.iter().filter_map(|device| device.group);
        groups
            .filter_map(|group| {
                let other = members.get(&group)?.iter().find(|member| member.resource != *resource)?;
                Some((group, other.clone()))
            })
            .collect()
    };
    offer
        .into_iter()
        .map(|(resource, devices)| {
            let elsewhere = elsewhere(&resource, &devices);
            (resource, Share { devices, elsewhere })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str, group: u32) -> Device {
        Device {
            id: id.into(),
            health: Health::Healthy,
            numa_node: None,
            nodes: vec![],
            group: Some(group),
            path: vec![],
        }
    }

    #[test]
    fn a_group_that_reaches_into_another_resource_is_known_on_both_sides() {
        let t4: ResourceName = "nvidia.com/TU104GL_TESLA_T4".parse().unwrap();
        let a10: ResourceName = "nvidia.com/GA102GL_A10".parse().unwrap();
        let offer = Offer::from([
            (t4.clone(), vec![device("0000:01:00.0", 1), device("0000:02:00.0", 2)]),
            (a10.clone(), vec![device("0000:03:00.0", 2), device("0000:04:00.0", 4)]),
        ]);

        let shares = shares(offer);

        let other = |resource: &ResourceName, id: &str| Elsewhere { resource: resource.clone(), id: id.into() };
        assert_eq!(shares[&t4].elsewhere, BTreeMap::from([(2, other(&a10, "0000:03:00.0"))]));
        assert_eq!(shares[&a10].elsewhere, BTreeMap::from([(2, other(&t4, "0000:02:00.0"))]));
    }

    #[test]
    fn two_devices_of_a_group_under_one_name_reach_nowhere_else() {
        let t4: ResourceName = "nvidia.com/TU104GL_TESLA_T4".parse().unwrap();
        let offer = Offer::from([(t4.clone(), vec![device("0000:01:00.0", 1), device("0000:02:00.0", 1)])]);
        assert_eq!(shares(offer)[&t4].elsewhere, BTreeMap::new());
    }
}
