//! From what is to what shall be: the steps, or why not. Pure.
//!
//! The unit is the IOMMU group: all GPUs and companions in it change together. Binding takes companions first and the GPU
//! last, releasing goes the other way. Each step says one thing, and doing it twice does no harm.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::address::PciAddress;
use crate::holders::Holder;
use crate::inventory::{Function, Gpu, Ids, Inventory};
use crate::journal::{Journal, Origin};

/// Who shall drive a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Binding {
    /// VFIO, so that a VM can have it: its whole group on `vfio-pci`, or on the kernel's variant of it.
    Vfio,
    /// The host: back on the drivers that it was taken from.
    Host,
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    pub inventory: &'a Inventory,
    pub holders: &'a BTreeMap<PciAddress, Vec<Holder>>,
    pub journal: &'a Journal,
    /// What each GPU of the host shall be; needed where GPUs share a group. One that is not named stays as it is.
    pub wanted: &'a BTreeMap<PciAddress, Binding>,
}

/// What would be done for one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    pub gpu: PciAddress,
    /// In order. Empty: everything is so already.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Whether it moves a device from one driver to another, which nobody may be using then.
    pub fn disrupts(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Unbind { .. } | Step::Probe { .. }))
    }
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Step {
    LoadModule { module: String },
    RecordOriginal { address: PciAddress, ids: Ids, origin: Origin },
    SetOverride { address: PciAddress, driver: String },
    Unbind { address: PciAddress, driver: String },
    Probe { address: PciAddress, driver: String },
    ClearOverride { address: PciAddress },
    ForgetOriginal { address: PciAddress },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadModule { module } => write!(f, "load module {module}"),
            Self::RecordOriginal { address, origin: Origin::Driver(driver), .. } => {
                write!(f, "note that {address} was on {driver}")
            }
            Self::RecordOriginal { address, origin: Origin::Unbound, .. } => {
                write!(f, "note that {address} was on no driver")
            }
            Self::RecordOriginal { address, origin: Origin::Adopted, .. } => {
                write!(f, "note that {address} was on VFIO already")
            }
            Self::SetOverride { address, driver } => write!(f, "reserve {address} for {driver}"),
            Self::Unbind { address, driver } => write!(f, "take {address} from {driver}"),
            Self::Probe { address, driver } => write!(f, "give {address} to {driver}"),
            Self::ClearOverride { address } => write!(f, "lift the reservation of {address}"),
            Self::ForgetOriginal { address } => write!(f, "forget where {address} was before"),
        }
    }
}

/// A device that should not be in a GPU's group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ForeignDevice {
    /// PCI address, or the kernel's name of a device that is not PCI or cannot be read.
    pub name: String,
    /// `vendor:device` in hex.
    pub ids: Option<String>,
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

/// Why nothing is done. Each names the device, what stands in the way, and the next step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum Refusal {
    #[error("{address} is no GPU of this host that can be handed out; `gpuvirt inspect` lists those")]
    NotAGpu { address: PciAddress },
    #[error(
        "gpu {gpu}: the IOMMU is off; switch on VT-d or AMD-Vi in the firmware and boot with intel_iommu=on or amd_iommu=on"
    )]
    IommuOff { gpu: PciAddress },
    #[error(
        "gpu {gpu} is in no IOMMU group although the IOMMU is on; look for its address in the kernel log (DMAR, AMD-Vi)"
    )]
    NoGroup { gpu: PciAddress },
    #[error(
        "gpu {gpu}: its IOMMU group {group} also holds {}; move the card to another slot, or give that device to vfio-pci \
         as well",
        list(devices)
    )]
    ForeignInGroup { gpu: PciAddress, group: u32, devices: Vec<ForeignDevice> },
    #[error(
        "gpu {gpu}: its IOMMU group {group} also holds gpu {}{}; set the same mode for all of them", list(others),
        port.map(|port| format!(" (both behind {port})")).unwrap_or_default()
    )]
    SharedGroup { gpu: PciAddress, group: u32, others: Vec<PciAddress>, port: Option<PciAddress> },
    #[error("gpu {gpu} is in use by {}; {}", list(holders), next_steps(holders))]
    InUse { gpu: PciAddress, holders: Vec<Holder> },
    #[error("gpu {gpu}: {device} has {count} virtual functions; end their VMs and write 0 to its sriov_numvfs")]
    VfsPresent { gpu: PciAddress, device: PciAddress, count: u16 },
    #[error(
        "gpu {gpu} was on {driver} before gpuvirt saw it, so it is left there; to give it to the host, clear its \
         driver_override and unbind it by hand, or look for what binds it at boot (vfio-pci.ids=, driverctl)"
    )]
    Adopted { gpu: PciAddress, driver: String },
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
            Self::InUse { .. } => "InUse",
            Self::VfsPresent { .. } => "VirtualFunctionsPresent",
            Self::Adopted { .. } => "Adopted",
            Self::WriteHanging { .. } => "WriteHanging",
        }
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

