//! A machine described in a few lines of YAML, read as if it were a host.
//!
//! For machines that cannot be had: the topology of a bug report can be tried with `gpuvirt plan --machine FILE`, and
//! the fixtures of this crate are such files. The format is in this crate's README.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::address::PciAddress;
use crate::driver;
use crate::egm::EGM;
use crate::inventory::{PCI_DEVICES, device_path};
use crate::iommu::GROUPS;
use crate::tree::Tree;
use crate::vgpu::MDEVS;

mod function;
mod nodes;

pub(crate) use nodes::{ProcessEntry, add_driver, minor, nodes_of, process};

/// A description. Fields are those of the YAML.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    pub(crate) kernel: String,
    #[serde(default = "x86_64")]
    architecture: String,
    os: String,
    #[serde(default)]
    iommufd: bool,
    #[serde(default)]
    command_line: String,
    #[serde(default)]
    drivers: BTreeSet<String>,
    #[serde(default)]
    pub(crate) modules: BTreeSet<String>,
    #[serde(default)]
    aliases: Vec<String>,
    /// Loaded beside those that `drivers` are in.
    #[serde(default)]
    loaded: BTreeSet<String>,
    unsafe_interrupts: Option<bool>,
    #[serde(default)]
    firmware_memory: BTreeMap<u32, Vec<String>>,
    #[serde(default)]
    egm: BTreeMap<String, Vec<PciAddress>>,
    #[serde(default)]
    mdevs: BTreeMap<String, DescribedMdev>,
    screen: Option<Screen>,
    #[serde(default)]
    holders: Vec<DescribedHolder>,
    pub(crate) functions: BTreeMap<PciAddress, DescribedFunction>,
}

