//! What is true for a whole host.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::console::{self, Framebuffer};
use crate::driver::{self, VfioDrivers};
use crate::host::{self, Host};
use crate::inventory::{ObserveError, PCI_DRIVERS, note};
use crate::iommu;
use crate::module::{self, Ban, Config};

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
    /// `vendor_id` of the processors, e.g. `GenuineIntel`; empty when unknown (Arm has none).
    pub cpu_vendor: String,
    /// The kernel command line.
    pub command_line: String,
    /// Whether UEFI Secure Boot is on, so that modules must be signed; `None` without UEFI.
    pub secure_boot: Option<bool>,
    /// Whether the kernel keeps devices apart with an IOMMU.
    pub iommu: bool,
    /// Names of the IOMMUs, e.g. `dmar0` (Intel), `ivhd0` (AMD), `smmu3.0x…` (Arm).
    pub iommus: BTreeSet<String>,
    /// Whether `/dev/iommu` exists: VFIO devices can be opened without their group.
    pub iommufd: bool,
    /// Whether VMs are allowed without interrupt remapping, which lets a guest forge interrupts of the host
    /// (`allow_unsafe_interrupts` of `vfio_iommu_type1`); `None` while that module is not loaded.
    pub unsafe_interrupts: Option<bool>,
    /// Modules that are loaded (`/proc/modules`); what is built in is not among them.
    pub loaded_modules: BTreeSet<String>,
    /// Whether the driver `vfio-pci` is there, loaded or built in.
    pub vfio_pci_loaded: bool,
    /// Names of all PCI drivers that are there.
    pub drivers: BTreeSet<String>,
    /// The VFIO drivers that the kernel's modules offer.
    pub vfio_drivers: VfioDrivers,
    /// VFIO modules that this kernel has, built in or as files (`modules.builtin`, `modules.dep`), with `_` for `-`.
    pub vfio_modules: BTreeSet<String>,
    /// Those of them that may not be loaded now, or need one that may not.
    pub module_bans: BTreeMap<String, Ban>,
    /// Groups with a node in `/dev/vfio`.
    pub vfio_groups: BTreeSet<u32>,
    /// Names (`vfioN`) of the nodes in `/dev/vfio/devices`.
    pub vfio_devices: BTreeSet<String>,
    /// What shows the console, and on which device.
    pub framebuffers: Vec<Framebuffer>,
}

impl HostFacts {
    /// Major and minor number of `kernel_release`; `None` where it begins with something else.
    pub fn kernel_version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.kernel_release.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

pub(crate) fn read(host: &impl Host, errors: &mut Vec<ObserveError>) -> HostFacts {
    const RELEASE: &str = "/proc/sys/kernel/osrelease";
    let kernel_release = note(errors, RELEASE, host::text(host, Path::new(RELEASE))).unwrap_or_default();
    // Only kernels since 6.1 say it; a program runs on the architecture it was built for.
    let architecture = host::text(host, Path::new("/proc/sys/kernel/arch"));
    let os = host::text(host, Path::new("/etc/os-release")).unwrap_or_default();
    let drivers = note(errors, PCI_DRIVERS, names(host, PCI_DRIVERS)).unwrap_or_default();
    let vfio_modules = vfio_modules(host, &kernel_release);
    HostFacts {
        architecture: architecture.unwrap_or_else(|_| std::env::consts::ARCH.to_owned()),
        os_id: os_release(&os, "ID"),
        os_version: os_release(&os, "VERSION_ID"),
        cpu_vendor: cpu_vendor(host),
        command_line: host::text(host, Path::new("/proc/cmdline")).unwrap_or_default(),
        secure_boot: secure_boot(host),
        iommu: false,
        iommus: names(host, "/sys/class/iommu").unwrap_or_default(),
        iommufd: host.exists(Path::new("/dev/iommu")),
        unsafe_interrupts: unsafe_interrupts(host),
        loaded_modules: loaded_modules(host),
        vfio_pci_loaded: drivers.contains(driver::VFIO_PCI),
        vfio_drivers: note(errors, "/lib/modules", VfioDrivers::read(host, &kernel_release)).unwrap_or_default(),
        vfio_modules: vfio_modules.keys().cloned().collect(),
        module_bans: vfio_modules.into_iter().filter_map(|(name, ban)| Some((name, ban?))).collect(),
        vfio_groups: iommu::open_nodes(host),
        vfio_devices: names(host, "/dev/vfio/devices").unwrap_or_default(),
        framebuffers: console::framebuffers(host),
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

/// `Y` or `N` (`param_get_bool`, `kernel/params.c`).
fn unsafe_interrupts(host: &impl Host) -> Option<bool> {
    let parameter = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
    host::text(host, Path::new(parameter)).ok().map(|text| text == "Y")
}

/// The first word of each line (`m_show`, `kernel/module/procfs.c`).
fn loaded_modules(host: &impl Host) -> BTreeSet<String> {
    let text = host::text(host, Path::new("/proc/modules")).unwrap_or_default();
    text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

/// Its head is enough: the file has an entry for each processor, and asks each for its frequency.
fn cpu_vendor(host: &impl Host) -> String {
    let head = host.head(Path::new("/proc/cpuinfo"), 1024).unwrap_or_default();
    let text = String::from_utf8_lossy(&head);
    let line = text.lines().find_map(|line| line.strip_prefix("vendor_id"));
    line.and_then(|line| line.split_once(':')).map(|(_, vendor)| vendor.trim().to_owned()).unwrap_or_default()
}

/// An EFI variable is four bytes of attributes and its value, here one byte (`Documentation/filesystems/efivarfs.rst`).
fn secure_boot(host: &impl Host) -> Option<bool> {
    let variable = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    host.read(Path::new(variable)).ok()?.get(4).map(|value| *value == 1)
}

/// VFIO modules and what forbids them. Only names that end like a VFIO driver's: the tables have thousands of others.
fn vfio_modules(host: &impl Host, release: &str) -> BTreeMap<String, Option<Ban>> {
    let dir = PathBuf::from("/lib/modules").join(release);
    let [dep, builtin] =
        ["modules.dep", "modules.builtin"].map(|file| host::text(host, &dir.join(file)).unwrap_or_default());
    let config = Config::read(host, release);
    let is_there = |name: &str| host.exists(&Path::new("/sys/module").join(name));
    let ban = |name: &str, needs: &str| {
        let needs = needs.split_ascii_whitespace().filter_map(|file| module::name_of(Path::new(file)));
        let found =
            std::iter::once(name.to_owned()).chain(needs).find_map(|module| Some((config.ban(&module)?, module)));
        let found = found.or_else(|| Some((config.renamed(name)?, name.to_owned())));
        found.filter(|(_, module)| !is_there(module)).map(|(ban, _)| ban)
    };
    let vfio = |file: &str| module::name_of(Path::new(file)).filter(|name| driver::is_vfio(name));
    let files = dep.lines().filter_map(|line| {
        let (file, needs) = line.split_once(':')?;
        let name = vfio(file)?;
        let ban = ban(&name, needs);
        Some((name, ban))
    });
    files.chain(builtin.lines().filter_map(|file| Some((vfio(file)?, None)))).collect()
}
