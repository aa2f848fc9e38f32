//! `gpuvirt inspect`: what a host has.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;
use vfio::{Aer, Binding, Function, Gpu, Inventory, Link, PciAddress, Presence, VgpuParent, World, deviations, plan};

use crate::{
    answer::{json, yaml},
    terminal::{BAD, Cell, GOOD, PLAIN, STRONG, WARN, paint, print, table},
};

use super::{
    Error, Subject, View,
    report::{FunctionReport, HolderReport, HostReport, RefusalReport},
    vgpus::{VgpusReport, found},
};

/// The form of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Table,
    /// The table with more columns.
    Wide,
    Json,
    Yaml,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InspectReport {
    pub host: HostReport,
    pub gpus: Vec<GpuReport>,
    /// What could not be read.
    pub errors: Vec<String>,
}

/// Who drives a GPU now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shown {
    Container,
    VmPassthrough,
    /// Some of its group is on VFIO and some is not.
    Partial,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    #[serde(flatten)]
    pub function: FunctionReport,
    pub mode: Shown,
    pub group: Option<u32>,
    pub numa_node: Option<u16>,
    /// Ports above it, the root port first.
    pub path: Vec<PciAddress>,
    /// The driver that it would go to for a VM.
    pub vfio_driver: String,
    pub boot_vga: bool,
    pub companions: Vec<FunctionReport>,
    pub foreign: Vec<FunctionReport>,
    pub shares_group_with: Vec<PciAddress>,
    /// Bytes of each memory BAR.
    pub bars: BTreeMap<u8, u64>,
    pub reset_methods: Vec<String>,
    pub power_state: Option<String>,
    pub d3cold_allowed: Option<bool>,
    pub vfs: u16,
    pub vfs_possible: u16,
    pub link: Option<Link>,
    /// Errors of the bus since boot; `null` where the kernel does not count them.
    pub bus_errors: Option<Aer>,
    /// `null`: it sleeps, and a question would wake it.
    pub presence: Option<Presence>,
    /// Of itself and its virtual functions, what makes vGPUs now.
    pub vgpus: BTreeMap<PciAddress, VgpuParent>,
    /// How it makes them, those that exist, and what could still be made; `null`: it makes none and has none.
    pub vgpu: Option<VgpusReport>,
    pub holders: Vec<HolderReport>,
    /// What keeps it from going to a VM, holders aside.
    pub obstacle: Option<RefusalReport>,
}

pub fn report(view: &View) -> InspectReport {
    let inventory = &view.inventory;
    let errors = view.remarks.iter().cloned().chain(inventory.errors.iter().map(ToString::to_string));
    InspectReport {
        host: HostReport::of(&inventory.facts),
        gpus: inventory.gpus().iter().map(|gpu| gpu_report(view, gpu)).collect(),
        errors: errors.collect(),
    }
}

fn gpu_report(view: &View, gpu: &Gpu<'_>) -> GpuReport {
    let inventory = &view.inventory;
    let primary = gpu.primary;
    let reached = |binding| deviations(inventory, primary.address, binding).is_empty();
    let mode = match (reached(Binding::Vfio), reached(Binding::Host)) {
        (true, _) => Shown::VmPassthrough,
        (false, true) => Shown::Container,
        (false, false) => Shown::Partial,
    };
    let wanted = inventory.gpus().iter().map(|gpu| (gpu.primary.address, Binding::Vfio)).collect();
    let world = World { inventory, holders: &BTreeMap::new(), journal: &view.journal, wanted: &wanted };
    let refusal = plan(&world, primary.address, Binding::Vfio).err();
    let functions = |list: &[&Function]| list.iter().map(|function| FunctionReport::of(function)).collect();
    GpuReport {
        function: FunctionReport::of(primary),
        mode,
        group: gpu.group,
        numa_node: primary.numa_node,
        path: inventory.path(primary.address),
        vfio_driver: inventory.vfio_driver(primary).name,
        boot_vga: primary.boot_vga,
        companions: functions(&gpu.companions),
        foreign: functions(&gpu.foreign),
        shares_group_with: gpu.shares_group_with.clone(),
        bars: primary.bars.iter().map(|bar| (bar.index, bar.size)).collect(),
        reset_methods: primary.reset_methods.clone(),
        power_state: primary.power_state.clone(),
        d3cold_allowed: primary.d3cold_allowed,
        vfs: primary.numvfs,
        vfs_possible: primary.vfs_possible,
        link: primary.link,
        bus_errors: primary.aer,
        presence: primary.presence,
        vgpus: vgpus(inventory, primary.address),
        vgpu: found(view, primary),
        holders: view.holders.get(&primary.address).into_iter().flatten().map(HolderReport::of).collect(),
        obstacle: refusal.as_ref().map(RefusalReport::of),
    }
}

pub fn text(report: &InspectReport, wide: bool) -> String {
    let mut text = report.host.text();
    if report.gpus.is_empty() {
        text.push_str("no NVIDIA GPU\n");
    } else {
        text.push('\n');
        text.push_str(&table(&rows(report, wide)));
    }
    let remarks: String = report.gpus.iter().map(remarks).collect();
    if !remarks.is_empty() {
        text.push('\n');
        text.push_str(&remarks);
    }
    for error in &report.errors {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} {error}", paint(BAD, "not readable:"));
    }
    text
}

