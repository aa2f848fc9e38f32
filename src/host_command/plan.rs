//! `gpuvirt plan`: what a mode would take on this host, or what forbids it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum;
use crds::WorkloadMode;
use serde::Serialize;
use vfio::{Binding, Disruption, Inventory, PciAddress, Plan, Step, World, plan};

use crate::{
    answer::Output,
    terminal::{BAD, GOOD, STRONG, WARN, paint},
};

use super::{
    Error, Subject, View,
    report::{FunctionReport, HolderReport, HostReport, RefusalReport},
};

/// Modes that a host can be brought to with what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// GPUs on VFIO, for VMs.
    VmPassthrough,
    /// GPUs on the drivers that they were taken from.
    Container,
    /// GPUs on NVIDIA's vGPU driver, cut into vGPUs as a layout says.
    VmVgpu,
}

impl Mode {
    fn binding(self) -> Binding {
        match self {
            Self::VmPassthrough => Binding::Vfio,
            Self::Container | Self::VmVgpu => Binding::Host,
        }
    }

    pub fn workload(self) -> WorkloadMode {
        match self {
            Self::VmPassthrough => WorkloadMode::VmPassthrough,
            Self::Container => WorkloadMode::Container,
            Self::VmVgpu => WorkloadMode::VmVgpu,
        }
    }