fn next_steps(holders: &[Holder]) -> String {
    let mut steps: Vec<_> = holders.iter().map(Holder::next_step).collect();
    steps.dedup();
    steps.join(", ")
}

/// The steps that bring a GPU and its group to a binding.
///
/// # Errors
/// A [`Refusal`] when that is not possible or not safe now.
pub fn plan(world: &World<'_>, gpu: PciAddress, binding: Binding) -> Result<Plan, Refusal> {
    let described = world.inventory.gpu(gpu).ok_or(Refusal::NotAGpu { address: gpu })?;
    let unit = unit(world.inventory, &described);
    refuse_hanging(world, gpu, &unit)?;
    let steps = match binding {
        Binding::Vfio => {
            refuse_unusable_group(world, &described)?;
            bind(world, &unit)
        }
        Binding::Host => {
            if world.journal.is_adopted(described.primary) {
                let driver = described.primary.driver.clone().unwrap_or_default();
                return Err(Refusal::Adopted { gpu, driver });
            }
            release(world, &unit)
        }
    };
    let plan = Plan { gpu, steps };
    if plan.disrupts() {
        refuse_split(world, &described, binding)?;
        refuse_in_use(world, &described, &unit)?;
    }
    Ok(plan)
}

/// Functions that change together, in the order of binding: companions, then GPUs, the asked one last.
fn unit<'a>(inventory: &'a Inventory, gpu: &Gpu<'a>) -> Vec<&'a Function> {
    let mut unit = gpu.companions.clone();
    let others: Vec<_> = gpu.shares_group_with.iter().filter_map(|address| inventory.gpu(*address)).collect();
    for companion in others.iter().flat_map(|other| &other.companions) {
        if !unit.contains(companion) {
            unit.push(companion);
        }
    }
    unit.extend(others.iter().map(|other| other.primary));
    unit.push(gpu.primary);
    unit
}

fn refuse_hanging(world: &World<'_>, gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
    for function in unit {
        if let Some(pending) = world.journal.pending().get(&function.address) {
            let path = pending.path.display().to_string();
            return Err(Refusal::WriteHanging { gpu, device: function.address, pid: pending.pid, path });
        }
    }
    Ok(())
}

fn refuse_unusable_group(world: &World<'_>, gpu: &Gpu<'_>) -> Result<(), Refusal> {
    let address = gpu.primary.address;
    if !world.inventory.facts.iommu {
        return Err(Refusal::IommuOff { gpu: address });
    }
    let group = gpu.group.ok_or(Refusal::NoGroup { gpu: address })?;
    // What is on VFIO itself does not spoil the group: somebody put it there for that.
    let foreign = gpu.foreign.iter().filter(|function| !function.on_vfio()).map(|function| ForeignDevice {
        name: function.address.to_string(),
        ids: Some(format!("{:04x}:{:04x}", function.vendor, function.device)),
        driver: function.driver.clone(),
    });
    let unknown = world.inventory.unknown_members(group).into_iter();
    let unknown = unknown.map(|name| ForeignDevice { name: name.to_owned(), ids: None, driver: None });
    let devices: Vec<_> = foreign.chain(unknown).collect();
    if devices.is_empty() { Ok(()) } else { Err(Refusal::ForeignInGroup { gpu: address, group, devices }) }
}

