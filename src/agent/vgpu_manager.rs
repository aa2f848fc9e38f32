//! Brings the vGPUs of GPUs in mode `vm-vgpu` to the layout of the order, and takes ours away where another mode is asked
//! for. Synchronous, as a part of [`VfioManager`](super::vfio_manager::VfioManager)'s round.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentFunction, Refusal},
};
use vfio::{
    Binding, Function, Holder, Inventory, Journal, Kernel, PciAddress, Root, deviations, observe_except,
    vgpu::{
        self, ApplyError, Framework, Layout, LibraryFacts, NoVgpu, Vgpu, VgpuRefusal, VgpuStep, VgpuWorld, View,
        framework, vgpu_holders, vgpus,
    },
};

use super::{
    holders::held_by,
    library::Answers,
    pod_resources::Allocations,
    translate,
    wish::{Wish, addresses},
    work::Work,
};

/// A driver's services come up after it, and bring the types: so long it is waited for them.
const PATIENT: Duration = Duration::from_secs(180);
/// How soon it is looked again meanwhile: types come without an event.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Failed work is tried again after this time, doubled with each failure up to the longest.
const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(300);

/// How far a GPU is with its layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// Waiting may give it.
    Pending(Refusal),
    /// Waiting alone will not.
    Failed(Refusal),
}

/// What a GPU has of vGPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuVgpus {
    pub framework: Framework,
    pub instances: Vec<Vgpu>,
    /// By instance.
    pub holders: BTreeMap<String, Vec<Holder>>,
}

/// After a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vgpus {
    pub gpus: BTreeMap<PciAddress, GpuVgpus>,
    /// Of the GPUs that are asked to be in `vm-vgpu`.
    pub progress: BTreeMap<PciAddress, Progress>,
    /// What the driver's library says.
    pub library: LibraryFacts,
}

impl Vgpus {
    /// What can change without an event: which vGPUs there are.
    pub fn ids(&self) -> Vec<(&str, Option<&str>)> {
        let all = self.gpus.values().flat_map(|gpu| &gpu.instances);
        all.map(|vgpu| (vgpu.id.as_str(), vgpu.name.as_deref())).collect()
    }
}

/// What the work is done with.
pub struct Bench<'a, K> {
    pub root: &'a Root,
    pub kernel: &'a mut K,
    pub journal: &'a mut Journal,
    pub allocations: &'a Allocations,
    pub library: &'a mut Answers,
    /// Why nothing may be done now, whatever the layout.
    pub hindrance: Option<Refusal>,
}

#[derive(Default)]
pub struct VgpuManager {
    node: String,
    failed: BTreeMap<PciAddress, Failure>,
    waiting: BTreeMap<PciAddress, Instant>,
}

struct Failure {
    layout: Option<Layout>,
    refusal: Refusal,
    wait: Duration,
    again: Instant,
}

impl VgpuManager {
    /// `node`: UUIDs are made from its name.
    pub fn new(node: String) -> Self {
        Self { node, ..Self::default() }
    }

    /// Takes away what was made for `vm-vgpu` where another mode is asked for, before drivers change. Returns whether
    /// anything was done.
    pub fn leave<K: Kernel>(&mut self, bench: &mut Bench<'_, K>, view: &View, wish: &Wish, work: &mut Work) -> bool {
        let before = work.steps.len();
        for gpu in addresses(&view.inventory) {
            let in_the_way = match wish.mode(gpu) {
                // Of a GPU that is there already they are somebody's choice.
                Some(WorkloadMode::VmPassthrough) => !deviations(&view.inventory, gpu, Binding::Vfio).is_empty(),
                Some(WorkloadMode::Container) => false,
                Some(WorkloadMode::VmVgpu) | None => continue,
            };
            let plan = |world: &VgpuWorld<'_>| vgpu::leave(world, gpu, in_the_way);
            let refusal = match self.bring(bench, view, wish, gpu, None, plan, work) {
                Ok(()) => foreign(view, bench.journal, gpu).filter(|_| !in_the_way && work.steps.len() == before),
                Err(Stop::Refused(refusal)) => Some(translate::vgpu_refusal(&refusal)),
                Err(Stop::Failed(refusal)) => Some(refusal),
            };
            if let Some(refusal) = refusal {
                work.tried.insert(gpu);
                work.refusals.insert(gpu, refusal);
            }
        }
        work.steps.len() > before
    }

    /// Makes the layout, after drivers have changed. Returns how far each GPU is, and whether anything was done.
    pub fn apply<K: Kernel>(
        &mut self,
        bench: &mut Bench<'_, K>,
        view: &View,
        wish: &Wish,
        work: &mut Work,
    ) -> (BTreeMap<PciAddress, Progress>, bool) {
        let before = work.steps.len();
        let mut progress = BTreeMap::new();
        for gpu in addresses(&view.inventory) {
            if wish.mode(gpu) != Some(WorkloadMode::VmVgpu) {
                self.waiting.remove(&gpu);
                continue;
            }
            let Some(layout) = wish.vgpus(gpu) else {
                // What exists stays, and is offered.
                progress.insert(gpu, Progress::Done);
                continue;
            };
            let plan = |world: &VgpuWorld<'_>| vgpu::plan(world, gpu, &layout);
            let outcome = match work.refusals.get(&gpu) {
                Some(refusal) => Err(Stop::Failed(refusal.clone())),
                None => self.bring(bench, view, wish, gpu, Some(&layout), plan, work),
            };
            progress.insert(gpu, self.judged(gpu, outcome));
        }
        (progress, work.steps.len() > before)
    }

