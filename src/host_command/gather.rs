//! `gpuvirt gather`: what a report on a fault needs of a host, as JSON. Run in an agent's pod by `kubectl gpuvirt must-gather`.
//! It changes nothing, and reads no attribute that takes a device's lock but through `vfio`, which knows when not to.

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io::{ErrorKind, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use nix::fcntl::OFlag;
use serde::Serialize;
use vfio::{Host, Root};

use super::{
    Error, Subject, View,
    inspect::{self, InspectReport},
};
use crate::{answer::json, terminal::print};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gathered {
    inspect: InspectReport,
    /// Files by their paths on the host; what is not there is left out.
    files: BTreeMap<String, String>,
    /// Whether the firmware starts signed code only. Unset: it does not say, as on machines without EFI.
    #[serde(skip_serializing_if = "Option::is_none")]
    secure_boot: Option<bool>,
    /// Lines of the kernel's log that speak of what matters here, oldest first.
    kernel_log: Vec<String>,
    /// Why the log, or a part of the look, is missing.
    remarks: Vec<String>,
}

/// Of the host as a whole.
const FILES: [&str; 9] = [
    "/proc/cmdline",
    "/proc/version",
    "/proc/driver/nvidia/version",
    "/etc/os-release",
    "/sys/kernel/security/lockdown",
    "/sys/module/vfio_pci/parameters/ids",
    "/sys/module/vfio_pci/parameters/disable_idle_d3",
    "/run/gpuvirt/journal",
    "/var/lib/gpuvirt/desired.json",
];
const MODULES: &str = "/proc/modules";
const MODPROBE: [&str; 3] = ["/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d"];
/// Of each function of this vendor. None of these takes the device's lock (`drivers/pci/pci-sysfs.c`, `pcie/aer.c`); link and
/// driver are in the look itself.
const NVIDIA: u16 = 0x10de;
const ATTRIBUTES: [&str; 8] = [
    "aer_dev_correctable",
    "aer_dev_fatal",
    "aer_dev_nonfatal",
    "boot_vga",
    "d3cold_allowed",
    "numa_node",
    "power_state",
    "resource",
];
/// The EFI variable: four bytes of attributes, and one that says it.
const SECURE_BOOT: &str = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
/// Longest file, in bytes.
const MOST: usize = 64 << 10;
/// Most lines of the kernel's log, the newest ones.
const LINES: usize = 2_000;
const WORDS: [&str; 14] = [
    "dmar",
    "amd-vi",
    "iommu",
    "smmu",
    "vfio",
    "nvrm",
    "xid",
    "nvidia",
    "nouveau",
    "aer:",
    "mdev",
    "bar ",
    "blocked for more",
    "lockdown",
];
/// Names of modules that have to do with GPUs.
const DRIVERS: [&str; 6] = ["nvidia", "nouveau", "vfio", "mdev", "iommufd", "irqbypass"];

pub fn run(root: &Path) -> Result<(), Error> {
    let view = View::of(&Subject::Host(root.to_path_buf()))?;
    let host = Root::new(root).map_err(|source| Error::Root { root: root.to_path_buf(), source })?;
    let mut remarks = view.remarks.clone();
    let kernel_log = kernel_log(&root.join("dev/kmsg")).unwrap_or_else(|error| {
        remarks.push(format!("/dev/kmsg: {error}"));
        Vec::new()
    });
    let gathered = Gathered {
        files: files(&host, &view),
        secure_boot: host.read(Path::new(SECURE_BOOT)).ok().and_then(|bytes| bytes.get(4).map(|byte| *byte == 1)),
        inspect: inspect::report(&view),
        kernel_log,
        remarks,
    };
    Ok(print(&json(&gathered)?)?)
}

fn files(host: &impl Host, view: &View) -> BTreeMap<String, String> {
    let mut paths: Vec<PathBuf> = FILES.iter().map(PathBuf::from).collect();
    for dir in MODPROBE {
        let listed = host.list(Path::new(dir)).unwrap_or_default();
        paths.extend(listed.into_iter().map(|name| Path::new(dir).join(name)));
    }
    let nvidia = view.inventory.functions.values().filter(|function| function.vendor == NVIDIA);
    for function in nvidia {
        let device = PathBuf::from(format!("/sys/bus/pci/devices/{}", function.address));
        paths.extend(ATTRIBUTES.iter().map(|attribute| device.join(attribute)));
    }
    let mut files = BTreeMap::new();
    for path in paths {
        if let Ok(bytes) = host.head(&path, MOST) {
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            let of_modprobe = MODPROBE.iter().any(|dir| path.starts_with(dir));
            let text = if of_modprobe { about_gpus(&text) } else { text };
            if !text.is_empty() {
                files.insert(path.display().to_string(), text);
            }
        }
    }
    if let Ok(bytes) = host.read(Path::new(MODULES)) {
        files.insert(MODULES.to_owned(), about_gpus(&String::from_utf8_lossy(&bytes)));
    }
    files
}

/// The rest of a host's modules is nobody's business here.
fn about_gpus(text: &str) -> String {
    let lines = text.lines().filter(|line| DRIVERS.iter().any(|driver| line.contains(driver)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Of `/dev/kmsg`: a read gives a record, and the last one is followed by `EAGAIN`.
fn kernel_log(path: &Path) -> std::io::Result<Vec<String>> {
    let mut kmsg = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let mut lines = Vec::new();
    let mut record = [0; 8192];
    loop {
        match kmsg.read(&mut record) {
            Ok(0) => break,
            Ok(length) => lines.extend(line(&String::from_utf8_lossy(&record[..length]))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // The record was overwritten while it was to be read; the next one is there.
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EPIPE as i32) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(lines.split_off(lines.len().saturating_sub(LINES)))
}

/// `prefix,sequence,microseconds,flags;message`, and more lines with keys: `[seconds] message` if it matters here.
fn line(record: &str) -> Option<String> {
    let (head, rest) = record.split_once(';')?;
    let message = rest.lines().next()?;
    let lower = message.to_lowercase();
    let matters = WORDS.iter().any(|word| lower.contains(word));
    let microseconds: u64 = head.split(',').nth(2)?.parse().ok()?;
    matters.then(|| format!("[{}.{:06}] {message}", microseconds / 1_000_000, microseconds % 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_that_matter_are_taken_from_the_kernels_log() {
        let xid = "4,1,12000034,-;NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n";
        let said = line(xid).expect("a line");
        assert_eq!(said, "[12.000034] NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.");
        assert_eq!(line("6,2,12000035,-;audit: user alice has logged in\n"), None);
        assert_eq!(line("no record"), None);
    }

    #[test]
    fn a_log_is_read_to_its_end() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("kmsg");
        std::fs::write(&file, "6,1,1,-;DMAR: IOMMU enabled\n").expect("a file should be writable");
        assert_eq!(kernel_log(&file).expect("a log"), ["[0.000001] DMAR: IOMMU enabled"]);
    }

    #[test]
    fn of_modules_only_those_of_gpus_are_told() {
        assert_eq!(about_gpus("nvidia 1 0\next4 2 1\nvfio_pci 3 0"), "nvidia 1 0\nvfio_pci 3 0");
    }
}
