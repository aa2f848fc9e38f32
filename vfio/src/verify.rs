//! What still differs from a binding. Pure; looked at after the act, on a fresh inventory.

use serde::Serialize;

use crate::address::PciAddress;
use crate::driver;
use crate::inventory::{Function, Inventory};
use crate::plan::Binding;

/// One difference.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum Deviation {
    /// There is no GPU at that address (any more).
    #[error("{gpu} is no GPU of this host")]
    Gone { gpu: PciAddress },
    /// A function of the group is on another driver than its VFIO driver, or on none.
    #[error("{address} is on {}, expected {expected}", driver.as_deref().unwrap_or("no driver"))]
    NotOnVfio { address: PciAddress, driver: Option<String>, expected: String },
    /// A function was to go back to the host and is on a VFIO driver.
    #[error("{address} is still on {driver}")]
    StillOnVfio { address: PciAddress, driver: String },
    /// Its `driver_override` still names a VFIO driver, so no other takes it.
    #[error("{address} is on no driver and reserved for {driver}: no driver of the host can take it")]
    StillReserved { address: PciAddress, driver: String },
    /// Without a group nobody can open it through VFIO.
    #[error("gpu {gpu} is in no IOMMU group")]
    NoGroup { gpu: PciAddress },
    /// A member keeps the group from being opened (`vfio_dev_viable`, since Linux 5.19 `iommu_group_claim_dma_owner`).
    #[error(
        "{name} is in IOMMU group {group} of gpu {gpu}, on a driver of the host or not readable: no VM can open the group"
    )]
    GroupNotViable { gpu: PciAddress, group: u32, name: String },
    /// `direct` lines in `reserved_regions` (`require_direct`, `drivers/iommu/iommu.c`).
    #[error("firmware uses memory through a device of IOMMU group {group} of gpu {gpu}: the kernel gives it to no VM")]
    FirmwareMemory { gpu: PciAddress, group: u32 },
    /// No device node that a VM could be given.
    #[error("gpu {gpu}: neither /dev/vfio/{group} nor a node in /dev/vfio/devices is there")]
    NoNode { gpu: PciAddress, group: u32 },
}

/// Differences between a host and a binding of one GPU with its group. Empty: it is so.
pub fn deviations(inventory: &Inventory, gpu: PciAddress, binding: Binding) -> Vec<Deviation> {
    let Some(described) = inventory.gpu(gpu) else { return vec![Deviation::Gone { gpu }] };
    let unit: Vec<&Function> = described.companions.iter().copied().chain([described.primary]).collect();
    match binding {
        Binding::Host => unit.into_iter().filter_map(host_deviation).collect(),
        Binding::Vfio => {
            let others = described.shares_group_with.iter().filter_map(|address| inventory.functions.get(address));
            let unbound = unit.into_iter().chain(others).filter(|function| !function.on_vfio());
            let mut found: Vec<_> = unbound
                .map(|function| Deviation::NotOnVfio {
                    address: function.address,
                    driver: function.driver.clone(),
                    expected: inventory.vfio_driver(function).name,
                })
                .collect();
            let Some(group) = described.group else {
                found.push(Deviation::NoGroup { gpu });
                return found;
            };
            let foreign = described.foreign.iter().filter(|function| function.driver.is_some() && !function.on_vfio());
            let foreign = foreign.map(|function| function.address.to_string());
            let unknown = inventory.unknown_members(group).into_iter().map(str::to_owned);
            found.extend(foreign.chain(unknown).map(|name| Deviation::GroupNotViable { gpu, group, name }));
            if inventory.firmware_memory.contains_key(&group) {
                found.push(Deviation::FirmwareMemory { gpu, group });
            }
            let device_node = described.primary.vfio_dev.as_ref();
            let openable = inventory.facts.vfio_groups.contains(&group)
                || device_node.is_some_and(|name| inventory.facts.vfio_devices.contains(name));
            if described.primary.on_vfio() && !openable {
                found.push(Deviation::NoNode { gpu, group });
            }
            found
        }
    }
}

fn host_deviation(function: &Function) -> Option<Deviation> {
    let address = function.address;
    match (&function.driver, &function.driver_override) {
        (Some(driver), _) if function.on_vfio() => Some(Deviation::StillOnVfio { address, driver: driver.clone() }),
        (None, Some(driver)) if driver::is_vfio(driver) => {
            Some(Deviation::StillReserved { address, driver: driver.clone() })
        }
        (Some(_) | None, _) => None,
    }
}
