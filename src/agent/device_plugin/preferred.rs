//! Which devices fit together best. A hint: the kubelet's topology manager goes first, and it may choose otherwise.
//!
//! ```text
//! NUMA node ─► root port ─► switch ─► unit (an IOMMU group, whole; or a device without one)
//! ```
//! Every sum in a [`Score`] is one over the places of this tree, so the best choice of each size for a place comes from
//! the best choices of the places in it: no search, and no worse than trying every choice.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Add,
};

use super::device::{Device, Share};

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
    /// A group of two leaves more to others than two groups of one.
    units: u64,
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
            units: self.units + other.units,
            broken_switches: self.broken_switches + other.broken_switches,
            broken_root_ports: self.broken_root_ports + other.broken_root_ports,
            broken_numa_nodes: self.broken_numa_nodes + other.broken_numa_nodes,
        }
    }
}

/// Chooses up to `size` of the available ids.
///
/// First those that must be included, in their order; the others follow by address. With them come the rests of their
/// IOMMU groups, then whole groups by [`Score`], among equals the lower addresses. Fewer than `size` come back where
/// the rest could only be had by splitting a group. The order of `available` does not matter.
pub fn prefer(share: &Share, available: &[String], must: &[String], size: usize) -> Vec<String> {
    let mut included: Vec<&str> = Vec::new();
    for id in must {
        if !included.contains(&id.as_str()) {
            included.push(id);
        }
    }
    let available: BTreeSet<&str> = available.iter().map(String::as_str).collect();
    // What is not ours and must be included takes room all the same.
    let unknown = included.iter().filter(|id| share.find(id).is_none()).count();
    let tree = tree(share, units(share, &available, &included, size));
    let best = tree.into_values().map(numa_node).fold(Table::nothing(), |all, next| all.and(&next));
    let mut others = best.largest(size.saturating_sub(unknown));
    others.retain(|id| !included.contains(id));
    others.sort_unstable();
    included.into_iter().chain(others).map(str::to_owned).collect()
}

/// What is given as one, or not at all.
struct Unit<'a> {
    ids: Vec<&'a str>,
    /// It has a device that must be included.
    fixed: bool,
}

/// Each group that is available as a whole, and each device without a group. A group that must be split because of what
/// must be included is in it with only that part: whether it is given is decided in `Allocate`.
fn units<'a>(share: &'a Share, available: &BTreeSet<&str>, included: &[&'a str], size: usize) -> Vec<Unit<'a>> {
    let mut groups: BTreeMap<(Option<u32>, &str), Vec<&str>> = BTreeMap::new();
    for device in &share.devices {
        let own = if device.group.is_some() { "" } else { device.id.as_str() };
        groups.entry((device.group, own)).or_default().push(&device.id);
    }
    let mut room = size.saturating_sub(included.len());
    let mut units = Vec::new();
    for ((group, _), ids) in groups {
        let part: Vec<&str> = ids.iter().copied().filter(|id| included.contains(id)).collect();
        let mixed = group.is_some_and(|group| share.elsewhere.contains_key(&group));
        let whole = !mixed && ids.iter().all(|id| available.contains(id) || part.contains(id));
        let rest = ids.len() - part.len();
        match (part.is_empty(), whole) {
            (true, false) => {}
            (true, true) => units.push(Unit { ids, fixed: false }),
            (false, true) if rest <= room => {
                room -= rest;
                units.push(Unit { ids, fixed: true });
            }
            (false, _) => units.push(Unit { ids: part, fixed: true }),
        }
    }
    units.sort_by_key(|unit| unit.ids.iter().min().copied());
    units
}

type Switches<'a> = BTreeMap<&'a str, Vec<Unit<'a>>>;
type RootPorts<'a> = BTreeMap<&'a str, Switches<'a>>;
type Tree<'a> = BTreeMap<Option<u16>, RootPorts<'a>>;

fn tree<'a>(share: &'a Share, units: Vec<Unit<'a>>) -> Tree<'a> {
    let mut below: BTreeMap<&str, u32> = BTreeMap::new();
    for port in share.devices.iter().flat_map(|device| &device.path) {
        *below.entry(port).or_default() += 1;
    }
    let mut tree = Tree::new();
    for unit in units {
        // The members of a group are behind one port, or the kernel would have made two groups.
        let Some(device) = unit.ids.first().and_then(|id| share.find(id)) else { continue };
        let root_port = device.path.first().unwrap_or(&device.id);
        let ports = tree.entry(device.numa_node).or_default();
        ports.entry(root_port).or_default().entry(switch(device, &below)).or_default().push(unit);
    }
    tree
}

/// The lowest port above a device that is above another device, too; without one the device is on its own.
fn switch<'a>(device: &'a Device, below: &BTreeMap<&str, u32>) -> &'a str {
    let shared = device.path.iter().rev().find(|port| below.get(port.as_str()).is_some_and(|count| *count > 1));
    shared.unwrap_or(&device.id)
}

fn numa_node(ports: RootPorts<'_>) -> Table<'_> {
    let inner = ports.into_values().map(root_port).fold(Table::nothing(), |all, next| all.and(&next));
    inner.scored(|used, broken| Score { numa_nodes: used, broken_numa_nodes: broken, ..Score::default() })
}

fn root_port(switches: Switches<'_>) -> Table<'_> {
    let inner = switches.into_values().map(of_switch).fold(Table::nothing(), |all, next| all.and(&next));
    inner.scored(|used, broken| Score { root_ports: used, broken_root_ports: broken, ..Score::default() })
}

fn of_switch(units: Vec<Unit<'_>>) -> Table<'_> {
    let inner = units.into_iter().map(Table::unit).fold(Table::nothing(), |all, next| all.and(&next));
    inner.scored(|used, broken| Score { switches: used, broken_switches: broken, ..Score::default() })
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

    fn unit(unit: Unit<'a>) -> Self {
        let mut table = Self::nothing();
        if unit.fixed {
            table.0[0] = None;
        }
        table.0.resize_with(unit.ids.len(), || None);
        table.0.push(Some(Choice { score: Score { units: 1, ..Score::default() }, ids: unit.ids }));
        table
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
