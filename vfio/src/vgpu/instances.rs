//! The vGPUs that exist, and who has them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::types::kind;
use super::{MdevType, VgpuParent};
use crate::address::PciAddress;
use crate::function::Function;
use crate::holder::{Holder, HolderKind};
use crate::inventory::Inventory;

/// Numbers of the vendor's own framework with their names. A function lists only what it could become, so the name of what
/// it is now has to be remembered from when it was listed.
pub type TypeNames = BTreeMap<u32, String>;

/// A vGPU that exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Vgpu {
    /// UUID of the mediated device, or address of the virtual function: what a VM is given.
    pub id: String,
    /// The kernel's name of its type; `None`: nobody has listed its number since boot.
    pub name: Option<String>,
    /// The function that it is made from: the GPU, or a virtual function of it.
    pub parent: PciAddress,
    /// `/dev/vfio/<group>` is what a VM opens.
    pub iommu_group: Option<u32>,
    /// Name in `/dev/vfio/devices`, which a VM opens where the host has iommufd.
    pub vfio_dev: Option<String>,
    /// Whether it is a mediated device.
    pub mediated: bool,
}

impl Vgpu {
    /// As config files name its type.
    pub fn kind(&self) -> Option<&str> {
        self.name.as_deref().map(kind)
    }
}

/// The functions that vGPUs of a GPU are made from, the GPU itself among them, by number.
pub fn parents(inventory: &Inventory, gpu: PciAddress) -> impl Iterator<Item = &Function> {
    inventory.functions.values().filter(move |f| f.address == gpu || f.physfn == Some(gpu))
}

/// The vGPUs of a GPU, by parent and id.
pub fn vgpus(inventory: &Inventory, gpu: PciAddress, names: &TypeNames) -> Vec<Vgpu> {
    let mut found = Vec::new();
    for function in parents(inventory, gpu) {
        match &function.vgpu {
            Some(VgpuParent::Mdev { types }) => found.extend(mdevs(inventory, function, types)),
            Some(VgpuParent::VendorVfio { current: Some(number), .. }) => found.push(Vgpu {
                id: function.address.to_string(),
                name: names.get(number).cloned(),
                parent: function.address,
                iommu_group: function.iommu_group,
                vfio_dev: function.vfio_dev.clone(),
                mediated: false,
            }),
            Some(VgpuParent::VendorVfio { current: None, .. }) | None => {}
        }
    }
    found
}

fn mdevs<'a>(
    inventory: &'a Inventory,
    function: &'a Function,
    types: &'a [MdevType],
) -> impl Iterator<Item = Vgpu> + use<'a> {
    let parent = function.address;
    let own = inventory.mdevs.iter().filter(move |(_, mdev)| mdev.parent == Some(parent));
    own.map(move |(uuid, mdev)| Vgpu {
        id: uuid.clone(),
        name: mdev.type_id.as_ref().map(|id| match types.iter().find(|kind| kind.id == *id) {
            Some(kind) => kind.name().to_owned(),
            None => id.clone(),
        }),
        parent,
        iommu_group: mdev.iommu_group,
        vfio_dev: mdev.vfio_dev.clone(),
        mediated: true,
    })
}

/// What the functions of a host list now.
pub fn listed_names(inventory: &Inventory) -> TypeNames {
    let lists = inventory.functions.values().filter_map(|function| match &function.vgpu {
        Some(VgpuParent::VendorVfio { creatable, .. }) => Some(creatable),
        Some(VgpuParent::Mdev { .. }) | None => None,
    });
    lists.flatten().map(|kind| (kind.id, kind.name.clone())).collect()
}

/// Who has each mediated device and each virtual function of a host, by the id that a VM knows it by: told from the device
/// node that is open. A process whose files cannot be read could have any of the GPUs that it is named for.
pub fn vgpu_holders(inventory: &Inventory, held: &BTreeMap<PciAddress, Vec<Holder>>) -> BTreeMap<String, Vec<Holder>> {
    let mut found = BTreeMap::new();
    for (gpu, holders) in held {
        for (id, nodes) in nodes(inventory, *gpu) {
            let has = |holder: &&Holder| holder.kind() == HolderKind::Unseen || nodes.contains(&holder.path);
            let holders: Vec<Holder> = holders.iter().filter(has).cloned().collect();
            if !holders.is_empty() {
                found.insert(id, holders);
            }
        }
    }
    found
}

/// Ids of what a VM may have of a GPU instead of all of it, whether it is a vGPU now or not.
pub fn part_ids(inventory: &Inventory, gpu: PciAddress) -> Vec<String> {
    nodes(inventory, gpu).into_iter().map(|(id, _)| id).collect()
}

/// Device nodes of what a VM may have of a GPU instead of all of it.
pub(crate) fn nodes(inventory: &Inventory, gpu: PciAddress) -> Vec<(String, Vec<PathBuf>)> {
    let paths = |group: Option<u32>, device: Option<&String>| {
        let group = group.map(|group| PathBuf::from(format!("/dev/vfio/{group}")));
        let device = device.map(|name| Path::new("/dev/vfio/devices").join(name));
        group.into_iter().chain(device).collect::<Vec<_>>()
    };
    let mut nodes = Vec::new();
    for function in parents(inventory, gpu) {
        if function.is_vf() {
            nodes.push((function.address.to_string(), paths(function.iommu_group, function.vfio_dev.as_ref())));
        }
        let own = inventory.mdevs.iter().filter(|(_, mdev)| mdev.parent == Some(function.address));
        nodes.extend(own.map(|(uuid, mdev)| (uuid.clone(), paths(mdev.iommu_group, mdev.vfio_dev.as_ref()))));
    }
    nodes
}
