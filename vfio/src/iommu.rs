//! What the kernel says about the IOMMU and its groups.
//!
//! A group is the smallest set of devices that the IOMMU can keep apart from the rest, so it goes to a VM as a whole
//! (`Documentation/driver-api/vfio.rst`). Its members are listed in `/sys/kernel/iommu_groups/<n>/devices`; that list is
//! also right when a member itself cannot be read.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::host::{self, Host};

/// Where the kernel lists its IOMMU groups; empty or absent when no IOMMU is in use.
pub const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Names of the devices of each group. They need not be PCI functions.
pub(crate) fn groups(host: &impl Host) -> io::Result<BTreeMap<u32, BTreeSet<String>>> {
    let mut groups = BTreeMap::new();
    for name in host::optional(host.list(Path::new(GROUPS)))?.unwrap_or_default() {
        let Some(number) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let devices = host.list(&PathBuf::from(GROUPS).join(&name).join("devices"))?;
        groups.insert(number, devices.iter().map(|device| device.to_string_lossy().into_owned()).collect());
    }
    Ok(groups)
}

/// Whether `group` can be opened: a node `/dev/vfio/<group>` appears with the first member bound to a VFIO driver.
pub(crate) fn open_nodes(host: &impl Host) -> BTreeSet<u32> {
    let names = host.list(Path::new("/dev/vfio")).unwrap_or_default();
    names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect()
}
