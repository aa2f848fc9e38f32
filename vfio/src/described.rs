//! A machine described in a few lines of YAML, read as if it were a host.
//!
//! For machines that cannot be had: the topology of a bug report can be tried with `gpuvirt plan --machine FILE`, and
//! the fixtures of this crate are such files. The format is in this crate's README.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::address::PciAddress;
use crate::driver;
use crate::inventory::{PCI_DEVICES, PCI_DRIVERS, device_path};
use crate::iommu::GROUPS;
use crate::tree::Tree;

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
    #[serde(default)]
    firmware_memory: BTreeMap<u32, Vec<String>>,
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DescribedAcs {
    Missing,
    Off,
    On,
}

/// Why a text describes no machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    #[error("{0}; the format is in vfio/README.md")]
    Yaml(String),
    #[error("function {address}: {field} `{text}`: expected {expected}")]
    Field { address: PciAddress, field: &'static str, text: String, expected: &'static str },
    #[error("function {address} is under {port}, which is under it, too")]
    Circle { address: PciAddress, port: PciAddress },
    #[error("firmware_memory of group {group}: `{text}`: expected `0xFIRST 0xLAST`")]
    Memory { group: u32, text: String },
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

    fn function(
        &self,
        tree: &mut Tree,
        address: PciAddress,
        function: &DescribedFunction,
    ) -> Result<(), DescriptionError> {
        let field =
            |field, text: &str, expected| DescriptionError::Field { address, field, text: text.to_owned(), expected };
        let wrong_ids = || field("ids", &function.ids, "`vendor:device` or `vendor:device subvendor:subdevice` in hex");
        let (ids, subsystem) = function.ids.split_once(' ').unwrap_or((&function.ids, "0000:0000"));
        let ids = ids.split_once(':').zip(subsystem.split_once(':')).ok_or_else(wrong_ids)?;
        let ((vendor, id), (subvendor, subdevice)) = ids;
        if ![vendor, id, subvendor, subdevice].iter().all(|text| is_hex(text, 4)) {
            return Err(wrong_ids());
        }
        let class = &function.class;
        if !is_hex(class, 6) {
            return Err(field("class", class, "six hex digits, as in 030200"));
        }
        let modalias = format!(
            "pci:v0000{}d0000{}sv0000{}sd0000{}bc{}sc{}i{}",
            vendor.to_uppercase(),
            id.to_uppercase(),
            subvendor.to_uppercase(),
            subdevice.to_uppercase(),
            &class[0..2],
            &class[2..4],
            &class[4..6]
        );
        let device = self.sysfs_path(address)?;
        let attributes = [
            ("vendor", format!("0x{vendor}")),
            ("device", format!("0x{id}")),
            ("subsystem_vendor", format!("0x{subvendor}")),
            ("subsystem_device", format!("0x{subdevice}")),
            ("class", format!("0x{class}")),
            ("modalias", modalias),
            ("numa_node", function.numa.unwrap_or(-1).to_string()),
            ("boot_vga", u8::from(function.boot_vga).to_string()),
            ("driver_override", "(null)".to_owned()),
        ];
        let total = function.vfs.map(|count| ("sriov_totalvfs", count.to_string()));
        let reset = function.reset.clone().map(|methods| ("reset_method", methods));
        for (name, value) in attributes.into_iter().chain(total).chain(reset) {
            tree.file(device.join(name), format!("{value}\n"));
        }
        if !function.bars.is_empty() {
            let wrong =
                |text: &str| field("bars", text, "a size as in `16M` or `32G`, with ` unassigned` after it, or `0`");
            let lines: Result<Vec<_>, _> =
                function.bars.iter().map(|text| bar(text).ok_or_else(|| wrong(text))).collect();
            tree.file(device.join("resource"), lines?.concat());
        }
        if let Some(acs) = function.acs {
            tree.file(device.join("config"), port_config(acs));
        }
        let below_devices = device.strip_prefix("/sys").unwrap_or(&device);
        tree.link_to(device_path(address), Path::new("../../..").join(below_devices));
        if let Some(group) = function.group {
            let dir = PathBuf::from(GROUPS).join(group.to_string());
            tree.link_to(device.join("iommu_group"), &dir);
            tree.link_to(dir.join("devices").join(address.to_string()), &device);
        }
        if let Some(physfn) = function.physfn {
            tree.link_to(device.join("physfn"), device_path(physfn));
            let number =
                self.functions.iter().filter(|(other, f)| f.physfn == Some(physfn) && **other < address).count();
            tree.link_to(self.sysfs_path(physfn)?.join(format!("virtfn{number}")), device_path(address));
        }
        if let Some(driver) = &function.driver {
            let group = function.group.map(|group| group.to_string());
            tree.link_to(device.join("driver"), Path::new(PCI_DRIVERS).join(driver));
            tree.link_to(Path::new(PCI_DRIVERS).join(driver).join(address.to_string()), device_path(address));
            nodes_of(&device, address, driver, group.as_deref(), |path, text| tree.file(path, text));
        }
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

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A line of `resource`.
fn bar(text: &str) -> Option<String> {
    let (size, assigned) = match text.split_once(' ') {
        Some((size, "unassigned")) => (size, false),
        Some(_) => return None,
        None => (text, true),
    };
    if size == "0" {
        return Some("0x0 0x0 0x0\n".to_owned());
    }
    let (number, shift) = match (size.strip_suffix('M'), size.strip_suffix('G')) {
        (Some(number), _) => (number, 20),
        (None, Some(number)) => (number, 30),
        (None, None) => return None,
    };
    let bytes = number.parse::<u64>().ok()?.checked_shl(shift).filter(|bytes| *bytes > 0)?;
    // Where it lies is of no interest; the upper half of the address space has room for all.
    let start = 1 << 45;
    match assigned {
        true => Some(format!("{start:#x} {:#x} 0x14220c\n", start + bytes - 1)),
        false => Some(format!("0x0 {:#x} 0x2014220c\n", bytes - 1)),
    }
}

fn port_config(acs: DescribedAcs) -> Vec<u8> {
    let mut config = vec![0; 0x1000];
    let (capability, control) = match acs {
        DescribedAcs::Missing => (0x01, 0),
        DescribedAcs::Off => (0x0d, 0),
        DescribedAcs::On => (0x0d, 0x1d),
    };
    config[0x100..0x107].copy_from_slice(&[capability, 0, 1, 0, 0, 0, control]);
    config
}

/// Its number among the nodes of a driver.
pub(crate) fn minor(address: PciAddress) -> u32 {
    u32::from(address.bus()) * 256 + u32::from(address.device()) * 8 + u32::from(address.function())
}

/// Files that a driver brings.
pub(crate) fn add_driver(name: &str, mut file: impl FnMut(&Path, &str)) {
    for attribute in ["bind", "unbind", "new_id"] {
        file(&Path::new(PCI_DRIVERS).join(name).join(attribute), "");
    }
}

/// Files and device nodes that come with a function's binding.
pub(crate) fn nodes_of(
    device: &Path,
    address: PciAddress,
    driver: &str,
    group: Option<&str>,
    mut file: impl FnMut(&Path, &str),
) {
    let number = minor(address);
    if let Some(group) = group.filter(|_| driver::is_vfio(driver)) {
        file(Path::new("/dev/vfio/vfio"), "char 10:196");
        file(Path::new(&format!("/dev/vfio/{group}")), &format!("char 240:{group}"));
        file(Path::new(&format!("/dev/vfio/devices/vfio{number}")), &format!("char 241:{number}"));
        file(&device.join(format!("vfio-dev/vfio{number}/dev")), &format!("241:{number}\n"));
    }
    if driver == "nvidia" {
        let information = format!("/proc/driver/nvidia/gpus/{address}/information");
        file(Path::new(&information), &format!("Model: \t\t NVIDIA\nDevice Minor: \t {number}\n"));
        file(Path::new(&format!("/dev/nvidia{number}")), &format!("char 195:{number}"));
    }
}

pub(crate) enum ProcessEntry {
    File(String),
    Link(String),
}

/// What `/proc` has of a process with a device node open.
pub(crate) fn process(
    pid: i32,
    command: &str,
    node: &str,
    pod: Option<&str>,
    mut put: impl FnMut(&Path, ProcessEntry),
) {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let cgroup = pod.map_or_else(|| "/system.slice".to_owned(), |uid| format!("/kubepods/burstable/pod{uid}/c0ffee"));
    put(&proc.join("comm"), ProcessEntry::File(format!("{command}\n")));
    put(&proc.join("cgroup"), ProcessEntry::File(format!("0::{cgroup}\n")));
    // As with every process, some descriptors are no paths, and one is open twice.
    for (fd, target) in [("0", "/dev/null"), ("1", "socket:[4711]"), ("7", node), ("8", node)] {
        put(&proc.join("fd").join(fd), ProcessEntry::Link(target.to_owned()));
    }
}
