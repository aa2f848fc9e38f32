//! What a host is, as its kernel says: PCI functions, drivers, IOMMU groups.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::address::PciAddress;
use crate::driver::VfioDriver;
use crate::facts;
pub use crate::facts::HostFacts;
pub use crate::function::{Function, Gpu, Ids, NVIDIA};
use crate::host::Host;
use crate::iommu::{self, Region};
use crate::reader::{self, About};
use crate::vgpu::{self, Mdev};

pub(crate) const PCI_DEVICES: &str = "/sys/bus/pci/devices";
pub(crate) const PCI_DRIVERS: &str = "/sys/bus/pci/drivers";

/// A host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inventory {
    /// What is true for the whole host.
    pub facts: HostFacts,
    /// Every PCI function that could be read, whoever made it.
    pub functions: BTreeMap<PciAddress, Function>,
    /// IOMMU group → names of its members, as the kernel lists them; not every member must be in `functions`.
    pub groups: BTreeMap<u32, BTreeSet<String>>,
    /// IOMMU group of a GPU → memory that firmware wants to stay mapped for a device of it. Absent: none, or not said.
    pub firmware_memory: BTreeMap<u32, Vec<Region>>,
    /// Mediated devices that exist, by their UUID (`/sys/bus/mdev/devices`).
    pub mdevs: BTreeMap<String, Mdev>,
    /// What could not be read. The rest of the inventory is right all the same.
    pub errors: Vec<ObserveError>,
}

/// Something that could not be read.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum ObserveError {
    /// Without this attribute the function cannot be told, so it is not in the inventory. Its group names it.
    #[error("pci function {address}: {attribute}: {reason}; it is left out, the others are served")]
    Function { address: PciAddress, attribute: &'static str, reason: String },
    /// The function is in the inventory without this attribute.
    #[error("pci function {address}: {attribute}: {reason}; it is taken as unset")]
    Attribute { address: PciAddress, attribute: &'static str, reason: String },
    /// What takes its lock, or asks its driver or the device, has not come back in time ([`Function::late`]).
    #[error(
        "pci function {address}: {reason}: its lock is held, or its driver waits for it; it is left as it is, the others are \
         served"
    )]
    Late { address: PciAddress, reason: String },
    /// The kernel lists something that is not named like a PCI function.
    #[error("`{name}` in {PCI_DEVICES} is not a PCI address; it is left out")]
    Name { name: String },
    /// A file or directory of the host; what it would have told counts as empty.
    #[error("{path}: {reason}", path = path.display())]
    Host { path: PathBuf, reason: String },
}

/// Reads a host. Whatever is broken becomes an entry in `errors` and hides nothing else.
pub fn observe(host: &impl Host) -> Inventory {
    observe_except(host, &BTreeSet::new())
}

/// As [`observe`], without reading attributes of `locked` that wait for the device's lock: a write to these hangs in the
/// kernel, and a read of such an attribute would hang behind it. See [`crate::journal::Journal::pending`].
pub fn observe_except(host: &impl Host, locked: &BTreeSet<PciAddress>) -> Inventory {
    let mut errors = Vec::new();
    let facts = facts::read(host, &mut errors);
    let groups = note(&mut errors, iommu::GROUPS, iommu::groups(host)).unwrap_or_default();
    let mdevs = note(&mut errors, vgpu::MDEVS, vgpu::mdevs(host)).unwrap_or_default();
    let mdev_parents = vgpu::mdev_parents(host);
    let mut abouts = Vec::new();
    for name in note(&mut errors, PCI_DEVICES, host.list(Path::new(PCI_DEVICES))).unwrap_or_default() {
        match name.to_str().and_then(|name| name.parse().ok()) {
            Some(address) => {
                let (locked, mdev_parent) = (locked.contains(&address), mdev_parents.contains(&address));
                abouts.push(About { address, locked, mdev_parent });
            }
            None => errors.push(ObserveError::Name { name: name.to_string_lossy().into_owned() }),
        }
    }
    let functions = reader::functions(host, &abouts, &mut errors);
    let facts = HostFacts { iommu: !groups.is_empty(), ..facts };
    let mut inventory = Inventory { facts, functions, groups, firmware_memory: BTreeMap::new(), mdevs, errors };
    look_closer(host, &mut inventory);
    inventory
}

