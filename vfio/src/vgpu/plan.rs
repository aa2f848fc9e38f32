//! From the vGPUs that a GPU has to those that it shall have: the steps, or why not. Pure.
//!
//! What fits stays, in use or not; only what is free goes. The kernel alone knows what can be made: a type in use changes
//! what else can be. So a plan is what can be told from one look, and [`apply`](super::apply()) looks again after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::framework::{Framework, NoVgpu, framework, lists_mig_only};
use super::instances::{Vgpu, parents, vgpus};
use super::library::{GpuFacts, LibraryFacts, MigAct};
use super::mig;
use super::offers::Offers;
use super::refusal::VgpuRefusal;
use super::sriov;
use super::types::{family, shape};
use crate::address::PciAddress;
use crate::function::Gpu;
use crate::holders::Holder;
use crate::inventory::Inventory;
use crate::journal::Journal;
use crate::plan::{Disruption, Step};
use crate::refusal::Refusal;

/// The vGPUs of one GPU: how many of which type, as config files name it.
pub type Layout = BTreeMap<String, u32>;

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct VgpuWorld<'a> {
    /// What is there; not older than the others.
    pub inventory: &'a Inventory,
    /// Who has each mediated device and virtual function, by its id.
    pub holders: &'a BTreeMap<String, Vec<Holder>>,
    /// Who has each GPU itself, by any of its nodes.
    pub gpu_holders: &'a BTreeMap<PciAddress, Vec<Holder>>,
    /// What the driver's library says.
    pub library: &'a LibraryFacts,
    /// What was done before.
    pub journal: &'a Journal,
    /// The node's name: part of what UUIDs are made from.
    pub node: &'a str,
}

/// One thing to do.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "camelCase")]
pub enum VgpuStep {
    /// Ask the driver's library for it.
    Mig { gpu: PciAddress, act: MigAct },
    /// Write to `sriov_numvfs` of the GPU; 0 removes its virtual functions (`drivers/pci/pci-sysfs.c`).
    SetVfs { gpu: PciAddress, count: u16 },
    /// Move the GPU between drivers, since its own cannot make virtual functions.
    Bind { gpu: PciAddress, step: Step },
    /// Write 1 to `remove` of a mediated device, or 0 to `current_vgpu_type` of a virtual function.
    Remove { vgpu: Box<Vgpu> },
    /// Write a UUID to `create` of a type.
    CreateMdev { uuid: String, parent: PciAddress, type_id: String, kind: String },
    /// Write a type's number to `current_vgpu_type`.
    SetType { vf: PciAddress, type_id: u32, kind: String },
}

impl VgpuStep {
    /// The function whose lock it takes.
    pub fn address(&self) -> PciAddress {
        match self {
            Self::SetVfs { gpu, .. } | Self::Bind { gpu, .. } | Self::Mig { gpu, .. } => *gpu,
            Self::Remove { vgpu } => vgpu.parent,
            Self::CreateMdev { parent, .. } => *parent,
            Self::SetType { vf, .. } => *vf,
        }
    }

    /// What it does to others.
    pub fn disruption(&self) -> Disruption {
        match self {
            Self::SetVfs { count: 0, .. }
            | Self::Remove { .. }
            | Self::Mig { act: MigAct::Mode { .. } | MigAct::Destroy { .. }, .. } => Disruption::Device,
            Self::Bind { step, .. } => step.disruption(),
            Self::SetVfs { .. }
            | Self::CreateMdev { .. }
            | Self::SetType { .. }
            | Self::Mig { act: MigAct::Create { .. } | MigAct::Compute { .. }, .. } => Disruption::None,
        }
    }
}

impl fmt::Display for VgpuStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mig { gpu, act } => write!(f, "{act} of {gpu}"),
            Self::SetVfs { gpu, count: 0 } => write!(f, "remove the virtual functions of {gpu}"),
            Self::SetVfs { gpu, count } => write!(f, "make {count} virtual functions of {gpu}"),
            Self::Bind { step, .. } => step.fmt(f),
            Self::Remove { vgpu } => {
                write!(f, "remove vGPU {} ({})", vgpu.id, vgpu.kind().unwrap_or("of an unknown type"))
            }
            Self::CreateMdev { uuid, parent, kind, .. } => write!(f, "make {kind} of {parent} as {uuid}"),
            Self::SetType { vf, kind, .. } => write!(f, "make {vf} a {kind}"),
        }
    }
}

