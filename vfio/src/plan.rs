//! From what is to what shall be: the steps, or why not. Pure.
//!
//! The unit is the IOMMU group: all GPUs and companions in it change together. Binding takes companions first and the GPU
//! last, releasing goes the other way. Each step says one thing, and doing it twice does no harm.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::address::PciAddress;
use crate::console::Framebuffer;
use crate::holders::Holder;
use crate::inventory::{Function, Gpu, Ids, Inventory};
use crate::journal::{Journal, Origin};
use crate::pcie::Presence;
pub use crate::refusal::{DriverGap, ForeignDevice, Refusal, SharedPort};

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

/// What a step does to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Disruption {
    /// Nothing: it concerns our own books, or a device that no driver has.
    None,
    /// Code comes into the kernel and stays until it is unloaded.
    Kernel,
    /// A driver loses the device, and so does whoever uses it through that driver.
    Device,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "camelCase")]
pub enum Step {
    LoadModule { module: String },
    RecordOriginal { address: PciAddress, ids: Ids, origin: Origin },
    SetOverride { address: PciAddress, driver: String },
    Unbind { address: PciAddress, driver: String },
    Probe { address: PciAddress, driver: String },
    ClearOverride { address: PciAddress },
    ForgetOriginal { address: PciAddress },
}

impl Step {
    pub fn disruption(&self) -> Disruption {
        match self {
            Self::LoadModule { .. } => Disruption::Kernel,
            Self::Unbind { .. } => Disruption::Device,
            Self::RecordOriginal { .. }
            | Self::SetOverride { .. }
            | Self::Probe { .. }
            | Self::ClearOverride { .. }
            | Self::ForgetOriginal { .. } => Disruption::None,
        }
    }
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
            Self::RecordOriginal { address, origin: Origin::Lost, .. } => {
                write!(f, "note that nobody knows where {address} was")
            }
            Self::SetOverride { address, driver } => write!(f, "reserve {address} for {driver}"),
            Self::Unbind { address, driver } => write!(f, "take {address} from {driver}"),
            Self::Probe { address, driver } => write!(f, "give {address} to {driver}"),
            Self::ClearOverride { address } => write!(f, "lift the reservation of {address}"),
            Self::ForgetOriginal { address } => write!(f, "forget where {address} was before"),
        }
    }
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
            refuse_adopted(world.journal, described.primary)?;
            release(world, &unit)
        }
    };
    let plan = Plan { gpu, steps };
    if plan.disrupts() && binding == Binding::Vfio {
        for function in &unit {
            refuse_useless(world.inventory, gpu, function)?;
        }
        refuse_console(world.inventory, gpu, &unit)?;
    }
    if !plan.steps.is_empty() {
        refuse_silent(gpu, &unit)?;
    }
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

/// What was not put on VFIO from here, for all that is known, is not taken from it.
fn refuse_adopted(journal: &Journal, primary: &Function) -> Result<(), Refusal> {
    let (gpu, driver) = (primary.address, primary.driver.clone().unwrap_or_default());
    match journal.adopted(primary) {
        Some(Origin::Lost) => Err(Refusal::RecordLost { gpu, driver }),
        Some(Origin::Adopted | Origin::Driver(_) | Origin::Unbound) => Err(Refusal::Adopted { gpu, driver }),
        None => Ok(()),
    }
}

