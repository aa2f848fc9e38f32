use proptest::prelude::*;

use super::{super::device::Health, *};

/// Where a group of devices is: NUMA node, root port, switch (0: directly below the root port).
type Place = (Option<u16>, u32, u32);

fn gpu(n: u32, (numa_node, root_port, switch): Place, group: u32) -> Device {
    let port = format!("port {root_port}");
    let path = match switch {
        0 => vec![port, format!("slot {group}")],
        switch => vec![port, format!("switch {root_port}.{switch}"), format!("slot {group}")],
    };
    Device { id: id(n), health: Health::Healthy, numa_node, nodes: vec![], group: Some(group), path }
}

fn id(n: u32) -> String {
    format!("0000:{n:02x}:00.0")
}

fn ids(numbers: &[u32]) -> Vec<String> {
    numbers.iter().map(|n| id(*n)).collect()
}

fn share(devices: impl IntoIterator<Item = Device>) -> Share {
    Share { devices: devices.into_iter().collect(), ..Share::default() }
}

/// Each on a root port of its own, in its own group: 1-3 on NUMA node 0, 4-8 on node 1.
fn flat() -> Share {
    share((1..=8).map(|n| gpu(n, (Some(u16::from(n > 3)), n, 0), n)))
}

/// NUMA node 0: switches of 1-4 and of 5, 6. Node 1: switches of 7, 8 and of 9-12.
fn switches() -> Share {
    let place = |n| match n {
        1..=4 => (Some(0), 1, 1),
        5..=6 => (Some(0), 2, 1),
        7..=8 => (Some(1), 3, 1),
        _ => (Some(1), 4, 1),
    };
    share((1..=12).map(|n| gpu(n, place(n), n)))
}

fn all(share: &Share) -> Vec<String> {
    share.devices.iter().map(|device| device.id.clone()).collect()
}

