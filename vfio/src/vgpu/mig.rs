//! The way to MIG-backed vGPUs: MIG mode, then GPU instances with their compute instances; virtual functions and types
//! follow. Pure.
//!
//! MIG mode is the whole GPU's, so that it changes only where nobody has the GPU or a part of it, and before virtual
//! functions are made. GPU instances that are there are used first. One goes only if it stands in the way of one that is
//! missing, and no VM runs on it.

use std::collections::BTreeMap;

use super::instances::Vgpu;
use super::library::{GpuFacts, MigAct, MigInstance, MigMode};
use super::plan::{Layout, VgpuStep, VgpuWorld};
use super::refusal::VgpuRefusal;
use super::sriov;
use super::types::{mig_profile, shape};
use crate::address::PciAddress;
use crate::function::{Function, Gpu};
use crate::refusal::Refusal;

/// Whether a layout asks for MIG mode, where it asks for anything that tells.
fn wants(layout: &Layout) -> Option<bool> {
    let mut asked = layout.iter().filter(|(_, count)| **count > 0);
    asked.find_map(|(kind, _)| shape(kind)).map(|shape| shape.slices.is_some())
}

/// The steps that come before virtual functions and types; empty: they may come. Nothing is known of a GPU of which the
/// library says nothing, and what the kernel lists decides then.
pub(super) fn steps(
    world: &VgpuWorld<'_>,
    gpu: &Gpu<'_>,
    layout: &Layout,
    surplus: &[&Vgpu],
) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let address = gpu.primary.address;
    let Some((facts, mode)) = world.library.gpus.get(&address).and_then(|facts| Some((facts, facts.mig?))) else {
        return Ok(Vec::new());
    };
    match wants(layout) {
        Some(on) if on != mode.on => switch(world, gpu, mode, on, surplus),
        Some(true) => instances(address, facts, layout, surplus),
        Some(false) | None => Ok(Vec::new()),
    }
}

fn switch(
    world: &VgpuWorld<'_>,
    gpu: &Gpu<'_>,
    mode: MigMode,
    on: bool,
    surplus: &[&Vgpu],
) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let address = gpu.primary.address;
    if mode.next == on {
        return Err(VgpuRefusal::MigNeedsReset { gpu: address, on });
    }
    if let Some(holders) = world.gpu_holders.get(&address).filter(|holders| !holders.is_empty()) {
        return Err(Refusal::InUse { gpu: address, holders: holders.clone() }.into());
    }
    sriov::free(world, gpu.primary, 0)?;
    let mut steps = removals(surplus);
    if gpu.primary.numvfs > 0 {
        steps.push(VgpuStep::SetVfs { gpu: address, count: 0 });
    }
    steps.push(VgpuStep::Mig { gpu: address, act: MigAct::Mode { on } });
    Ok(steps)
}

fn instances(
    address: PciAddress,
    facts: &GpuFacts,
    layout: &Layout,
    surplus: &[&Vgpu],
) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let act = |act| VgpuStep::Mig { gpu: address, act };
    let needed = needed(address, facts, layout)?;
    let there = |profile: u32| facts.instances.iter().filter(move |instance| instance.profile == profile);
    let incomplete = facts.instances.iter().filter(|one| !one.compute && needed.contains_key(&one.profile));
    let mut steps: Vec<VgpuStep> = incomplete.map(|one| act(MigAct::Compute { instance: one.id })).collect();
    // Large ones first: small ones find a place between them, not the other way round.
    let mut order: Vec<(u32, u32)> = needed.iter().map(|(profile, count)| (*profile, *count)).collect();
    order.sort_by_key(|(profile, _)| std::cmp::Reverse(size(facts, *profile)));
    for (profile, wanted) in order {
        let made = u32::try_from(there(profile).count()).unwrap_or(u32::MAX);
        let missing = wanted.saturating_sub(made);
        let Some(found) = facts.profile(profile) else {
            let (name, most) = (profile.to_string(), 0);
            return Err(VgpuRefusal::NoGpuInstance { gpu: address, name, wanted, made, most });
        };
        if missing == 0 {
            continue;
        }
        if found.remaining >= missing {
            let create = |nth| act(MigAct::Create { profile, name: found.name.clone(), nth });
            steps.extend((made + 1..=wanted).map(create));
            // What there is room for then is asked again.
            return Ok(steps);
        }
        // vGPUs first: an instance with one cannot go.
        if !surplus.is_empty() {
            return Ok(removals(surplus));
        }
        let Some(spare) = spare(facts, &needed) else {
            let (name, most) = (found.name.clone(), made + found.remaining);
            return Err(VgpuRefusal::NoGpuInstance { gpu: address, name, wanted, made, most });
        };
        let name = facts.profile(spare.profile).map_or_else(|| spare.profile.to_string(), |of| of.name.clone());
        return Ok(vec![act(MigAct::Destroy { instance: spare.id, name })]);
    }
    Ok(steps)
}

