//! UUIDs that are the same after a reboot.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::address::PciAddress;

/// Of all vGPUs that are made here.
const NAMESPACE: Uuid = Uuid::from_u128(0x6770_7576_6972_7456_9047_5055_0000_0001);

/// The first of its kind that is not taken, and takes it: version 5 (RFC 9562) of node, parent, type and a count.
pub(super) fn next(node: &str, parent: PciAddress, kind: &str, taken: &mut BTreeSet<String>) -> String {
    let nth = |index: u32| Uuid::new_v5(&NAMESPACE, format!("{node}/{parent}/{kind}/{index}").as_bytes()).to_string();
    let free = (0..=u32::MAX).map(nth).find(|uuid| !taken.contains(uuid));
    let uuid = free.expect("a parent should have fewer vGPUs than there are numbers");
    taken.insert(uuid.clone());
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_place_has_the_same_uuids_and_no_two_places_share_one() {
        let parent = "0000:08:00.4".parse().unwrap();
        let two = |node: &str, kind: &str| {
            let mut taken = BTreeSet::new();
            [next(node, parent, kind, &mut taken), next(node, parent, kind, &mut taken)]
        };
        assert_eq!(two("node-1", "A2-4Q"), two("node-1", "A2-4Q"));
        let all: BTreeSet<String> =
            [two("node-1", "A2-4Q"), two("node-2", "A2-4Q"), two("node-1", "A2-4C")].into_iter().flatten().collect();
        assert_eq!(all.len(), 6);
        assert_eq!(two("node-1", "A2-4Q")[0], "5720bb8b-71da-58ee-ba49-7e2a8cff5df9");
    }
}
