//! Every described machine as it is understood and planned for, beside its fixture: a change shows as a difference.

#![allow(clippy::disallowed_methods, reason = "lists the fixtures")]

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::holders::holders;
use crate::inventory::{Function, Inventory, observe};
use crate::journal::Journal;
use crate::plan::{Binding, World, plan};
use crate::testing::Machine;
use crate::verify::deviations;

const MACHINES: [&str; 15] = [
    "a2-sriov",
    "eight-h200",
    "eight-t4",
    "gb200",
    "gb200-bound",
    "gtx-860m",
    "mi300x",
    "rtx-4000",
    "same-names",
    "six-rtx-3090",
    "troubled",
    "tu116",
    "twins",
    "two-a40",
    "v100",
];

#[test]
fn every_described_machine_is_understood_and_planned_for_as_before() {
    for name in MACHINES {
        let machine = Machine::described(name);
        let inventory = observe(&machine);
        let mut text = understood(&inventory);
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
}

fn understood(inventory: &Inventory) -> String {
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
    inventory.errors.iter().for_each(|error| writeln!(text, "error {error}").unwrap());
    text
}

fn line(function: &Function) -> String {
    let Function { address, vendor, device, class, .. } = function;
    let group = function.iommu_group.map_or_else(|| "none".to_owned(), |group| group.to_string());
    let driver = function.driver.as_deref().unwrap_or("no driver");
    format!("{address} {vendor:04x}:{device:04x} {class:06x} group {group} on {driver}")
}