/// GPUs of one group go together or not at all.
fn refuse_split(world: &World<'_>, gpu: &Gpu<'_>, binding: Binding) -> Result<(), Refusal> {
    let current = |address: &PciAddress| {
        let on_vfio = world.inventory.functions.get(address).is_some_and(Function::on_vfio);
        if on_vfio { Binding::Vfio } else { Binding::Host }
    };
    let stays =
        |address: &&PciAddress| world.wanted.get(*address).copied().unwrap_or_else(|| current(address)) != binding;
    let others: Vec<_> = gpu.shares_group_with.iter().filter(stays).copied().collect();
    match gpu.group {
        Some(group) if !others.is_empty() => {
            Err(Refusal::SharedGroup { gpu: gpu.primary.address, group, others, port: gpu.primary.upstream })
        }
        Some(_) | None => Ok(()),
    }
}

fn refuse_in_use(world: &World<'_>, gpu: &Gpu<'_>, unit: &[&Function]) -> Result<(), Refusal> {
    let address = gpu.primary.address;
    let mut holders: Vec<Holder> =
        unit.iter().filter_map(|function| world.holders.get(&function.address)).flatten().cloned().collect();
    holders.sort();
    holders.dedup();
    if !holders.is_empty() {
        return Err(Refusal::InUse { gpu: address, holders });
    }
    match unit.iter().find(|function| function.numvfs > 0) {
        Some(device) => Err(Refusal::VfsPresent { gpu: address, device: device.address, count: device.numvfs }),
        None => Ok(()),
    }
}

fn bind(world: &World<'_>, unit: &[&Function]) -> Vec<Step> {
    let mut loads = Vec::new();
    let mut steps = Vec::new();
    for function in unit.iter().filter(|function| !function.on_vfio()) {
        let address = function.address;
        let target = world.inventory.vfio_driver(function);
        let load = Step::LoadModule { module: target.module.clone() };
        if !world.inventory.facts.drivers.contains(&target.name) && !loads.contains(&load) {
            loads.push(load);
        }
        if let Some(origin) = origin_to_record(world.journal, function) {
            steps.push(Step::RecordOriginal { address, ids: function.ids(), origin });
        }
        steps.push(Step::SetOverride { address, driver: target.name.clone() });
        if let Some(driver) = function.driver.clone() {
            steps.push(Step::Unbind { address, driver });
        }
        steps.push(Step::Probe { address, driver: target.name });
    }
    loads.append(&mut steps);
    loads
}

/// What has to be noted before a function is taken; `None` when that stands in the journal already.
fn origin_to_record(journal: &Journal, function: &Function) -> Option<Origin> {
    let origin = match (&function.driver, journal.origin(function)) {
        (Some(driver), _) => Origin::Driver(driver.clone()),
        // Taken and not given back, the work was interrupted: what was noted then holds.
        (None, Some(Origin::Driver(_) | Origin::Unbound)) => return None,
        (None, Some(Origin::Adopted) | None) => Origin::Unbound,
    };
    (journal.origin(function) != Some(&origin)).then_some(origin)
}

/// The way back, for what was taken. A function that is not in the journal is not ours.
fn release(world: &World<'_>, unit: &[&Function]) -> Vec<Step> {
    let mut steps = Vec::new();
    for function in unit.iter().rev() {
        let address = function.address;
        // Bound to a driver of the host by somebody else meanwhile: it stays there.
        let taken = function.driver.is_none() || function.on_vfio();
        let back_to = match world.journal.origin(function) {
            Some(Origin::Driver(name)) if taken && world.inventory.facts.drivers.contains(name) => Some(name.clone()),
            Some(Origin::Driver(_) | Origin::Unbound) => None,
            // Once somebody else has taken it from VFIO, there is nothing left to remember.
            Some(Origin::Adopted) if !function.on_vfio() => {
                steps.push(Step::ForgetOriginal { address });
                continue;
            }
            Some(Origin::Adopted) | None => continue,
        };
        if let Some(driver) = back_to.clone() {
            steps.push(Step::SetOverride { address, driver });
        }
        if let Some(driver) = function.driver.clone().filter(|_| function.on_vfio()) {
            steps.push(Step::Unbind { address, driver });
        }
        if let Some(driver) = back_to {
            steps.push(Step::Probe { address, driver });
        }
        steps.push(Step::ClearOverride { address });
        steps.push(Step::ForgetOriginal { address });
    }
    steps
}
