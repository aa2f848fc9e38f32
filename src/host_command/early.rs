//! `gpuvirt plan --early`: what makes a host give GPUs to VFIO while it boots, before any other driver has seen them.
//!
//! Taking a GPU from the NVIDIA driver later can hang in the kernel on machines with `NVSwitch` (8×H100, 8×H200); a GPU
//! that this driver never had cannot.

mod files;
mod machine_config;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::Serialize;
use vfio::{Binding, Function, Holder, Inventory, Journal, PciAddress, Refusal, World, driver::VfioDriver, plan};

use crate::{
    answer::Output,
    terminal::{BAD, FAINT, STRONG, WARN, paint},
};

use super::{
    Error, Subject, View,
    plan::asked,
    report::{FunctionReport, HostReport, RefusalReport},
};
use files::{BootFile, Family};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EarlyReport {
    pub host: HostReport,
    /// Functions that go to a VFIO driver at boot.
    pub functions: Vec<EarlyFunction>,
    pub refused: Vec<RefusedGpu>,
    pub files: Vec<BootFile>,
    pub kernel_arguments: Vec<KernelArgument>,
    /// What is run once the files are there.
    pub commands: Vec<String>,
    /// The files and the arguments as an `OpenShift` object; `null` where there is nothing to bind.
    pub machine_config: Option<serde_json::Value>,
    pub remarks: Vec<String>,
    #[serde(skip)]
    family: Family,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EarlyFunction {
    #[serde(flatten)]
    pub function: FunctionReport,
    pub vfio_driver: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedGpu {
    pub address: PciAddress,
    pub refusal: RefusalReport,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct KernelArgument {
    pub argument: String,
    pub why: &'static str,
}

/// What goes to VFIO at boot, and what is in its way.
struct Chosen<'a> {
    functions: BTreeMap<PciAddress, (&'a Function, VfioDriver)>,
    refused: Vec<(PciAddress, Refusal)>,
    /// Whether the host's console is drawn by one of them.
    console: bool,
}

/// `devices`: GPUs that are asked for; all where it is empty.
pub fn report(view: &View, devices: &[PciAddress]) -> EarlyReport {
    let inventory = &view.inventory;
    let chosen = choose(inventory, &asked(inventory, devices));
    let functions: Vec<_> = chosen.functions.values().cloned().collect();
    let family = Family::of(&inventory.facts);
    let files = files::all(&functions, family);
    let kernel_arguments = kernel_arguments(inventory, &chosen, family);
    let machine_config = (!files.is_empty()).then(|| machine_config::object(&files, &kernel_arguments));
    let refused = chosen.refused.iter();
    EarlyReport {
        host: HostReport::of(&inventory.facts),
        functions: functions
            .iter()
            .map(|(function, driver)| EarlyFunction {
                function: FunctionReport::of(function),
                vfio_driver: driver.name.clone(),
            })
            .collect(),
        refused: refused
            .map(|(address, why)| RefusedGpu { address: *address, refusal: RefusalReport::of(why) })
            .collect(),
        commands: if files.is_empty() { Vec::new() } else { family.commands() },
        files,
        kernel_arguments,
        machine_config,
        remarks: remarks(view, &chosen),
        family,
    }
}

fn choose<'a>(inventory: &'a Inventory, asked: &[PciAddress]) -> Chosen<'a> {
    // Nobody holds anything at boot, nothing hangs, and no picture is drawn where the kernel is told not to.
    let bare = Inventory {
        facts: vfio::HostFacts { framebuffers: Vec::new(), ..inventory.facts.clone() },
        ..inventory.clone()
    };
    let (holders, journal) = (BTreeMap::<_, Vec<Holder>>::new(), Journal::in_memory());
    let wanted: BTreeMap<_, _> = asked.iter().map(|gpu| (*gpu, Binding::Vfio)).collect();
    let world = |inventory| World { inventory, holders: &holders, journal: &journal, wanted: &wanted };
    let mut chosen = Chosen { functions: BTreeMap::new(), refused: Vec::new(), console: false };
    for address in asked {
        match plan(&world(&bare), *address, Binding::Vfio) {
            // Without an IOMMU there are no groups to be judged, and switching it on is part of the answer.
            Ok(_) | Err(Refusal::IommuOff { .. }) => {}
            Err(refusal) => {
                chosen.refused.push((*address, refusal));
                continue;
            }
        }
        let shown = plan(&world(inventory), *address, Binding::Vfio);
        chosen.console |= matches!(shown, Err(Refusal::Console { .. }));
        let Some(gpu) = inventory.gpu(*address) else { continue };
        let functions = std::iter::once(gpu.primary).chain(gpu.companions);
        chosen
            .functions
            .extend(functions.map(|function| (function.address, (function, inventory.vfio_driver(function)))));
    }
    chosen
}

fn kernel_arguments(inventory: &Inventory, chosen: &Chosen<'_>, family: Family) -> Vec<KernelArgument> {
    if chosen.functions.is_empty() {
        return Vec::new();
    }
    let facts = &inventory.facts;
    let given: BTreeSet<&str> = facts.command_line.split_ascii_whitespace().collect();
    let mut arguments = Vec::new();
    let mut add = |argument: &str, why| {
        if !given.contains(argument) {
            arguments.push(KernelArgument { argument: argument.to_owned(), why });
        }
    };
    match (facts.architecture.as_str(), facts.cpu_vendor.as_str()) {
        ("x86_64", "GenuineIntel") => {
            add("intel_iommu=on", "switches the IOMMU on, where the firmware allows it");
            add("iommu=pt", "devices that stay with the host keep their speed");
        }
        ("x86_64", _) => add("iommu=pt", "devices that stay with the host keep their speed"),
        // An SMMU is on as the firmware describes it.
        (_, _) => {}
    }
    let ids = whole_ids(inventory, chosen);
    if !ids.is_empty() {
        let ids: Vec<_> = ids.iter().map(|(vendor, device)| format!("{vendor:04x}:{device:04x}")).collect();
        add(&format!("vfio-pci.ids={}", ids.join(",")), "vfio-pci takes them whenever it is loaded, udev or not");
    }
    if family == Family::Dracut {
        add("rd.driver.pre=vfio-pci", "loaded in the initramfs before the drivers that udev loads");
    }
    if chosen.console {
        // Before Linux 5.15 the firmware's picture had no switch of its own.
        let (argument, why) = match facts.kernel_version().is_some_and(|version| version < (5, 15)) {
            true => ("video=efifb:off", "a GPU that goes draws the console: the host has none on it from then on"),
            false => (
                "initcall_blacklist=sysfb_init",
                "a GPU that goes draws the console: the host has none on it from then on",
            ),
        };
        add(argument, why);
    }
    arguments
}

/// Ids of which this host has no device that stays: `ids=` knows no addresses. Variant drivers have no such parameter.
fn whole_ids(inventory: &Inventory, chosen: &Chosen<'_>) -> BTreeSet<(u16, u16)> {
    let ids = |function: &Function| (function.vendor, function.device);
    let generic = chosen.functions.values().filter(|(_, driver)| driver.name == vfio::driver::VFIO_PCI);
    let mut whole: BTreeSet<_> = generic.map(|(function, _)| ids(function)).collect();
    for function in inventory.functions.values().filter(|function| !chosen.functions.contains_key(&function.address)) {
        whole.remove(&ids(function));
    }
    whole
}

fn remarks(view: &View, chosen: &Chosen<'_>) -> Vec<String> {
    let mut remarks = view.remarks.clone();
    remarks.extend(view.inventory.errors.iter().map(ToString::to_string));
    if chosen.functions.is_empty() {
        return remarks;
    }
    if !view.inventory.facts.iommu {
        remarks.push(
            "the IOMMU is off, so groups are not known: boot with the arguments, then run `gpuvirt plan` before the files \
             are made"
                .to_owned(),
        );
    }
    remarks.push(
        "gpuvirt keeps what is on VFIO at boot and offers it to VMs; it does not give it back to containers: remove the \
         files and arguments and boot for that"
            .to_owned(),
    );
    remarks
}

pub fn text(report: &EarlyReport) -> String {
    let mut text = report.host.text();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "to VFIO at boot: {} functions", report.functions.len());
    for EarlyFunction { function, vfio_driver } in &report.functions {
        let _ = writeln!(text, "  {} -> {vfio_driver}", function.text());
    }
    for RefusedGpu { refusal, .. } in &report.refused {
        let _ = writeln!(text, "  {}: {}", paint(BAD, &format!("refused ({})", refusal.reason)), refusal.message);
    }
    for file in &report.files {
        section(&mut text, &format!("{} (mode {:04o})", file.path, file.mode));
        let _ = writeln!(text, "{}", file.contents.trim_end());
    }
    if !report.kernel_arguments.is_empty() {
        section(&mut text, "kernel arguments");
        for KernelArgument { argument, why } in &report.kernel_arguments {
            let _ = writeln!(text, "{argument}\n    {}", paint(FAINT, why));
        }
    }
    if !report.commands.is_empty() {
        section(&mut text, "then");
        let _ = writeln!(text, "{}", report.commands.join("\n"));
    }
    // No OpenShift runs on the others; whoever writes for another machine finds it in the JSON.
    let object = report.machine_config.as_ref().filter(|_| report.family != Family::InitramfsTools);
    if let Some(Ok(object)) = object.map(serde_saphyr::to_string) {
        section(&mut text, "or, on OpenShift, for a pool of machines that are all alike");
        text.push_str(&object);
    }
    for remark in &report.remarks {
        let _ = writeln!(text, "\n{} {remark}", paint(WARN, "note:"));
    }
    text
}

fn section(text: &mut String, title: &str) {
    let _ = writeln!(text, "\n{}", paint(STRONG, &format!("── {title}")));
}

/// Returns whether every GPU that was asked for goes to VFIO.
pub fn run(subject: &Subject, devices: &[PciAddress], output: Output) -> Result<bool, Error> {
    let report = report(&View::of(subject)?, devices);
    output.print(&report, text)?;
    Ok(report.refused.is_empty())
}
