//! What the kernel says about the IOMMU and its groups.
//!
//! A group is the smallest set of devices that the IOMMU can keep apart from the rest, so it goes to a VM as a whole
//! (`Documentation/driver-api/vfio.rst`). Its members are listed in `/sys/kernel/iommu_groups/<n>/devices`; that list is
//! also right when a member itself cannot be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::host::{self, Host};

/// Where the kernel lists its IOMMU groups; empty or absent when no IOMMU is in use.
pub const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Names of the devices of each group. They need not be PCI functions.
pub(crate) fn groups(host: &impl Host) -> io::Result<BTreeMap<u32, BTreeSet<String>>> {
    let mut groups = BTreeMap::new();
    for name in host::optional(host.list(Path::new(GROUPS)))?.unwrap_or_default() {
        let Some(number) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // One that has gone meanwhile is none any more.
        let Some(devices) = host::optional(host.list(&PathBuf::from(GROUPS).join(&name).join("devices")))? else {
            continue;
        };
        groups.insert(number, devices.iter().map(|device| device.to_string_lossy().into_owned()).collect());
    }
    Ok(groups)
}

/// Whether `group` can be opened: a node `/dev/vfio/<group>` appears with the first member bound to a VFIO driver.
pub(crate) fn open_nodes(host: &impl Host) -> BTreeSet<u32> {
    let names = host.list(Path::new("/dev/vfio")).unwrap_or_default();
    names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect()
}

/// A range of bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Region {
    /// Its first byte.
    pub first: u64,
    /// Its last byte.
    pub last: u64,
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.first, self.last)
    }
}

/// What the kernel says of a group's memory; it takes the group's lock.
pub(crate) fn reserved_regions(group: u32) -> PathBuf {
    PathBuf::from(GROUPS).join(group.to_string()).join("reserved_regions")
}

/// Memory that firmware uses through a device of the group (Intel RMRR, AMD IVMD): lines of type `direct` in
/// `reserved_regions` (`Documentation/ABI/testing/sysfs-kernel-iommu_groups`). The kernel gives such a device to no VM
/// (`iommu_group_claim_dma_owner`, `require_direct`); `direct-relaxable` (graphics, USB) and `msi` are no obstacle.
pub(crate) fn firmware_memory(host: &impl Host, reserved_regions: &Path) -> io::Result<Vec<Region>> {
    let text = host::optional(host::text(host, reserved_regions))?.unwrap_or_default();
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let region = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (first, last) = (number(words.next()?)?, number(words.next()?)?);
        (words.next()? == "direct").then_some(Region { first, last })
    };
    Ok(text.lines().filter_map(region).collect())
}

/// Whether a port keeps the devices behind it apart (`PCIe` Access Control Services).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Acs {
    /// It cannot.
    Missing,
    /// It could; some of what the kernel asks for is switched off.
    Off,
    /// It does.
    On,
}

/// Reads the configuration space of a port; `None` where only its first part may be read, as without `CAP_SYS_ADMIN`.
///
/// The four bits are what the kernel asks for before it makes groups (`REQ_ACS_FLAGS`, `drivers/iommu/iommu.c`):
/// source validation, request and completion redirect, upstream forwarding.
pub(crate) fn acs(config: &[u8]) -> Option<Acs> {
    const EXTENDED: usize = 0x100;
    const CAPABILITY: u32 = 0x000d;
    const WANTED: u16 = 0x1d;
    if config.len() < 0x1000 {
        // 256 bytes: all that a conventional bridge has.
        return (config.len() == EXTENDED).then_some(Acs::Missing);
    }
    let mut at = EXTENDED;
    // The list is linked; a broken one may be a circle.
    for _ in 0..64 {
        let header = u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?);
        if header & 0xffff == CAPABILITY {
            let control = u16::from_le_bytes(config.get(at + 6..at + 8)?.try_into().ok()?);
            return Some(if control & WANTED == WANTED { Acs::On } else { Acs::Off });
        }
        at = (header >> 20) as usize;
        if at < EXTENDED {
            return Some(Acs::Missing);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(capabilities: &[(usize, u32, u16)]) -> Vec<u8> {
        let mut config = vec![0; 0x1000];
        for (at, header, control) in capabilities {
            config[*at..*at + 4].copy_from_slice(&header.to_le_bytes());
            config[*at + 6..*at + 8].copy_from_slice(&control.to_le_bytes());
        }
        config
    }

    #[test]
    fn acs_is_found_behind_other_capabilities() {
        let with = |control| acs(&port(&[(0x100, 0x1481_0001, 0), (0x148, 0x0001_000d, control)]));
        assert_eq!(with(0x1d), Some(Acs::On));
        assert_eq!(with(0x05), Some(Acs::Off));
        assert_eq!(acs(&port(&[(0x100, 0x0001_0001, 0)])), Some(Acs::Missing));
    }

    #[test]
    fn what_may_not_be_read_is_not_known() {
        assert_eq!(acs(&[0; 64]), None);
        assert_eq!(acs(&[]), None);
        assert_eq!(acs(&[0; 256]), Some(Acs::Missing));
        let circle = port(&[(0x100, 0x1001_0001, 0)]);
        assert_eq!(acs(&circle), None);
    }
}
