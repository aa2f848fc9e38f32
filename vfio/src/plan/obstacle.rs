//! What stands in the way of a plan.

use crate::address::PciAddress;
use crate::console::Framebuffer;
use crate::holders::Holder;
use crate::inventory::{Function, Gpu, Inventory};
use crate::journal::{Journal, Origin};
use crate::pcie::Presence;
use crate::plan::{Binding, World};
use crate::refusal::{DriverGap, ForeignDevice, Refusal, SharedPort};

pub(super) fn hanging(world: &World<'_>, gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
    for function in unit {
        if let Some(pending) = world.journal.pending().get(&function.address) {
            let path = pending.path.display().to_string();
            return Err(Refusal::WriteHanging { gpu, device: function.address, pid: pending.pid, path });
        }
    }
    Ok(())
}

/// What was not put on VFIO from here, for all that is known, is not taken from it.
pub(super) fn adopted(journal: &Journal, primary: &Function) -> Result<(), Refusal> {
    let (gpu, driver) = (primary.address, primary.driver.clone().unwrap_or_default());
    match journal.adopted(primary) {
        Some(Origin::Lost) => Err(Refusal::RecordLost { gpu, driver }),
        Some(Origin::Adopted | Origin::Driver(_) | Origin::Unbound) => Err(Refusal::Adopted { gpu, driver }),
        None => Ok(()),
    }
}

/// What does not answer takes no write either, and a child of ours would hang in it.
pub(super) fn silent(gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
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

pub(super) fn unusable_group(world: &World<'_>, gpu: &Gpu<'_>) -> Result<(), Refusal> {
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
pub(super) fn useless(inventory: &Inventory, gpu: PciAddress, function: &Function) -> Result<(), Refusal> {
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

pub(super) fn console(inventory: &Inventory, gpu: PciAddress, unit: &[&Function]) -> Result<(), Refusal> {
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
pub(super) fn split(world: &World<'_>, gpu: &Gpu<'_>, binding: Binding) -> Result<(), Refusal> {
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

pub(super) fn in_use(world: &World<'_>, gpu: &Gpu<'_>, unit: &[&Function]) -> Result<(), Refusal> {
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