/// What does not answer takes no write either, and a child of ours would hang in it.
fn refuse_silent(gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
    for function in unit {
        let device = function.address;
        if function.late {
            return Err(Refusal::Late { gpu, device });
        }
        if function.presence == Some(Presence::FellOff) {
            return Err(Refusal::FellOff { gpu, device });
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
    if !devices.is_empty() {
        let port = shared_port(world.inventory, address, gpu.foreign.iter().map(|function| function.address));
        return Err(Refusal::ForeignInGroup { gpu: address, group, devices, port });
    }
    match world.inventory.firmware_memory.get(&group) {
        Some(regions) => Err(Refusal::FirmwareMemory { gpu: address, group, regions: regions.clone() }),
        None => Ok(()),
    }
}

/// The lowest port above a GPU and all of the others.
fn shared_port(
    inventory: &Inventory,
    gpu: PciAddress,
    others: impl IntoIterator<Item = PciAddress>,
) -> Option<SharedPort> {
    let mut shared = inventory.path(gpu);
    for other in others {
        let path = inventory.path(other);
        shared.retain(|port| path.contains(port));
    }
    let address = *shared.last()?;
    Some(SharedPort { address, acs: inventory.functions.get(&address)?.acs })
}

/// What VFIO would take, and then do nothing with.
fn refuse_useless(inventory: &Inventory, gpu: PciAddress, function: &Function) -> Result<(), Refusal> {
    let device = function.address;
    if let Some(bar) = function.bars.iter().find(|bar| !bar.assigned) {
        return Err(Refusal::BarUnassigned { gpu, device, bar: *bar });
    }
    let (driver, facts) = (inventory.vfio_driver(function), &inventory.facts);
    if function.on_vfio() || facts.drivers.contains(&driver.name) {
        return Ok(());
    }
    let gap = if !facts.vfio_modules.contains(&driver.module) {
        DriverGap::NoModule
    } else if let Some(ban) = facts.module_bans.get(&driver.module) {
        DriverGap::Forbidden(Box::new(ban.clone()))
    } else {
        return Ok(());
    };
    let (driver, release) = (driver.name, facts.kernel_release.clone());
    Err(Refusal::NoDriver { gpu, device, driver, release, gap })
}

fn refuse_console(inventory: &Inventory, gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
    let shown = unit.iter().filter(|function| !function.on_vfio()).find_map(|function| {
        let on = |framebuffer: &&Framebuffer| framebuffer.is_on(function.address, function.boot_vga);
        Some((function.address, inventory.facts.framebuffers.iter().find(on)?))
    });
    match shown {
        Some((device, framebuffer)) => Err(Refusal::Console { gpu, device, framebuffer: framebuffer.clone() }),
        None => Ok(()),
    }
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
            let port = shared_port(world.inventory, gpu.primary.address, others.iter().copied());
            Err(Refusal::SharedGroup { gpu: gpu.primary.address, group, others, port })
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
    if let Some(device) = unit.iter().find(|function| function.numvfs > 0) {
        return Err(Refusal::VfsPresent { gpu: address, device: device.address, count: device.numvfs });
    }
    let made = |parent: PciAddress| unit.iter().any(|function| function.address == parent);
    let mdevs = world.inventory.mdevs.iter().filter(|(_, mdev)| mdev.parent.is_some_and(made));
    let mdevs: Vec<_> = mdevs.map(|(uuid, _)| uuid.clone()).collect();
    if mdevs.is_empty() { Ok(()) } else { Err(Refusal::MdevsPresent { gpu: address, mdevs }) }
}

fn bind(world: &World<'_>, unit: &[&Function]) -> Vec<Step> {
    let mut loads = Vec::new();
    let mut steps = Vec::new();
    for function in unit {
        let address = function.address;
        if let Some(driver) = function.driver.clone().filter(|_| function.on_vfio()) {
            if is_promised_back(world.journal, function) {
                steps.push(Step::SetOverride { address, driver });
            }
            continue;
        }
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

/// A release that ended after its first step has left a function on VFIO and reserved for the driver that it came from.
fn is_promised_back(journal: &Journal, function: &Function) -> bool {
    match journal.origin(function) {
        Some(Origin::Driver(origin)) => function.driver_override.as_ref() == Some(origin),
        Some(Origin::Unbound | Origin::Adopted | Origin::Lost) | None => false,
    }
}

/// What has to be noted before a function is taken; `None` when that stands in the journal already.
fn origin_to_record(journal: &Journal, function: &Function) -> Option<Origin> {
    let origin = match (&function.driver, journal.origin(function)) {
        // Taken and not given back: the work was interrupted, or somebody has put another driver on it meanwhile. Where it
        // came from is what was noted then.
        (_, Some(Origin::Driver(_) | Origin::Unbound)) => return None,
        (Some(driver), Some(Origin::Adopted | Origin::Lost) | None) => Origin::Driver(driver.clone()),
        (None, Some(Origin::Adopted | Origin::Lost) | None) => Origin::Unbound,
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
            Some(Origin::Adopted | Origin::Lost) if !function.on_vfio() => {
                steps.push(Step::ForgetOriginal { address });
                continue;
            }
            Some(Origin::Adopted | Origin::Lost) | None => continue,
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
