//! NVML: what the driver's library says of the GPUs, asked in a child process.
//!
//! The library keeps device files open and can hang on a GPU that has gone, so no long-lived process has it: the child
//! `gpuvirt nvml` opens it, prints JSON and ends. The driver may be in another root (the host's, or the driver pod's):
//! the child changes into it, so that library, device files and `/proc` are of one driver.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nvml_wrapper::{Device, Nvml, bitmasks::InitFlags, enum_wrappers::vgpu::VmId, error::NvmlError, vgpu::VgpuType};
use nvml_wrapper_sys::bindings::nvmlVgpuHeterogeneousMode_t;
use serde::{Deserialize, Serialize};
use tokio::{process::Command, time::timeout};

/// The child's command.
pub const COMMAND: &str = "nvml";
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Where distributions put it, if the loader's cache does not know it.
const DIRECTORIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// As in `595.91.07`.
    pub driver: String,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// As the kernel writes it: `0000:01:00.0`.
    pub address: String,
    pub name: String,
    pub uuid: String,
}

/// What the library knows of vGPUs; `gpuvirt nvml --vgpus`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuReport {
    /// As in `595.91.07`.
    pub driver: String,
    pub gpus: Vec<VgpuGpu>,
}

/// Of one GPU. What it does not support is unset or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuGpu {
    /// As the kernel writes it: `0000:01:00.0`.
    pub address: String,
    /// Whether MIG mode is on. It hides the types that share time.
    pub mig: Option<bool>,
    pub ecc: Option<bool>,
    /// Whether vGPUs may differ in their framebuffer size.
    pub heterogeneous: Option<bool>,
    pub supported: Vec<VgpuKind>,
    /// Of the supported ones, numbers of those of which one could be made now.
    pub creatable: Vec<u32>,
    /// Those that a VM runs with.
    pub active: Vec<ActiveVgpu>,
    /// Why the rest is not known; other GPUs are.
    pub error: Option<String>,
}

/// A vGPU type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuKind {
    /// The number that sysfs has, too.
    pub id: u32,
    /// As in `NVIDIA A10-4Q`.
    pub name: String,
    pub framebuffer_mib: u64,
    pub max_instances: u32,
}