    fn name(self) -> &'static str {
        self.workload().as_str()
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    pub mode: Mode,
    pub host: HostReport,
    pub gpus: Vec<GpuPlan>,
    /// What could not be read.
    pub errors: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPlan {
    pub address: PciAddress,
    pub product: Option<&'static str>,
    pub group: Option<u32>,
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What becomes of one GPU.
#[derive(Debug, Serialize)]
#[serde(tag = "verdict", rename_all = "camelCase")]
pub enum Verdict {
    /// It is so already.
    Reached,
    Change {
        steps: Vec<StepReport>,
        disturbs: Vec<Disturbed>,
    },
    /// It is in another GPU's group, and goes with it.
    Together {
        with: PciAddress,
    },
    Refused {
        refusal: RefusalReport,
        holders: Vec<HolderReport>,
    },
}

#[derive(Debug, Serialize)]
pub struct StepReport {
    pub text: String,
    pub disruption: Disruption,
    #[serde(flatten)]
    pub step: Step,
}

/// A device that a driver of the host loses, or a VM could have had.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disturbed {
    pub device: FunctionReport,
    /// The driver that gets it; `null`: none.
    pub then: Option<String>,
}

/// `devices`: GPUs that are asked for; all where it is empty.
pub fn report(view: &View, mode: Mode, devices: &[PciAddress]) -> PlanReport {
    let inventory = &view.inventory;
    let asked = asked(inventory, devices);
    let wanted = asked.iter().map(|gpu| (*gpu, mode.binding())).collect();
    let world = World { inventory, holders: &view.holders, journal: &view.journal, wanted: &wanted };
    let mut leaders = BTreeMap::new();
    let gpus = asked.iter().map(|address| {
        let function = inventory.functions.get(address);
        let group = function.and_then(|function| function.iommu_group);
        let verdict = verdict(&world, *address, mode.binding());
        let leader = group.map(|group| *leaders.entry(group).or_insert(*address));
        let verdict = match (verdict, leader) {
            (Verdict::Change { .. }, Some(with)) if with != *address => Verdict::Together { with },
            (verdict, _) => verdict,
        };
        let product = function.and_then(|function| FunctionReport::of(function).product);
        GpuPlan { address: *address, product, group, verdict }
    });
    let errors = view.remarks.iter().cloned().chain(inventory.errors.iter().map(ToString::to_string));
    PlanReport { mode, host: HostReport::of(&inventory.facts), gpus: gpus.collect(), errors: errors.collect() }
}

/// All GPUs of the host, where none is named.
pub fn asked(inventory: &Inventory, devices: &[PciAddress]) -> Vec<PciAddress> {
    match devices {
        [] => inventory.gpus().iter().map(|gpu| gpu.primary.address).collect(),
        some => some.to_vec(),
    }
}

fn verdict(world: &World<'_>, gpu: PciAddress, binding: Binding) -> Verdict {
    match plan(world, gpu, binding) {
        Err(refusal) => {
            let held = if let vfio::Refusal::InUse { holders, .. } = &refusal { holders.as_slice() } else { &[] };
            let holders = held.iter().map(HolderReport::of).collect();
            Verdict::Refused { refusal: RefusalReport::of(&refusal), holders }
        }
        Ok(plan) if plan.steps.is_empty() => Verdict::Reached,
        Ok(plan) => {
            let disturbs = disturbed(world, &plan);
            let report = |step: Step| StepReport { text: step.to_string(), disruption: step.disruption(), step };
            Verdict::Change { steps: plan.steps.into_iter().map(report).collect(), disturbs }
        }
    }
}

fn disturbed(world: &World<'_>, plan: &Plan) -> Vec<Disturbed> {
    let taken = plan.steps.iter().filter_map(|step| match step {
        Step::Unbind { address, .. } => world.inventory.functions.get(address),
        Step::LoadModule { .. }
        | Step::RecordOriginal { .. }
        | Step::SetOverride { .. }
        | Step::Probe { .. }
        | Step::ClearOverride { .. }
        | Step::ForgetOriginal { .. } => None,
    });
    let then = |of: PciAddress| {
        plan.steps.iter().find_map(|step| match step {
            Step::Probe { address, driver } if *address == of => Some(driver.clone()),
            Step::Probe { .. }
            | Step::LoadModule { .. }
            | Step::RecordOriginal { .. }
            | Step::SetOverride { .. }
            | Step::Unbind { .. }
            | Step::ClearOverride { .. }
            | Step::ForgetOriginal { .. } => None,
        })
    };
    let report =
        |function: &vfio::Function| Disturbed { device: FunctionReport::of(function), then: then(function.address) };
    taken.map(report).collect()
}

pub fn text(report: &PlanReport) -> String {
    let mut text = report.host.text();
    let count = |wanted: fn(&Verdict) -> bool| report.gpus.iter().filter(|gpu| wanted(&gpu.verdict)).count();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{}: GPUs to change: {}, there already: {}, refused: {}",
        report.mode.name(),
        count(|verdict| matches!(verdict, Verdict::Change { .. } | Verdict::Together { .. })),
        count(|verdict| matches!(verdict, Verdict::Reached)),
        count(|verdict| matches!(verdict, Verdict::Refused { .. })),
    );
    for gpu in &report.gpus {
        let group = gpu.group.map(|group| format!(", group {group}")).unwrap_or_default();
        let _ =
            writeln!(text, "\n{} {}{group}", paint(STRONG, &gpu.address.to_string()), gpu.product.unwrap_or("unknown"));
        verdict_text(&mut text, &gpu.verdict);
    }
    for error in &report.errors {
        let _ = writeln!(text, "{} {error}", paint(BAD, "not readable:"));
    }
    text
}

fn verdict_text(text: &mut String, verdict: &Verdict) {
    let _ = match verdict {
        Verdict::Reached => writeln!(text, "  {}", paint(GOOD, "is there already")),
        Verdict::Together { with } => writeln!(text, "  goes with {with}, whose group it is in"),
        Verdict::Refused { refusal, .. } => {
            writeln!(text, "  {}: {}", paint(BAD, &format!("refused ({})", refusal.reason)), refusal.message)
        }
        Verdict::Change { steps, disturbs } => {
            for (number, step) in (1..).zip(steps) {
                let _ = writeln!(text, "  {number:>2}. {}", step.text);
            }
            for Disturbed { device, then } in disturbs {
                let then = then.as_deref().unwrap_or("no driver");
                let _ = writeln!(text, "  {} {}, which goes to {then}", paint(WARN, "disturbs"), device.text());
            }
            Ok(())
        }
    };
}

/// Returns whether every GPU can be, or is, in the mode.
pub fn run(subject: &Subject, mode: Mode, devices: &[PciAddress], output: Output) -> Result<bool, Error> {
    let report = report(&View::of(subject)?, mode, devices);
    output.print(&report, text)?;
    Ok(!report.gpus.iter().any(|gpu| matches!(gpu.verdict, Verdict::Refused { .. })))
}