fn rows(report: &InspectReport, wide: bool) -> Vec<Vec<Cell>> {
    let mut head = vec!["GPU", "MODEL", "MODE", "DRIVER", "GROUP", "NUMA", "IN USE", "TO A VM"];
    if wide {
        head.extend(["IDS", "BARS", "RESET", "POWER", "LINK", "VFS", "VGPU", "ABOVE IT"]);
    }
    let head = head.into_iter().map(|title| Cell::new(STRONG, title)).collect();
    std::iter::once(head).chain(report.gpus.iter().map(|gpu| row(gpu, wide))).collect()
}

fn row(gpu: &GpuReport, wide: bool) -> Vec<Cell> {
    let function = &gpu.function;
    let (style, mode) = match gpu.mode {
        Shown::Container => (PLAIN, "container"),
        Shown::VmPassthrough => (PLAIN, "vm-passthrough"),
        Shown::Partial => (WARN, "partial"),
    };
    let mut row = vec![
        Cell::plain(Some(function.address.to_string())),
        Cell::new(PLAIN, function.product.unwrap_or("unknown")),
        Cell::new(style, mode),
        Cell::plain(function.driver.clone()),
        Cell::plain(gpu.group.map(|group| group.to_string())),
        Cell::plain(gpu.numa_node.map(|node| node.to_string())),
        match gpu.holders.len() {
            0 => Cell::new(PLAIN, "no"),
            count => Cell::new(WARN, format!("by {count}")),
        },
        match &gpu.obstacle {
            None => Cell::new(GOOD, "yes"),
            Some(obstacle) => Cell::new(BAD, obstacle.reason),
        },
    ];
    if wide {
        let bars: Vec<_> = gpu.bars.iter().map(|(index, size)| format!("{index}:{}", bytes(*size))).collect();
        let path: Vec<_> = gpu.path.iter().map(ToString::to_string).collect();
        row.extend([
            Cell::plain(Some(function.ids.clone())),
            Cell::plain(Some(bars.join(" "))),
            Cell::plain(Some(gpu.reset_methods.join(" "))),
            Cell::plain(gpu.power_state.clone()),
            link(gpu.link),
            Cell::plain(Some(format!("{}/{}", gpu.vfs, gpu.vfs_possible))),
            Cell::plain(gpu.vgpu.as_ref().map(VgpusReport::cell)),
            Cell::plain(Some(path.join(" > "))),
        ]);
    }
    row
}

/// An idle GPU lowers its speed, so only lanes that are missing are worth a colour.
fn link(link: Option<Link>) -> Cell {
    match link {
        None => Cell::plain(None),
        Some(Link { current, maximum }) if current.width < maximum.width => {
            Cell::new(WARN, format!("{current} of {maximum}"))
        }
        Some(Link { current, .. }) => Cell::new(PLAIN, current.to_string()),
    }
}

fn vgpus(inventory: &Inventory, gpu: PciAddress) -> BTreeMap<PciAddress, VgpuParent> {
    let own = |function: &&Function| function.address == gpu || function.physfn == Some(gpu);
    let functions = inventory.functions.values().filter(own);
    functions.filter_map(|function| Some((function.address, function.vgpu.clone()?))).collect()
}

fn bytes(size: u64) -> String {
    if size >> 30 > 0 { format!("{}G", size >> 30) } else { format!("{}M", size.div_ceil(1 << 20)) }
}

fn remarks(gpu: &GpuReport) -> String {
    let mut text = String::new();
    let address = gpu.function.address;
    let mut say = |what: &str, of: String| {
        let _ = writeln!(text, "{address} {what} {of}");
    };
    for companion in &gpu.companions {
        say("goes with", companion.text());
    }
    for foreign in &gpu.foreign {
        say("shares its group with", foreign.text());
    }
    for other in &gpu.shares_group_with {
        say("shares its group with gpu", other.to_string());
    }
    for holder in &gpu.holders {
        let pod = holder.pod.as_ref().map(|pod| format!(" of pod {pod}")).unwrap_or_default();
        let HolderReport { pid, command, path, next_step, .. } = holder;
        say(&paint(WARN, "is in use by"), format!("pid {pid} ({command}){pod} with {path}: {next_step}"));
    }
    if let Some(Aer { fatal, nonfatal, correctable }) =
        gpu.bus_errors.filter(|errors| errors.fatal + errors.nonfatal > 0)
    {
        let errors = format!("{fatal} fatal, {nonfatal} nonfatal, {correctable} correctable since boot");
        say(&paint(WARN, "has errors of the bus:"), errors);
    }
    if let Some(obstacle) = &gpu.obstacle {
        say(&paint(BAD, "cannot go to a VM:"), obstacle.message.clone());
    }
    text
}

pub fn run(subject: &Subject, output: Output) -> Result<(), Error> {
    let report = report(&View::of(subject)?);
    let answer = match output {
        Output::Table => text(&report, false),
        Output::Wide => text(&report, true),
        Output::Json => json(&report)?,
        Output::Yaml => yaml(&report)?,
    };
    print(&answer)?;
    Ok(())
}