/// A vGPU in a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ActiveVgpu {
    /// Number of its type.
    pub kind: u32,
    /// The VM's UUID, or its number among the hypervisor's domains.
    pub vm: String,
    /// Its mediated device, where it is one.
    pub mdev: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{root} cannot become the root", root = root.display())]
    Root { root: PathBuf, source: nix::errno::Errno },
    #[error("{LIBRARY} is not there or does not load: {0}")]
    Library(NvmlError),
    #[error("NVML: {0}")]
    Nvml(#[from] NvmlError),
    #[error("{0}")]
    Answer(String),
    #[error("NVML has not answered within {} s: a GPU may have fallen off the bus, see dmesg for Xid messages", after.as_secs())]
    Late { after: Duration },
    #[error("the child that asks NVML does not start")]
    Spawn(#[source] std::io::Error),
}

/// In the child: the answer of the library below `root`. Its version alone opens no GPU.
pub fn answer(root: &Path, version_only: bool) -> Result<Report, Error> {
    change_root(root)?;
    let nvml = open(version_only)?;
    let count = if version_only { 0 } else { nvml.device_count()? };
    let gpus = (0..count).map(|index| {
        let device = nvml.device_by_index(index)?;
        let pci = device.pci_info()?;
        Ok(Gpu { address: address(&pci.bus_id), name: device.name()?, uuid: device.uuid()? })
    });
    Ok(Report { driver: nvml.sys_driver_version()?, gpus: gpus.collect::<Result<_, NvmlError>>()? })
}

/// In the child: what the library below `root` knows of vGPUs. A GPU that does not answer keeps no other from being known.
pub fn vgpus(root: &Path) -> Result<VgpuReport, Error> {
    change_root(root)?;
    let nvml = open(false)?;
    let gpu = |index| {
        let mut found = VgpuGpu::default();
        found.error = vgpu_gpu(&nvml, index, &mut found).err().map(|error| error.to_string());
        found
    };
    let gpus = (0..nvml.device_count()?).map(gpu).collect();
    Ok(VgpuReport { driver: nvml.sys_driver_version()?, gpus })
}

fn vgpu_gpu(nvml: &Nvml, index: u32, found: &mut VgpuGpu) -> Result<(), NvmlError> {
    let device = nvml.device_by_index(index)?;
    found.address = address(&device.pci_info()?.bus_id);
    found.mig = supported(device.mig_mode())?.map(|mode| mode.current == 1);
    found.ecc = supported(device.is_ecc_enabled())?.map(|mode| mode.currently_enabled);
    found.heterogeneous = heterogeneous(nvml, &device);
    for kind in supported(device.vgpu_supported_types())?.unwrap_or_default() {
        let framebuffer_mib = kind.framebuffer_size()? >> 20;
        let (id, name, max_instances) = (kind.id(), kind.name()?, kind.max_instances()?);
        found.supported.push(VgpuKind { id, name, framebuffer_mib, max_instances });
    }
    found.creatable = supported(device.vgpu_creatable_types())?.unwrap_or_default().iter().map(VgpuType::id).collect();
    for vgpu in supported(device.active_vgpus())?.unwrap_or_default() {
        let vm = match vgpu.vm_id()? {
            VmId::Domain(id) | VmId::Uuid(id) => id,
        };
        let mdev = supported(vgpu.mdev_uuid())?.filter(|uuid| !uuid.is_empty());
        found.active.push(ActiveVgpu { kind: vgpu.instance_type()?.id(), vm, mdev });
    }
    Ok(())
}

/// What a GPU or a library of that age does not have is no error.
fn supported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::NotSupported | NvmlError::NotFound | NvmlError::FailedToLoadSymbol(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The wrapper has no call for it.
fn heterogeneous(nvml: &Nvml, device: &Device<'_>) -> Option<bool> {
    // `NVML_STRUCT_VERSION(VgpuHeterogeneousMode, 1)`
    let size = u32::try_from(size_of::<nvmlVgpuHeterogeneousMode_t>()).ok()?;
    let ask = *nvml.lib().nvmlDeviceGetVgpuHeterogeneousMode.as_ref().ok()?;
    let mut mode = nvmlVgpuHeterogeneousMode_t { version: (1 << 24) | size, mode: 0 };
    // SAFETY: the device's handle is used while the library that gave it is open, and the library writes to a structure of
    // the version and size that it is told.
    let code = unsafe { ask(device.handle(), &raw mut mode) };
    (code == 0).then_some(mode.mode == 1)
}

/// NVML writes the domain in eight digits, and in capitals.
fn address(bus_id: &str) -> String {
    bus_id.parse().map_or_else(|_| bus_id.to_owned(), |address: vfio::PciAddress| address.to_string())
}

fn change_root(root: &Path) -> Result<(), Error> {
    if root != Path::new("/") {
        let failed = |source| Error::Root { root: root.to_owned(), source };
        nix::unistd::chroot(root).map_err(failed)?;
        nix::unistd::chdir("/").map_err(failed)?;
    }
    Ok(())
}

fn open(version_only: bool) -> Result<Nvml, Error> {
    let flags = if version_only { InitFlags::NO_GPUS | InitFlags::NO_ATTACH } else { InitFlags::empty() };
    let elsewhere = DIRECTORIES.map(|directory| Path::new(directory).join(LIBRARY).into_os_string());
    let mut last = None;
    for path in std::iter::once(OsString::from(LIBRARY)).chain(elsewhere) {
        match Nvml::builder().lib_path(&path).flags(flags).init() {
            Ok(nvml) => return Ok(nvml),
            // A library that loads and refuses has the better reason.
            Err(error @ NvmlError::LibloadingError(_)) => {
                last.get_or_insert(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Library(last.expect("at least one path should have been tried")))
}

/// Asks through a child of `helper`, this program.
pub async fn ask(helper: &OsStr, root: &Path, version_only: bool, patience: Duration) -> Result<Report, Error> {
    let child = Command::new(helper)
        .arg(COMMAND)
        .arg("--root")
        .arg(root)
        .args(version_only.then_some("--version-only"))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(patience, child).await.map_err(|_| Error::Late { after: patience })?.map_err(Error::Spawn)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("the child ended without a word");
        return Err(Error::Answer(line.trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Answer(format!("the child's answer is no report: {error}")))
}
