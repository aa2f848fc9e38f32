//! What a function offers of NVIDIA's two vGPU frameworks. Looked for, not looked up: which of them a driver has depends on
//! its version, the kernel and the card.
//!
//! - *mdev*: `/sys/class/mdev_bus/<address>` is there, and `mdev_supported_types/<id>` describes each type
//!   (`Documentation/driver-api/vfio-mediated-device.rst`).
//! - *vendor VFIO*: a virtual function has `nvidia/current_vgpu_type` and `nvidia/creatable_vgpu_types` (vGPU 17, Linux 6.8).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::address::PciAddress;
use crate::host::{self, Host};

mod apply;
mod framework;
mod instances;
mod library;
mod mig;
mod offers;
mod plan;
mod refusal;
mod sriov;
mod types;
mod uuid;

pub use apply::{ApplyError, Asked, View, apply};
pub use framework::{Framework, NoVgpu, framework};
pub(crate) use instances::nodes;
pub use instances::{TypeNames, Vgpu, listed_names, parents, part_ids, vgpu_holders, vgpus};
pub use library::{
    ActiveVgpu, GpuFacts, Library, LibraryFacts, MigAct, MigInstance, MigKind, MigMode, MigProfile, NoLibrary, Silence,
    SilenceReason,
};
pub use plan::{Layout, VgpuStep, VgpuWorld, leave, plan};
pub use refusal::VgpuRefusal;
pub use types::{Shape, kind, mig_profile, shape};

/// Functions that can have mediated devices, one link each.
pub(crate) const MDEV_PARENTS: &str = "/sys/class/mdev_bus";
/// Mediated devices that exist, one link each, named by their UUID.
pub(crate) const MDEVS: &str = "/sys/bus/mdev/devices";

/// How a function makes vGPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum VgpuParent {
    /// A UUID is written to `create` of a type.
    Mdev {
        /// All that the driver knows for this function, also those of which none can be made now; by number.
        types: Vec<MdevType>,
    },
    /// The number of a type is written to `current_vgpu_type` of the virtual function.
    VendorVfio {
        /// Number of the type that it is now; `None`: it is no vGPU.
        current: Option<u32>,
        /// Types that it could become now; empty where it is one, or where the GPU has no room.
        creatable: Vec<VgpuType>,
    },
}

/// A directory of `mdev_supported_types`, as the kernel gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MdevType {
    /// The directory, e.g. `nvidia-746`: it differs between drivers for the same type.
    pub id: String,
    /// E.g. `NVIDIA A2-4Q`; not every vendor gives one.
    pub name: Option<String>,
    /// E.g. `num_heads=4, frl_config=60, framebuffer=4096M, …`; not every vendor gives one.
    pub description: Option<String>,
    /// How many more can be made now.
    pub available_instances: u32,
    /// E.g. `vfio-pci`.
    pub device_api: String,
}

impl MdevType {
    /// Its name, or its directory where it has none.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }

    /// `max_instance` of the description: how many of it a whole GPU holds.
    pub fn max_instances(&self) -> Option<u32> {
        let mut fields = self.description.as_deref()?.split([',', ' ', '\n']);
        fields.find_map(|field| field.strip_prefix("max_instance="))?.parse().ok()
    }
}

/// A line of `creatable_vgpu_types`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VgpuType {
    /// What is written to `current_vgpu_type`; it differs between drivers for the same type.
    pub id: u32,
    /// E.g. `NVIDIA L40S-24Q`.
    pub name: String,
}

/// A mediated device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mdev {
    /// The function that it is made from; `None` where that is no PCI function.
    pub parent: Option<PciAddress>,
    /// E.g. `nvidia-746`.
    pub type_id: Option<String>,
    /// Its own: `/dev/vfio/<group>` is what a VM opens.
    pub iommu_group: Option<u32>,
    /// Name in `/dev/vfio/devices` (`vfioN`, Linux 6.2 and newer).
    pub vfio_dev: Option<String>,
}

