//! What a host is, as its kernel says: PCI functions, drivers, IOMMU groups.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::address::PciAddress;
use crate::driver::{self, VfioDriver, VfioDrivers};
use crate::host::{self, Host};
use crate::iommu;

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
    /// What could not be read. The rest of the inventory is right all the same.
    pub errors: Vec<ObserveError>,
}

/// What is true for the whole host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    /// As `uname -r` says.
    pub kernel_release: String,
    /// As `uname -m` says, e.g. `x86_64`, `aarch64`.
    pub architecture: String,
    /// `ID` of os-release, e.g. `debian`; empty when unknown.
    pub os_id: String,
    /// `VERSION_ID` of os-release; empty when unknown or when there is none.
    pub os_version: String,
    /// Whether the kernel keeps devices apart with an IOMMU.
    pub iommu: bool,
    /// Whether `/dev/iommu` exists: VFIO devices can be opened without their group.
    pub iommufd: bool,
    /// Whether the driver `vfio-pci` is there, loaded or built in.
    pub vfio_pci_loaded: bool,
    /// Names of all PCI drivers that are there.
    pub drivers: BTreeSet<String>,
    /// The VFIO drivers that the kernel's modules offer.
    pub vfio_drivers: VfioDrivers,
    /// Groups with a node in `/dev/vfio`.
    pub vfio_groups: BTreeSet<u32>,
    /// Names (`vfioN`) of the nodes in `/dev/vfio/devices`.
    pub vfio_devices: BTreeSet<String>,
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
        self.vendor == NVIDIA && matches!(self.class >> 8, 0x0300 | 0x0302) && !self.is_vf()
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
    let facts = facts(host, &mut errors);
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
    Inventory { facts, functions, groups, errors }
}

fn note<T>(errors: &mut Vec<ObserveError>, path: &str, result: io::Result<T>) -> Option<T> {
    result.map_err(|error| errors.push(ObserveError::Host { path: path.into(), reason: error.to_string() })).ok()
}

fn facts(host: &impl Host, errors: &mut Vec<ObserveError>) -> HostFacts {
    const RELEASE: &str = "/proc/sys/kernel/osrelease";
    let kernel_release = note(errors, RELEASE, host::text(host, Path::new(RELEASE))).unwrap_or_default();
    // Only kernels since 6.1 say it; a program runs on the architecture it was built for.
    let architecture = host::text(host, Path::new("/proc/sys/kernel/arch"));
    let os = host::text(host, Path::new("/etc/os-release")).unwrap_or_default();
    let drivers = note(errors, PCI_DRIVERS, names(host, PCI_DRIVERS)).unwrap_or_default();
    HostFacts {
        architecture: architecture.unwrap_or_else(|_| std::env::consts::ARCH.to_owned()),
        os_id: os_release(&os, "ID"),
        os_version: os_release(&os, "VERSION_ID"),
        iommu: false,
        iommufd: host.exists(Path::new("/dev/iommu")),
        vfio_pci_loaded: drivers.contains(driver::VFIO_PCI),
        vfio_drivers: note(errors, "/lib/modules", VfioDrivers::read(host, &kernel_release)).unwrap_or_default(),
        vfio_groups: iommu::open_nodes(host),
        vfio_devices: names(host, "/dev/vfio/devices").unwrap_or_default(),
        drivers,
        kernel_release,
    }
}

fn names(host: &impl Host, dir: &str) -> io::Result<BTreeSet<String>> {
    Ok(host.list(Path::new(dir))?.iter().map(|name| name.to_string_lossy().into_owned()).collect())
}

fn os_release(text: &str, key: &str) -> String {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value.unwrap_or_default().trim_matches(['"', '\'']).to_owned()
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
        let numvfs = entries.iter().filter(|name| name.as_encoded_bytes().starts_with(b"virtfn")).count();
        Ok(Function {
            address: self.address,
            vendor,
            device: self.id("device")?,
            subsystem_vendor: self.id("subsystem_vendor")?,
            subsystem_device: self.id("subsystem_device")?,
            class: self.hex("class")?,
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
        })
    }

    fn path(&self, attribute: &str) -> PathBuf {
        device_path(self.address).join(attribute)
    }

    fn required<T>(&self, attribute: &'static str, result: io::Result<T>) -> Result<T, ObserveError> {
        let address = self.address;
        result.map_err(|error| ObserveError::Function { address, attribute, reason: error.to_string() })
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
