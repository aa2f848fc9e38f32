//! A PCI function, and a GPU with what its IOMMU group makes of it.

use serde::{Deserialize, Serialize};

use crate::address::PciAddress;
use crate::bar::Bar;
use crate::driver;
use crate::iommu::Acs;
use crate::pcie::{Aer, Link, Presence};
use crate::vgpu::VgpuParent;

/// PCI vendor id of NVIDIA.
pub const NVIDIA: u16 = 0x10de;

/// The four numbers by which a function is told from another one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ids {
    /// Who made the chip.
    pub vendor: u16,
    /// Which chip it is.
    pub device: u16,
    /// Who made the board.
    pub subsystem_vendor: u16,
    /// Which board it is.
    pub subsystem_device: u16,
}

/// One PCI function. What is not said otherwise is the attribute of its name in `/sys/bus/pci/devices/<address>`
/// (`Documentation/ABI/testing/sysfs-bus-pci`, `drivers/pci/pci-sysfs.c`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Function {
    /// The name of its directory.
    pub address: PciAddress,
    /// Who made the chip ([`NVIDIA`] is 0x10de).
    pub vendor: u16,
    /// Which chip it is.
    pub device: u16,
    /// Who made the board; 0 of many virtual functions.
    pub subsystem_vendor: u16,
    /// Which board it is; 0 of many virtual functions.
    pub subsystem_device: u16,
    /// Three bytes: base class, subclass, interface (`0x030200` is a 3D controller).
    pub class: u32,
    /// Where the link `driver` leads; `None`: nobody has it.
    pub driver: Option<String>,
    /// `None` also where it was not asked for: only NVIDIA's functions are asked, since reading it takes the device's lock.
    pub driver_override: Option<String>,
    /// Where the link `iommu_group` leads.
    pub iommu_group: Option<u32>,
    /// `None` where the kernel says -1: no node is nearer than another.
    pub numa_node: Option<u16>,
    /// The physical function that this virtual function belongs to.
    pub physfn: Option<PciAddress>,
    /// Virtual functions that exist now. Counted from the `virtfnN` links: `sriov_numvfs` takes the device's lock. Only
    /// NVIDIA's functions are asked.
    pub numvfs: u16,
    /// Whether firmware used it for the console.
    pub boot_vga: bool,
    /// Name in `/dev/vfio/devices` (`vfioN`) while it is on a VFIO driver, or is a vGPU (Linux 6.1 and newer).
    pub vfio_dev: Option<String>,
    /// E.g. `pci:v000010DEd00002941sv…`: what aliases of modules are compared with.
    pub modalias: Option<String>,
    /// The bridge or port above it, where there is one: the parent in the device tree.
    pub upstream: Option<PciAddress>,
    /// Its memory as the kernel has placed it (`resource`). Only GPUs are asked.
    pub bars: Vec<Bar>,
    /// Ways to reset it, the first that works is used (`reset_method`, Linux 5.15). Only GPUs are asked.
    pub reset_methods: Vec<String>,
    /// `D0` … `D3cold` or `unknown` (`power_state`, Linux 5.11). Only GPUs are asked.
    pub power_state: Option<String>,
    /// Whether it may be switched off wholly while nobody uses it (`d3cold_allowed`). Only GPUs are asked.
    pub d3cold_allowed: Option<bool>,
    /// Virtual functions that it could have (`sriov_totalvfs`); 0 where it can have none. Only GPUs are asked.
    pub vfs_possible: u16,
    /// Its `PCIe` link; `None`: not known, or it is not on such a bus. Only GPUs are asked.
    pub link: Option<Link>,
    /// Errors of the bus since boot; `None` where the kernel does not count them. Only GPUs are asked.
    pub aer: Option<Aer>,
    /// Whether it answers; `None`: not asked, since it sleeps (D3cold) and a question would wake it. Only GPUs are asked.
    pub presence: Option<Presence>,
    /// How it makes vGPUs; `None`: it makes none, as long as it is on the driver that it is on.
    pub vgpu: Option<VgpuParent>,
    /// Of a port: whether it keeps apart what is behind it. Only ports above a GPU that shares its group are asked.
    pub acs: Option<Acs>,
    /// Whether its driver, its lock or the device itself did not answer in time. Nothing that only GPUs or functions of
    /// NVIDIA are asked is known then, and a write would not come back either.
    pub late: bool,
}

impl Function {
    /// What tells it from another function that comes to the same place.
    pub fn ids(&self) -> Ids {
        Ids {
            vendor: self.vendor,
            device: self.device,
            subsystem_vendor: self.subsystem_vendor,
            subsystem_device: self.subsystem_device,
        }
    }

    /// Whether it is a virtual function of SR-IOV.
    pub fn is_vf(&self) -> bool {
        self.physfn.is_some()
    }

    /// A bridge stays on its driver: the port drivers leave the DMA of what is behind them alone
    /// (`driver_managed_dma`, Linux 5.19). Class 0680 is "other bridge": `NVSwitch` and friends are no bridges in that sense.
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06 && self.class >> 8 != 0x0680
    }

    /// A GPU that can be handed out: a display controller of NVIDIA that is not a virtual function.
    pub fn is_primary(&self) -> bool {
        self.vendor == NVIDIA && is_display(self.class) && !self.is_vf()
    }

    /// Whether it is bound to `vfio-pci` or a variant of it.
    pub fn on_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(driver::is_vfio)
    }

    /// What may go along with a GPU: audio, USB, UCSI of the same board.
    pub(crate) fn can_accompany(&self) -> bool {
        self.vendor == NVIDIA && self.class >> 16 != 0x06 && !self.is_primary() && !self.is_vf()
    }
}

/// VGA compatible (0300) and 3D controller (0302).
fn is_display(class: u32) -> bool {
    matches!(class >> 8, 0x0300 | 0x0302)
}

/// A GPU with what its IOMMU group makes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu<'a> {
    /// The display function.
    pub primary: &'a Function,
    /// Other functions of NVIDIA in the same slot or group, which go along.
    pub companions: Vec<&'a Function>,
    /// Anything else in the group except bridges: the group cannot be handed out.
    pub foreign: Vec<&'a Function>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Other GPUs in the group: one allocation unit with this one.
    pub shares_group_with: Vec<PciAddress>,
}
