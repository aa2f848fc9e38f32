//! The layouts that there are without a ConfigMap of the user's: `default`, and one a type, as `A10-4Q`. Pure.
//!
//! Names are those that users of NVIDIA's operator know. Each entry names its boards, so a GPU that two boards share the
//! device id with gets the types of its own, and a node with several models may be given a layout of one of them.

use std::{collections::BTreeMap, fmt::Write as _};

use crds::v1alpha1::GPUStatus;

use super::{
    boards::{BOARDS, Board},
    filter::{Filter, Id},
};

const NVIDIA: u16 = 0x10de;

/// Layout of nodes that name none.
pub const USUAL: &str = "default";

/// In the format of NVIDIA's vgpu-device-manager, version v1.
pub fn yaml() -> String {
    let mut text = String::from("version: v1\nvgpu-configs:\n");
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  {USUAL}:");
    for board in BOARDS {
        let products: Vec<&str> = board.ids.iter().map(|(_, product)| *product).collect();
        let _ = writeln!(text, "    # {}, {} GB", products.join(", "), board.memory);
        entry(&mut text, board, board.usual);
    }
    let mut layouts: BTreeMap<String, Vec<(&Board, u8)>> = BTreeMap::new();
    for board in BOARDS {
        for (size, count) in board.sizes {
            layouts.entry(name(board, size)).or_default().push((board, *count));
        }
    }
    for (name, boards) in layouts {
        let _ = writeln!(text, "  {name}:");
        for (board, count) in boards {
            let size = &name[board.family.len() + 1..];
            entry(&mut text, board, (size, count));
        }
    }
    text
}

/// Whether it is a board that has this type, as far as they are known here.
pub fn makes(gpu: &GPUStatus, kind: &str) -> bool {
    BOARDS.iter().any(|board| {
        let has = || board.sizes.iter().any(|(size, _)| name(board, size) == kind);
        filters(board).any(|filter| filter.matches(gpu)) && has()
    })
}

fn filters(board: &Board) -> impl Iterator<Item = Filter> {
    let subsystem = board.subsystem.map(|device| Id { vendor: NVIDIA, device });
    board.ids.iter().map(move |(device, _)| Filter { id: Id { vendor: NVIDIA, device: *device }, subsystem })
}

fn name(board: &Board, size: &str) -> String {
    format!("{}-{size}", board.family)
}

fn entry(text: &mut String, board: &Board, (size, count): (&str, u8)) {
    let filters: Vec<String> = filters(board).map(|filter| format!("\"{filter}\"")).collect();
    let filters = match filters.as_slice() {
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    };
    let _ = writeln!(text, "    - device-filter: {filters}");
    let _ = writeln!(text, "      devices: all\n      vgpu-devices: {{{}: {count}}}", name(board, size));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::vgpu::{
        config::{Config, Devices, Entry},
        kind::{Backing, VgpuType},
    };

    fn config() -> Config {
        Config::parse(&yaml()).expect("our own layouts")
    }

    fn gpu(board: &Board, id: u16) -> GPUStatus {
        GPUStatus {
            id: format!("10de:{id:04x}"),
            subsystem: Some(format!("10de:{:04x}", board.subsystem.unwrap_or_default())),
            ..GPUStatus::default()
        }
    }

    /// What a layout gives a GPU: at most one entry may want it.
    fn given<'a>(layout: &'a [Entry], gpu: &GPUStatus) -> Option<&'a Entry> {
        let mut of = layout.iter().filter(|entry| entry.filters.iter().any(|filter| filter.matches(gpu)));
        let first = of.next();
        assert_eq!(of.next(), None, "{} is claimed twice", gpu.id);
        first
    }

    #[test]
    fn every_board_gets_its_own_usual_type_and_only_that() {
        let config = config();
        let usual = config.layout(USUAL).expect("the usual layout");
        for board in BOARDS {
            for (id, product) in board.ids {
                let entry = given(usual, &gpu(board, *id)).unwrap_or_else(|| panic!("{product} gets nothing"));
                let expected = (name(board, board.usual.0), u32::from(board.usual.1));
                let found = entry.instances.iter().map(|(kind, count)| (kind.to_string(), *count));
                assert_eq!(found.collect::<Vec<_>>(), [expected], "{product}");
                assert_eq!(entry.devices, Devices::All);
            }
        }
    }

    #[test]
    fn every_type_of_a_board_is_a_layout_with_the_count_that_fits_on_it() {
        let config = config();
        for board in BOARDS {
            for (size, count) in board.sizes {
                let name = name(board, size);
                let layout = config.layout(&name).unwrap_or_else(|| panic!("no layout {name}"));
                let entry = given(layout, &gpu(board, board.ids[0].0)).expect("an entry of the board");
                assert_eq!(entry.instances, [(name.parse().expect("a type"), u32::from(*count))], "{name}");
            }
        }
        assert_eq!(config.names().count(), 711, "those that users know, and `default`");
    }

    #[test]
    fn two_sizes_of_one_family_are_told_apart() {
        let config = config();
        let layout = config.layout("DC-16Q").expect("a layout");
        let counts: Vec<u32> = layout.iter().map(|entry| entry.instances[0].1).collect();
        assert_eq!(counts, [6, 2], "96 GB and 32 GB");
        assert_eq!(config.layout("DC-48Q").map(<[Entry]>::len), Some(1), "48 GB are on the larger one only");
    }

    #[test]
    fn no_layout_wants_more_memory_than_a_board_has() {
        for board in BOARDS {
            for (size, count) in board.sizes {
                let kind: VgpuType = name(board, size).parse().expect("a type");
                let last = size.rsplit('-').next().expect("a last part");
                let memory: u32 = last.trim_end_matches(char::is_alphabetic).parse().expect("GB");
                // Names of MIG profiles are rounded up.
                let rounded = match kind.backing() {
                    Backing::Time => 0,
                    Backing::Mig => u32::from(*count),
                };
                let wanted = memory * u32::from(*count) - rounded;
                assert!(wanted <= board.memory, "{kind}: {count} on {} GB", board.memory);
            }
            assert!(board.sizes.iter().any(|(size, count)| *size == board.usual.0 && *count >= board.usual.1));
        }
    }

    #[test]
    fn every_device_id_is_the_product_that_stands_beside_it() {
        for (id, product) in BOARDS.iter().flat_map(|board| board.ids) {
            // Some are too new for the table, or two boards share an entry there.
            let Some(device) = pci_ids::Device::from_vid_pid(NVIDIA, *id) else { continue };
            let all_words = product.split(' ').all(|word| device.name().contains(word));
            assert!(all_words, "{id:04x} is {}, not {product}", device.name());
        }
    }
}