/// The steps that are known from one look. Empty: it is so. Where virtual functions come first, what they will offer is not
/// known yet, and the plan ends with them.
///
/// # Errors
/// A [`VgpuRefusal`] when the layout cannot be had, or not safely now. Nothing has been touched then.
pub fn plan(world: &VgpuWorld<'_>, gpu: PciAddress, layout: &Layout) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let described = answering(world, gpu)?;
    if let Some(steps) = sriov::on_the_way(world, described.primary) {
        return Ok(steps);
    }
    let wanted: u32 = layout.values().sum();
    sorts(gpu, layout)?;
    let existing = vgpus(world.inventory, gpu, world.journal.vgpu_types());
    let change = Change::of(world, gpu, &existing, layout)?;
    if change.nothing(wanted) {
        return Ok(Vec::new());
    }
    change.one_size(layout)?;
    let first = mig::steps(world, &described, layout, &change.surplus)?;
    if !first.is_empty() {
        return Ok(first);
    }
    match framework(world.inventory, described.primary, world.library.gpus.get(&gpu)) {
        Framework::None(NoVgpu::VfsOff { possible, .. }) => return sriov::make(world, &described, possible),
        Framework::None(why) => return Err(why.into()),
        Framework::Mdev | Framework::VendorVfio => {}
    }
    if let Some(steps) = sriov::more(world, &described, wanted, &change.kept)? {
        return Ok(steps);
    }
    let offers = Offers::of(world.inventory, gpu, world.journal.vgpu_types());
    other_mode(world, gpu, layout, &offers)?;
    other_board(world, gpu, layout, &offers, &existing)?;
    change.sizes(layout, &offers)?;
    let mut steps = mig::removals(&change.surplus);
    change.create(world, layout, offers, &mut steps)?;
    Ok(steps)
}

/// The steps that leave a GPU without vGPUs of ours, for a mode that has none: also the virtual functions go, where they
/// were made from here, or where they are `in_the_way` of that mode and nobody has made anything of them (a driver's
/// start makes those of all GPUs). Empty: there is nothing to remove.
///
/// # Errors
/// As [`plan`].
pub fn leave(world: &VgpuWorld<'_>, gpu: PciAddress, in_the_way: bool) -> Result<Vec<VgpuStep>, VgpuRefusal> {
    let Some(function) = world.inventory.functions.get(&gpu) else { return Ok(Vec::new()) };
    let made = world.journal.vgpus_made(function);
    let mut steps = match made {
        Some(_) => plan(world, gpu, &Layout::new())?,
        None => Vec::new(),
    };
    let none_stay = made.is_some() || vgpus(world.inventory, gpu, world.journal.vgpu_types()).is_empty();
    let ours = made == Some(true) || (in_the_way && none_stay && sriov::untouched(world, function));
    if ours && function.numvfs > 0 {
        sriov::free(world, function, 0)?;
        steps.push(VgpuStep::SetVfs { gpu, count: 0 });
    }
    steps.extend(mig::leave(world, function));
    Ok(steps)
}

/// A GPU that takes writes.
fn answering<'a>(world: &VgpuWorld<'a>, gpu: PciAddress) -> Result<Gpu<'a>, VgpuRefusal> {
    let described = world.inventory.gpu(gpu).ok_or(Refusal::NotAGpu { address: gpu })?;
    for function in parents(world.inventory, gpu) {
        let device = function.address;
        if let Some(pending) = world.journal.pending().get(&device) {
            let path = pending.path.display().to_string();
            return Err(Refusal::WriteHanging { gpu, device, pid: pending.pid, path }.into());
        }
        if function.late {
            return Err(Refusal::Late { gpu, device }.into());
        }
        if function.presence == Some(crate::pcie::Presence::FellOff) {
            return Err(Refusal::FellOff { gpu, device }.into());
        }
    }
    Ok(described)
}

/// Slices and shares of time are of different modes of the GPU.
fn sorts(gpu: PciAddress, layout: &Layout) -> Result<(), VgpuRefusal> {
    let asked = || layout.iter().filter(|(_, count)| **count > 0).map(|(kind, _)| kind);
    let is = |mig: bool| move |kind: &&String| shape(kind).is_some_and(|shape| shape.slices.is_some() == mig);
    match (asked().find(is(true)), asked().find(is(false))) {
        (Some(mig), Some(shared)) => Err(VgpuRefusal::MixedMig { gpu, mig: mig.clone(), shared: shared.clone() }),
        (_, _) => Ok(()),
    }
}