/// What is asked only where a GPU needs the answer: the kernel has more groups and ports than anybody wants to know of.
fn look_closer(host: &impl Host, inventory: &mut Inventory) {
    let groups: BTreeSet<u32> = inventory.gpus().iter().filter_map(|gpu| gpu.group).collect();
    let paths: Vec<_> = groups.iter().map(|group| iommu::reserved_regions(*group)).collect();
    let subjects = paths.iter().map(|path| (path.clone(), path.clone())).collect();
    let answers = host.each(subjects, |host, path| iommu::firmware_memory(host, path));
    for ((group, path), answer) in groups.into_iter().zip(paths).zip(answers) {
        let regions = note(&mut inventory.errors, &path, answer.flatten()).unwrap_or_default();
        if !regions.is_empty() {
            inventory.firmware_memory.insert(group, regions);
        }
    }
    let crowded =
        inventory.gpus().into_iter().filter(|gpu| !gpu.foreign.is_empty() || !gpu.shares_group_with.is_empty());
    let ports: BTreeSet<_> = crowded.flat_map(|gpu| inventory.path(gpu.primary.address)).collect();
    let configs = ports.iter().map(|port| device_path(*port).join("config")).map(|path| (path.clone(), path)).collect();
    let answers = host.each(configs, |host, path| host.read(path));
    for (port, answer) in ports.into_iter().zip(answers) {
        if let Some(function) = inventory.functions.get_mut(&port) {
            function.acs = answer.flatten().ok().and_then(|config| iommu::acs(&config));
        }
    }
}

pub(crate) fn note<T>(errors: &mut Vec<ObserveError>, path: impl AsRef<Path>, result: io::Result<T>) -> Option<T> {
    let path = path.as_ref().to_owned();
    result.map_err(|error| errors.push(ObserveError::Host { path, reason: error.to_string() })).ok()
}

/// Where the kernel describes a PCI function.
pub(crate) fn device_path(address: PciAddress) -> PathBuf {
    PathBuf::from(PCI_DEVICES).join(address.to_string())
}

impl Inventory {
    /// The GPUs in order of their addresses.
    pub fn gpus(&self) -> Vec<Gpu<'_>> {
        self.functions.values().filter(|function| function.is_primary()).map(|primary| self.describe(primary)).collect()
    }

    /// The GPU at an address.
    pub fn gpu(&self, address: PciAddress) -> Option<Gpu<'_>> {
        self.functions.get(&address).filter(|function| function.is_primary()).map(|primary| self.describe(primary))
    }

    /// The VFIO driver that a function goes to.
    pub fn vfio_driver(&self, function: &Function) -> VfioDriver {
        self.facts.vfio_drivers.best(function.modalias.as_deref())
    }

    /// Members of a group that are in no condition to be judged: not readable, or not PCI.
    pub fn unknown_members(&self, group: u32) -> Vec<&str> {
        let known = |name: &str| name.parse().is_ok_and(|address| self.functions.contains_key(&address));
        let members = self.groups.get(&group).into_iter().flatten();
        members.map(String::as_str).filter(|name| !known(name)).collect()
    }

    /// Ports and bridges above a function, the root port first.
    pub fn path(&self, address: PciAddress) -> Vec<PciAddress> {
        let upstream = |address: &PciAddress| self.functions.get(address).and_then(|function| function.upstream);
        // A described machine may have a circle; no bus is deeper than there are bus numbers.
        let mut path: Vec<_> = std::iter::successors(upstream(&address), upstream).take(256).collect();
        path.reverse();
        path
    }

    fn describe<'a>(&'a self, primary: &'a Function) -> Gpu<'a> {
        let group = primary.iommu_group;
        let mut gpu =
            Gpu { primary, companions: Vec::new(), foreign: Vec::new(), group, shares_group_with: Vec::new() };
        for function in self.functions.values().filter(|function| function.address != primary.address) {
            let same_group = group.is_some() && function.iommu_group == group;
            if function.can_accompany() && (same_group || function.address.same_slot(primary.address)) {
                gpu.companions.push(function);
            } else if same_group && function.is_primary() {
                gpu.shares_group_with.push(function.address);
            } else if same_group && !function.is_bridge() {
                gpu.foreign.push(function);
            }
        }
        gpu
    }
}
