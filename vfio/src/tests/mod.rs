//! Described machines through the whole pipeline.

mod executing;
mod golden;
mod holding;
mod observing;
mod planning;
mod topologies;
mod vgpus;
mod waiting;

use std::collections::BTreeMap;

use crate::address::PciAddress;
use crate::holders::{Holder, holders};
use crate::inventory::{Inventory, observe};
use crate::journal::Journal;
use crate::plan::{Binding, Plan, Refusal, World, plan};
use crate::testing::Machine;

fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// A machine as it is seen now, with the journal of the one who looks.
struct View {
    inventory: Inventory,
    holders: BTreeMap<PciAddress, Vec<Holder>>,
    wanted: BTreeMap<PciAddress, Binding>,
}

impl View {
    fn of(machine: &Machine) -> Self {
        let inventory = observe(machine);
        let holders = holders(machine, &inventory);
        Self { inventory, holders, wanted: BTreeMap::new() }
    }

    fn plan(&self, journal: &Journal, gpu: &str, binding: Binding) -> Result<Plan, Refusal> {
        let Self { inventory, holders, wanted } = self;
        plan(&World { inventory, holders, journal, wanted }, at(gpu), binding)
    }
}

/// The sentences of a plan.
fn steps(plan: &Plan) -> Vec<String> {
    plan.steps.iter().map(ToString::to_string).collect()
}

/// Driver and reservation of each NVIDIA function, for comparing before and after.
fn drivers(machine: &Machine) -> BTreeMap<String, (Option<String>, Option<String>)> {
    let functions = observe(machine).functions.into_values();
    functions.map(|function| (function.address.to_string(), (function.driver, function.driver_override))).collect()
}
