//! NVML's answers for the vGPU manager. The library is in a child process, and asked only on nodes whose GPUs are to have
//! vGPUs: when something has changed that it could say more of, and now and then, since modes change without an event.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tokio::runtime::Handle;
use vfio::{
    PciAddress, Root,
    vgpu::{
        ActiveVgpu, GpuFacts, Library, LibraryFacts, MigAct, MigMode, NoLibrary, Silence, SilenceReason, View, kind,
        vgpus,
    },
};

use crate::{host_driver, nvml};

/// A GPU that sleeps is woken first, of eight one after the other.
const PATIENCE: Duration = Duration::from_secs(10);
/// Making GPU instances and turning MIG mode on takes longer.
const PATIENCE_TO_ACT: Duration = Duration::from_secs(60);
/// Where a driver pod has its root, unless the policy says otherwise.
pub const DRIVER_ROOT: &str = "/run/nvidia/driver";
/// What was said is believed so long while nothing has changed.
const FRESH: Duration = Duration::from_secs(30);
/// A library that has hung is left alone for so long: each question leaves a process behind that may never end.
const AFTER_A_HANG: Duration = Duration::from_secs(600);

/// NVML through a child of this program.
pub struct NvmlChild {
    helper: OsString,
    host_root: PathBuf,
    /// Where a driver pod has its root, below the host's.
    driver_root: PathBuf,
    runtime: Handle,
}

impl NvmlChild {
    /// Must be called within a runtime.
    pub fn new(helper: OsString, host_root: &Path, driver_root: &Path) -> Self {
        let driver_root = host_root.join(driver_root.strip_prefix("/").unwrap_or(driver_root));
        Self { helper, host_root: host_root.to_owned(), driver_root, runtime: Handle::current() }
    }

    async fn answer(&self) -> LibraryFacts {
        match nvml::ask_vgpus(&self.helper, self.root(), PATIENCE).await {
            Ok(report) => facts(report),
            Err(error) => silent(&error),
        }
    }

    /// The root whose library fits the loaded module.
    fn root(&self) -> &Path {
        let origin =
            Root::new(&self.host_root).ok().and_then(|host| host_driver::look(&host)).map(|found| found.origin);
        match origin {
            Some(host_driver::Origin::Pod) if self.driver_root.join("usr").exists() => &self.driver_root,
            Some(host_driver::Origin::Pod | host_driver::Origin::Host | host_driver::Origin::HostIdle) | None => {
                &self.host_root
            }
        }
    }
}

/// Asks once, through a child of `helper`. Must be called within a runtime.
pub async fn once(helper: OsString, host_root: &Path, driver_root: &Path) -> LibraryFacts {
    NvmlChild::new(helper, host_root, driver_root).answer().await
}

impl Library for NvmlChild {
    fn ask(&mut self) -> LibraryFacts {
        self.runtime.block_on(self.answer())
    }

    fn act(&mut self, gpu: PciAddress, act: &MigAct) -> Result<(), String> {
        let asked = nvml::ask_act(&self.helper, self.root(), gpu, act, PATIENCE_TO_ACT);
        self.runtime.block_on(asked).map_err(|error| crate::chain(&error))
    }
}

fn silent(error: &nvml::Error) -> LibraryFacts {
    let reason = match error {
        nvml::Error::Library(_) | nvml::Error::NoLibrary(_) => SilenceReason::NoLibrary,
        nvml::Error::VersionMismatch(_) => SilenceReason::VersionMismatch,
        nvml::Error::Late { .. } => SilenceReason::Late,
        nvml::Error::Root { .. }
        | nvml::Error::Nvml(_)
        | nvml::Error::NoGpu(_)
        | nvml::Error::Answer(_)
        | nvml::Error::Spawn(_) => SilenceReason::Failed,
    };
    let silence = Silence { reason, message: crate::chain(error) };
    LibraryFacts { silence: Some(silence), ..LibraryFacts::default() }
}

