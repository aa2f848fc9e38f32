//! Looks at the host, brings GPUs into the modes asked for, and looks again. Synchronous: it runs on a thread of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crds::{
    WorkloadMode,
    v1alpha1::{AgentFunction, Refusal},
};
use vfio::{
    Binding, Holder, Inventory, Journal, Kernel, LinuxKernel, PciAddress, Plan, Root, World, deviations, execute,
    observe_except, plan,
};

use super::{
    health::{Ailments, Bus, Watch, bus},
    holders::{Held, held_by},
    library::Answers,
    patience::Patience,
    pod_resources::{self, Allocations},
    translate,
    vgpu_manager::{self, Bench, VgpuManager, Vgpus},
    wish::{Wish, addresses, binding, switched_off, wanted},
    work::{Change, Work},
};

/// How long a write to a driver's attribute may take. Longer means that the device is in use.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// How soon a kubelet that does not answer is asked again.
const KUBELET_RETRY: Duration = Duration::from_secs(5);
const JOURNAL: &str = vfio::journal::PATH;

/// The host after the work, and why any of it was not done.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    pub inventory: Inventory,
    pub holders: BTreeMap<PciAddress, Vec<Holder>>,
    /// What the kubelet has given out, as it was at the beginning of the round.
    pub allocations: Allocations,
    /// What is wrong with GPUs.
    pub ailments: Ailments,
    /// Memory that GPUs share, by its device node.
    pub egm: BTreeMap<PathBuf, BTreeSet<PciAddress>>,
    pub vgpus: Vgpus,
    pub refusals: BTreeMap<PciAddress, Refusal>,
    pub obstacles: BTreeMap<(PciAddress, WorkloadMode), Refusal>,
    /// What was done, or would have to be, one sentence a step.
    pub plan: Vec<String>,
    /// What is wrong with our own books.
    pub complaints: Vec<String>,
    /// Time from the first look to the last, if anything was executed in between.
    pub worked: Option<Duration>,
    /// Plans that were executed.
    pub changes: Vec<Change>,
    /// When failed work is due again.
    pub again: Option<Instant>,
}