/// The types that are listed tell the GPU's mode: nothing is removed for a type of the other one.
fn other_mode(world: &VgpuWorld<'_>, gpu: PciAddress, layout: &Layout, offers: &Offers) -> Result<(), VgpuRefusal> {
    let Some(mig) = in_mig_mode(world, gpu, offers) else { return Ok(()) };
    let other = |kind: &str| shape(kind).is_some_and(|shape| shape.slices.is_some() != mig);
    match layout.iter().find(|(kind, count)| **count > 0 && !offers.known(kind) && other(kind)) {
        Some((kind, _)) => Err(unknown(world, gpu, kind, offers)),
        None => Ok(()),
    }
}

/// Functions that are vGPUs list nothing, so that a type may come that is on no list; not one of another board, and nothing
/// is removed for it.
fn other_board(
    world: &VgpuWorld<'_>,
    gpu: PciAddress,
    layout: &Layout,
    offers: &Offers,
    existing: &[Vgpu],
) -> Result<(), VgpuRefusal> {
    let there: BTreeSet<&str> = existing.iter().filter_map(|vgpu| family(vgpu.kind()?)).collect();
    let other = |kind: &str| family(kind).is_some_and(|board| !there.contains(board));
    match layout.iter().find(|(kind, count)| **count > 0 && !there.is_empty() && other(kind)) {
        Some((kind, _)) => Err(unknown(world, gpu, kind, offers)),
        None => Ok(()),
    }
}

/// As the library says, or as what is listed shows.
fn in_mig_mode(world: &VgpuWorld<'_>, gpu: PciAddress, offers: &Offers) -> Option<bool> {
    let told = world.library.gpus.get(&gpu).and_then(|facts| facts.mig);
    told.map(|mode| mode.on).or_else(|| lists_mig_only(offers.kinds()))
}

fn unknown(world: &VgpuWorld<'_>, gpu: PciAddress, kind: &str, offers: &Offers) -> VgpuRefusal {
    let asked_mig = shape(kind).map(|shape| shape.slices.is_some());
    let mig = in_mig_mode(world, gpu, offers).filter(|only_mig| Some(*only_mig) != asked_mig);
    VgpuRefusal::UnknownType { gpu, kind: kind.to_owned(), kinds: offers.kinds().map(str::to_owned).collect(), mig }
}

/// What stays and what goes.
struct Change<'a> {
    gpu: PciAddress,
    facts: Option<&'a GpuFacts>,
    kept: Vec<&'a Vgpu>,
    surplus: Vec<&'a Vgpu>,
}

impl<'a> Change<'a> {
    fn of(world: &VgpuWorld<'a>, gpu: PciAddress, existing: &'a [Vgpu], layout: &Layout) -> Result<Self, VgpuRefusal> {
        let held = |vgpu: &Vgpu| world.holders.get(&vgpu.id);
        let mut room = layout.clone();
        let mut order: Vec<&Vgpu> = existing.iter().collect();
        // Those in use first, so that a free one has to go and not they.
        order.sort_by_key(|vgpu| held(vgpu).is_none());
        let mut kept = Vec::new();
        for vgpu in order {
            if let Some(count) = vgpu.kind().and_then(|kind| room.get_mut(kind)).filter(|count| **count > 0) {
                *count -= 1;
                kept.push(vgpu);
            }
        }
        let surplus: Vec<&Vgpu> = existing.iter().filter(|vgpu| !kept.contains(vgpu)).collect();
        for vgpu in &surplus {
            if let Some(holders) = held(vgpu) {
                let kind = vgpu.kind().unwrap_or("type not known").to_owned();
                return Err(VgpuRefusal::InUse { gpu, id: vgpu.id.clone(), kind, holders: holders.clone() });
            }
        }
        Ok(Self { gpu, facts: world.library.gpus.get(&gpu), kept, surplus })
    }

    fn nothing(&self, wanted: u32) -> bool {
        self.surplus.is_empty() && self.kept_count() == wanted
    }

    fn kept_count(&self) -> u32 {
        u32::try_from(self.kept.len()).unwrap_or(u32::MAX)
    }

    /// Two sizes on a GPU that says that it takes one only: known before the first is made.
    fn one_size(&self, layout: &Layout) -> Result<(), VgpuRefusal> {
        if self.facts.and_then(|facts| facts.heterogeneous) != Some(false) {
            return Ok(());
        }
        let asked = layout.iter().filter(|(_, count)| **count > 0);
        let mut sized = asked.filter_map(|(kind, _)| Some((kind, shape(kind).filter(|of| of.slices.is_none())?)));
        let Some((beside, first)) = sized.next() else { return Ok(()) };
        match sized.find(|(_, shape)| shape.framebuffer != first.framebuffer) {
            Some((kind, _)) => {
                Err(VgpuRefusal::Homogeneous { gpu: self.gpu, kind: kind.clone(), beside: beside.clone() })
            }
            None => Ok(()),
        }
    }

