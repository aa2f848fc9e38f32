//! Device nodes, and processes that have them open.

use std::path::{Path, PathBuf};

use crate::address::PciAddress;
use crate::driver;
use crate::inventory::PCI_DRIVERS;

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
