//! Every described machine as it is understood and planned for, beside its fixture: a change shows as a difference.

#![allow(clippy::disallowed_methods, reason = "lists the fixtures")]

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::egm::egm;
use crate::holders::holders;
use crate::inventory::{Function, Inventory, observe};
use crate::journal::Journal;
use crate::pcie::{Aer, Presence};
use crate::plan::{Binding, World, plan};
use crate::testing::Machine;
use crate::verify::deviations;
use crate::vgpu::{self, Layout, Mdev, VgpuParent, VgpuWorld};

const MACHINES: [&str; 19] = [
    "a2-sriov",
    "eight-h200",
    "eight-t4",
    "gb200",
    "gb200-bound",
    "gtx-860m",
    "l40s-vgpu",
    "mi300x",
    "rtx-4000",
    "rtx-pro-6000",
    "same-names",
    "six-rtx-3090",
    "troubled",
    "tu116",
    "twins",
    "two-a40",
    "two-t4-vgpu",
    "two-vendors",
    "v100",
];

/// How many of which type.
type Asked = &'static [(&'static str, u32)];

/// Machine, GPU and layout: what the configs of users ask of such boards.
const LAYOUTS: [(&str, &str, Asked); 14] = [
    ("a2-sriov", "0000:08:00.0", &[("A2-4Q", 4)]),
    ("a2-sriov", "0000:08:00.0", &[("A2-4Q", 1), ("A2-4C", 1), ("A2-4A", 2)]),
    ("a2-sriov", "0000:08:00.0", &[("A2-8Q", 2)]),
    ("a2-sriov", "0000:08:00.0", &[]),
    ("eight-t4", "0000:18:00.0", &[("T4-1Q", 16)]),
    ("l40s-vgpu", "0000:26:00.0", &[("L40S-24Q", 2)]),
    ("l40s-vgpu", "0000:26:00.0", &[("L40S-48Q", 1)]),
    ("rtx-pro-6000", "0000:41:00.0", &[("DC-3Q", 1), ("DC-3A", 1)]),
    ("rtx-pro-6000", "0000:41:00.0", &[("DC-3Q", 1), ("DC-6Q", 1)]),
    ("rtx-pro-6000", "0000:41:00.0", &[("DC-1-24CGFX", 1)]),
    ("two-t4-vgpu", "0000:3b:00.0", &[("T4-1Q", 16)]),
    ("two-t4-vgpu", "0000:3b:00.0", &[("T4-1Q", 17)]),
    ("two-t4-vgpu", "0000:3b:00.0", &[("T4-1Q", 1), ("T4-1B", 1), ("nvidia-229", 1)]),
    ("two-t4-vgpu", "0000:af:00.0", &[("T4-2Q", 8)]),
];

/// What would be done for each layout, from one look.
fn layouts(name: &str, world: &VgpuWorld<'_>) -> String {
    let mut text = String::new();
    for (_, gpu, counts) in LAYOUTS.iter().filter(|(machine, ..)| *machine == name) {
        let layout: Layout = counts.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect();
        let asked: Vec<_> = layout.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        writeln!(text, "\n{gpu} with vGPUs: {}", if asked.is_empty() { "none".to_owned() } else { asked.join(", ") })
            .unwrap();
        match vgpu::plan(world, gpu.parse().unwrap(), &layout) {
            Err(refusal) => writeln!(text, "  refused ({}): {refusal}", refusal.reason()).unwrap(),
            Ok(steps) if steps.is_empty() => writeln!(text, "  nothing to do").unwrap(),
            Ok(steps) => steps.iter().for_each(|step| writeln!(text, "  {step}").unwrap()),
        }
    }
    text
}

#[test]
fn every_described_machine_is_understood_and_planned_for_as_before() {
    for name in MACHINES {
        let machine = Machine::described(name);
        let inventory = observe(&machine);
        let mut text = understood(&machine, &inventory);
        let holders = holders(&machine, &inventory);
        for binding in [Binding::Vfio, Binding::Host] {
            let wanted: BTreeMap<_, _> = inventory.gpus().iter().map(|gpu| (gpu.primary.address, binding)).collect();
            let world =
                World { inventory: &inventory, holders: &holders, journal: &Journal::in_memory(), wanted: &wanted };
            for gpu in wanted.keys() {
                writeln!(text, "\n{gpu} to {binding:?}").unwrap();
                match plan(&world, *gpu, binding) {
                    Err(refusal) => writeln!(text, "  refused ({}): {refusal}", refusal.reason()).unwrap(),
                    Ok(plan) if plan.steps.is_empty() => writeln!(text, "  nothing to do").unwrap(),
                    Ok(plan) => plan.steps.iter().for_each(|step| writeln!(text, "  {step}").unwrap()),
                }
            }
        }
        let mut journal = Journal::in_memory();
        journal.learn_vgpu_types(&inventory).unwrap();
        let held = vgpu::vgpu_holders(&inventory, &holders);
        let (inventory, gpu_holders, journal, node) = (&inventory, &holders, &journal, "node-1");
        let library = &vgpu::LibraryFacts::default();
        text += &layouts(name, &VgpuWorld { inventory, holders: &held, gpu_holders, library, journal, node });
        insta::with_settings!({ snapshot_path => "../../fixtures", prepend_module_to_snapshot => false, omit_expression => true }, {
            insta::assert_snapshot!(name, text);
        });
    }
}

