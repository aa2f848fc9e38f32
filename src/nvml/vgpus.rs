//! What the library knows of vGPUs.

use std::{ffi::OsStr, path::Path, time::Duration};

use nvml_wrapper::{Device, Nvml, enum_wrappers::vgpu::VmId, error::NvmlError, vgpu::VgpuType};
use nvml_wrapper_sys::bindings::nvmlVgpuHeterogeneousMode_t;
use serde::{Deserialize, Serialize};

use super::{Error, address, change_root, mig, open, question_of};

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
    /// It hides the types that share time.
    pub mig: Option<MigMode>,
    /// What GPU instances it could have.
    pub profiles: Vec<vfio::vgpu::MigProfile>,
    /// GPU instances that it has.
    pub instances: Vec<vfio::vgpu::MigInstance>,
    /// Whether a display is connected or driven.
    pub display: Option<bool>,
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

/// MIG mode now, and after the GPU's next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigMode {
    pub on: bool,
    pub next: bool,
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
    /// Of a MIG-backed one.
    pub mig: Option<vfio::vgpu::MigKind>,
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
    found.mig = supported(device.mig_mode())?.map(|mode| MigMode { on: mode.current == 1, next: mode.pending == 1 });
    found.ecc = supported(device.is_ecc_enabled())?.map(|mode| mode.currently_enabled);
    found.heterogeneous = heterogeneous(nvml, &device);
    let connected = supported(device.is_display_connected())?;
    let active = supported(device.is_display_active())?;
    found.display = connected.or(active).map(|_| connected == Some(true) || active == Some(true));
    for kind in supported(device.vgpu_supported_types())?.unwrap_or_default() {
        let framebuffer_mib = kind.framebuffer_size()? >> 20;
        let (id, name, max_instances) = (kind.id(), kind.name()?, kind.max_instances()?);
        let mig = mig::stands_on(nvml, id);
        found.supported.push(VgpuKind { id, name, framebuffer_mib, max_instances, mig });
    }
    found.creatable = supported(device.vgpu_creatable_types())?.unwrap_or_default().iter().map(VgpuType::id).collect();
    let mut in_use = Vec::new();
    for vgpu in supported(device.active_vgpus())?.unwrap_or_default() {
        let vm = match vgpu.vm_id()? {
            VmId::Domain(id) | VmId::Uuid(id) => id,
        };
        let mdev = supported(vgpu.mdev_uuid())?.filter(|uuid| !uuid.is_empty());
        in_use.extend(supported(vgpu.gpu_instance_id())?);
        found.active.push(ActiveVgpu { kind: vgpu.instance_type()?.id(), vm, mdev });
    }
    if found.mig.is_some_and(|mode| mode.on) {
        (found.profiles, found.instances) = mig::instances(nvml, &device, &in_use)?;
    }
    Ok(())
}

/// What a GPU or a library of that age does not have is no error.
pub(super) fn supported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
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

/// Asks through a child of `helper`, this program.
pub async fn ask_vgpus(helper: &OsStr, root: &Path, patience: Duration) -> Result<VgpuReport, Error> {
    question_of(helper, root, &["--vgpus"], patience).await
}
