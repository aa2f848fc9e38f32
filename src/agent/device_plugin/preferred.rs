//! Which devices fit together best. A hint: the kubelet's topology manager goes first, and it may choose otherwise.
//!
//! ```text
//! NUMA node ─► root port ─► switch ─► device
//! ```
//! Every part of a [`Score`] is a sum over the places of this tree, so the best choice of each size for a place comes from
//! the best choices of the places in it: no search, and no worse than trying every choice.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Add,
};

use super::device::{Device, find};

/// How good a choice is; the smaller, the better, the first field before the second and so on.
///
/// A choice on one switch is on one NUMA node, too. Nodes are counted first for the sake of requests that are too large
/// for a switch: three switches of one node are nearer to each other than two larger ones of two nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    /// Places that the choice is spread over.
    numa_nodes: u64,
    root_ports: u64,
    switches: u64,
    /// Sums over all places of (what was there)² − (what is left)²: least where what is left is in one piece.
    /// Switches come first: a broken one is of no use to those who want a whole one.
    broken_switches: u64,
    broken_root_ports: u64,
    broken_numa_nodes: u64,
}

impl Add for Score {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            numa_nodes: self.numa_nodes + other.numa_nodes,
            root_ports: self.root_ports + other.root_ports,
            switches: self.switches + other.switches,
            broken_switches: self.broken_switches + other.broken_switches,
            broken_root_ports: self.broken_root_ports + other.broken_root_ports,
            broken_numa_nodes: self.broken_numa_nodes + other.broken_numa_nodes,
        }
    }
}

/// Chooses `size` of the available ids, or all if there are fewer.
///
/// First those that must be included, in their order; the others follow by address. They are chosen by the score, among
/// equals the lower addresses. The order of `available` does not matter.
pub fn prefer(devices: &[Device], available: &[String], must: &[String], size: usize) -> Vec<String> {
    let mut included: Vec<&str> = Vec::new();
    for id in must {
        if !included.contains(&id.as_str()) {
            included.push(id);
        }
    }
    let free: BTreeSet<&str> = available.iter().chain(must).map(String::as_str).collect();
    let mut tree = Tree::new();
    let mut below: BTreeMap<&str, u32> = BTreeMap::new();
    for port in devices.iter().flat_map(|device| &device.path) {
        *below.entry(port).or_default() += 1;
    }
    for device in free.iter().filter_map(|id| find(devices, id)) {
        let root_port = device.path.first().unwrap_or(&device.id);
        let ports = tree.entry(device.numa_node).or_default();
        ports.entry(root_port).or_default().entry(switch(device, &below)).or_default().push(&device.id);
    }
    let best = together(tree.into_values(), |ports| numa_node(ports, &included));
    // What is not ours and must be included takes room all the same.
    let unknown = included.iter().filter(|id| find(devices, id).is_none()).count();
    let mut others = best.largest(size.saturating_sub(unknown));
    others.retain(|id| !included.contains(id));
    others.sort_unstable();
    included.into_iter().chain(others).map(str::to_owned).collect()
}

type Switches<'a> = BTreeMap<&'a str, Vec<&'a str>>;
type RootPorts<'a> = BTreeMap<&'a str, Switches<'a>>;
type Tree<'a> = BTreeMap<Option<u16>, RootPorts<'a>>;

/// The lowest port above a device that is above another device, too; without one the device is on its own.
fn switch<'a>(device: &'a Device, below: &BTreeMap<&str, u32>) -> &'a str {
    let shared = device.path.iter().rev().find(|port| below.get(port.as_str()).is_some_and(|count| *count > 1));
    shared.unwrap_or(&device.id)
}

fn numa_node<'a>(ports: RootPorts<'a>, included: &[&str]) -> Table<'a> {
    together(ports.into_values(), |switches| root_port(switches, included)).scored(|used, broken| Score {
        numa_nodes: used,
        broken_numa_nodes: broken,
        ..Score::default()
    })
}

fn root_port<'a>(switches: Switches<'a>, included: &[&str]) -> Table<'a> {
    let of_switch = |ids: Vec<&'a str>| {
        together(ids, |id| Table::device(id, included.contains(&id))).scored(|used, broken| Score {
            switches: used,
            broken_switches: broken,
            ..Score::default()
        })
    };
    together(switches.into_values(), of_switch).scored(|used, broken| Score {
        root_ports: used,
        broken_root_ports: broken,
        ..Score::default()
    })
}

fn together<'a, P>(places: impl IntoIterator<Item = P>, table: impl Fn(P) -> Table<'a>) -> Table<'a> {
    places.into_iter().map(table).fold(Table::nothing(), |all, next| all.and(&next))
}

struct Choice<'a> {
    score: Score,
    ids: Vec<&'a str>,
}

/// The best choice of each number of devices in a place; `None` where no choice has that number. The last one is all.
struct Table<'a>(Vec<Option<Choice<'a>>>);

impl<'a> Table<'a> {
    fn nothing() -> Self {
        Self(vec![Some(Choice { score: Score::default(), ids: Vec::new() })])
    }

    fn device(id: &'a str, included: bool) -> Self {
        let without = Choice { score: Score::default(), ids: Vec::new() };
        let with = Choice { score: Score::default(), ids: vec![id] };
        Self(vec![Some(without).filter(|_| !included), Some(with)])
    }

    /// Two places together. Among equals as many as can be from the first, which has the lower addresses.
    fn and(&self, other: &Self) -> Self {
        let mut both: Vec<Option<Choice<'a>>> = Vec::new();
        both.resize_with(self.0.len() + other.0.len() - 1, || None);
        for (here, one) in self.0.iter().enumerate().rev() {
            for (there, two) in other.0.iter().enumerate() {
                let (Some(one), Some(two)) = (one, two) else { continue };
                let score = one.score + two.score;
                let best = &mut both[here + there];
                if best.as_ref().is_none_or(|best| score < best.score) {
                    *best = Some(Choice { score, ids: [one.ids.as_slice(), &two.ids].concat() });
                }
            }
        }
        Self(both)
    }

    /// Adds the place's own part: whether it is used at all, and what breaking it costs.
    fn scored(mut self, score: impl Fn(u64, u64) -> Score) -> Self {
        let all = self.0.len() - 1;
        for (taken, choice) in self.0.iter_mut().enumerate() {
            if let Some(choice) = choice {
                let left = all - taken;
                choice.score = choice.score + score(u64::from(taken > 0), (all * all - left * left) as u64);
            }
        }
        self
    }

    /// The best choice of the largest number up to `size`. More only where so many must be included.
    fn largest(mut self, size: usize) -> Vec<&'a str> {
        let fits = self.0.iter().take(size + 1).rposition(Option::is_some);
        let chosen = fits.or_else(|| self.0.iter().position(Option::is_some));
        chosen.and_then(|number| self.0[number].take()).map(|choice| choice.ids).unwrap_or_default()
    }
}

#[cfg(test)]
#[path = "preferred_tests.rs"]
mod tests;
