//! Looks at the host, brings GPUs into the modes asked for, and looks again. Synchronous: it runs on a thread of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crds::{
    WorkloadMode,
    v1alpha1::{AgentFunction, GPUNodeSpec, Refusal},
};
use vfio::{
    Binding, Holder, Inventory, Journal, LinuxKernel, PciAddress, Plan, Root, World, deviations, execute, holders,
    observe_except, plan,
};

use super::{patience::Patience, pod_resources::Allocations, translate};

/// How long a write to a driver's attribute may take. Longer means that the device is in use.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
const JOURNAL: &str = "/run/gpuvirt/journal";

/// What is asked of the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wish {
    pub spec: GPUNodeSpec,
}

impl Wish {
    /// The mode of one GPU, if one is asked for.
    pub fn mode(&self, gpu: PciAddress) -> Option<WorkloadMode> {
        let address = gpu.to_string();
        self.spec.gpus.iter().find(|own| own.address == address).map(|own| own.mode).or(self.spec.mode)
    }

    pub fn has(&self, function: AgentFunction) -> bool {
        !self.spec.disabled.contains(&function)
    }
}

/// The host after the work, and why any of it was not done.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    pub inventory: Inventory,
    pub holders: BTreeMap<PciAddress, Vec<Holder>>,
    pub refusals: BTreeMap<PciAddress, Refusal>,
    pub obstacles: BTreeMap<(PciAddress, WorkloadMode), Refusal>,
    /// What was done, or would have to be, one sentence a step.
    pub plan: Vec<String>,
    /// What is wrong with our own books.
    pub complaints: Vec<String>,
    /// Time that executing took, if anything was executed.
    pub worked: Option<Duration>,
    /// When failed work is due again.
    pub again: Option<Instant>,
}

pub struct VfioManager {
    root: Root,
    kernel: LinuxKernel,
    journal: Journal,
    /// What pods have, as of this round.
    allocations: Allocations,
    patience: Patience,
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
    /// `helper`: the executable that serves `kernel-write`, i.e. this one.
    pub fn open(host_root: &Path, helper: PathBuf) -> Result<Self, Error> {
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
        let kernel = LinuxKernel::new(host_root.to_owned(), helper, WRITE_DEADLINE);
        Ok(Self { root, kernel, journal, allocations: Allocations::new(), patience: Patience::default(), complaints })
    }

    /// One round. Nothing that goes wrong with one GPU keeps another from being served.
    ///
    /// `allocations`: what the kubelet has given to pods; a GPU that a pod has is in use, opened or not.
    pub fn round(&mut self, wish: &Wish, allocations: Allocations) -> Observation {
        self.allocations = allocations;
        let mut complaints = self.complaints.clone();
        note(&mut complaints, self.journal.settle(&self.root).map(drop));
        let (mut inventory, mut held) = self.look();
        note(&mut complaints, self.journal.adopt(&inventory).map(drop));
        let mut refusals = BTreeMap::new();
        let mut plan = Vec::new();
        let wanted = wanted(&inventory, wish);
        let mut worked = None;
        for gpu in addresses(&inventory) {
            let Some(mode) = wish.mode(gpu) else { continue };
            match self.bring(&inventory, &held, &wanted, wish, gpu, mode) {
                Ok(Done { steps, took: None }) => plan.extend(steps),
                Ok(Done { steps, took: Some(took) }) => {
                    plan.extend(steps);
                    worked = Some(worked.unwrap_or_default() + took);
                    (inventory, held) = self.look();
                }
                Err(refusal) => {
                    tracing::warn!(%gpu, %mode, reason = refusal.reason, "{}", refusal.message);
                    refusals.insert(gpu, refusal);
                    (inventory, held) = self.look();
                }
            }
        }
        for stale in self.journal.stale(&inventory) {
            complaints.push(format!("journal: {stale} is not the device that was recorded; its entry is not acted on"));
        }
        let obstacles = self.obstacles(&inventory, wish);
        Observation {
            inventory,
            holders: held,
            refusals,
            obstacles,
            plan,
            complaints,
            worked,
            again: self.patience.next(),
        }
    }

    fn look(&self) -> (Inventory, BTreeMap<PciAddress, Vec<Holder>>) {
        let inventory = observe_except(&self.root, &self.journal.locked());
        let mut held = holders(&self.root, &inventory);
        for gpu in addresses(&inventory) {
            let pods = self.allocations.get(&gpu.to_string()).into_iter().flatten();
            held.entry(gpu).or_default().extend(pods.map(|pod| translate::allocation(pod)));
        }
        held.retain(|_, holders| !holders.is_empty());
        (inventory, held)
    }