    fn judged(&mut self, gpu: PciAddress, outcome: Result<(), Stop>) -> Progress {
        let now = Instant::now();
        match outcome {
            Ok(()) => {
                self.waiting.remove(&gpu);
                Progress::Done
            }
            Err(Stop::Refused(refusal)) if refusal.is_passing() => {
                let since = *self.waiting.entry(gpu).or_insert(now);
                // A driver may be compiled first, for as long as it takes.
                let without_end = matches!(refusal, VgpuRefusal::NoFramework(NoVgpu::NotOnDriver { .. }));
                let refusal = translate::vgpu_refusal(&refusal);
                match without_end || now < since + PATIENT {
                    true => Progress::Pending(refusal),
                    false => Progress::Failed(refusal),
                }
            }
            Err(Stop::Refused(refusal)) => Progress::Failed(translate::vgpu_refusal(&refusal)),
            Err(Stop::Failed(refusal)) => Progress::Failed(refusal),
        }
    }

    /// Does what a plan says, if anything. A second look is taken only then.
    #[allow(clippy::too_many_arguments, reason = "each is one thing that the work needs")]
    fn bring<K: Kernel>(
        &mut self,
        bench: &mut Bench<'_, K>,
        view: &View,
        wish: &Wish,
        gpu: PciAddress,
        layout: Option<&Layout>,
        plan: impl Fn(&VgpuWorld<'_>) -> Result<Vec<VgpuStep>, VgpuRefusal>,
        work: &mut Work,
    ) -> Result<(), Stop> {
        let known = bench.journal.learn_vgpu_types(&view.inventory);
        known.map_err(|error| Stop::Failed(translate::journal(&error)))?;
        let world = view.world(bench.library.facts(), bench.journal, &self.node);
        if plan(&world).map_err(Stop::Refused)?.is_empty() {
            self.failed.remove(&gpu);
            return Ok(());
        }
        if !wish.has(AgentFunction::VgpuDeviceManager) {
            return Err(Stop::Failed(switched_off(gpu)));
        }
        if let Some(hindrance) = &bench.hindrance {
            return Err(Stop::Failed(hindrance.clone()));
        }
        let failure = self.failed.get(&gpu).filter(|failure| failure.layout.as_ref() == layout);
        if let Some(failure) = failure.filter(|failure| Instant::now() < failure.again) {
            return Err(Stop::Failed(failure.refusal.clone()));
        }
        let admitted = bench.journal.admit_epoch(wish.spec.epoch);
        admitted.map_err(|error| Stop::Failed(translate::journal(&error)))?;
        let (root, allocations) = (bench.root, bench.allocations);
        let told = bench.library.facts().clone();
        let look = |journal: &Journal| look(root, allocations, journal, &told);
        let mut asked = bench.library.asked();
        let (steps, result) = vgpu::apply(gpu, &self.node, bench.kernel, bench.journal, &mut asked, look, plan);
        work.steps.extend(steps.iter().map(|step| format!("{gpu}: {step}")));
        match result {
            Ok(()) => {
                tracing::info!(%gpu, steps = steps.len(), "vGPUs are as asked for");
                self.failed.remove(&gpu);
                Ok(())
            }
            Err(ApplyError::Refused(refusal)) => Err(Stop::Refused(refusal)),
            Err(
                error @ (ApplyError::Kernel { .. }
                | ApplyError::Library { .. }
                | ApplyError::NotVerified { .. }
                | ApplyError::Bind(_)
                | ApplyError::Journal { .. }),
            ) => {
                let refusal = translate::vgpu_failure(&error);
                tracing::warn!(%gpu, reason = refusal.reason, "{}", refusal.message);
                self.fail(gpu, layout.cloned(), refusal.clone());
                Err(Stop::Failed(refusal))
            }
        }
    }

    fn fail(&mut self, gpu: PciAddress, layout: Option<Layout>, refusal: Refusal) {
        let wait = match self.failed.get(&gpu).filter(|failure| failure.layout == layout) {
            Some(failure) => (failure.wait * 2).min(LONGEST),
            None => FIRST,
        };
        self.failed.insert(gpu, Failure { layout, refusal, wait, again: Instant::now() + wait });
    }

    /// When it is to be looked again.
    pub fn again(&self, progress: &BTreeMap<PciAddress, Progress>) -> Option<Instant> {
        let now = Instant::now();
        // What comes later than that makes an event: a driver takes the GPU.
        let soon = |gpu: &PciAddress| self.waiting.get(gpu).is_some_and(|since| now < *since + PATIENT);
        let waits = progress.iter().any(|(gpu, progress)| matches!(progress, Progress::Pending(_)) && soon(gpu));
        let waits = waits.then(|| now + LOOK_AGAIN);
        waits.into_iter().chain(self.failed.values().map(|failure| failure.again)).min()
    }
}

enum Stop {
    Refused(VgpuRefusal),
    Failed(Refusal),
}

/// What the kernel and the kubelet say now.
pub fn look(root: &Root, allocations: &Allocations, journal: &Journal, library: &LibraryFacts) -> View {
    let inventory = observe_except(root, &journal.locked());
    let gpu_holders = held_by(root, allocations, &inventory);
    view(inventory, gpu_holders, allocations, library)
}

/// A look, with the pods that have vGPUs, opened or not, and the VMs that the library tells of.
pub fn view(
    inventory: Inventory,
    gpu_holders: BTreeMap<PciAddress, Vec<Holder>>,
    allocations: &Allocations,
    library: &LibraryFacts,
) -> View {
    let mut holders = vgpu_holders(&inventory, &gpu_holders);
    for (id, pods) in allocations {
        let is_vf =
            |id: &str| id.parse().is_ok_and(|a: PciAddress| inventory.functions.get(&a).is_some_and(Function::is_vf));
        if inventory.mdevs.contains_key(id) || is_vf(id) {
            holders.entry(id.clone()).or_default().extend(pods.iter().map(translate::allocation));
        }
    }
    for mdev in library.active.iter().filter_map(|vgpu| vgpu.mdev.as_ref()) {
        let known = holders.get(mdev).is_some_and(|holders| !holders.is_empty());
        if let Some(vm) = library.vm(mdev).filter(|_| !known && inventory.mdevs.contains_key(mdev)) {
            holders.entry(mdev.clone()).or_default().push(Holder::told(vm));
        }
    }
    View { inventory, holders, gpu_holders }
}

/// Asks the driver's library if that is due: where GPUs are to have vGPUs, or have MIG from here.
pub fn follow(
    library: &mut Answers,
    inventory: &Inventory,
    held: &BTreeMap<PciAddress, Vec<Holder>>,
    allocations: &Allocations,
    journal: &Journal,
    wish: &Wish,
) {
    let wanted = inventory.gpus().iter().any(|gpu| {
        let mode = wish.mode(gpu.primary.address);
        mode == Some(WorkloadMode::VmVgpu) || (mode.is_some() && journal.mig_made(gpu.primary))
    });
    let seen = view(inventory.clone(), held.clone(), allocations, library.facts());
    library.follow(wanted, &seen, Instant::now());
}

/// What there is to say of each GPU that makes vGPUs, has some, or is asked for some.
pub fn found(view: &View, journal: &Journal, wish: &Wish, library: &LibraryFacts) -> BTreeMap<PciAddress, GpuVgpus> {
    let mut found = BTreeMap::new();
    for gpu in view.inventory.gpus() {
        let address = gpu.primary.address;
        let instances = vgpus(&view.inventory, address, journal.vgpu_types());
        let framework = framework(&view.inventory, gpu.primary, library.gpus.get(&address));
        let silent = matches!(framework, Framework::None(_)) && instances.is_empty();
        if silent && wish.mode(address) != Some(WorkloadMode::VmVgpu) {
            continue;
        }
        let held = |vgpu: &Vgpu| Some((vgpu.id.clone(), view.holders.get(&vgpu.id)?.clone()));
        let holders = instances.iter().filter_map(held).collect();
        found.insert(address, GpuVgpus { framework, instances, holders });
    }
    found
}

/// Whether virtual functions and mediated devices are no obstacle on the way to passthrough, holders aside.
pub fn may_leave(inventory: &Inventory, journal: &Journal, gpu: PciAddress) -> bool {
    let (holders, gpu_holders) = (BTreeMap::new(), BTreeMap::new());
    let library = &LibraryFacts::default();
    let world = VgpuWorld { inventory, holders: &holders, gpu_holders: &gpu_holders, library, journal, node: "" };
    vgpu::leave(&world, gpu, true).is_ok_and(|steps| !steps.is_empty())
}

/// vGPUs that were not made from here are nobody's to remove.
fn foreign(view: &View, journal: &Journal, gpu: PciAddress) -> Option<Refusal> {
    let existing = vgpus(&view.inventory, gpu, journal.vgpu_types());
    let ids: Vec<&str> = existing.iter().map(|vgpu| vgpu.id.as_str()).collect();
    (!ids.is_empty()).then(|| Refusal {
        reason: "ForeignVgpus".to_owned(),
        message: format!(
            "GPU {gpu} has vGPUs that gpuvirt did not make ({}), and serves no container with them: remove them, or use mode vm-vgpu",
            ids.join(", ")
        ),
    })
}

fn switched_off(gpu: PciAddress) -> Refusal {
    Refusal {
        reason: "VgpuDeviceManagerDisabled".to_owned(),
        message: format!(
            "the vGPUs of GPU {gpu} are left as they are: label {}vgpu-device-manager=false switches making them off on this node; remove it",
            labels::DEPLOY_PREFIX
        ),
    }
}

#[cfg(test)]
#[path = "vgpu_manager_tests.rs"]
mod tests;
