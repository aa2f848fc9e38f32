//! Doing what a plan says, one step at a time: after each the kernel is asked again what it has and what it would make.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::instances::vgpus;
use super::library::{Library, LibraryFacts, MigAct};
use super::plan::{VgpuStep, VgpuWorld};
use super::refusal::VgpuRefusal;
use super::{MDEVS, Vgpu};
use crate::address::PciAddress;
use crate::execute::{ExecuteError, execute};
use crate::function::Function;
use crate::holders::Holder;
use crate::inventory::{Inventory, device_path};
use crate::journal::{Journal, JournalError, Pending};
use crate::kernel::{Kernel, KernelError};
use crate::plan::Plan;

/// More steps than a GPU can need: 64 vGPUs removed, as many made, and the way through the stub driver.
const MOST_STEPS: usize = 512;

/// One look at a host.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// What is there.
    pub inventory: Inventory,
    /// See [`VgpuWorld::holders`].
    pub holders: BTreeMap<String, Vec<Holder>>,
    /// See [`VgpuWorld::gpu_holders`].
    pub gpu_holders: BTreeMap<PciAddress, Vec<Holder>>,
}

impl View {
    /// What a plan is made from.
    pub fn world<'a>(&'a self, library: &'a LibraryFacts, journal: &'a Journal, node: &'a str) -> VgpuWorld<'a> {
        let Self { inventory, holders, gpu_holders } = self;
        VgpuWorld { inventory, holders, gpu_holders, library, journal, node }
    }
}

/// The driver's library, and what it said last.
#[allow(missing_debug_implementations, reason = "a door")]
pub struct Asked<'a> {
    /// Asked again after each step that it has done.
    pub library: &'a mut dyn Library,
    /// What is true until then.
    pub facts: &'a mut LibraryFacts,
}

