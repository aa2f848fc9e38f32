//! What a host is, as its kernel says: PCI functions, drivers, IOMMU groups.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::address::PciAddress;
use crate::bar::{self, Bar};
use crate::driver::{self, VfioDriver};
use crate::facts;
pub use crate::facts::HostFacts;
use crate::host::{self, Host};
use crate::iommu::{self, Acs, Region};

pub(crate) const PCI_DEVICES: &str = "/sys/bus/pci/devices";
pub(crate) const PCI_DRIVERS: &str = "/sys/bus/pci/drivers";

/// PCI vendor id of NVIDIA.
pub const NVIDIA: u16 = 0x10de;

/// A host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inventory {
    pub facts: HostFacts,
    pub functions: BTreeMap<PciAddress, Function>,
    /// IOMMU group → names of its members, as the kernel lists them; not every member must be in `functions`.
    pub groups: BTreeMap<u32, BTreeSet<String>>,
    /// IOMMU group of a GPU → memory that firmware wants to stay mapped for a device of it. Absent: none, or not said.
    pub firmware_memory: BTreeMap<u32, Vec<Region>>,
    /// What could not be read. The rest of the inventory is right all the same.
    pub errors: Vec<ObserveError>,
}

/// The four numbers by which a function is told from another one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ids {
    pub vendor: u16,
    pub device: u16,
    pub subsystem_vendor: u16,
    pub subsystem_device: u16,
}

/// One PCI function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Function {
    pub address: PciAddress,
    pub vendor: u16,
    pub device: u16,
    pub subsystem_vendor: u16,
    pub subsystem_device: u16,
    /// Three bytes: base class, subclass, interface (`0x030200` is a 3D controller).
    pub class: u32,
    pub driver: Option<String>,
    /// `None` also where it was not asked for: only NVIDIA's functions are asked, since reading it takes the device's lock.
    pub driver_override: Option<String>,
    pub iommu_group: Option<u32>,
    /// `None` where the kernel says -1: no node is nearer than another.
    pub numa_node: Option<u16>,
    /// The physical function that this virtual function belongs to.
    pub physfn: Option<PciAddress>,
    /// Virtual functions that exist now. Counted from the `virtfnN` links: `sriov_numvfs` takes the device's lock.
    pub numvfs: u16,
    /// Whether firmware used it for the console.
    pub boot_vga: bool,
    /// Name in `/dev/vfio/devices` (`vfioN`) while it is on a VFIO driver (Linux 6.1 and newer).
    pub vfio_dev: Option<String>,
    pub modalias: Option<String>,
    /// The bridge or port above it, where there is one.
    pub upstream: Option<PciAddress>,
    /// Its memory as the kernel has placed it. Only GPUs are asked.
    pub bars: Vec<Bar>,
    /// Ways to reset it, the first that works is used (`reset_method`, Linux 5.15). Only GPUs are asked.
    pub reset_methods: Vec<String>,
    /// `D0` … `D3cold` or `unknown` (`power_state`, Linux 5.11). Only GPUs are asked.
    pub power_state: Option<String>,
    /// Whether it may be switched off wholly while nobody uses it (`d3cold_allowed`). Only GPUs are asked.
    pub d3cold_allowed: Option<bool>,
    /// Virtual functions that it could have (`sriov_totalvfs`); 0 where it can have none. Only GPUs are asked.
    pub vfs_possible: u16,
    /// Of a port: whether it keeps apart what is behind it. Only ports above a GPU that shares its group are asked.
    pub acs: Option<Acs>,
}

impl Function {
    pub fn ids(&self) -> Ids {
        Ids {
            vendor: self.vendor,
            device: self.device,
            subsystem_vendor: self.subsystem_vendor,
            subsystem_device: self.subsystem_device,
        }
    }

    pub fn is_vf(&self) -> bool {
        self.physfn.is_some()
    }

