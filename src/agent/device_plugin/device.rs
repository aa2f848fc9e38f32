//! What the agent offers to the kubelet.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::names::ResourceName;

/// Everything that this node offers. The same device must not be under two names.
pub type Offer = BTreeMap<ResourceName, Vec<Device>>;

/// Device nodes of VFIO's own character devices (kernel `drivers/vfio/device_cdev.c`), usable only through iommufd.
const CDEV_DIR: &str = "/dev/vfio/devices/";

/// One thing that a VM can be given: a GPU with its IOMMU group, or a vGPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// PCI address, e.g. `0000:3b:00.0`, or UUID of a mediated device; this is what the VM's launcher finds in its environment.
    pub id: String,
    pub health: Health,
    /// `None` where the kernel says -1: the kubelet then gets no topology hint, rather than a made-up node 0.
    pub numa_node: Option<u16>,
    /// Device nodes to hand over, as the host sees them, e.g. `/dev/vfio/35` and `/dev/vfio/devices/vfio3`.
    pub nodes: Vec<PathBuf>,
    /// Ids of the other GPUs of its IOMMU group. They are not offered: whoever has the group has them.
    pub others: Vec<String>,
    /// Names of the ports and bridges above it, the root port first. Devices below one port are near to each other.
    pub path: Vec<String>,
    /// Memory that it shares with other GPUs of its board, on boards that have such.
    pub egm: Option<Egm>,
    /// It is a vGPU.
    pub partition: Option<Partition>,
}

/// What a vGPU is a part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// PCI address of the GPU.
    pub gpu: String,
    /// Its id is the UUID of a mediated device, which `KubeVirt` looks for in another variable than a PCI address.
    pub mediated: bool,
}

/// Extended GPU memory of a Grace board: host memory for the GPUs behind one socket, a device node of its own. It can
/// be given only to one who has all of these GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Egm {
    /// E.g. `/dev/egm0`.
    pub node: PathBuf,
    /// Ids of the GPUs whose memory it is.
    pub gpus: Vec<String>,
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
pub(super) fn is_cdev(node: &Path) -> bool {
    node.starts_with(CDEV_DIR)
}

pub(super) fn find<'a>(devices: &'a [Device], id: &str) -> Option<&'a Device> {
    devices.iter().find(|device| device.id == id)
}

pub(super) fn healthy(devices: &[Device]) -> usize {
    devices.iter().filter(|device| device.health == Health::Healthy).count()
}
