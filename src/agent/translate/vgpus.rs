//! vGPUs, in the cluster's terms.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode,
    v1alpha1::{
        Refusal, VgpuFramework, VgpuInstance, VgpuLibrary, VgpuProgress, VgpuState, VgpuStatus, VgpuTypeStatus,
    },
};
use vfio::{
    Inventory, KernelError, PciAddress,
    vgpu::{ApplyError, Framework, LibraryFacts, SilenceReason, VgpuParent, VgpuRefusal, kind, parents},
};

use super::{Report, execution, failure, journal};
use crate::agent::{offer, vgpu_manager::Progress};

/// More are not listed: the schema's bound.
const MOST_TYPES: usize = 256;

pub fn vgpu_refusal(refusal: &VgpuRefusal) -> Refusal {
    Refusal { reason: refusal.reason().to_owned(), message: refusal.to_string() }
}

pub fn vgpu_failure(error: &ApplyError) -> Refusal {
    let reason = match error {
        ApplyError::Refused(refusal) => return vgpu_refusal(refusal),
        ApplyError::Bind(error) => return execution(error),
        ApplyError::Journal { source, .. } => return journal(source),
        ApplyError::NotVerified { .. } => "NotVerified",
        ApplyError::Library { .. } => "LibraryRefused",
        ApplyError::Kernel { source: KernelError::Hung { .. }, .. } => "NeedsReboot",
        ApplyError::Kernel { source: KernelError::Refused { .. }, .. } => "KernelRefused",
        ApplyError::Kernel { source: KernelError::Module { .. }, .. } => "ModuleNotLoaded",
        ApplyError::Kernel { source: KernelError::Child { .. }, .. } => "WriteFailed",
    };
    // Each says what the kernel said.
    Refusal { message: error.to_string(), ..failure(reason, error) }
}

/// How far the layout is. `None`: none was asked for.
pub fn state(report: &Report<'_>) -> Option<VgpuState> {
    let layout = report.wish.spec.vgpu.as_ref()?;
    let progress = &report.observation.vgpus.progress;
    let (mut failed, mut pending) = (Vec::new(), Vec::new());
    for progress in progress.values() {
        match progress {
            Progress::Done => {}
            Progress::Pending(why) => pending.push(why.message.clone()),
            Progress::Failed(why) => failed.push(why.message.clone()),
        }
    }
    for gpu in &layout.gpus {
        let known = gpu.address.parse().ok().filter(|address| report.observation.inventory.gpu(*address).is_some());
        match known {
            None => failed.push(format!(
                "gpu {} of the layout is not on this node; change the config's devices or filter",
                gpu.address
            )),
            Some(address) if report.wish.mode(address) != Some(WorkloadMode::VmVgpu) => {
                pending.push(format!("gpu {address} is not asked to be in mode vm-vgpu"));
            }
            Some(_) => {}
        }
    }
    let (state, message) = match (failed.is_empty(), pending.is_empty()) {
        (false, _) => (VgpuProgress::Failed, [failed, pending].concat()),
        (true, false) => (VgpuProgress::Pending, pending),
        (true, true) => (VgpuProgress::Success, Vec::new()),
    };
    Some(VgpuState { config: layout.name.clone(), state, message: message.join("; ") })
}

/// What a GPU offers and has of vGPUs. `None`: nobody asked, and it has none.
pub fn status(report: &Report<'_>, gpu: PciAddress) -> Option<VgpuStatus> {
    let found = report.observation.vgpus.gpus.get(&gpu)?;
    let (framework, reason, message) = match &found.framework {
        Framework::Mdev => (VgpuFramework::Mdev, String::new(), String::new()),
        Framework::VendorVfio => (VgpuFramework::VendorVfio, String::new(), String::new()),
        Framework::None(why) => (VgpuFramework::None, why.reason().to_owned(), why.to_string()),
    };
    let library = &report.observation.vgpus.library;
    let instances = found.instances.iter().map(|vgpu| VgpuInstance {
        id: vgpu.id.clone(),
        kind: vgpu.kind().unwrap_or("unknown").to_owned(),
        resource: offer::vgpu_resource(vgpu).ok().map(|name| name.as_str().to_owned()),
        parent: vgpu.parent.to_string(),
        holders: found.holders.get(&vgpu.id).into_iter().flatten().map(super::holder).collect(),
        vm: {
            let named = found.holders.get(&vgpu.id).into_iter().flatten().find_map(|holder| holder.vm.clone());
            named.or_else(|| library.vm(&vgpu.id).map(str::to_owned))
        },
    });
    Some(VgpuStatus {
        framework,
        reason,
        message,
        types: types(&report.observation.inventory, gpu),
        library: told(library, gpu),
        instances: instances.collect(),
    })
}

/// `None`: nobody has asked.
fn told(library: &LibraryFacts, gpu: PciAddress) -> Option<VgpuLibrary> {
    if let Some(silence) = &library.silence {
        let (reason, message) = (silence.reason.word().to_owned(), silence.message.clone());
        return Some(VgpuLibrary { reason, message, ..VgpuLibrary::default() });
    }
    let facts = library.gpus.get(&gpu)?;
    let profile = |id: u32| facts.profiles.iter().find(|profile| profile.id == id).map(|profile| profile.name.as_str());
    let failed = facts.error.as_ref().map(|_| SilenceReason::Failed.word().to_owned());
    Some(VgpuLibrary {
        mig: facts.mig.map(|mode| mode.on),
        heterogeneous: facts.heterogeneous,
        display: facts.display,
        ecc: facts.ecc,
        gpu_instances: facts.instances.iter().filter_map(|one| profile(one.profile)).map(str::to_owned).collect(),
        reason: failed.unwrap_or_default(),
        message: facts.error.clone().unwrap_or_default(),
    })
}

fn types(inventory: &Inventory, gpu: PciAddress) -> Vec<VgpuTypeStatus> {
    let mut available: BTreeMap<&str, u32> = BTreeMap::new();
    for function in parents(inventory, gpu) {
        match &function.vgpu {
            Some(VgpuParent::Mdev { types }) => {
                for one in types {
                    *available.entry(kind(one.name())).or_default() += one.available_instances;
                }
            }
            Some(VgpuParent::VendorVfio { current, creatable }) => {
                for one in creatable {
                    *available.entry(kind(&one.name)).or_default() += u32::from(current.is_none());
                }
            }
            None => {}
        }
    }
    let one = |(name, count): (&str, u32)| VgpuTypeStatus {
        name: name.to_owned(),
        available: i32::try_from(count).unwrap_or(i32::MAX),
    };
    available.into_iter().map(one).take(MOST_TYPES).collect()
}