    /// A bridge stays on its driver: the port drivers leave the DMA of what is behind them alone
    /// (`driver_managed_dma`, Linux 5.19). Class 0680 is "other bridge": `NVSwitch` and friends are no bridges in that sense.
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06 && self.class >> 8 != 0x0680
    }

    /// A GPU that can be handed out: a display controller of NVIDIA that is not a virtual function.
    pub fn is_primary(&self) -> bool {
        self.vendor == NVIDIA && is_display(self.class) && !self.is_vf()
    }

    /// Whether it is bound to `vfio-pci` or a variant of it.
    pub fn on_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(driver::is_vfio)
    }

    /// What may go along with a GPU: audio, USB, UCSI of the same board.
    fn can_accompany(&self) -> bool {
        self.vendor == NVIDIA && self.class >> 16 != 0x06 && !self.is_primary() && !self.is_vf()
    }
}

/// VGA compatible (0300) and 3D controller (0302).
fn is_display(class: u32) -> bool {
    matches!(class >> 8, 0x0300 | 0x0302)
}

/// A GPU with what its IOMMU group makes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu<'a> {
    pub primary: &'a Function,
    /// Other functions of NVIDIA in the same slot or group, which go along.
    pub companions: Vec<&'a Function>,
    /// Anything else in the group except bridges: the group cannot be handed out.
    pub foreign: Vec<&'a Function>,
    pub group: Option<u32>,
    /// Other GPUs in the group: one allocation unit with this one.
    pub shares_group_with: Vec<PciAddress>,
}

/// Something that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum ObserveError {
    #[error("pci function {address}: {attribute}: {reason}; it is left out, the others are served")]
    Function { address: PciAddress, attribute: &'static str, reason: String },
    #[error("pci function {address}: {attribute}: {reason}; it is taken as unset")]
    Attribute { address: PciAddress, attribute: &'static str, reason: String },
    #[error("`{name}` in {PCI_DEVICES} is not a PCI address; it is left out")]
    Name { name: String },
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
    let mut functions = BTreeMap::new();
    for name in note(&mut errors, PCI_DEVICES, host.list(Path::new(PCI_DEVICES))).unwrap_or_default() {
        let Some(address) = name.to_str().and_then(|name| name.parse().ok()) else {
            errors.push(ObserveError::Name { name: name.to_string_lossy().into_owned() });
            continue;
        };
        let reader = Reader { host, address, locked: locked.contains(&address) };
        match reader.function(&mut errors) {
            Ok(function) => drop(functions.insert(address, function)),
            Err(error) => errors.push(error),
        }
    }
    let facts = HostFacts { iommu: !groups.is_empty(), ..facts };
    let mut inventory = Inventory { facts, functions, groups, firmware_memory: BTreeMap::new(), errors };
    look_closer(host, &mut inventory);
    inventory
}

/// What is asked only where a GPU needs the answer: the kernel has more groups and ports than anybody wants to know of.
fn look_closer(host: &impl Host, inventory: &mut Inventory) {
    let groups: BTreeSet<u32> = inventory.gpus().iter().filter_map(|gpu| gpu.group).collect();
    for group in groups {
        let regions =
            note(&mut inventory.errors, iommu::GROUPS, iommu::firmware_memory(host, group)).unwrap_or_default();
        if !regions.is_empty() {
            inventory.firmware_memory.insert(group, regions);
        }
    }
    let crowded =
        inventory.gpus().into_iter().filter(|gpu| !gpu.foreign.is_empty() || !gpu.shares_group_with.is_empty());
    let ports: BTreeSet<_> = crowded.flat_map(|gpu| inventory.path(gpu.primary.address)).collect();
    for port in ports {
        if let Some(function) = inventory.functions.get_mut(&port) {
            function.acs = host.read(&device_path(port).join("config")).ok().and_then(|config| iommu::acs(&config));
        }
    }
}

pub(crate) fn note<T>(errors: &mut Vec<ObserveError>, path: &str, result: io::Result<T>) -> Option<T> {
    result.map_err(|error| errors.push(ObserveError::Host { path: path.into(), reason: error.to_string() })).ok()
}

struct Reader<'a, H> {
    host: &'a H,
    address: PciAddress,
    locked: bool,
}