    fn bring(
        &mut self,
        inventory: &Inventory,
        held: &BTreeMap<PciAddress, Vec<Holder>>,
        wanted: &BTreeMap<PciAddress, Binding>,
        wish: &Wish,
        gpu: PciAddress,
        mode: WorkloadMode,
    ) -> Result<Done, Refusal> {
        let binding = binding(mode)?;
        let world = World { inventory, holders: held, journal: &self.journal, wanted };
        let plan = plan(&world, gpu, binding).map_err(|refusal| translate::refusal(&refusal))?;
        if plan.steps.is_empty() {
            self.patience.succeeded(gpu);
            return Ok(Done { steps: Vec::new(), took: None });
        }
        if !wish.has(AgentFunction::VfioManager) {
            return Err(switched_off(gpu));
        }
        if let Some(refusal) = self.patience.too_early(gpu, binding, Instant::now()) {
            return Err(refusal.clone());
        }
        self.journal.admit_epoch(wish.spec.epoch).map_err(|error| translate::failure("StaleOrder", &error))?;
        let done = self.act(&plan, binding);
        match &done {
            Ok(_) => self.patience.succeeded(gpu),
            Err(refusal) => self.patience.failed(gpu, binding, refusal.clone(), Instant::now()),
        }
        done
    }

    /// Executes, and believes only a new look.
    fn act(&mut self, plan: &Plan, binding: Binding) -> Result<Done, Refusal> {
        let gpu = plan.gpu;
        let began = Instant::now();
        execute(plan, &mut self.kernel, &mut self.journal).map_err(|error| translate::execution(&error))?;
        let took = began.elapsed();
        let (now, _) = self.look();
        let still = deviations(&now, gpu, binding);
        if !still.is_empty() {
            let differs: Vec<String> = still.iter().map(ToString::to_string).collect();
            return Err(Refusal {
                reason: "NotVerified".to_owned(),
                message: format!(
                    "every step was taken, and the kernel still shows: {}; see its log for {gpu}",
                    differs.join("; ")
                ),
            });
        }
        tracing::info!(%gpu, ?binding, milliseconds = took.as_millis(), "binding reached");
        let steps = plan.steps.iter().map(|step| format!("{gpu}: {step}")).collect();
        Ok(Done { steps, took: Some(took) })
    }

    /// What would stop each GPU on its way to each mode, holders aside.
    fn obstacles(&self, inventory: &Inventory, wish: &Wish) -> BTreeMap<(PciAddress, WorkloadMode), Refusal> {
        let nobody = BTreeMap::new();
        let mut obstacles = BTreeMap::new();
        for mode in WorkloadMode::ALL {
            let all: BTreeMap<_, _> = match binding(mode) {
                Ok(binding) => addresses(inventory).map(|gpu| (gpu, binding)).collect(),
                Err(_) => BTreeMap::new(),
            };
            let world = World { inventory, holders: &nobody, journal: &self.journal, wanted: &all };
            for gpu in addresses(inventory) {
                let refused = match binding(mode) {
                    Err(refusal) => Some(refusal),
                    Ok(binding) => match plan(&world, gpu, binding) {
                        Err(refusal) => Some(translate::refusal(&refusal)),
                        Ok(plan) if !plan.steps.is_empty() && !wish.has(AgentFunction::VfioManager) => {
                            Some(switched_off(gpu))
                        }
                        Ok(_) => None,
                    },
                };
                if let Some(refusal) = refused {
                    obstacles.insert((gpu, mode), refusal);
                }
            }
        }
        obstacles
    }
}

struct Done {
    steps: Vec<String>,
    took: Option<Duration>,
}

fn addresses(inventory: &Inventory) -> impl Iterator<Item = PciAddress> + use<> {
    let gpus: BTreeSet<PciAddress> = inventory.gpus().iter().map(|gpu| gpu.primary.address).collect();
    gpus.into_iter()
}

fn wanted(inventory: &Inventory, wish: &Wish) -> BTreeMap<PciAddress, Binding> {
    addresses(inventory).filter_map(|gpu| Some((gpu, binding(wish.mode(gpu)?).ok()?))).collect()
}

fn binding(mode: WorkloadMode) -> Result<Binding, Refusal> {
    match mode {
        WorkloadMode::Container => Ok(Binding::Host),
        WorkloadMode::VmPassthrough => Ok(Binding::Vfio),
        WorkloadMode::VmVgpu => Err(Refusal {
            reason: "VGPUNotSupported".to_owned(),
            message: "this version of gpuvirt makes no vGPUs: use container or vm-passthrough".to_owned(),
        }),
    }
}

fn switched_off(gpu: PciAddress) -> Refusal {
    Refusal {
        reason: "VfioManagerDisabled".to_owned(),
        message: format!(
            "GPU {gpu} is left as it is: label {}vfio-manager=false switches binding off on this node; remove it",
            crds::labels::DEPLOY_PREFIX
        ),
    }
}

fn note(complaints: &mut Vec<String>, result: Result<(), vfio::journal::JournalError>) {
    if let Err(error) = result {
        tracing::error!(%error, "journal");
        complaints.push(error.to_string());
    }
}
