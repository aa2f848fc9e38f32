use proptest::prelude::*;

use super::{super::device::Health, *};

/// NUMA node, root port, switch (0: directly below the root port).
type Place = (Option<u16>, u32, u32);

fn gpu(n: u32, (numa_node, root_port, switch): Place) -> Device {
    let port = format!("port {root_port}");
    let path = match switch {
        0 => vec![port, format!("slot {n}")],
        switch => vec![port, format!("switch {root_port}.{switch}"), format!("slot {n}")],
    };
    Device {
        id: id(n),
        health: Health::Healthy,
        numa_node,
        nodes: vec![],
        others: vec![],
        path,
        egm: None,
        partition: None,
    }
}

fn id(n: u32) -> String {
    format!("0000:{n:02x}:00.0")
}

fn ids(numbers: &[u32]) -> Vec<String> {
    numbers.iter().map(|n| id(*n)).collect()
}

/// Each on a root port of its own: 1-3 on NUMA node 0, 4-8 on node 1.
fn flat() -> Vec<Device> {
    (1..=8).map(|n| gpu(n, (Some(u16::from(n > 3)), n, 0))).collect()
}

/// NUMA node 0: switches of 1-4 and of 5, 6. Node 1: switches of 7, 8 and of 9-12.
fn switches() -> Vec<Device> {
    let place = |n| match n {
        1..=4 => (Some(0), 1, 1),
        5..=6 => (Some(0), 2, 1),
        7..=8 => (Some(1), 3, 1),
        _ => (Some(1), 4, 1),
    };
    (1..=12).map(|n| gpu(n, place(n))).collect()
}

fn all(devices: &[Device]) -> Vec<String> {
    devices.iter().map(|device| device.id.clone()).collect()
}

fn choose(devices: &[Device], size: usize) -> Vec<String> {
    prefer(devices, &all(devices), &[], size)
}

#[test]
fn a_request_that_fits_a_switch_stays_on_it_and_leaves_the_larger_ones_whole() {
    assert_eq!(choose(&switches(), 2), ids(&[5, 6]));
    assert_eq!(choose(&switches(), 4), ids(&[1, 2, 3, 4]));
    assert_eq!(choose(&switches(), 1), ids(&[5]));
}

#[test]
fn a_request_too_large_for_a_switch_stays_on_a_numa_node() {
    assert_eq!(choose(&switches(), 6), ids(&[1, 2, 3, 4, 5, 6]));
}

#[test]
fn a_broken_switch_is_used_up_before_a_whole_one_is_broken() {
    let available = ids(&[2, 3, 4, 9, 10, 11, 12]);
    assert_eq!(prefer(&switches(), &available, &[], 3), ids(&[2, 3, 4]));
    assert_eq!(prefer(&switches(), &available, &[], 1), ids(&[2]));
}

#[test]
fn a_switch_below_a_switch_counts_on_its_own() {
    let devices: Vec<_> = (1..=5).map(|n| gpu(n, (Some(0), 1, if n < 4 { 1 } else { 2 }))).collect();
    assert_eq!(choose(&devices, 2), ids(&[4, 5]));
    assert_eq!(choose(&devices, 3), ids(&[1, 2, 3]));
}

#[test]
fn the_numa_node_that_fits_most_tightly_is_filled_from_its_lowest_address() {
    assert_eq!(choose(&flat(), 2), ids(&[1, 2]));
    assert_eq!(choose(&flat(), 4), ids(&[4, 5, 6, 7]));
}

#[test]
fn included_devices_come_first_and_draw_the_rest_to_their_place() {
    assert_eq!(prefer(&flat(), &all(&flat()), &ids(&[7]), 3), ids(&[7, 4, 5]));
    assert_eq!(prefer(&switches(), &all(&switches()), &ids(&[10, 9]), 3), ids(&[10, 9, 11]));
}

#[test]
fn only_available_devices_are_chosen_and_all_of_them_where_they_are_too_few() {
    assert_eq!(prefer(&flat(), &ids(&[2, 5]), &[], 2), ids(&[2, 5]));
    assert_eq!(prefer(&flat(), &ids(&[2, 5]), &[], 3), ids(&[2, 5]));
}

#[test]
fn a_device_that_left_the_offer_is_not_preferred() {
    assert_eq!(prefer(&flat(), &ids(&[9, 5]), &[], 1), ids(&[5]));
}