/// GPU instances by profile: several vGPUs may share one.
fn needed(gpu: PciAddress, facts: &GpuFacts, layout: &Layout) -> Result<BTreeMap<u32, u32>, VgpuRefusal> {
    let mut needed: BTreeMap<u32, u32> = BTreeMap::new();
    for (kind, count) in layout.iter().filter(|(_, count)| **count > 0) {
        let by_name = || {
            let name = mig_profile(kind)?;
            facts.profiles.iter().find(|profile| profile.name == name).map(|profile| (profile.id, 1))
        };
        let known = facts.kinds.get(kind).map(|kind| (kind.profile, kind.most.max(1)));
        let Some((profile, most)) = known.or_else(by_name) else {
            let kinds = facts.kinds.keys().cloned().collect();
            return Err(VgpuRefusal::UnknownType { gpu, kind: kind.clone(), kinds, mig: None });
        };
        // Types differ, and an instance carries vGPUs of one.
        *needed.entry(profile).or_default() += count.div_ceil(most);
    }
    Ok(needed)
}

/// One that nothing needs and nobody is known to be on. A vGPU that exists and runs nowhere has one, and only the library
/// knows which: it refuses to remove that, and another is tried.
fn spare<'a>(facts: &'a GpuFacts, needed: &BTreeMap<u32, u32>) -> Option<&'a MigInstance> {
    let surplus = |profile: u32| {
        let there = facts.instances.iter().filter(|one| one.profile == profile).count();
        u32::try_from(there).unwrap_or(u32::MAX) > needed.get(&profile).copied().unwrap_or(0)
    };
    facts.instances.iter().find(|one| !one.in_use && surplus(one.profile))
}

fn size(facts: &GpuFacts, profile: u32) -> u32 {
    let name = facts.profile(profile).map_or("", |profile| profile.name.as_str());
    name.split('g').next().and_then(|slices| slices.parse().ok()).unwrap_or(0)
}

pub(super) fn removals(surplus: &[&Vgpu]) -> Vec<VgpuStep> {
    surplus.iter().map(|vgpu| VgpuStep::Remove { vgpu: Box::new((*vgpu).clone()) }).collect()
}

/// What takes MIG away again where it came from here. A GPU that needs a reset first keeps it until then.
pub(super) fn leave(world: &VgpuWorld<'_>, gpu: &Function) -> Vec<VgpuStep> {
    let address = gpu.address;
    let facts = world.library.gpus.get(&address).filter(|_| world.journal.mig_made(gpu));
    let Some((facts, mode)) = facts.and_then(|facts| Some((facts, facts.mig?))) else { return Vec::new() };
    if !mode.on || !mode.next {
        return Vec::new();
    }
    let name = |of: &MigInstance| facts.profile(of.profile).map_or_else(String::new, |profile| profile.name.clone());
    let destroy = facts.instances.iter().map(|one| MigAct::Destroy { instance: one.id, name: name(one) });
    let acts = destroy.chain([MigAct::Mode { on: false }]);
    acts.map(|act| VgpuStep::Mig { gpu: address, act }).collect()
}
