//! From what is to what shall be: the steps, or why not. Pure.
//!
//! The unit is the IOMMU group: all GPUs and companions in it change together. Binding takes companions first and the GPU
//! last, releasing goes the other way. Each step says one thing, and doing it twice does no harm.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::address::PciAddress;
use crate::holders::Holder;
use crate::inventory::{Function, Ids, Inventory};
use crate::journal::{Journal, Origin};
pub use crate::refusal::{DriverGap, ForeignDevice, Refusal, SharedPort};
use crate::verify::deviations;

mod obstacle;

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
    /// What is there; not older than the other two.
    pub inventory: &'a Inventory,
    /// Who uses it, from [`holders()`](crate::holders::holders) and whoever else knows.
    pub holders: &'a BTreeMap<PciAddress, Vec<Holder>>,
    /// What was done before.
    pub journal: &'a Journal,
    /// What each GPU of the host shall be; needed where GPUs share a group. One that is not named stays as it is.
    pub wanted: &'a BTreeMap<PciAddress, Binding>,
}

/// What would be done for one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The GPU that was asked for. Others of its group go along.
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
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "camelCase")]
pub enum Step {
    /// Load a module and what it needs; nothing when it is there.
    LoadModule { module: String },
    /// Note in the journal where a function is now, before it is taken.
    RecordOriginal { address: PciAddress, ids: Ids, origin: Origin },
    /// Write `driver_override`, so that only this driver takes the function (`drivers/pci/pci-driver.c`).
    SetOverride { address: PciAddress, driver: String },
    /// Write the function's address to `unbind` of the driver that has it.
    Unbind { address: PciAddress, driver: String },
    /// Write its address to `drivers_probe`, with the driver that takes it then.
    Probe { address: PciAddress, driver: String },
    /// Write a newline to `driver_override`: any driver may take it again, when somebody asks for that.
    ClearOverride { address: PciAddress },
    /// Strike it from the journal: it is back where it was.
    ForgetOriginal { address: PciAddress },
}

impl Step {
    /// The function that it is about; `None`: the host.
    pub fn address(&self) -> Option<PciAddress> {
        match self {
            Self::LoadModule { .. } => None,
            Self::RecordOriginal { address, .. }
            | Self::SetOverride { address, .. }
            | Self::Unbind { address, .. }
            | Self::Probe { address, .. }
            | Self::ClearOverride { address }
            | Self::ForgetOriginal { address } => Some(*address),
        }
    }

    /// What it does to others.
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
    let unit = world.inventory.unit(&described);
    obstacle::hanging(world, gpu, &unit)?;
    let steps = match binding {
        Binding::Vfio => {
            // What a VM can use already is not in need of the way there.
            if !deviations(world.inventory, gpu, binding).is_empty() {
                obstacle::unusable_group(world, &described)?;
            }
            bind(world, &unit)
        }
        Binding::Host => {
            obstacle::adopted(world.journal, described.primary)?;
            release(world, &unit)
        }
    };
    let plan = Plan { gpu, steps };
    if plan.disrupts() && binding == Binding::Vfio {
        for function in &unit {
            obstacle::useless(world.inventory, gpu, function)?;
        }
        obstacle::console(world.inventory, gpu, &unit)?;
    }
    if !plan.steps.is_empty() {
        obstacle::silent(gpu, &unit)?;
    }
    if plan.disrupts() {
        obstacle::split(world, &described, binding)?;
        obstacle::in_use(world, &described, &unit)?;
    }
    Ok(plan)
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
