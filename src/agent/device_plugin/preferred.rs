//! Which devices fit together best. A hint: the kubelet's topology manager goes first, and it may choose otherwise.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::device::{Device, Share};

/// Chooses up to `size` of the available ids.
///
/// First those that must be included, in their order, with the rest of their IOMMU groups; then whole groups, those on
/// one NUMA node before the others, larger before smaller, lower address before higher. Fewer than `size` come back
/// where the rest could only be had by splitting a group. The order of `available` does not matter.
pub(super) fn prefer(share: &Share, available: &[String], must: &[String], size: usize) -> Vec<String> {
    let available: BTreeSet<&str> = available.iter().map(String::as_str).collect();
    let mut chosen: Vec<&str> = Vec::with_capacity(size);
    for id in must {
        if !chosen.contains(&id.as_str()) {
            chosen.push(id);
        }
    }
    let numa = |id: &str| share.find(id).and_then(|device| device.numa_node);
    let home = home(&available, &chosen, size, numa);

    let mut units = units(share, &available);
    units.sort_by_key(|unit| {
        let begun = unit.iter().any(|id| chosen.contains(id));
        let away = unit.iter().filter(|id| numa(id) != home).count();
        (!begun, away, Reverse(unit.len()), unit.clone())
    });
    for unit in units {
        let rest: Vec<&str> = unit.into_iter().filter(|id| !chosen.contains(id)).collect();
        if chosen.len() + rest.len() <= size {
            chosen.extend(rest);
        }
    }
    chosen.into_iter().map(str::to_owned).collect()
}

/// The NUMA node to fill from: where most of the included devices are; else the one that fits most tightly; else the
/// one that has most. `None` is the node of devices that have none.
fn home(available: &BTreeSet<&str>, included: &[&str], size: usize, numa: impl Fn(&str) -> Option<u16>) -> Option<u16> {
    let mut per_node: BTreeMap<Option<u16>, usize> = BTreeMap::new();
    for id in available {
        *per_node.entry(numa(id)).or_default() += 1;
    }
    let rank = |(node, count): (Option<u16>, usize)| {
        let here = included.iter().filter(|id| numa(id) == node).count();
        let spare = count.checked_sub(size);
        (here, spare.is_some(), spare.map(Reverse), count, Reverse(node))
    };
    per_node.into_iter().max_by_key(|entry| rank(*entry)).and_then(|(node, _)| node)
}