#[test]
fn a_host_without_numa_nodes_is_one_node() {
    let devices: Vec<_> = (1..=8).map(|n| gpu(n, (None, n, 0))).collect();
    assert_eq!(choose(&devices, 5), ids(&[1, 2, 3, 4, 5]));
}

/// The score of a choice, counted from the devices themselves.
fn score(devices: &[Device], free: &BTreeSet<String>, choice: &BTreeSet<String>) -> Score {
    let mut below: BTreeMap<&str, u32> = BTreeMap::new();
    devices.iter().flat_map(|d| &d.path).for_each(|port| *below.entry(port).or_default() += 1);
    let numa = |d: &Device| format!("{:?}", d.numa_node);
    let port = |d: &Device| format!("{} {}", numa(d), d.path.first().unwrap_or(&d.id));
    let near = |d: &Device| format!("{} {}", port(d), switch(d, &below));
    let count = |level: &dyn Fn(&Device) -> String| {
        let mut places: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for device in devices.iter().filter(|device| free.contains(&device.id)) {
            let (all, taken) = places.entry(level(device)).or_default();
            *all += 1;
            *taken += u64::from(choice.contains(&device.id));
        }
        let used = places.values().filter(|(_, taken)| *taken > 0).count() as u64;
        let broken = places.values().map(|(all, taken)| all * all - (all - taken) * (all - taken)).sum::<u64>();
        (used, broken)
    };
    let ((numa_nodes, broken_numa_nodes), (root_ports, broken_root_ports)) = (count(&numa), count(&port));
    let (switches, broken_switches) = count(&near);
    Score { numa_nodes, root_ports, switches, broken_switches, broken_root_ports, broken_numa_nodes }
}

/// A machine of up to nine GPUs, what is free of it, and what of that must be included.
fn machines() -> impl Strategy<Value = (Vec<Device>, Vec<String>, Vec<String>)> {
    let place = (prop::option::weighted(0.9, 0_u16..2), 1_u32..=2, 0_u32..=2);
    let flags = || prop::collection::vec(prop::bool::weighted(0.15), 9);
    (prop::collection::vec(place, 1..=9), flags(), flags()).prop_map(|(places, taken, must)| {
        let devices: Vec<_> = (1..).zip(places).map(|(n, place)| gpu(n, place)).collect();
        let free: Vec<_> = all(&devices).into_iter().zip(taken).filter(|(_, taken)| !taken).map(|(id, _)| id).collect();
        let must = free.iter().zip(must).filter(|(_, must)| *must).map(|(id, _)| id.clone()).take(2).collect();
        (devices, free, must)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_choice_is_better_by_the_score((devices, free, must) in machines(), size in 2_usize..=9) {
        let choice: BTreeSet<String> = prefer(&devices, &free, &must, size).into_iter().collect();
        let every = (0_u32..1 << free.len()).map(|bits| {
            let taken = free.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1);
            taken.map(|(_, id)| id.clone()).collect::<BTreeSet<_>>()
        });
        let most = size.min(free.len());
        let (free, must): (BTreeSet<_>, BTreeSet<_>) = (free.iter().cloned().collect(), must.into_iter().collect());
        let possible = every.filter(|other| other.len() == most && must.is_subset(other));
        prop_assert_eq!(choice.len(), most);
        prop_assert_eq!(Some(score(&devices, &free, &choice)), possible.map(|other| score(&devices, &free, &other)).min());
    }

    #[test]
    fn a_choice_is_of_what_is_free_holds_what_must_be_and_is_the_same_for_any_order(
        (devices, free, must) in machines(),
        size in 2_usize..=9,
        turn in 0_usize..9,
    ) {
        let choice = prefer(&devices, &free, &must, size);

        let mut turned = free.clone();
        turned.rotate_left(turn % free.len().max(1));
        prop_assert_eq!(&choice, &prefer(&devices, &turned, &must, size));
        prop_assert!(choice.starts_with(&must));
        prop_assert!(choice.iter().all(|id| free.contains(id)));
        let distinct: BTreeSet<&String> = choice.iter().collect();
        prop_assert_eq!(distinct.len(), choice.len());
        prop_assert_eq!(choice.len(), size.min(free.len()));
    }
}
