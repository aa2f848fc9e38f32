//! Why a GPU stays as it is.

use std::fmt;

use serde::Serialize;

use crate::address::PciAddress;
use crate::bar::Bar;
use crate::console::{Framebuffer, FramebufferKind};
use crate::holders::Holder;
use crate::iommu::{Acs, Region};
use crate::journal;
use crate::module::Ban;

/// A device that should not be in a GPU's group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ForeignDevice {
    /// PCI address, or the kernel's name of a device that is not PCI or cannot be read.
    pub name: String,
    /// `vendor:device` in hex.
    pub ids: Option<String>,
    /// Who has it; `None`: nobody, or not known.
    pub driver: Option<String>,
}

impl fmt::Display for ForeignDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.name)?;
        match &self.ids {
            Some(ids) => write!(f, "{ids}, ")?,
            None => write!(f, "unreadable, ")?,
        }
        match &self.driver {
            Some(driver) => write!(f, "on {driver})"),
            None => write!(f, "on no driver)"),
        }
    }
}

/// The lowest port above all members of a group that do not belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SharedPort {
    /// The bridge or switch port.
    pub address: PciAddress,
    /// `None`: not known.
    pub acs: Option<Acs>,
}

/// Why a VFIO driver that is not there cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum DriverGap {
    /// Neither built in nor among the modules.
    NoModule,
    /// The kernel command line or `modprobe.d` forbids it.
    Forbidden(Box<Ban>),
}

impl DriverGap {
    fn advice(&self, driver: &str, release: &str) -> String {
        match self {
            Self::NoModule => format!(
                "which kernel {release} has neither built in nor among its modules; install the kernel's full module \
                 package, then `modprobe {driver}`"
            ),
            Self::Forbidden(ban) => format!("which is not loaded and may not be: {ban}"),
        }
    }
}

/// Why nothing is done. Each names the device, what stands in the way, and the next step.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum Refusal {
    /// No display function of NVIDIA at that address, or a virtual function.
    #[error("{address} is no GPU of this host that can be handed out; `gpuvirt inspect` lists those")]
    NotAGpu { address: PciAddress },
    /// `/sys/kernel/iommu_groups` is empty.
    #[error(
        "gpu {gpu}: the IOMMU is off; switch on VT-d or AMD-Vi in the firmware and boot with intel_iommu=on or amd_iommu=on"
    )]
    IommuOff { gpu: PciAddress },
    /// There are groups, and the GPU is in none.
    #[error(
        "gpu {gpu} is in no IOMMU group although the IOMMU is on; look for its address in the kernel log (DMAR, AMD-Vi)"
    )]
    NoGroup { gpu: PciAddress },
    /// A group goes to a VM as a whole, and this one has members that are neither of a GPU nor bridges, or cannot be read.
    #[error(
        "gpu {gpu}: its IOMMU group {group} also holds {}{}; move the card to another slot, or give that device to vfio-pci \
         as well",
        list(devices), behind(port.as_ref())
    )]
    ForeignInGroup { gpu: PciAddress, group: u32, devices: Vec<ForeignDevice>, port: Option<SharedPort> },
    /// GPUs of one group go together, and another one shall stay.
    #[error(
        "gpu {gpu}: its IOMMU group {group} also holds gpu {}{}; set the same mode for all of them", list(others),
        behind(port.as_ref())
    )]
    SharedGroup { gpu: PciAddress, group: u32, others: Vec<PciAddress>, port: Option<SharedPort> },
    /// RMRR (Intel) or IVMD (AMD): see [`Inventory::firmware_memory`](crate::Inventory::firmware_memory).
    #[error(
        "gpu {gpu}: firmware uses memory {} through a device of its IOMMU group {group}, and the kernel gives such a device \
         to no VM; look in the firmware's setup for what uses the slot (remote management, legacy USB, RMRR)",
        list(regions)
    )]
    FirmwareMemory { gpu: PciAddress, group: u32, regions: Vec<Region> },
    /// VFIO would take it, and the VM would find no memory: see [`Bar`].
    #[error(
        "gpu {gpu}: BAR {} of {device}{} has no place in the address space, so no VM can use it; switch on \"above 4G \
         decoding\" (64-bit MMIO) in the firmware, or boot with pci=realloc",
        bar.index, bar_size(bar)
    )]
    BarUnassigned { gpu: PciAddress, device: PciAddress, bar: Bar },
    /// The VFIO driver that the function wants is not there and cannot be loaded.
    #[error("gpu {gpu}: {device} needs the driver {driver}, {}", gap.advice(driver, release))]
    NoDriver { gpu: PciAddress, device: PciAddress, driver: String, release: String, gap: DriverGap },
    /// The memory that a picture is drawn into would be taken from below it.
    #[error(
        "gpu {gpu}: {device} shows the host's console through {}; {}",
        shown(framebuffer),
        release_console(framebuffer)
    )]
    Console { gpu: PciAddress, device: PciAddress, framebuffer: Framebuffer },
    /// `unbind` of a device that is in use does not come back. All holders of the group are named.
    #[error("gpu {gpu} is in use by {}; {}", list(holders), next_steps(holders))]
    InUse { gpu: PciAddress, holders: Vec<Holder> },
    /// Unbinding the physical function would take them from their users.
    #[error("gpu {gpu}: {device} has {count} virtual functions; end their VMs and write 0 to its sriov_numvfs")]
    VfsPresent { gpu: PciAddress, device: PciAddress, count: u16 },
    /// Unbinding the parent would remove them.
    #[error(
        "gpu {gpu}: vGPUs are made from it (mdev {}); end their VMs and write 1 to remove of each in /sys/bus/mdev/devices",
        list(mdevs)
    )]
    MdevsPresent { gpu: PciAddress, mdevs: Vec<String> },
    /// [`Presence::FellOff`](crate::Presence::FellOff).
    #[error(
        "gpu {gpu}: {device} has fallen off the bus (it reads as all ones), so no driver can work with it; look for its \
         address and Xid 79 in the kernel log, then reset it or switch the host off and on"
    )]
    FellOff { gpu: PciAddress, device: PciAddress },
    /// [`Function::late`](crate::Function::late).
    #[error(
        "gpu {gpu}: {device} does not answer, since its lock is held or its driver waits for it; look for tasks in state D \
         and for its address in the kernel log; it takes a reboot if that does not end"
    )]
    Late { gpu: PciAddress, device: PciAddress },
    /// [`Origin::Adopted`](crate::journal::Origin::Adopted).
    #[error(
        "gpu {gpu} was on {driver} before gpuvirt saw it, so it is left there; to give it to the host, clear its \
         driver_override and unbind it by hand, or look for what binds it at boot (vfio-pci.ids=, driverctl)"
    )]
    Adopted { gpu: PciAddress, driver: String },
    /// [`Origin::Lost`](crate::journal::Origin::Lost).
    #[error(
        "gpu {gpu} is on {driver}, and it is not known any more who put it there, since the journal was damaged; it is left \
         there: to give it to the host, clear its driver_override and unbind it by hand ({}.damaged may still tell from \
         which driver), or reboot",
        journal::PATH
    )]
    RecordLost { gpu: PciAddress, driver: String },
    /// An earlier write has not come back and holds the device's lock ([`Journal::pending`](crate::Journal::pending)).
    #[error(
        "gpu {gpu}: a write to {path} hangs in the kernel (pid {pid}); it ends when the user of {device} lets go, or by a reboot"
    )]
    WriteHanging { gpu: PciAddress, device: PciAddress, pid: i32, path: String },
}