/// What can be given as one: each IOMMU group that is available as a whole, and each device without a group.
fn units<'a>(share: &'a Share, available: &BTreeSet<&str>) -> Vec<Vec<&'a str>> {
    let mut groups: BTreeMap<u32, Vec<&Device>> = BTreeMap::new();
    let mut units: Vec<Vec<&Device>> = Vec::new();
    for device in &share.devices {
        match device.group {
            Some(group) => groups.entry(group).or_default().push(device),
            None => units.push(vec![device]),
        }
    }
    units.extend(groups.into_iter().filter(|(group, _)| !share.elsewhere.contains_key(group)).map(|(_, unit)| unit));
    let ids = units.into_iter().map(|unit| {
        let mut ids: Vec<&str> = unit.into_iter().map(|device| device.id.as_str()).collect();
        ids.sort_unstable();
        ids
    });
    ids.filter(|unit| unit.iter().all(|id| available.contains(id))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::device::Health, *};

    fn gpu(n: u32, numa_node: Option<u16>, group: u32) -> Device {
        Device { id: id(n), health: Health::Healthy, numa_node, nodes: vec![], group: Some(group) }
    }

    fn id(n: u32) -> String {
        format!("0000:{n:02x}:00.0")
    }

    fn ids(numbers: &[u32]) -> Vec<String> {
        numbers.iter().map(|n| id(*n)).collect()
    }

    /// Two NUMA nodes: 1-3 on node 0, 4-8 on node 1, each in its own group.
    fn world() -> Share {
        let devices = (1..=8).map(|n| gpu(n, Some(u16::from(n > 3)), n)).collect();
        Share { devices, ..Share::default() }
    }

    fn all() -> Vec<String> {
        ids(&[1, 2, 3, 4, 5, 6, 7, 8])
    }

    #[test]
    fn the_node_that_fits_most_tightly_is_filled_from_its_lowest_address() {
        assert_eq!(prefer(&world(), &all(), &[], 2), ids(&[1, 2]));
        assert_eq!(prefer(&world(), &all(), &[], 4), ids(&[4, 5, 6, 7]));
    }

    #[test]
    fn included_devices_come_first_and_draw_the_rest_to_their_node() {
        assert_eq!(prefer(&world(), &all(), &ids(&[7]), 3), ids(&[7, 4, 5]));
    }

    #[test]
    fn a_request_larger_than_a_node_takes_the_larger_node_first() {
        assert_eq!(prefer(&world(), &all(), &[], 6), ids(&[4, 5, 6, 7, 8, 1]));
    }

    #[test]
    fn only_available_devices_are_chosen() {
        assert_eq!(prefer(&world(), &ids(&[2, 5]), &[], 2), ids(&[2, 5]));
    }

    #[test]
    fn a_single_request_leaves_shared_groups_alone() {
        let mut share = world();
        share.devices[1].group = Some(1);
        assert_eq!(prefer(&share, &all(), &[], 1), ids(&[3]));
    }

    #[test]
    fn a_request_of_two_takes_a_shared_group_before_two_singles() {
        let mut share = world();
        share.devices[2].group = Some(2);
        assert_eq!(prefer(&share, &all(), &[], 2), ids(&[2, 3]));
    }

    #[test]
    fn an_included_device_brings_its_group() {
        let mut share = world();
        share.devices[7].group = Some(1);
        assert_eq!(prefer(&share, &all(), &ids(&[1]), 2), ids(&[1, 8]));
    }

    #[test]
    fn a_host_without_numa_nodes_is_one_node() {
        let mut share = world();
        share.devices.iter_mut().for_each(|device| device.numa_node = None);
        assert_eq!(prefer(&share, &all(), &[], 5), ids(&[1, 2, 3, 4, 5]));
    }

    proptest! {
        #[test]
        fn the_choice_is_the_same_for_any_order_and_never_splits_a_group(
            layout in prop::collection::vec((prop::option::of(0_u16..3), 1_u32..=8), 1..=8),
            order in Just((1_u32..=8).collect::<Vec<_>>()).prop_shuffle(),
            absent in 0_u32..=8,
            size in 1_usize..=8,
        ) {
            let devices: Vec<Device> = layout.iter().zip(1..).map(|((numa, group), n)| gpu(n, *numa, *group)).collect();
            let share = Share { devices, ..Share::default() };
            let known = |n: &u32| share.find(&id(*n)).is_some() && *n != absent;
            let shuffled: Vec<u32> = order.into_iter().filter(known).collect();
            let mut sorted = shuffled.clone();
            sorted.sort_unstable();

            let choice = prefer(&share, &ids(&shuffled), &[], size);

            prop_assert_eq!(&choice, &prefer(&share, &ids(&sorted), &[], size));
            prop_assert!(choice.len() <= size);
            let distinct: BTreeSet<&String> = choice.iter().collect();
            prop_assert_eq!(distinct.len(), choice.len());
            prop_assert!(choice.iter().all(|id| ids(&sorted).contains(id)));
            for device in &share.devices {
                let together = |other: &&Device| other.group == device.group;
                if choice.contains(&device.id) {
                    prop_assert!(share.devices.iter().filter(together).all(|other| choice.contains(&other.id)));
                }
            }
        }

        #[test]
        fn what_must_be_included_is_included(
            layout in prop::collection::vec((prop::option::of(0_u16..3), 1_u32..=8), 2..=8),
            size in 2_usize..=8,
            must in 1_u32..=2,
        ) {
            let devices: Vec<Device> = layout.iter().zip(1..).map(|((numa, group), n)| gpu(n, *numa, *group)).collect();
            let all: Vec<String> = devices.iter().map(|device| device.id.clone()).collect();
            let choice = prefer(&Share { devices, ..Share::default() }, &all, &ids(&[must]), size);
            prop_assert_eq!(choice.first(), Some(&id(must)));
            prop_assert!(choice.len() <= size);
        }
    }
}