fn facts(report: nvml::VgpuReport) -> LibraryFacts {
    let mut facts = LibraryFacts::default();
    for gpu in report.gpus {
        let Ok(address) = gpu.address.parse::<PciAddress>() else { continue };
        let names: BTreeMap<u32, &str> = gpu.supported.iter().map(|one| (one.id, kind(&one.name))).collect();
        facts.active.extend(gpu.active.iter().map(|vgpu| ActiveVgpu {
            gpu: address,
            kind: names.get(&vgpu.kind).map(|name| (*name).to_owned()),
            vm: vgpu.vm.clone(),
            mdev: vgpu.mdev.clone(),
        }));
        let kinds = gpu.supported.iter().filter_map(|one| Some((kind(&one.name).to_owned(), one.mig?)));
        let of = GpuFacts {
            mig: gpu.mig.map(|mode| MigMode { on: mode.on, next: mode.next }),
            heterogeneous: gpu.heterogeneous,
            display: gpu.display,
            ecc: gpu.ecc,
            kinds: kinds.collect(),
            profiles: gpu.profiles,
            instances: gpu.instances,
            error: gpu.error,
        };
        facts.gpus.insert(address, of);
    }
    facts
}

/// What was said last, and when it is to be asked again.
pub struct Answers {
    library: Box<dyn Library + Send>,
    facts: LibraryFacts,
    /// What was there when it was asked.
    about: Vec<String>,
    until: Option<Instant>,
}

impl Default for Answers {
    fn default() -> Self {
        Self::of(Box::new(NoLibrary))
    }
}

impl Answers {
    pub fn of(library: Box<dyn Library + Send>) -> Self {
        Self { library, facts: LibraryFacts::default(), about: Vec::new(), until: None }
    }

    pub fn facts(&self) -> &LibraryFacts {
        &self.facts
    }

    /// The door, and what came through it last.
    pub fn asked(&mut self) -> vfio::vgpu::Asked<'_> {
        vfio::vgpu::Asked { library: self.library.as_mut(), facts: &mut self.facts }
    }

    /// Asks if that could tell more than is known. `wanted`: this node is to have vGPUs.
    pub fn follow(&mut self, wanted: bool, view: &View, now: Instant) {
        if !wanted || !view.inventory.facts.loaded_modules.contains("nvidia") {
            (self.facts, self.about, self.until) = (LibraryFacts::default(), Vec::new(), None);
            return;
        }
        let about = subject(view);
        let hung = self.facts.silence.as_ref().is_some_and(|silence| silence.reason == SilenceReason::Late);
        let fresh = self.until.is_some_and(|until| now < until);
        if fresh && (hung || about == self.about) {
            return;
        }
        let facts = self.library.ask();
        if facts.silence != self.facts.silence
            && let Some(Silence { message, .. }) = &facts.silence
        {
            tracing::warn!("NVML does not answer, and what only it knows of vGPUs stays unknown: {message}");
        }
        let hangs = facts.silence.as_ref().is_some_and(|silence| silence.reason == SilenceReason::Late);
        (self.facts, self.about) = (facts, about);
        self.until = Some(now + if hangs { AFTER_A_HANG } else { FRESH });
    }
}

/// What its answers depend on: drivers, virtual functions, vGPUs, and who has them.
fn subject(view: &View) -> Vec<String> {
    let mut about = Vec::new();
    for gpu in view.inventory.gpus() {
        let (address, vfs) = (gpu.primary.address, gpu.primary.numvfs);
        about.push(format!("{address} {:?} {vfs}", gpu.primary.driver));
        let names = vfio::vgpu::TypeNames::new();
        about.extend(vgpus(&view.inventory, address, &names).into_iter().map(|vgpu| vgpu.id));
    }
    about.extend(view.holders.iter().map(|(id, holders)| {
        let pids: Vec<i32> = holders.iter().map(|holder| holder.pid).filter(|pid| *pid > 0).collect();
        format!("{id} {pids:?}")
    }));
    about
}

#[cfg(test)]
#[path = "library_tests.rs"]
mod tests;