#[test]
fn no_described_machine_is_left_out() {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures")).unwrap();
    let mut names: Vec<_> =
        files.filter_map(|file| file.unwrap().file_name().to_str()?.strip_suffix(".yaml").map(str::to_owned)).collect();
    names.sort();
    assert_eq!(names, MACHINES);
    let listed = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/README.md")).unwrap();
    let unlisted: Vec<_> = MACHINES.iter().filter(|name| !listed.contains(&format!("`{name}`"))).collect();
    assert!(unlisted.is_empty(), "fixtures/README.md says nothing of {unlisted:?}");
}

fn understood(machine: &Machine, inventory: &Inventory) -> String {
    let facts = &inventory.facts;
    let mut text = format!(
        "{} {}, kernel {} {}, iommu {}, iommufd {}, vfio modules {:?}\n",
        facts.os_id,
        facts.os_version,
        facts.kernel_release,
        facts.architecture,
        facts.iommu,
        facts.iommufd,
        facts.vfio_modules
    );
    for gpu in inventory.gpus() {
        let primary = gpu.primary;
        let numa = primary.numa_node.map_or_else(|| "-".to_owned(), |node| node.to_string());
        let target = inventory.vfio_driver(primary);
        writeln!(
            text,
            "gpu {}, numa {numa}, vfs {}/{}, wants {target}",
            line(primary),
            primary.numvfs,
            primary.vfs_possible
        )
        .unwrap();
        health(&mut text, primary);
        vgpus(&mut text, inventory, primary);
        for port in inventory.path(primary.address) {
            writeln!(text, "  below {port}").unwrap();
        }
        gpu.companions.iter().for_each(|function| writeln!(text, "  with {}", line(function)).unwrap());
        gpu.foreign.iter().for_each(|function| writeln!(text, "  foreign {}", line(function)).unwrap());
        gpu.shares_group_with.iter().for_each(|other| writeln!(text, "  shares with {other}").unwrap());
        for binding in [Binding::Vfio, Binding::Host] {
            let still = deviations(inventory, primary.address, binding);
            let still: Vec<_> = still.iter().map(ToString::to_string).collect();
            let still = if still.is_empty() { "reached".to_owned() } else { still.join("; ") };
            writeln!(text, "  {binding:?}: {still}").unwrap();
        }
    }
    for (node, gpus) in egm(machine) {
        let gpus: Vec<_> = gpus.iter().map(ToString::to_string).collect();
        writeln!(text, "extended memory {} of {}", node.display(), gpus.join(", ")).unwrap();
    }
    inventory.errors.iter().for_each(|error| writeln!(text, "error {error}").unwrap());
    text
}

fn health(text: &mut String, gpu: &Function) {
    if let Some(link) = gpu.link {
        writeln!(text, "  link {} of {}", link.current, link.maximum).unwrap();
    }
    if let Some(Aer { correctable, nonfatal, fatal }) = gpu.aer {
        writeln!(text, "  errors {correctable} correctable, {nonfatal} nonfatal, {fatal} fatal").unwrap();
    }
    if gpu.presence == Some(Presence::FellOff) {
        writeln!(text, "  has fallen off the bus").unwrap();
    }
}

/// What the GPU and its virtual functions can make and have made, each kind of function once.
fn vgpus(text: &mut String, inventory: &Inventory, gpu: &Function) {
    let parts = inventory.functions.values().filter(|f| f.address == gpu.address || f.physfn == Some(gpu.address));
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for vgpu in parts.clone().filter_map(|function| function.vgpu.as_ref()) {
        let kind = match vgpu {
            VgpuParent::Mdev { types } => {
                let free = types.iter().filter(|kind| kind.available_instances > 0).map(|kind| {
                    let name = kind.name.as_deref().unwrap_or("without name");
                    format!("{} ({name}) x{}", kind.id, kind.available_instances)
                });
                let free = free.collect::<Vec<_>>().join(", ");
                format!("mdev, {} types, free: {}", types.len(), if free.is_empty() { "none" } else { &free })
            }
            VgpuParent::VendorVfio { current, creatable } => {
                let now = current.map_or_else(|| "nothing".to_owned(), |id| id.to_string());
                let creatable: Vec<_> = creatable.iter().map(|kind| format!("{} ({})", kind.id, kind.name)).collect();
                format!(
                    "vendor vfio, now {now}, creatable: {}",
                    if creatable.is_empty() { "none".to_owned() } else { creatable.join(", ") }
                )
            }
        };
        *kinds.entry(kind).or_default() += 1;
    }
    for (kind, count) in kinds {
        writeln!(text, "  vgpu on {count} function(s) by {kind}").unwrap();
    }
    for (uuid, Mdev { parent, type_id, iommu_group, .. }) in &inventory.mdevs {
        if parts.clone().any(|function| Some(function.address) == *parent) {
            let (on, kind) = (parent.unwrap(), type_id.as_deref().unwrap_or("no type"));
            writeln!(text, "  mdev {uuid} of {kind} on {on}, group {}", iommu_group.unwrap()).unwrap();
        }
    }
}

fn line(function: &Function) -> String {
    let Function { address, vendor, device, class, .. } = function;
    let group = function.iommu_group.map_or_else(|| "none".to_owned(), |group| group.to_string());
    let driver = function.driver.as_deref().unwrap_or("no driver");
    format!("{address} {vendor:04x}:{device:04x} {class:06x} group {group} on {driver}")
}