fn x86_64() -> String {
    "x86_64".to_owned()
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Screen {
    driver: String,
    on: Option<PciAddress>,
    #[serde(default)]
    console: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedMdev {
    on: PciAddress,
    #[serde(rename = "type")]
    kind: String,
    group: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedHolder {
    pid: i32,
    command: String,
    open: String,
    pod: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DescribedFunction {
    ids: String,
    class: String,
    pub(crate) driver: Option<String>,
    #[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "moves devices in tests only"))]
    pub(crate) native: Option<String>,
    group: Option<u32>,
    numa: Option<i32>,
    under: Option<PciAddress>,
    physfn: Option<PciAddress>,
    #[serde(default)]
    boot_vga: bool,
    #[serde(default)]
    bars: Vec<String>,
    acs: Option<DescribedAcs>,
    reset: Option<String>,
    vfs: Option<u16>,
    power: Option<String>,
    link: Option<[String; 2]>,
    aer: Option<[u64; 3]>,
    #[serde(default)]
    fell_off: bool,
    #[serde(default)]
    mdev_types: BTreeMap<String, DescribedMdevType>,
    vgpu: Option<DescribedVgpu>,
    #[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "makes vGPUs in tests only"))]
    pub(crate) board: Option<DescribedBoard>,
}

/// A board whose driver makes vGPUs when it is asked to.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "makes vGPUs in tests only"))]
pub(crate) struct DescribedBoard {
    pub framework: BoardFramework,
    /// In GB.
    pub framebuffer: u32,
    pub types: BTreeMap<u32, String>,
    /// As many virtual functions as it can have; 0: it is the parent itself.
    #[serde(default)]
    pub vfs: u16,
    #[serde(default)]
    pub heterogeneous: bool,
    /// Its driver makes no virtual functions itself.
    #[serde(default)]
    pub stub: bool,
    #[serde(default)]
    pub mig: Option<DescribedMig>,
}

/// A board with MIG.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(not(any(test, feature = "testing")), expect(dead_code, reason = "makes GPU instances in tests only"))]
pub(crate) struct DescribedMig {
    pub slices: u32,
    /// Of a slice, in GB.
    pub memory: u32,
    /// Another mode comes with a reset only.
    #[serde(default)]
    pub reset: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BoardFramework {
    Mdev,
    Vendor,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedMdevType {
    name: Option<String>,
    description: Option<String>,
    available: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescribedVgpu {
    #[serde(default)]
    current: u32,
    #[serde(default)]
    creatable: BTreeMap<u32, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DescribedAcs {
    Missing,
    Off,
    On,
}

/// Why a text describes no machine.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// The text is no YAML, or has a key that is not known or lacks one that is needed; the parser's words.
    #[error("{0}; the format is in vfio/README.md")]
    Yaml(String),
    /// A value of a function is not written as `expected`.
    #[error("function {address}: {field} `{text}`: expected {expected}")]
    Field { address: PciAddress, field: &'static str, text: String, expected: &'static str },
    /// The ports above a function lead back to it.
    #[error("function {address} is under {port}, which is under it, too")]
    Circle { address: PciAddress, port: PciAddress },
    /// A range of `firmware_memory` is not two hex numbers.
    #[error("firmware_memory of group {group}: `{text}`: expected `0xFIRST 0xLAST`")]
    Memory { group: u32, text: String },
    /// A mediated device is of a type that its function does not offer.
    #[error("mdev {uuid}: function {on} has no `{kind}` among its mdev_types")]
    Mdev { uuid: String, on: PciAddress, kind: String },
    /// A holder has something open that no device node leads to.
    #[error("holder {pid}: `{open}` is neither a path nor a function with a device node")]
    Holder { pid: i32, open: String },
}

impl Description {
    /// Reads a description.
    pub fn parse(yaml: &str) -> Result<Self, DescriptionError> {
        serde_saphyr::from_str(yaml).map_err(|error| DescriptionError::Yaml(error.to_string()))
    }

    /// The machine as a tree that reads like its `/`.
    pub fn tree(&self) -> Result<Tree, DescriptionError> {
        let mut tree = Tree::default();
        self.host(&mut tree)?;
        for (address, function) in &self.functions {
            self.function(&mut tree, *address, function)?;
        }
        for (uuid, mdev) in &self.mdevs {
            self.mdev(&mut tree, uuid, mdev)?;
        }
        // Processes last: they have nodes open that functions bring.
        for holder in &self.holders {
            self.holder(&mut tree, holder)?;
        }
        Ok(tree)
    }

    fn host(&self, tree: &mut Tree) -> Result<(), DescriptionError> {
        let Self { kernel, architecture, command_line, .. } = self;
        tree.file("/proc/sys/kernel/osrelease", format!("{kernel}\n"));
        tree.file("/proc/sys/kernel/arch", format!("{architecture}\n"));
        tree.file("/proc/cmdline", format!("{command_line}\n"));
        let (id, version) = self.os.split_once(' ').unwrap_or((&self.os, ""));
        tree.file("/etc/os-release", format!("NAME=\"Some OS\"\nID={id}\nVERSION_ID=\"{version}\"\n"));
        let modules = format!("/lib/modules/{kernel}");
        let aliases: Vec<_> = self.aliases.iter().map(|line| format!("alias {line}")).collect();
        tree.file(format!("{modules}/modules.alias"), aliases.join("\n"));
        let files: Vec<_> = self.modules.iter().map(|name| format!("kernel/drivers/vfio/pci/{name}.ko.xz:")).collect();
        tree.file(format!("{modules}/modules.dep"), files.join("\n"));
        let loaded: Vec<_> = self.loaded.iter().map(|name| format!("{name} 16384 0 - Live 0x0\n")).collect();
        tree.file("/proc/modules", loaded.concat());
        if let Some(allowed) = self.unsafe_interrupts {
            let parameter = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
            tree.file(parameter, if allowed { "Y\n" } else { "N\n" });
        }
        for (name, gpus) in &self.egm {
            let gpus: Vec<_> = gpus.iter().map(|gpu| format!("{gpu}\n")).collect();
            tree.file(Path::new(EGM).join(name).join("gpu_devices"), gpus.concat());
            tree.file(Path::new("/dev").join(name), "char 250:0");
        }
        if self.iommufd {
            tree.file("/dev/iommu", "char 10:124");
        }
        tree.dir(PCI_DEVICES);
        let used = self.functions.values().filter_map(|function| function.driver.as_ref());
        for driver in self.drivers.iter().chain(used) {
            add_driver(driver, |path, text| tree.file(path, text));
        }
        for (group, regions) in &self.firmware_memory {
            let well_formed = |text: &&String| text.split(' ').filter(|word| word.starts_with("0x")).count() == 2;
            if let Some(text) = regions.iter().find(|text| !well_formed(text)) {
                return Err(DescriptionError::Memory { group: *group, text: text.clone() });
            }
            let lines: Vec<_> = regions.iter().map(|region| format!("{region} direct\n")).collect();
            tree.file(format!("{GROUPS}/{group}/reserved_regions"), lines.concat());
        }
        if let Some(Screen { driver, on, console }) = &self.screen {
            let device = match on {
                Some(address) => self.sysfs_path(*address)?,
                None => PathBuf::from("/sys/devices/platform/efi-framebuffer.0"),
            };
            tree.dir("/sys/class/graphics");
            tree.file(device.join("graphics/fb0/name"), format!("{driver}\n"));
            tree.link_to("/sys/class/graphics/fb0", device.join("graphics/fb0"));
            tree.file("/sys/class/vtconsole/vtcon1/name", "(M) frame buffer device\n");
            tree.file("/sys/class/vtconsole/vtcon1/bind", u8::from(*console).to_string());
        }
        Ok(())
    }

    /// Below the ports that it is under.
    fn sysfs_path(&self, address: PciAddress) -> Result<PathBuf, DescriptionError> {
        let mut way = vec![address];
        let under = |address: &PciAddress| self.functions.get(address).and_then(|function| function.under);
        while let Some(port) = way.last().and_then(under) {
            if way.contains(&port) {
                return Err(DescriptionError::Circle { address, port });
            }
            way.push(port);
        }
        let root = PathBuf::from(format!("/sys/devices/pci{:04x}:00", address.domain()));
        Ok(way.iter().rev().fold(root, |path, part| path.join(part.to_string())))
    }

    fn mdev(&self, tree: &mut Tree, uuid: &str, mdev: &DescribedMdev) -> Result<(), DescriptionError> {
        let DescribedMdev { on, kind, group } = mdev;
        let offered = self.functions.get(on).is_some_and(|function| function.mdev_types.contains_key(kind));
        if !offered {
            return Err(DescriptionError::Mdev { uuid: uuid.to_owned(), on: *on, kind: kind.clone() });
        }
        let device = self.sysfs_path(*on)?.join(uuid);
        tree.link_to(device.join("mdev_type"), device_path(*on).join("mdev_supported_types").join(kind));
        let dir = PathBuf::from(GROUPS).join(group.to_string());
        tree.link_to(device.join("iommu_group"), &dir);
        tree.link_to(dir.join("devices").join(uuid), &device);
        tree.link_to(Path::new(MDEVS).join(uuid), &device);
        tree.file(format!("/dev/vfio/{group}"), format!("char 240:{group}"));
        Ok(())
    }

    fn holder(&self, tree: &mut Tree, holder: &DescribedHolder) -> Result<(), DescriptionError> {
        let DescribedHolder { pid, command, open, pod } = holder;
        let node = match open.parse::<PciAddress>() {
            Ok(address) => self.functions.get(&address).and_then(|function| {
                let driver = function.driver.as_deref()?;
                match (driver::is_vfio(driver), function.group) {
                    (true, group) => group.map(|group| format!("/dev/vfio/{group}")),
                    (false, _) => (driver == "nvidia").then(|| format!("/dev/nvidia{}", minor(address))),
                }
            }),
            Err(_) => open.starts_with('/').then(|| open.clone()),
        };
        let node = node.ok_or_else(|| DescriptionError::Holder { pid: *pid, open: open.clone() })?;
        process(*pid, command, &node, pod.as_deref(), |path, entry| match entry {
            ProcessEntry::File(text) => tree.file(path, text),
            ProcessEntry::Link(target) => tree.link_to(path, target),
        });
        Ok(())
    }
}