/// Where work on a GPU's vGPUs came to a stop. What was done before stands.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// It cannot be had, or not now.
    #[error(transparent)]
    Refused(#[from] VgpuRefusal),
    /// The kernel did not do a step.
    #[error("gpu {gpu}: could not {step}: {source}{}", meaning(step, source))]
    Kernel { gpu: PciAddress, step: Box<VgpuStep>, source: KernelError },
    /// The driver's library did not do a step.
    #[error("gpu {gpu}: could not {step}: {said}")]
    Library { gpu: PciAddress, step: Box<VgpuStep>, said: String },
    /// It took a step and shows nothing of it.
    #[error("gpu {gpu}: the kernel took the step `{step}` and does not show it; look for {} in its log", step.address())]
    NotVerified { gpu: PciAddress, step: Box<VgpuStep> },
    /// A step on the way between drivers.
    #[error(transparent)]
    Bind(#[from] ExecuteError),
    /// It could not be noted, so it was not done.
    #[error("gpu {gpu}: {source}")]
    Journal { gpu: PciAddress, source: JournalError },
}

/// Brings a GPU to what `plan` asks for ([`plan`](super::plan()) with a layout, or [`leave`](super::leave)); returns what was done, also
/// when it came to a stop.
///
/// `look` is called before the first step and after each.
pub fn apply<K: Kernel>(
    gpu: PciAddress,
    node: &str,
    kernel: &mut K,
    journal: &mut Journal,
    asked: &mut Asked<'_>,
    mut look: impl FnMut(&Journal) -> View,
    plan: impl Fn(&VgpuWorld<'_>) -> Result<Vec<VgpuStep>, VgpuRefusal>,
) -> (Vec<VgpuStep>, Result<(), ApplyError>) {
    let mut done = Vec::new();
    let mut work = || {
        while done.len() < MOST_STEPS {
            let view = look(journal);
            let inventory = &view.inventory;
            journal.learn_vgpu_types(inventory).map_err(|source| ApplyError::Journal { gpu, source })?;
            let steps = plan(&view.world(asked.facts, journal, node))?;
            let Some(step) = steps.into_iter().next() else { return forget(inventory, gpu, journal) };
            if done.last() == Some(&step) {
                return Err(ApplyError::NotVerified { gpu, step: Box::new(step) });
            }
            tracing::info!(%gpu, %step, "step");
            let function = inventory.functions.get(&gpu).cloned();
            match (&function, &step) {
                (Some(function), VgpuStep::Mig { act, .. }) => {
                    if !mig_step(act, function, asked, journal)? {
                        continue;
                    }
                }
                (Some(function), _) => execute_step(&step, function, kernel, journal)?,
                (None, _) => {}
            }
            done.push(step);
        }
        let step = done.last().cloned().expect("so many steps should have a last one");
        Err(ApplyError::NotVerified { gpu, step: Box::new(step) })
    };
    let result = work();
    (done, result)
}

/// A GPU without vGPUs has none of ours.
fn forget(inventory: &Inventory, gpu: PciAddress, journal: &mut Journal) -> Result<(), ApplyError> {
    match inventory.functions.get(&gpu) {
        Some(function)
            if journal.vgpus_made(function).is_some() && vgpus(inventory, gpu, journal.vgpu_types()).is_empty() =>
        {
            journal.note_vgpus(function, false).map_err(|source| ApplyError::Journal { gpu, source })
        }
        Some(_) | None => Ok(()),
    }
}

/// Whether it is done. A GPU instance that does not go is in use by something that the library did not name.
fn mig_step(act: &MigAct, gpu: &Function, asked: &mut Asked<'_>, journal: &mut Journal) -> Result<bool, ApplyError> {
    let address = gpu.address;
    let noted = |source| ApplyError::Journal { gpu: address, source };
    match act {
        MigAct::Mode { on: true } | MigAct::Create { .. } | MigAct::Compute { .. } => {
            journal.note_mig(gpu, true).map_err(noted)?;
        }
        MigAct::Mode { on: false } | MigAct::Destroy { .. } => {}
    }
    let done = asked.library.act(address, act);
    // What a refusal to go has taught stays known until something has changed.
    if done.is_ok() {
        *asked.facts = asked.library.ask();
    }
    match (done, act) {
        (Ok(()), MigAct::Mode { on: false }) => journal.note_mig(gpu, false).map_err(noted)?,
        (Ok(()), _) => {}
        (Err(said), MigAct::Destroy { instance, .. }) => {
            tracing::info!(gpu = %address, instance, said, "GPU instance stays");
            let instances = asked.facts.gpus.get_mut(&address).into_iter().flat_map(|facts| &mut facts.instances);
            instances.filter(|one| one.id == *instance).for_each(|one| one.in_use = true);
            return Ok(false);
        }
        (Err(said), MigAct::Mode { .. } | MigAct::Create { .. } | MigAct::Compute { .. }) => {
            let step = Box::new(VgpuStep::Mig { gpu: address, act: act.clone() });
            return Err(ApplyError::Library { gpu: address, step, said });
        }
    }
    Ok(true)
}

fn execute_step(
    step: &VgpuStep,
    gpu: &Function,
    kernel: &mut impl Kernel,
    journal: &mut Journal,
) -> Result<(), ApplyError> {
    let address = gpu.address;
    let noted = |source| ApplyError::Journal { gpu: address, source };
    let (path, value) = match step {
        VgpuStep::Mig { .. } => return Ok(()),
        VgpuStep::Bind { gpu, step } => {
            return Ok(execute(&Plan { gpu: *gpu, steps: vec![step.clone()] }, kernel, journal)?);
        }
        VgpuStep::SetVfs { gpu: address, count } => {
            if *count > 0 {
                journal.note_vfs(gpu, true).map_err(noted)?;
            }
            (device_path(*address).join("sriov_numvfs"), count.to_string())
        }
        VgpuStep::Remove { vgpu } => removal(vgpu),
        VgpuStep::CreateMdev { uuid, parent, type_id, .. } => {
            journal.note_vgpus(gpu, true).map_err(noted)?;
            let dir = device_path(*parent).join("mdev_supported_types").join(type_id);
            (dir.join("create"), uuid.clone())
        }
        VgpuStep::SetType { vf, type_id, .. } => {
            journal.note_vgpus(gpu, true).map_err(noted)?;
            (current_type(*vf), type_id.to_string())
        }
    };
    match (kernel.write(&path, &value), step) {
        (Ok(()), VgpuStep::SetVfs { count: 0, .. }) => journal.note_vfs(gpu, false).map_err(noted),
        (Ok(()), _) => Ok(()),
        // Its driver has no function for that; the next plan goes through the stub.
        (Err(error), VgpuStep::SetVfs { count: 1.., .. })
            if error.errno() == Some(Errno::ENOENT) && !journal.needs_stub(gpu) =>
        {
            journal.note_vfs(gpu, false).map_err(noted)?;
            journal.note_stub(gpu).map_err(noted)
        }
        (Err(source), _) => {
            if let KernelError::Hung { path, pid, start_time, .. } = &source {
                let pending = Pending { pid: *pid, start_time: *start_time, path: path.clone() };
                journal.add_pending(step.address(), pending).map_err(noted)?;
            }
            Err(ApplyError::Kernel { gpu: address, step: Box::new(step.clone()), source })
        }
    }
}

fn removal(vgpu: &Vgpu) -> (PathBuf, String) {
    match vgpu.mediated {
        true => (Path::new(MDEVS).join(&vgpu.id).join("remove"), "1".to_owned()),
        false => (current_type(vgpu.parent), "0".to_owned()),
    }
}

fn current_type(vf: PciAddress) -> PathBuf {
    device_path(vf).join("nvidia/current_vgpu_type")
}

/// What the driver means by its answer; what it is to be told depends on the step.
fn meaning(step: &VgpuStep, error: &KernelError) -> &'static str {
    let makes = matches!(step, VgpuStep::CreateMdev { .. } | VgpuStep::SetType { .. });
    match (step, error.errno()) {
        (VgpuStep::SetVfs { .. }, Some(Errno::EBUSY)) => {
            "; the driver is busy with the GPU or has virtual functions already: it is tried again"
        }
        (VgpuStep::SetVfs { .. }, Some(Errno::ENOSPC | Errno::ENOMEM)) => {
            "; the firmware has left no bus numbers or memory for them: enable SR-IOV, ARI and 64-bit MMIO in its setup"
        }
        (VgpuStep::Remove { .. }, Some(Errno::EBUSY)) => "; somebody has opened it meanwhile: end its VM",
        (_, Some(Errno::EBUSY)) if makes => {
            "; the function is taken already or its last user has not gone yet: it is tried again"
        }
        (_, Some(Errno::EINVAL)) if makes => {
            "; the driver does not take this type here and now: another framebuffer size is in use on the GPU, or the type needs a GPU instance (MIG)"
        }
        (_, Some(Errno::ENOSPC | Errno::ENOMEM | Errno::EUSERS)) if makes => "; the GPU has no room for another one",
        (_, Some(Errno::EEXIST)) if makes => "; a mediated device with this UUID exists already, of another parent",
        (_, Some(_) | None) => "",
    }
}