/// `K`: the door to the kernel, a described machine's in tests.
pub struct VfioManager<K = LinuxKernel> {
    root: Root,
    kernel: K,
    journal: Journal,
    /// What pods have, as the kubelet said last.
    allocations: Allocations,
    /// Why the kubelet does not say it now.
    unknown: Option<String>,
    /// Whether the next change could be noted, or why not; `None` before it was tried.
    writable: Option<Result<(), Refusal>>,
    patience: Patience,
    vgpus: VgpuManager,
    library: Answers,
    /// Of the last round.
    made: Vgpus,
    health: Watch,
    /// Of the last round.
    ailments: Ailments,
    /// Of the last glance.
    bus: Bus,
    in_use: BTreeSet<PciAddress>,
    gpus: BTreeSet<String>,
    complaints: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("host root {root} cannot be opened: mount the host's file system there or set --host-root")]
    Root { root: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Journal(#[from] vfio::journal::JournalError),
}

impl VfioManager {
    /// `helper`: the executable that serves `kernel-write`, i.e. this one. `node`: its name.
    pub fn open(host_root: &Path, helper: PathBuf, node: &str) -> Result<Self, Error> {
        Self::with_kernel(host_root, LinuxKernel::new(host_root.to_owned(), helper, WRITE_DEADLINE), node)
    }
}

impl<K: Kernel> VfioManager<K> {
    pub(super) fn with_kernel(host_root: &Path, kernel: K, node: &str) -> Result<Self, Error> {
        let root = Root::new(host_root).map_err(|source| Error::Root { root: host_root.to_owned(), source })?;
        let path = host_root.join(JOURNAL.trim_start_matches('/'));
        let mut complaints = Vec::new();
        let journal = match Journal::open(&path) {
            Err(error @ vfio::journal::JournalError::Corrupt { .. }) => {
                tracing::error!(%error, "journal damaged");
                complaints.push(error.to_string());
                Journal::open(&path)?
            }
            other => other?,
        };
        Ok(Self {
            root,
            kernel,
            journal,
            allocations: Allocations::new(),
            unknown: None,
            writable: None,
            patience: Patience::default(),
            vgpus: VgpuManager::new(node.to_owned()),
            library: Answers::default(),
            made: Vgpus::default(),
            health: Watch::default(),
            ailments: Ailments::new(),
            bus: Bus::new(),
            in_use: BTreeSet::new(),
            gpus: BTreeSet::new(),
            complaints,
        })
    }

    /// `library`: the driver's, as far as this process may ask it.
    #[must_use]
    pub fn with_library(mut self, library: Box<dyn vfio::vgpu::Library + Send>) -> Self {
        self.library = Answers::of(library);
        self
    }

    /// Takes the journal away, for a host that is left for good. `false`: it has something to undo, and stays.
    pub fn leave(&mut self) -> Result<bool, Error> {
        Ok(self.journal.leave()?)
    }

    /// One round. Nothing that goes wrong with one GPU keeps another from being served.
    ///
    /// `allocations`: what the kubelet has given to pods; a GPU that a pod has is in use, opened or not. While the kubelet
    /// does not say, what it said last holds, and no GPU is taken from anybody.
    pub fn round(&mut self, wish: &Wish, allocations: Result<Allocations, String>) -> Observation {
        self.unknown = None;
        match allocations {
            Ok(allocations) => self.allocations = allocations,
            Err(why) => self.unknown = Some(why),
        }
        // Known before anything is asked; tried again by what needs it, and while it fails.
        if !matches!(self.writable, Some(Ok(()))) {
            self.try_journal();
        }
        let mut complaints = self.complaints.clone();
        complaints.extend(self.unknown.clone());
        note(&mut complaints, self.journal.settle(&self.root).map(drop));
        let mut view = self.look();
        note(&mut complaints, self.journal.adopt(&view.inventory).map(drop));
        vgpu_manager::follow(&mut self.library, &view.inventory, &view.held, &self.allocations, &self.journal, wish);
        let began = Instant::now();
        let mut work = Work::default();
        let left = self.with_vgpus(&view, |vgpus, bench, view| vgpus.leave(bench, view, wish, &mut work));
        if left {
            view = self.look();
        }
        while let Some(done) = self.pass(&view, wish, &mut work) {
            view = self.look();
            self.verify(&view, &done, &mut work);
        }
        let (progress, changed) =
            self.with_vgpus(&view, |vgpus, bench, view| vgpus.apply(bench, view, wish, &mut work));
        if changed {
            view = self.look();
        }
        self.kernel.rest();
        let facts = self.library.facts();
        let shown = vgpu_manager::view(view.inventory.clone(), view.held.clone(), &self.allocations, facts);
        let gpus = vgpu_manager::found(&shown, &self.journal, wish, facts);
        self.made = Vgpus { gpus, progress, library: facts.clone() };
        // An entry whose device is away is no complaint: it may come back.
        let replaced = |address: &PciAddress| view.inventory.functions.contains_key(address);
        for stale in self.journal.stale(&view.inventory).into_iter().filter(replaced) {
            complaints.push(format!("journal: {stale} is not the device that was recorded; its entry is not acted on"));
        }
        let obstacles = self.obstacles(&view.inventory, wish);
        self.gpus = addresses(&view.inventory).map(|gpu| gpu.to_string()).collect();
        self.gpus.extend(self.made.ids().into_iter().map(|(id, _)| id.to_owned()));
        self.in_use = view.held.keys().copied().collect();
        self.ailments = self.examine(&view.inventory);
        Observation {
            ailments: self.ailments.clone(),
            egm: vfio::egm(&self.root),
            changes: work.changes,
            worked: (!work.steps.is_empty()).then(|| began.elapsed()),
            inventory: view.inventory,
            holders: view.held,
            allocations: self.allocations.clone(),
            vgpus: self.made.clone(),
            refusals: work.refusals,
            obstacles,
            plan: work.steps,
            complaints,
            again: self.again(),
        }
    }

    /// Whether a round is due because of what makes no event: health, and who has what, as the kubelet says now.
    /// Reads sysfs only.
    pub fn glance(&mut self, allocations: &Result<Allocations, String>) -> bool {
        let inventory = observe_except(&self.root, &self.journal.locked());
        self.bus = bus(&inventory);
        let vgpus = inventory
            .gpus()
            .into_iter()
            .flat_map(|gpu| vfio::vgpu::vgpus(&inventory, gpu.primary.address, self.journal.vgpu_types()));
        let vgpus: Vec<_> = vgpus.collect();
        let ids = vgpus.iter().map(|vgpu| (vgpu.id.as_str(), vgpu.name.as_deref()));
        self.made.ids().into_iter().ne(ids) || self.examine(&inventory) != self.ailments || self.given_anew(allocations)
    }

    /// Work on vGPUs from one look.
    fn with_vgpus<T>(
        &mut self,
        view: &View,
        work: impl FnOnce(&mut VgpuManager, &mut Bench<'_, K>, &vfio::vgpu::View) -> T,
    ) -> T {
        let facts = self.library.facts();
        let view = vgpu_manager::view(view.inventory.clone(), view.held.clone(), &self.allocations, facts);
        let hindrance = self.unable("the vGPUs");
        let Self { root, kernel, journal, allocations, vgpus, library, .. } = self;
        work(vgpus, &mut Bench { root, kernel, journal, allocations, library, hindrance }, &view)
    }

    /// How GPUs were doing on the bus at the last glance.
    pub fn bus(&self) -> Bus {
        self.bus.clone()
    }

    /// What pods had in the last round.
    pub fn allocations(&self) -> &Allocations {
        &self.allocations
    }

    /// Whether pods have other GPUs of the last round than they had then.
    pub fn given_anew(&self, allocations: &Result<Allocations, String>) -> bool {
        let ours = |given: &Allocations| pod_resources::ours(given, |id| self.gpus.contains(id));
        allocations.as_ref().is_ok_and(|now| ours(now) != ours(&self.allocations))
    }

    fn examine(&mut self, inventory: &Inventory) -> Ailments {
        self.health.examine(inventory, |gpu| self.in_use.contains(&gpu), Instant::now())
    }

    fn try_journal(&mut self) {
        self.writable = Some(self.journal.writable().map_err(|error| translate::journal(&error)));
    }

    /// What the kernel and the kubelet say now.
    fn look(&self) -> View {
        let inventory = observe_except(&self.root, &self.journal.locked());
        let held = self.held(&inventory);
        View { inventory, held }
    }

    fn held(&self, inventory: &Inventory) -> Held {
        held_by(&self.root, &self.allocations, inventory)
    }

    /// Does for each GPU what can be done from one look, and returns what is to be verified; `None` if nothing was
    /// touched. A plan covers a whole group, so a second GPU of a group waits for the next look.
    fn pass(&mut self, view: &View, wish: &Wish, work: &mut Work) -> Option<Vec<(PciAddress, Binding)>> {
        let mut done = Vec::new();
        let mut touched = BTreeSet::new();
        let wanted = wanted(&view.inventory, wish);
        for gpu in addresses(&view.inventory) {
            let Some(mode) = wish.mode(gpu) else { continue };
            let group = view.inventory.gpu(gpu).and_then(|gpu| gpu.group);
            if work.tried.contains(&gpu) || (group.is_some() && touched.contains(&group)) {
                continue;
            }
            let binding = binding(mode);
            match self.plan(view, &wanted, wish, gpu, binding) {
                Ok(plan) if plan.steps.is_empty() => self.patience.succeeded(gpu),
                Ok(plan) => {
                    work.tried.insert(gpu);
                    touched.insert(group);
                    work.steps.extend(plan.steps.iter().map(|step| format!("{gpu}: {step}")));
                    let began = Instant::now();
                    let executed = execute(&plan, &mut self.kernel, &mut self.journal);
                    work.changes.push(Change { binding, took: began.elapsed(), done: executed.is_ok() });
                    match executed {
                        Ok(()) => done.push((gpu, binding)),
                        Err(error) => self.failed(gpu, binding, translate::execution(&error), work),
                    }
                }
                Err(refusal) => {
                    work.tried.insert(gpu);
                    work.refusals.insert(gpu, refusal);
                }
            }
        }
        (!touched.is_empty()).then_some(done)
    }

    /// A plan that may be executed now, or why not. Holders are looked for anew right before anything is done.
    fn plan(
        &mut self,
        view: &View,
        wanted: &BTreeMap<PciAddress, Binding>,
        wish: &Wish,
        gpu: PciAddress,
        binding: Binding,
    ) -> Result<Plan, Refusal> {
        let from = |journal: &Journal, held: &Held| {
            let world = World { inventory: &view.inventory, holders: held, journal, wanted };
            plan(&world, gpu, binding).map_err(|refusal| translate::refusal(&refusal))
        };
        let plan = from(&self.journal, &view.held)?;
        if plan.steps.is_empty() {
            return Ok(plan);
        }
        self.try_journal();
        if let Some(hindrance) = self.hindrance(wish, gpu) {
            return Err(hindrance);
        }
        if let Some(refusal) = self.patience.too_early(gpu, binding, Instant::now()) {
            return Err(refusal.clone());
        }
        self.journal.admit_epoch(wish.spec.epoch).map_err(|error| translate::journal(&error))?;
        from(&self.journal, &self.held(&view.inventory))
    }

    /// Why nothing at all may be done now, whatever the plan.
    fn hindrance(&self, wish: &Wish, gpu: PciAddress) -> Option<Refusal> {
        if !wish.has(AgentFunction::VfioManager) {
            return Some(switched_off(gpu));
        }
        self.unable(&format!("GPU {gpu}"))
    }

    /// Why nothing may be done to anything.
    fn unable(&self, what: &str) -> Option<Refusal> {
        let unknown = self.unknown.as_ref().map(|why| Refusal {
            reason: "AllocationsUnknown".to_owned(),
            message: format!(
                "{what}: left as it is, since a pod could have it: {why}; it goes on when the kubelet answers"
            ),
        });
        unknown.or_else(|| self.writable.as_ref()?.as_ref().err().cloned())
    }

    /// When failed or hindered work is due again.
    fn again(&self) -> Option<Instant> {
        let kubelet = self.unknown.as_ref().map(|_| Instant::now() + KUBELET_RETRY);
        [self.patience.next(), self.vgpus.again(&self.made.progress), kubelet].into_iter().flatten().min()
    }

    /// Only a new look is believed.
    fn verify(&mut self, now: &View, done: &[(PciAddress, Binding)], work: &mut Work) {
        for (gpu, binding) in done {
            let still = deviations(&now.inventory, *gpu, *binding);
            if still.is_empty() {
                tracing::info!(%gpu, ?binding, "reached");
                self.patience.succeeded(*gpu);
                continue;
            }
            let differs: Vec<String> = still.iter().map(ToString::to_string).collect();
            let message = format!(
                "every step was taken, and the kernel still shows: {}; see its log for {gpu}",
                differs.join("; ")
            );
            self.failed(*gpu, *binding, Refusal { reason: "NotVerified".to_owned(), message }, work);
        }
    }

    fn failed(&mut self, gpu: PciAddress, binding: Binding, refusal: Refusal, work: &mut Work) {
        tracing::warn!(%gpu, ?binding, reason = refusal.reason, "{}", refusal.message);
        self.patience.failed(gpu, binding, refusal.clone(), Instant::now());
        work.refusals.insert(gpu, refusal);
    }

    /// What would stop each GPU on its way to each mode, holders aside.
    fn obstacles(&self, inventory: &Inventory, wish: &Wish) -> BTreeMap<(PciAddress, WorkloadMode), Refusal> {
        let nobody = BTreeMap::new();
        let mut obstacles = BTreeMap::new();
        for mode in WorkloadMode::ALL {
            let all: BTreeMap<_, _> = addresses(inventory).map(|gpu| (gpu, binding(mode))).collect();
            let world = World { inventory, holders: &nobody, journal: &self.journal, wanted: &all };
            for gpu in addresses(inventory) {
                let refused = match plan(&world, gpu, binding(mode)) {
                    Err(vfio::Refusal::VfsPresent { .. } | vfio::Refusal::MdevsPresent { .. })
                        if vgpu_manager::may_leave(inventory, &self.journal, gpu) =>
                    {
                        self.hindrance(wish, gpu)
                    }
                    Err(refusal) => Some(translate::refusal(&refusal)),
                    Ok(plan) if plan.steps.is_empty() => None,
                    Ok(_) => self.hindrance(wish, gpu),
                };
                if let Some(refusal) = refused {
                    obstacles.insert((gpu, mode), refusal);
                }
            }
        }
        obstacles
    }
}

/// One look.
struct View {
    inventory: Inventory,
    held: Held,
}

fn note(complaints: &mut Vec<String>, result: Result<(), vfio::journal::JournalError>) {
    if let Err(error) = result {
        tracing::error!(%error, "journal");
        complaints.push(error.to_string());
    }
}

#[cfg(test)]
#[path = "vfio_manager_tests.rs"]
mod tests;
