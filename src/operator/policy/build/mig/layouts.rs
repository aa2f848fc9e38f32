//! Named MIG layouts of the GPUs that have MIG, as users of NVIDIA's operator know them: `all-disabled`, `all-enabled`,
//! `all-PROFILE`, `all-balanced`.
//!
//! Profiles: NVIDIA's MIG user guide, "Supported MIG Profiles". Device ids: the PCI id list.

use std::{collections::BTreeMap, fmt::Write as _};

/// GPUs that are sliced alike.
struct Family {
    name: &'static str,
    /// PCI device ids.
    ids: &'static [u16],
    /// Profile, and how many of it one GPU has.
    profiles: &'static [(&'static str, u8)],
    /// One of each size.
    balanced: &'static [(&'static str, u8)],
}

const FAMILIES: &[Family] = &[
    Family {
        name: "A30 24GB",
        ids: &[0x20b7],
        profiles: &[("1g.6gb", 4), ("1g.6gb+me", 1), ("2g.12gb", 2), ("2g.12gb+me", 1), ("4g.24gb", 1)],
        balanced: &[("1g.6gb", 2), ("2g.12gb", 1)],
    },
    Family {
        name: "A100 40GB, A800 40GB",
        ids: &[0x20b0, 0x20f1, 0x20f6],
        profiles: &[
            ("1g.5gb", 7),
            ("1g.5gb+me", 1),
            ("1g.10gb", 4),
            ("2g.10gb", 3),
            ("3g.20gb", 2),
            ("4g.20gb", 1),
            ("7g.40gb", 1),
        ],
        balanced: &[("1g.5gb", 2), ("2g.10gb", 1), ("3g.20gb", 1)],
    },
    Family {
        name: "A100 80GB, A800 80GB, H100 80GB, H800 80GB",
        ids: &[0x20b2, 0x20b5, 0x20f3, 0x20f5, 0x2322, 0x2324, 0x2330, 0x2331],
        profiles: &[
            ("1g.10gb", 7),
            ("1g.10gb+me", 1),
            ("1g.20gb", 4),
            ("2g.20gb", 3),
            ("3g.40gb", 2),
            ("4g.40gb", 1),
            ("7g.80gb", 1),
        ],
        balanced: &[("1g.10gb", 2), ("2g.20gb", 1), ("3g.40gb", 1)],
    },
    Family {
        name: "H100 NVL 94GB",
        ids: &[0x2321],
        profiles: &[
            ("1g.12gb", 7),
            ("1g.12gb+me", 1),
            ("1g.24gb", 4),
            ("2g.24gb", 3),
            ("3g.47gb", 2),
            ("4g.47gb", 1),
            ("7g.94gb", 1),
        ],
        balanced: &[("1g.12gb", 2), ("2g.24gb", 1), ("3g.47gb", 1)],
    },
    Family {
        name: "GH200 96GB, H20 96GB",
        ids: &[0x2342, 0x2329],
        profiles: &[
            ("1g.12gb", 7),
            ("1g.12gb+me", 1),
            ("1g.24gb", 4),
            ("2g.24gb", 3),
            ("3g.48gb", 2),
            ("4g.48gb", 1),
            ("7g.96gb", 1),
        ],
        balanced: &[("1g.12gb", 2), ("2g.24gb", 1), ("3g.48gb", 1)],
    },
    Family {
        name: "H200 141GB, GH200 144GB",
        ids: &[0x2335, 0x233b, 0x2348],
        profiles: &[
            ("1g.18gb", 7),
            ("1g.18gb+me", 1),
            ("1g.35gb", 4),
            ("2g.35gb", 3),
            ("3g.71gb", 2),
            ("4g.71gb", 1),
            ("7g.141gb", 1),
        ],
        balanced: &[("1g.18gb", 2), ("2g.35gb", 1), ("3g.71gb", 1)],
    },
    Family {
        name: "B200 180GB",
        ids: &[0x2901],
        profiles: &[
            ("1g.23gb", 7),
            ("1g.23gb+me", 1),
            ("1g.45gb", 4),
            ("2g.45gb", 3),
            ("3g.90gb", 2),
            ("4g.90gb", 1),
            ("7g.180gb", 1),
        ],
        balanced: &[("1g.23gb", 2), ("2g.45gb", 1), ("3g.90gb", 1)],
    },
    Family {
        name: "GB200 186GB",
        ids: &[0x2941],
        profiles: &[
            ("1g.24gb", 7),
            ("1g.24gb+me", 1),
            ("1g.47gb", 4),
            ("2g.47gb", 3),
            ("3g.95gb", 2),
            ("4g.95gb", 1),
            ("7g.189gb", 1),
        ],
        balanced: &[("1g.24gb", 2), ("2g.47gb", 1), ("3g.95gb", 1)],
    },
];

