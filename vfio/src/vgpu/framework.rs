//! Which of the two frameworks a GPU has now, or why none. Probed: no table of boards, drivers and kernels says it better.

use serde::Serialize;

use super::instances::parents;
use super::library::GpuFacts;
use super::{VgpuParent, types::shape};
use crate::address::PciAddress;
use crate::function::Function;
use crate::inventory::Inventory;

/// The module of NVIDIA's vGPU host driver, in both frameworks.
const VGPU_MODULE: &str = "nvidia_vgpu_vfio";
/// The driver that makes vGPUs.
pub(super) const NVIDIA_DRIVER: &str = "nvidia";
/// Keeps a physical function whose virtual functions are made, where the host's driver cannot make them itself.
pub(super) const STUB_DRIVER: &str = "pci-pf-stub";

/// How a GPU makes vGPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Framework {
    /// Mediated devices, of the GPU or of its virtual functions.
    Mdev,
    /// Types of its virtual functions.
    VendorVfio,
    /// It makes none now.
    None(NoVgpu),
}

/// Why a GPU makes no vGPU. Each names the GPU and the next step.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum NoVgpu {
    /// Only NVIDIA's driver makes them.
    #[error("gpu {gpu} is on {driver}: vGPUs are made by the nvidia driver of NVIDIA's vGPU host package")]
    NotOnDriver { gpu: PciAddress, driver: String },
    /// Virtual functions can be had and are not there: what the driver makes of them is not known before.
    #[error(
        "gpu {gpu} has none of its {possible} virtual functions: they are made with the first vGPU that is asked for"
    )]
    VfsOff { gpu: PciAddress, possible: u16 },
    /// `sriov_drivers_autoprobe` is off, or their driver's probe has failed.
    #[error(
        "gpu {gpu}: {count} virtual functions are there and none is on the nvidia driver; look for their addresses in the kernel log, and write 1 to sriov_drivers_autoprobe of {gpu} if it is 0"
    )]
    VfsUnbound { gpu: PciAddress, count: u16 },
    /// The driver without the module that makes vGPUs.
    #[error(
        "gpu {gpu}: its driver makes no vGPUs (module nvidia_vgpu_vfio is not loaded): install NVIDIA's vGPU host driver in place of the data center driver"
    )]
    NoVgpuDriver { gpu: PciAddress },
    /// No virtual function can be had, and the GPU itself has no mediated devices.
    #[error(
        "gpu {gpu} has neither mediated devices nor virtual functions: enable SR-IOV (and ARI) in the firmware's setup, and take the board out of display mode (displaymodeselector --gpumode compute) if it has one"
    )]
    NoSriov { gpu: PciAddress },
    /// Its firmware gives up vGPUs for displays.
    #[error(
        "gpu {gpu} is in display mode, in which it makes no vGPUs: take the board out of it (displaymodeselector --gpumode compute) and reboot"
    )]
    DisplayMode { gpu: PciAddress },
    /// MIG mode hides what shares time, and GPU instances are what it shows types for.
    #[error(
        "gpu {gpu} is in MIG mode and has no GPU instance, so that its driver offers no type: choose a layout with MIG-backed types, or end that mode (nvidia-smi -i {gpu} -mig 0)"
    )]
    MigWithoutInstances { gpu: PciAddress },
    /// Virtual functions on the right driver, without either interface.
    #[error(
        "gpu {gpu}: its virtual functions offer neither mediated devices nor vGPU types on Linux {kernel}: up to vGPU 16 the driver needs mdev (before Linux 6.8), from vGPU 17 on it needs its vGPU manager to run; see the log of nvidia-vgpu-mgr"
    )]
    NoInterface { gpu: PciAddress, kernel: String },
}

impl NoVgpu {
    /// One word for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotOnDriver { .. } => "NotOnNvidiaDriver",
            Self::VfsOff { .. } => "NoVirtualFunctions",
            Self::VfsUnbound { .. } => "VirtualFunctionsUnbound",
            Self::NoVgpuDriver { .. } => "NoVgpuDriver",
            Self::NoSriov { .. } => "NoSriov",
            Self::DisplayMode { .. } => "DisplayMode",
            Self::MigWithoutInstances { .. } => "MigWithoutInstances",
            Self::NoInterface { .. } => "NoVgpuInterface",
        }
    }

    /// Whether it may end by itself soon after a driver was loaded or virtual functions were made: the driver's own services
    /// bring what is missing.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::NotOnDriver { .. }
            | Self::NoVgpuDriver { .. }
            | Self::VfsUnbound { .. }
            | Self::NoInterface { .. } => true,
            Self::VfsOff { .. }
            | Self::NoSriov { .. }
            | Self::DisplayMode { .. }
            | Self::MigWithoutInstances { .. } => false,
        }
    }
}

/// What a GPU's functions show. Why they show nothing the library may know better.
pub fn framework(inventory: &Inventory, gpu: &Function, facts: Option<&GpuFacts>) -> Framework {
    let address = gpu.address;
    let vgpu = |function: &Function| match function.vgpu {
        Some(VgpuParent::Mdev { .. }) => Some(Framework::Mdev),
        Some(VgpuParent::VendorVfio { .. }) => Some(Framework::VendorVfio),
        None => None,
    };
    if let Some(found) = parents(inventory, address).find_map(vgpu) {
        return found;
    }
    let driver = gpu.driver.as_deref().unwrap_or("no driver");
    let bound = |function: &Function| function.driver.as_deref() == Some(NVIDIA_DRIVER);
    let makes_vgpus = inventory.facts.loaded_modules.contains(VGPU_MODULE);
    Framework::None(if driver != NVIDIA_DRIVER {
        NoVgpu::NotOnDriver { gpu: address, driver: driver.to_owned() }
    } else if !makes_vgpus {
        NoVgpu::NoVgpuDriver { gpu: address }
    } else if gpu.numvfs == 0 && gpu.vfs_possible > 0 {
        NoVgpu::VfsOff { gpu: address, possible: gpu.vfs_possible }
    } else if gpu.numvfs == 0 && facts.is_some_and(|facts| facts.display == Some(true)) {
        NoVgpu::DisplayMode { gpu: address }
    } else if gpu.numvfs == 0 {
        NoVgpu::NoSriov { gpu: address }
    } else if !parents(inventory, address).any(|function| function.is_vf() && bound(function)) {
        NoVgpu::VfsUnbound { gpu: address, count: gpu.numvfs }
    } else if facts.is_some_and(|facts| facts.mig.is_some_and(|mode| mode.on) && facts.instances.is_empty()) {
        NoVgpu::MigWithoutInstances { gpu: address }
    } else {
        NoVgpu::NoInterface { gpu: address, kernel: inventory.facts.kernel_release.clone() }
    })
}

/// Whether everything that a GPU lists is MIG-backed, as in MIG mode, which hides the types that share time (and the other
/// way round). `None`: it lists nothing that NVIDIA's rule for names applies to.
pub(super) fn lists_mig_only<'a>(kinds: impl Iterator<Item = &'a str>) -> Option<bool> {
    let mut slices = kinds.filter_map(shape).map(|shape| shape.slices.is_some()).peekable();
    slices.peek()?;
    Some(slices.all(|mig| mig))
}