fn choose(share: &Share, size: usize) -> Vec<String> {
    prefer(share, &all(share), &[], size)
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
    let place = |n| (Some(0), 1, if n < 4 { 1 } else { 2 });
    let share = share((1..=5).map(|n| gpu(n, place(n), n)));
    assert_eq!(choose(&share, 2), ids(&[4, 5]));
    assert_eq!(choose(&share, 3), ids(&[1, 2, 3]));
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
fn only_available_devices_are_chosen() {
    assert_eq!(prefer(&flat(), &ids(&[2, 5]), &[], 2), ids(&[2, 5]));
}

#[test]
fn a_single_request_leaves_shared_groups_alone() {
    let mut share = flat();
    share.devices[1] = gpu(2, (Some(0), 1, 0), 1);
    assert_eq!(choose(&share, 1), ids(&[3]));
}

#[test]
fn a_request_of_two_takes_a_shared_group_before_two_singles() {
    let mut share = flat();
    share.devices[2] = gpu(3, (Some(0), 2, 0), 2);
    assert_eq!(choose(&share, 2), ids(&[2, 3]));
}

#[test]
fn an_included_device_brings_its_group() {
    let mut share = flat();
    share.devices[7] = gpu(8, (Some(0), 1, 0), 1);
    assert_eq!(prefer(&share, &all(&share), &ids(&[1]), 2), ids(&[1, 8]));
}

#[test]
fn fewer_are_chosen_where_the_rest_would_split_a_group() {
    let share =
        share([gpu(1, (None, 1, 0), 1), gpu(2, (None, 1, 0), 1), gpu(3, (None, 2, 0), 2), gpu(4, (None, 2, 0), 2)]);
    assert_eq!(choose(&share, 3), ids(&[1, 2]));
}

#[test]
fn a_host_without_numa_nodes_is_one_node() {
    let share = share((1..=8).map(|n| gpu(n, (None, n, 0), n)));
    assert_eq!(choose(&share, 5), ids(&[1, 2, 3, 4, 5]));
}

#[test]
fn a_group_that_reaches_into_another_resource_is_left_alone() {
    let mut share = flat();
    let other = super::super::device::Elsewhere { resource: "nvidia.com/A10".parse().unwrap(), id: id(99) };
    share.elsewhere.insert(1, other);
    assert_eq!(choose(&share, 1), ids(&[2]));
}

/// The score of a choice, counted from the devices themselves.
fn score(share: &Share, free: &BTreeSet<String>, choice: &BTreeSet<String>) -> Score {
    let mut below: BTreeMap<&str, u32> = BTreeMap::new();
    share.devices.iter().flat_map(|d| &d.path).for_each(|port| *below.entry(port).or_default() += 1);
    let numa = |d: &Device| format!("{:?}", d.numa_node);
    let port = |d: &Device| format!("{} {}", numa(d), d.path.first().unwrap_or(&d.id));
    let near = |d: &Device| format!("{} {}", port(d), switch(d, &below));
    let count = |level: &dyn Fn(&Device) -> String| {
        let mut places: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for device in share.devices.iter().filter(|device| free.contains(&device.id)) {
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
    let groups: BTreeSet<_> = share.devices.iter().filter(|d| choice.contains(&d.id)).map(|d| d.group).collect();
    Score {
        numa_nodes,
        root_ports,
        switches,
        units: groups.len() as u64,
        broken_switches,
        broken_root_ports,
        broken_numa_nodes,
    }
}

/// A machine of up to nine groups of one to three GPUs, what is taken of it already, and what must be included.
fn machines() -> impl Strategy<Value = (Share, Vec<String>, Vec<String>)> {
    let place = (prop::option::weighted(0.9, 0_u16..2), 1_u32..=2, 0_u32..=2);
    let size = prop_oneof![6 => Just(1_usize), 1 => Just(2), 1 => Just(3)];
    let groups = prop::collection::vec((place, size), 1..=9);
    let flags = || prop::collection::vec(prop::bool::weighted(0.15), 27);
    (groups, flags(), flags()).prop_map(|(groups, taken, must)| {
        let members = groups.into_iter().zip(1..).flat_map(|((place, size), group)| vec![(place, group); size]);
        let share = share(members.zip(1..).map(|((place, group), n)| gpu(n, place, group)));
        let free: Vec<_> =
            share.devices.iter().zip(taken).filter(|(_, taken)| !taken).map(|(d, _)| d.clone()).collect();
        let must = free.iter().zip(must).filter(|(_, must)| *must).map(|(d, _)| d.id.clone()).take(2).collect();
        (share, free.into_iter().map(|d| d.id).collect(), must)
    })
}

/// Every choice of whole groups with all of `must`, up to `size`.
fn every_choice(share: &Share, free: &BTreeSet<String>, must: &BTreeSet<String>, size: usize) -> Vec<BTreeSet<String>> {
    let mut groups: BTreeMap<Option<u32>, BTreeSet<String>> = BTreeMap::new();
    for device in &share.devices {
        groups.entry(device.group).or_default().insert(device.id.clone());
    }
    let whole: Vec<_> = groups.into_values().filter(|group| group.is_subset(free)).collect();
    let choices = (0_u32..1 << whole.len()).map(|bits| {
        let taken = whole.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1);
        taken.flat_map(|(_, group)| group.iter().cloned()).collect::<BTreeSet<_>>()
    });
    choices.filter(|choice| choice.len() <= size && must.is_subset(choice)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn no_choice_is_better_by_the_score((share, free, must) in machines(), size in 1_usize..=12) {
        prop_assume!(must.len() <= size);
        let choice: BTreeSet<String> = prefer(&share, &free, &must, size).into_iter().collect();
        let (free, must): (BTreeSet<_>, BTreeSet<_>) = (free.into_iter().collect(), must.into_iter().collect());
        let every = every_choice(&share, &free, &must, size);
        // Without any, what must be included splits a group.
        let Some(most) = every.iter().map(BTreeSet::len).max() else { return Ok(()) };
        // Of groups that are not free as a whole nothing can be had, so nothing of them is left either.
        let whole = every_choice(&share, &free, &BTreeSet::new(), usize::MAX).into_iter().flatten().collect();
        let best = every.iter().filter(|other| other.len() == most).map(|other| score(&share, &whole, other)).min();
        prop_assert_eq!(choice.len(), most);
        prop_assert_eq!(Some(score(&share, &whole, &choice)), best);
    }

    #[test]
    fn a_choice_is_of_what_is_free_holds_what_must_be_and_splits_no_group(
        (share, free, must) in machines(),
        size in 1_usize..=12,
        turn in 0_usize..12,
    ) {
        prop_assume!(must.len() <= size);
        let choice = prefer(&share, &free, &must, size);

        let mut turned = free.clone();
        turned.rotate_left(turn % free.len().max(1));
        prop_assert_eq!(&choice, &prefer(&share, &turned, &must, size));
        prop_assert!(choice.starts_with(&must));
        prop_assert!(choice.len() <= size);
        prop_assert!(choice.iter().all(|id| free.contains(id)));
        let distinct: BTreeSet<&String> = choice.iter().collect();
        prop_assert_eq!(distinct.len(), choice.len());
        for device in share.devices.iter().filter(|device| choice.contains(&device.id)) {
            let group = share.devices.iter().filter(|other| other.group == device.group);
            let asked = group.clone().any(|member| must.contains(&member.id));
            prop_assert!(asked || group.clone().all(|member| choice.contains(&member.id)), "{}", device.id);
        }
    }
}
