//! Virtual functions: made when vGPUs need them, and never while one of them is in use.
//!
//! `sriov_numvfs` takes a number only while it is 0 (`sriov_numvfs_store`, `drivers/pci/pci-sysfs.c`): more virtual functions
//! mean to lose those that are there. Where the driver has no such function the write ends with ENOENT, and `pci-pf-stub`
//! has the GPU meanwhile. `sriov_drivers_autoprobe` is the administrator's and left alone.

use super::framework::{NVIDIA_DRIVER, STUB_DRIVER};
use super::instances::{Vgpu, parents};
use super::plan::{VgpuStep, VgpuWorld};
use super::refusal::VgpuRefusal;
use crate::function::{Function, Gpu};
use crate::holders::Holder;
use crate::plan::Step;
use crate::refusal::Refusal;
use crate::vgpu::VgpuParent;

/// All that the board can have, as `sriov-manage` does: how many vGPUs they can carry is another number.
pub(super) fn make(world: &VgpuWorld<'_>, gpu: &Gpu<'_>, count: u16) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let address = gpu.primary.address;
    let make = VgpuStep::SetVfs { gpu: address, count };
    if !world.journal.needs_stub(gpu.primary) {
        return Ok(vec![make]);
    }
    if let Some(holders) = world.gpu_holders.get(&address).filter(|holders| !holders.is_empty()) {
        return Err(Refusal::InUse { gpu: address, holders: holders.clone() }.into());
    }
    Ok(through_stub(world, gpu.primary, count))
}

/// What is left of the way through the stub for a GPU that is on it: the way is found again from wherever it was left.
pub(super) fn on_the_way(world: &VgpuWorld<'_>, primary: &Function) -> Option<Vec<VgpuStep>> {
    let reserved = |name: &str| primary.driver_override.as_deref() == Some(name);
    let driver = primary.driver.as_deref();
    let away = driver == Some(STUB_DRIVER) || (driver.is_none() && reserved(STUB_DRIVER)) || reserved(NVIDIA_DRIVER);
    (away && world.journal.needs_stub(primary)).then(|| through_stub(world, primary, primary.vfs_possible))
}

fn through_stub(world: &VgpuWorld<'_>, primary: &Function, count: u16) -> Vec<VgpuStep> {
    let address = primary.address;
    let (nvidia, stub) = (|| NVIDIA_DRIVER.to_owned(), || STUB_DRIVER.to_owned());
    let reserve =
        |driver| (primary.driver_override.as_ref() != Some(&driver)).then_some(Step::SetOverride { address, driver });
    let probe = |driver| Some(Step::Probe { address, driver });
    let on = |driver: &str| primary.driver.as_deref() == Some(driver);
    let coming = primary.driver_override.as_deref() == Some(NVIDIA_DRIVER);
    let load = (!world.inventory.facts.drivers.contains(STUB_DRIVER)).then(|| Step::LoadModule { module: stub() });
    let there = match (on(STUB_DRIVER), coming) {
        (true, _) | (_, true) => [None, None, None, None],
        (false, false) => {
            let unbind = on(NVIDIA_DRIVER).then(|| Step::Unbind { address, driver: nvidia() });
            [load, reserve(stub()), unbind, probe(stub())]
        }
    };
    let arrived = coming && on(NVIDIA_DRIVER);
    let leave = (primary.driver.is_some() || !coming).then(|| Step::Unbind { address, driver: stub() });
    let back = if arrived { [None, None, None] } else { [reserve(nvidia()), leave, probe(nvidia())] };
    let make = (primary.numvfs == 0 && !coming).then_some(VgpuStep::SetVfs { gpu: address, count });
    let bind = |step| VgpuStep::Bind { gpu: address, step };
    let back = back.into_iter().flatten().chain([Step::ClearOverride { address }]).map(bind);
    there.into_iter().flatten().map(bind).chain(make).chain(back).collect()
}

/// The way to more virtual functions, where there are fewer than vGPUs.
pub(super) fn more(
    world: &VgpuWorld<'_>,
    gpu: &Gpu<'_>,
    wanted: u32,
    kept: &[&Vgpu],
) -> Result<Option<Vec<VgpuStep>>, VgpuRefusal> {
    let Function { address, numvfs, vfs_possible, .. } = *gpu.primary;
    let itself = matches!(gpu.primary.vgpu, Some(VgpuParent::Mdev { .. }));
    if itself || u32::from(numvfs) >= wanted || numvfs >= vfs_possible {
        return Ok(None);
    }
    free(world, gpu.primary, wanted)?;
    if !kept.is_empty() {
        let (count, possible, holders) = (numvfs, vfs_possible, Vec::new());
        return Err(VgpuRefusal::VfsInUse { gpu: address, count, possible, wanted, holders });
    }
    let mut steps = vec![VgpuStep::SetVfs { gpu: address, count: 0 }];
    steps.extend(make(world, gpu, vfs_possible)?);
    Ok(Some(steps))
}

/// Nobody has any of the virtual functions, or something that is made of them.
pub(super) fn free(world: &VgpuWorld<'_>, gpu: &Function, wanted: u32) -> Result<(), VgpuRefusal> {
    let vfs: Vec<_> = parents(world.inventory, gpu.address).filter(|f| f.is_vf()).map(|f| f.address).collect();
    let mdevs = world.inventory.mdevs.iter();
    let mdevs = mdevs.filter(|(_, mdev)| mdev.parent.is_some_and(|parent| vfs.contains(&parent)));
    let ids = vfs.iter().map(ToString::to_string).chain(mdevs.map(|(uuid, _)| uuid.clone()));
    let mut holders: Vec<Holder> = ids.filter_map(|id| world.holders.get(&id)).flatten().cloned().collect();
    holders.sort();
    holders.dedup();
    if holders.is_empty() {
        return Ok(());
    }
    let (count, possible) = (gpu.numvfs, gpu.vfs_possible);
    Err(VgpuRefusal::VfsInUse { gpu: gpu.address, count, possible, wanted, holders })
}

/// Whether they are as a driver's start leaves them: nobody has given one to something else.
pub(super) fn untouched(world: &VgpuWorld<'_>, gpu: &Function) -> bool {
    let mut vfs = parents(world.inventory, gpu.address).filter(|function| function.is_vf());
    vfs.all(|vf| vf.driver.as_deref().is_none_or(|driver| driver == NVIDIA_DRIVER))
}