/// In the format of NVIDIA's mig-parted, version v1.
pub(super) fn yaml() -> String {
    let mut text = String::from("version: v1\nmig-configs:\n");
    text.push_str("  all-disabled:\n    - devices: all\n      mig-enabled: false\n");
    text.push_str("  all-enabled:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {}\n");
    let mut by_profile: BTreeMap<&str, Vec<(&Family, u8)>> = BTreeMap::new();
    for family in FAMILIES {
        for (profile, count) in family.profiles {
            by_profile.entry(profile).or_default().push((family, *count));
        }
    }
    for (profile, families) in by_profile {
        // Labels have no plus sign: users know these as `all-1g.10gb.me`.
        layout(
            &mut text,
            &profile.replace("+me", ".me"),
            families.into_iter().map(|(f, count)| (f, vec![(profile, count)])),
        );
    }
    layout(&mut text, "balanced", FAMILIES.iter().map(|family| (family, family.balanced.to_vec())));
    text
}

fn layout<'a>(text: &mut String, name: &str, of: impl Iterator<Item = (&'a Family, Vec<(&'a str, u8)>)>) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  all-{name}:");
    for (family, devices) in of {
        let ids: Vec<String> = family.ids.iter().map(|id| format!("\"0x{id:04X}10DE\"")).collect();
        let _ = writeln!(text, "    # {}", family.name);
        let _ = writeln!(text, "    - device-filter: [{}]", ids.join(", "));
        text.push_str("      devices: all\n      mig-enabled: true\n      mig-devices:\n");
        for (profile, count) in devices {
            let _ = writeln!(text, "        \"{profile}\": {count}");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_layouts_are_yaml_with_the_names_that_users_know() {
        let parsed: Value = serde_saphyr::from_str(&yaml()).expect("YAML");
        let configs = parsed["mig-configs"].as_object().expect("layouts");
        for name in ["all-disabled", "all-enabled", "all-1g.5gb", "all-1g.10gb", "all-1g.10gb.me", "all-balanced"] {
            assert!(configs.contains_key(name), "{name}");
        }
        assert_eq!(configs["all-1g.10gb"].as_array().map(Vec::len), Some(2), "A100 40GB has fewer of them");
    }

    #[test]
    fn every_device_id_is_the_product_that_its_family_names() {
        for family in FAMILIES {
            for id in family.ids {
                let device = pci_ids::Device::from_vid_pid(0x10de, *id);
                let name = device.unwrap_or_else(|| panic!("{id:04x} of {} is no device", family.name)).name();
                let product = |part: &str| name.contains(part.split(' ').next().unwrap_or(part));
                assert!(family.name.split(", ").any(product), "{id:04x} is {name}, not {}", family.name);
            }
        }
    }

    #[test]
    fn no_layout_wants_more_than_seven_slices() {
        let slices = |profile: &str| profile.split('g').next().and_then(|n| n.parse::<u32>().ok()).expect("slices");
        for family in FAMILIES {
            let balanced: u32 = family.balanced.iter().map(|(p, count)| slices(p) * u32::from(*count)).sum();
            assert!(balanced <= 7, "{}", family.name);
            assert!(
                family.balanced.iter().all(|(p, _)| family.profiles.iter().any(|(q, _)| p == q)),
                "{}",
                family.name
            );
        }
    }
}