    /// Two sizes on a GPU that shows that it takes one only. While it shows nothing, making them will tell.
    fn sizes(&self, layout: &Layout, offers: &Offers) -> Result<(), VgpuRefusal> {
        if !self.surplus.is_empty() || self.takes_all_sizes() {
            return Ok(());
        }
        let size = |kind: &str| shape(kind).filter(|shape| shape.slices.is_none()).map(|shape| shape.framebuffer);
        let Some((beside, there)) = self.kept.iter().find_map(|vgpu| Some((vgpu.kind()?, size(vgpu.kind()?)?))) else {
            return Ok(());
        };
        let listed: BTreeSet<u32> = offers.creatable().filter_map(size).collect();
        let other = layout.iter().find(|(kind, count)| **count > 0 && size(kind).is_some_and(|size| size != there));
        match other {
            Some((kind, _)) if listed == [there].into() => {
                Err(VgpuRefusal::Homogeneous { gpu: self.gpu, kind: kind.clone(), beside: beside.to_owned() })
            }
            Some(_) | None => Ok(()),
        }
    }

    fn takes_all_sizes(&self) -> bool {
        self.facts.is_some_and(|facts| facts.heterogeneous == Some(true))
    }

    /// What is missing, the largest first: small ones find a place between large ones, not the other way round.
    fn create(
        &self,
        world: &VgpuWorld<'_>,
        layout: &Layout,
        mut offers: Offers,
        steps: &mut Vec<VgpuStep>,
    ) -> Result<(), VgpuRefusal> {
        let gone: BTreeSet<&str> = self.surplus.iter().map(|vgpu| vgpu.id.as_str()).collect();
        for vgpu in &self.surplus {
            offers.freed(vgpu.parent);
        }
        let mut taken: BTreeSet<String> = world.inventory.mdevs.keys().cloned().collect();
        taken.retain(|uuid| !gone.contains(uuid.as_str()));
        let mut order: Vec<(&String, u32)> = layout.iter().map(|(kind, count)| (kind, *count)).collect();
        order.sort_by_key(|(kind, _)| std::cmp::Reverse(shape(kind).map(|shape| shape.framebuffer)));
        for (kind, count) in order {
            let there = self.kept.iter().filter(|vgpu| vgpu.kind() == Some(kind)).count();
            let there = u32::try_from(there).unwrap_or(u32::MAX);
            if count > there && offers.most(kind).is_some_and(|most| count > most) {
                return Err(self.full(kind, count, there, &offers));
            }
            for made in there..count {
                match offers.take(kind, world.node, &mut taken) {
                    Some(step) => steps.push(step),
                    // What will be free then may have a place for it: the next look tells.
                    None if !self.surplus.is_empty() && offers.may_come(kind) => break,
                    None => return Err(self.refused(world, kind, count, made, &offers)),
                }
            }
        }
        Ok(())
    }

    fn refused(&self, world: &VgpuWorld<'_>, kind: &str, wanted: u32, made: u32, offers: &Offers) -> VgpuRefusal {
        let alone = self.kept.is_empty() && made == 0;
        if !offers.known(kind) && (offers.is_complete() || (alone && self.surplus.is_empty())) {
            return unknown(world, self.gpu, kind, offers);
        }
        let size = |kind: &str| shape(kind).filter(|shape| shape.slices.is_none()).map(|shape| shape.framebuffer);
        let others = self.kept.iter().filter(|_| !self.takes_all_sizes()).filter_map(|vgpu| vgpu.kind());
        let beside = others.into_iter().find(|other| size(other) != size(kind));
        match beside {
            // Only its own size is listed: it is not that there is no room at all.
            Some(beside)
                if offers.creatable().next().is_some() && offers.creatable().all(|k| size(k) == size(beside)) =>
            {
                VgpuRefusal::Homogeneous { gpu: self.gpu, kind: kind.to_owned(), beside: beside.to_owned() }
            }
            Some(_) | None => self.full(kind, wanted, made, offers),
        }
    }

    fn full(&self, kind: &str, wanted: u32, made: u32, offers: &Offers) -> VgpuRefusal {
        let offered = offers.creatable().map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect();
        VgpuRefusal::Full { gpu: self.gpu, kind: kind.to_owned(), wanted, made, most: offers.most(kind), offered }
    }
}