impl<H: Host> Reader<'_, H> {
    fn function(&self, errors: &mut Vec<ObserveError>) -> Result<Function, ObserveError> {
        let vendor = self.id("vendor")?;
        let driver = self.required("driver", host::optional(host::link_name(self.host, &self.path("driver"))))?;
        let group =
            self.required("iommu_group", host::optional(host::link_name(self.host, &self.path("iommu_group"))))?;
        let iommu_group = match group {
            Some(name) => Some(self.required("iommu_group", name.parse().map_err(invalid))?),
            None => None,
        };
        let physfn = self.required("physfn", host::optional(host::link_name(self.host, &self.path("physfn"))))?;
        let physfn = match physfn {
            Some(name) => Some(self.required("physfn", name.parse().map_err(invalid))?),
            None => None,
        };
        let entries = self.required("directory", self.host.list(&device_path(self.address)))?;
        let class = self.hex("class")?;
        let gpu = vendor == NVIDIA && is_display(class);
        let numvfs = entries.iter().filter(|name| name.as_encoded_bytes().starts_with(b"virtfn")).count();
        Ok(Function {
            address: self.address,
            vendor,
            device: self.id("device")?,
            subsystem_vendor: self.id("subsystem_vendor")?,
            subsystem_device: self.id("subsystem_device")?,
            class,
            driver,
            driver_override: if vendor == NVIDIA && !self.locked { self.driver_override(errors) } else { None },
            iommu_group,
            numa_node: self.soft(errors, "numa_node").and_then(|text| text.parse().ok()),
            physfn,
            numvfs: u16::try_from(numvfs).unwrap_or(u16::MAX),
            boot_vga: self.soft(errors, "boot_vga").is_some_and(|text| text == "1"),
            vfio_dev: self
                .host
                .list(&self.path("vfio-dev"))
                .ok()
                .and_then(|names| names.first()?.to_str().map(str::to_owned)),
            modalias: self.soft(errors, "modalias"),
            upstream: self.upstream(),
            bars: self.of_gpu(errors, gpu, "resource").map(|text| bar::parse(&text)).unwrap_or_default(),
            reset_methods: self
                .of_gpu(errors, gpu, "reset_method")
                .map(|text| text.split_ascii_whitespace().map(str::to_owned).collect())
                .unwrap_or_default(),
            power_state: self.of_gpu(errors, gpu, "power_state"),
            d3cold_allowed: self.of_gpu(errors, gpu, "d3cold_allowed").map(|text| text == "1"),
            vfs_possible: self.of_gpu(errors, gpu, "sriov_totalvfs").and_then(|text| text.parse().ok()).unwrap_or(0),
            acs: None,
        })
    }

    fn path(&self, attribute: &str) -> PathBuf {
        device_path(self.address).join(attribute)
    }

    fn required<T>(&self, attribute: &'static str, result: io::Result<T>) -> Result<T, ObserveError> {
        let address = self.address;
        result.map_err(|error| ObserveError::Function { address, attribute, reason: error.to_string() })
    }

    fn of_gpu(&self, errors: &mut Vec<ObserveError>, gpu: bool, attribute: &'static str) -> Option<String> {
        gpu.then(|| self.soft(errors, attribute)).flatten()
    }

    /// An attribute without which the function is still known: absent on some kernels and devices.
    fn soft(&self, errors: &mut Vec<ObserveError>, attribute: &'static str) -> Option<String> {
        match host::optional(host::text(self.host, &self.path(attribute))) {
            Ok(value) => value,
            Err(error) => {
                errors.push(ObserveError::Attribute { address: self.address, attribute, reason: error.to_string() });
                None
            }
        }
    }

    fn hex(&self, attribute: &'static str) -> Result<u32, ObserveError> {
        let text = self.required(attribute, host::text(self.host, &self.path(attribute)))?;
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        self.required(attribute, u32::from_str_radix(digits, 16).map_err(|_| invalid(format!("`{text}` is no number"))))
    }

    fn id(&self, attribute: &'static str) -> Result<u16, ObserveError> {
        let value = self.hex(attribute)?;
        self.required(attribute, u16::try_from(value).map_err(invalid))
    }

    /// Reads `(null)` when empty.
    fn driver_override(&self, errors: &mut Vec<ObserveError>) -> Option<String> {
        self.soft(errors, "driver_override").filter(|name| !name.is_empty() && name != "(null)")
    }

    /// `…/pci0000:00/0000:00:01.0/0000:01:00.0`: the parent in the device tree.
    fn upstream(&self) -> Option<PciAddress> {
        let target = self.host.link(&device_path(self.address)).ok()?;
        target.parent()?.file_name()?.to_str()?.parse().ok()
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
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