impl Refusal {
    /// One word for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotAGpu { .. } => "NotAGpu",
            Self::IommuOff { .. } => "IommuOff",
            Self::NoGroup { .. } => "NoIommuGroup",
            Self::ForeignInGroup { .. } => "ForeignDeviceInGroup",
            Self::SharedGroup { .. } => "SharedIommuGroup",
            Self::FirmwareMemory { .. } => "FirmwareMemory",
            Self::BarUnassigned { .. } => "BarUnassigned",
            Self::NoDriver { .. } => "NoVfioDriver",
            Self::Console { .. } => "Console",
            Self::InUse { .. } => "InUse",
            Self::VfsPresent { .. } => "VirtualFunctionsPresent",
            Self::MdevsPresent { .. } => "MediatedDevicesPresent",
            Self::FellOff { .. } => "FellOffBus",
            Self::Late { .. } => "DeviceNotAnswering",
            Self::Adopted { .. } => "Adopted",
            Self::RecordLost { .. } => "RecordLost",
            Self::WriteHanging { .. } => "WriteHanging",
        }
    }
}

pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

pub(crate) fn next_steps(holders: &[Holder]) -> String {
    let mut steps: Vec<_> = holders.iter().map(Holder::next_step).collect();
    steps.dedup();
    steps.join(", ")
}

fn behind(port: Option<&SharedPort>) -> String {
    let Some(SharedPort { address, acs }) = port else { return String::new() };
    let why = match acs {
        Some(Acs::Missing) => ", which has no ACS and cannot keep them apart",
        Some(Acs::Off) => ", whose ACS is off: look for it in the firmware's setup",
        Some(Acs::On) => ", which has ACS on: what lies between it and them has not",
        None => "",
    };
    format!(" (both behind {address}{why})")
}

fn bar_size(bar: &Bar) -> String {
    match bar.size {
        0 => String::new(),
        size if size >> 30 > 0 => format!(" ({} GiB)", size >> 30),
        size => format!(" ({} MiB)", size.div_ceil(1 << 20)),
    }
}

fn shown(framebuffer: &Framebuffer) -> String {
    let Framebuffer { name, driver, .. } = framebuffer;
    if name == driver { name.clone() } else { format!("{name} ({driver})") }
}

fn release_console(framebuffer: &Framebuffer) -> String {
    match (framebuffer.kind, &framebuffer.console) {
        (FramebufferKind::Driver, Some(console)) => {
            format!("echo 0 > /sys/class/vtconsole/{console}/bind, or make another card the first one in the firmware")
        }
        (FramebufferKind::Driver, None) | (FramebufferKind::Firmware, _) => {
            "boot with initcall_blacklist=sysfb_init (video=efifb:off before Linux 5.15), or make another card the first one \
             in the firmware"
                .to_owned()
        }
    }
}
