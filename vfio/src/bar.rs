//! The memory of a PCI function.
//!
//! `resource` has a line for each region: first and last address, and flags (`resource_show`, `drivers/pci/pci-sysfs.c`);
//! the first six are the base address registers. Flags are those of `include/linux/ioport.h`.

use serde::Serialize;

const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_UNSET: u64 = 0x2000_0000;

/// One base address register that is memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bar {
    /// 0-5; one of 64 bits takes two numbers.
    pub index: u8,
    /// In bytes; 0 where the kernel has given it up.
    pub size: u64,
    /// Whether it has a place in the address space, without which nobody can use it.
    pub assigned: bool,
}

/// Registers of memory in the text of `resource`, and register 0 in any case: every GPU has one, and a kernel that found
/// no room for it may have wiped its line (`reset_resource`, `drivers/pci/setup-bus.c`).
pub(crate) fn parse(text: &str) -> Vec<Bar> {
    let bar = |(index, line): (u8, &str)| {
        let mut numbers =
            line.split_ascii_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
        let (Some(Ok(start)), Some(Ok(end)), Some(Ok(flags))) = (numbers.next(), numbers.next(), numbers.next()) else {
            return None;
        };
        let memory = flags & IORESOURCE_MEM != 0;
        let size = if memory && end > start { (end - start).saturating_add(1) } else { 0 };
        let assigned = start != 0 && flags & IORESOURCE_UNSET == 0;
        (memory || index == 0).then_some(Bar { index, size, assigned })
    };
    (0..6).zip(text.lines()).filter_map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const T4: &str = "0x00000000b7000000 0x00000000b7ffffff 0x0000000000040200\n\
        0x000003a000000000 0x000003a00fffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x000003a020000000 0x000003a021ffffff 0x000000000014220c\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000000000000000 0x000000000000007f 0x0000000020040101\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";

    #[test]
    fn memory_is_listed_with_its_size_and_ports_are_not() {
        let bar = |index, size| Bar { index, size, assigned: true };
        assert_eq!(parse(T4), [bar(0, 16 << 20), bar(1, 256 << 20), bar(3, 32 << 20)]);
    }

    #[test]
    fn memory_without_a_place_is_unassigned_in_both_spellings() {
        let unset = "0x0000000000000000 0x00000007ffffffff 0x000000002014220c";
        let zero = "0x0000000000000000 0x0000000000000000 0x0000000000000000";
        assert_eq!(
            parse(&format!("{zero}\n{unset}\n")),
            [Bar { index: 0, size: 0, assigned: false }, Bar { index: 1, size: 32 << 30, assigned: false }]
        );
    }

    #[test]
    fn what_is_no_table_has_no_memory() {
        assert_eq!(parse(""), []);
        assert_eq!(parse("garbage\n"), []);
    }
}
