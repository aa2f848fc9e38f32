//! vGPUs of a host: what `gpuvirt inspect` shows of them, and `gpuvirt plan --mode vm-vgpu`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crds::v1alpha1::{GPUStatus, VgpuFramework, VgpuStatus, VgpuTypeStatus};
use serde::Serialize;
use vfio::{
    Binding, Disruption, Inventory, PciAddress, World,
    vgpu::{
        self, Framework, Layout, LibraryFacts, VgpuParent, VgpuStep, VgpuWorld, framework, kind, listed_names, parents,
        vgpu_holders,
    },
};

use super::{
    Error, Subject, View,
    report::{FunctionReport, HolderReport, HostReport, RefusalReport},
};
use crate::agent::library;
use crate::answer::Output;
use crate::operator::vgpu::{Config, USUAL, default_yaml, resolve};
use crate::terminal::{BAD, GOOD, STRONG, WARN, paint};

/// A vGPU that exists.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceReport {
    /// UUID of a mediated device, or address of a virtual function.
    pub id: String,
    /// As config files name it; `null`: nobody has listed it since boot.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub parent: PciAddress,
    pub group: Option<u32>,
    pub holders: Vec<HolderReport>,
}

/// What a GPU has and could have of vGPUs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpusReport {
    pub framework: VgpuFramework,
    pub instances: Vec<InstanceReport>,
    /// The most that the kernel would still make of each type. Virtual functions count each for itself.
    pub types: BTreeMap<String, u32>,
}

/// `None`: the GPU makes none and has none.
pub fn found(view: &View, gpu: &vfio::Function) -> Option<VgpusReport> {
    let inventory = &view.inventory;
    let holders = vgpu_holders(inventory, &view.holders);
    let mut names = view.journal.vgpu_types().clone();
    names.extend(listed_names(inventory));
    let instance = |vgpu: vgpu::Vgpu| InstanceReport {
        kind: vgpu.kind().map(str::to_owned),
        holders: holders.get(&vgpu.id).into_iter().flatten().map(HolderReport::of).collect(),
        parent: vgpu.parent,
        group: vgpu.iommu_group,
        id: vgpu.id,
    };
    let instances = vgpu::vgpus(inventory, gpu.address, &names).into_iter().map(instance);
    let report = VgpusReport {
        framework: told(&framework(inventory, gpu, None)),
        instances: instances.collect(),
        types: types(inventory, gpu.address),
    };
    let none = report.framework == VgpuFramework::None && report.instances.is_empty();
    (!none).then_some(report)
}

fn told(framework: &Framework) -> VgpuFramework {
    match framework {
        Framework::Mdev => VgpuFramework::Mdev,
        Framework::VendorVfio => VgpuFramework::VendorVfio,
        Framework::None(_) => VgpuFramework::None,
    }
}

fn types(inventory: &Inventory, gpu: PciAddress) -> BTreeMap<String, u32> {
    let mut left: BTreeMap<String, u32> = BTreeMap::new();
    for function in parents(inventory, gpu) {
        let listed: Vec<(&str, u32)> = match &function.vgpu {
            Some(VgpuParent::Mdev { types }) => types.iter().map(|one| (one.name(), one.available_instances)).collect(),
            Some(VgpuParent::VendorVfio { current, creatable }) => {
                creatable.iter().map(|one| (one.name.as_str(), u32::from(current.is_none()))).collect()
            }
            None => Vec::new(),
        };
        for (name, count) in listed {
            *left.entry(kind(name).to_owned()).or_default() += count;
        }
    }
    left
}