/// Addresses of functions that can have mediated devices.
pub(crate) fn mdev_parents(host: &impl Host) -> BTreeSet<PciAddress> {
    let names = host.list(Path::new(MDEV_PARENTS)).unwrap_or_default();
    names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect()
}

pub(crate) fn mdevs(host: &impl Host) -> io::Result<BTreeMap<String, Mdev>> {
    let names = host::optional(host.list(Path::new(MDEVS)))?.unwrap_or_default();
    let mdev = |name: &std::ffi::OsString| {
        let dir = Path::new(MDEVS).join(name);
        // …/0000:08:00.0/0000:08:00.4/f715f63c-…: the parent in the device tree.
        let parent = host.link(&dir).ok().and_then(|target| target.parent()?.file_name()?.to_str()?.parse().ok());
        let link = |what| host::link_name(host, &dir.join(what)).ok();
        let iommu_group = link("iommu_group").and_then(|name| name.parse().ok());
        let nodes = host.list(&dir.join("vfio-dev")).unwrap_or_default();
        let vfio_dev = nodes.first().and_then(|name| name.to_str()).map(str::to_owned);
        (name.to_string_lossy().into_owned(), Mdev { parent, type_id: link("mdev_type"), iommu_group, vfio_dev })
    };
    Ok(names.iter().map(mdev).collect())
}

/// Of a function that is among the [`mdev_parents`].
pub(crate) fn mdev(host: &impl Host, function: &Path) -> io::Result<Option<VgpuParent>> {
    let dir = function.join("mdev_supported_types");
    let mut types = Vec::new();
    for name in host.list(&dir)? {
        let text = |file| host::text(host, &dir.join(&name).join(file));
        let available = text("available_instances")?;
        types.push(MdevType {
            name: host::optional(text("name"))?,
            description: host::optional(text("description"))?.map(|text| text.trim_end().to_owned()),
            available_instances: available
                .trim()
                .parse()
                .map_err(|_| not_understood("available_instances", &available))?,
            device_api: text("device_api")?,
            id: name.to_string_lossy().into_owned(),
        });
    }
    // By number, as `mdevctl` and people do: `nvidia-9` before `nvidia-10`.
    types.sort_by_key(|kind| (kind.id.len(), kind.id.clone()));
    Ok(Some(VgpuParent::Mdev { types }))
}

/// Of a virtual function of NVIDIA; `None` where its driver does not have this framework.
pub(crate) fn vendor_vfio(host: &impl Host, function: &Path) -> io::Result<Option<VgpuParent>> {
    let dir: PathBuf = function.join("nvidia");
    let Some(current) = host::optional(host::text(host, &dir.join("current_vgpu_type")))? else { return Ok(None) };
    let current: u32 = current.trim().parse().map_err(|_| not_understood("current_vgpu_type", &current))?;
    let table = host::text(host, &dir.join("creatable_vgpu_types"))?;
    Ok(Some(VgpuParent::VendorVfio { current: Some(current).filter(|id| *id != 0), creatable: creatable(&table) }))
}

/// `ID    : vGPU Name`, then a line such as `1155  : NVIDIA L40S-24Q` for each type.
fn creatable(table: &str) -> Vec<VgpuType> {
    let line = |line: &str| {
        let (id, name) = line.split_once(':')?;
        Some(VgpuType { id: id.trim().parse().ok()?, name: name.trim().to_owned() })
    };
    table.lines().filter_map(line).collect()
}

fn not_understood(attribute: &str, text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{attribute} `{text}` is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_of_the_table_is_no_type_and_an_empty_table_has_none() {
        let table = "ID    : vGPU Name\n1155  : NVIDIA L40S-24Q\n2164  : NVIDIA L40S-3B\n";
        let ids: Vec<_> = creatable(table).into_iter().map(|kind| (kind.id, kind.name)).collect();
        assert_eq!(ids, [(1155, "NVIDIA L40S-24Q".to_owned()), (2164, "NVIDIA L40S-3B".to_owned())]);
        assert_eq!(creatable("ID    : vGPU Name\n"), []);
        assert_eq!(creatable(""), []);
    }
}