impl VgpusReport {
    /// In a cell: `mdev: 2 A2-4Q, 1 A2-4A`.
    pub fn cell(&self) -> String {
        let framework = match self.framework {
            VgpuFramework::Mdev => "mdev",
            VgpuFramework::VendorVfio => "vendor VFIO",
            VgpuFramework::None => "none",
        };
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for instance in &self.instances {
            *counts.entry(instance.kind.as_deref().unwrap_or("unknown")).or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        if counts.is_empty() { framework.to_owned() } else { format!("{framework}: {}", counts.join(", ")) }
    }
}

/// Where the layout is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// A file of vgpu-device-manager, version v1; `None`: our own layouts.
    pub config: Option<PathBuf>,
    /// `None`: `default`.
    pub layout: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuPlanReport {
    pub mode: &'static str,
    pub layout: String,
    pub host: HostReport,
    pub gpus: Vec<VgpuGpuPlan>,
    /// What of the layout has no effect here.
    pub notes: Vec<String>,
    /// What could not be read.
    pub errors: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuGpuPlan {
    pub address: PciAddress,
    pub product: Option<&'static str>,
    pub group: Option<u32>,
    /// Type → count. Empty: the layout names no vGPU for it, so that it shall have none.
    pub vgpus: Layout,
    #[serde(flatten)]
    pub verdict: VgpuVerdict,
}

/// What becomes of one GPU's vGPUs.
#[derive(Debug, Serialize)]
#[serde(tag = "verdict", rename_all = "camelCase")]
pub enum VgpuVerdict {
    /// It is so already.
    Reached,
    /// Those that can be told from what is there now.
    Change {
        steps: Vec<VgpuStepReport>,
        /// Whether more follow, which the driver tells when these are done.
        more: bool,
    },
    Refused {
        refusal: RefusalReport,
    },
}

#[derive(Debug, Serialize)]
pub struct VgpuStepReport {
    pub text: String,
    pub disruption: Disruption,
}

/// # Errors
/// The file has a fault, or no such layout, or the layout is none for these GPUs.
pub fn report(
    view: &View,
    text: &str,
    layout: &str,
    devices: &[PciAddress],
    library: &LibraryFacts,
    node: &str,
) -> Result<VgpuPlanReport, String> {
    let config = Config::parse(text).map_err(|fault| fault.to_string())?;
    let inventory = &view.inventory;
    let gpus: Vec<GPUStatus> = inventory.gpus().iter().map(|gpu| described(inventory, gpu.primary, library)).collect();
    let resolved = resolve(&config, layout, &gpus).map_err(|error| error.to_string())?;
    let holders = vgpu_holders(inventory, &view.holders);
    let mut journal = view.journal.clone();
    journal.learn_vgpu_types(inventory).map_err(|error| error.to_string())?;
    let world =
        VgpuWorld { inventory, holders: &holders, gpu_holders: &view.holders, library, journal: &journal, node };
    let asked = super::plan::asked(inventory, devices);
    let plans = asked.iter().map(|address| {
        let entries = resolved.layout.gpus.iter().filter(|gpu| gpu.address == address.to_string());
        let counts = entries.flat_map(|gpu| &gpu.instances);
        let vgpus = counts.map(|of| (of.kind.clone(), u32::try_from(of.count).unwrap_or(0))).collect();
        let function = inventory.functions.get(address);
        VgpuGpuPlan {
            address: *address,
            product: function.and_then(|function| FunctionReport::of(function).product),
            group: function.and_then(|function| function.iommu_group),
            verdict: verdict(view, &world, *address, &vgpus),
            vgpus,
        }
    });
    let errors = view.remarks.iter().cloned().chain(inventory.errors.iter().map(ToString::to_string));
    Ok(VgpuPlanReport {
        mode: "vm-vgpu",
        layout: layout.to_owned(),
        host: HostReport::of(&inventory.facts),
        gpus: plans.collect(),
        notes: resolved.notes,
        errors: errors.collect(),
    })
}

/// A GPU as the layout's filters see it.
fn described(inventory: &Inventory, gpu: &vfio::Function, library: &LibraryFacts) -> GPUStatus {
    let framework = told(&framework(inventory, gpu, library.gpus.get(&gpu.address)));
    let of = |(name, left): (String, u32)| VgpuTypeStatus { name, available: i32::try_from(left).unwrap_or(i32::MAX) };
    let there = vgpu::vgpus(inventory, gpu.address, &vgpu::TypeNames::new()).into_iter();
    let instances = there.map(|vgpu| crds::v1alpha1::VgpuInstance { id: vgpu.id, ..Default::default() }).collect();
    let types = types(inventory, gpu.address).into_iter().map(of).collect();
    GPUStatus {
        address: gpu.address.to_string(),
        id: format!("{:04x}:{:04x}", gpu.vendor, gpu.device),
        subsystem: Some(format!("{:04x}:{:04x}", gpu.subsystem_vendor, gpu.subsystem_device)),
        product: FunctionReport::of(gpu).product.unwrap_or_default().to_owned(),
        vgpu: Some(VgpuStatus { framework, types, instances, ..VgpuStatus::default() }),
        ..GPUStatus::default()
    }
}

/// A GPU that VFIO has goes back to its driver first.
fn verdict(view: &View, world: &VgpuWorld<'_>, gpu: PciAddress, layout: &Layout) -> VgpuVerdict {
    let wanted = [(gpu, Binding::Host)].into();
    let back = World { inventory: world.inventory, holders: &view.holders, journal: world.journal, wanted: &wanted };
    let back = match vfio::plan(&back, gpu, Binding::Host) {
        Ok(plan) => plan.steps,
        Err(refusal) => return VgpuVerdict::Refused { refusal: RefusalReport::of(&refusal) },
    };
    if !back.is_empty() {
        let told = |step: vfio::Step| VgpuStepReport { text: step.to_string(), disruption: step.disruption() };
        return VgpuVerdict::Change { steps: back.into_iter().map(told).collect(), more: !layout.is_empty() };
    }
    match vgpu::plan(world, gpu, layout) {
        Err(refusal) => {
            VgpuVerdict::Refused { refusal: RefusalReport { reason: refusal.reason(), message: refusal.to_string() } }
        }
        Ok(steps) if steps.is_empty() => VgpuVerdict::Reached,
        Ok(steps) => {
            let makes = |step: &VgpuStep| matches!(step, VgpuStep::CreateMdev { .. } | VgpuStep::SetType { .. });
            let made = vgpu::vgpus(world.inventory, gpu, world.journal.vgpu_types()).len();
            let gone = steps.iter().filter(|step| matches!(step, VgpuStep::Remove { .. })).count();
            let then = made - gone.min(made) + steps.iter().filter(|step| makes(step)).count();
            let more = u32::try_from(then).unwrap_or(u32::MAX) < layout.values().sum();
            let told = |step: VgpuStep| VgpuStepReport { text: step.to_string(), disruption: step.disruption() };
            VgpuVerdict::Change { steps: steps.into_iter().map(told).collect(), more }
        }
    }
}

pub fn text(report: &VgpuPlanReport) -> String {
    let mut text = report.host.text();
    for gpu in &report.gpus {
        let group = gpu.group.map(|group| format!(", group {group}")).unwrap_or_default();
        let vgpus: Vec<String> = gpu.vgpus.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let vgpus = if vgpus.is_empty() { "no vGPU".to_owned() } else { vgpus.join(", ") };
        let (address, product) = (paint(STRONG, &gpu.address.to_string()), gpu.product.unwrap_or("unknown"));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{address} {product}{group}: {vgpus}");
        let _ = match &gpu.verdict {
            VgpuVerdict::Reached => writeln!(text, "  {}", paint(GOOD, "is so already")),
            VgpuVerdict::Refused { refusal } => {
                writeln!(text, "  {}: {}", paint(BAD, &format!("refused ({})", refusal.reason)), refusal.message)
            }
            VgpuVerdict::Change { steps, more } => {
                for (number, step) in (1..).zip(steps) {
                    let _ = writeln!(text, "  {number:>2}. {}", step.text);
                }
                match more {
                    true => writeln!(text, "      {}", paint(WARN, "what follows the driver tells when that is done")),
                    false => Ok(()),
                }
            }
        };
    }
    for note in &report.notes {
        let _ = writeln!(text, "\n{} {note}", paint(WARN, "note:"));
    }
    for error in &report.errors {
        let _ = writeln!(text, "{} {error}", paint(BAD, "not readable:"));
    }
    text
}

/// Returns whether every GPU can have, or has, its layout. NVML is asked in a child, where the host has it.
pub async fn run(subject: &Subject, choice: &Choice, devices: &[PciAddress], output: Output) -> Result<bool, Error> {
    let view = View::of(subject)?;
    let file =
        |file: &PathBuf| std::fs::read_to_string(file).map_err(|source| Error::File { file: file.clone(), source });
    let yaml = choice.config.as_ref().map(file).transpose()?.unwrap_or_else(default_yaml);
    let library = match subject {
        Subject::Host(root) if view.inventory.facts.loaded_modules.contains("nvidia") => {
            library::once("/proc/self/exe".into(), root, Path::new(library::DRIVER_ROOT)).await
        }
        Subject::Host(_) | Subject::Described(_) => LibraryFacts::default(),
    };
    let node = match subject {
        Subject::Host(root) => std::fs::read_to_string(root.join("proc/sys/kernel/hostname")).unwrap_or_default(),
        Subject::Described(_) => "described".to_owned(),
    };
    let layout = choice.layout.as_deref().unwrap_or(USUAL);
    let report = report(&view, &yaml, layout, devices, &library, node.trim()).map_err(Error::Layout)?;
    output.print(&report, text)?;
    Ok(!report.gpus.iter().any(|gpu| matches!(gpu.verdict, VgpuVerdict::Refused { .. })))
}
