//! GPU instances and compute instances. The wrapper has no call for them, so that this file speaks to the library itself.
//!
//! Every call is of the form `code = f(handle, …, &mut answer)`: a handle that the library gave and that is used while it is
//! open, and an answer of the size that `nvml.h` says.

use std::{
    ffi::{CStr, OsStr},
    mem::MaybeUninit,
    path::Path,
    time::Duration,
};

use nvml_wrapper::{
    Device, Nvml,
    error::{NvmlError, nvml_sym, nvml_try},
};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_GPU_INSTANCE_PROFILE_COUNT,
    nvmlComputeInstance_t, nvmlComputeInstanceProfileInfo_t, nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstanceProfileInfo_v2_t, nvmlReturn_t, nvmlVgpuTypeMaxInstance_t,
};
use vfio::{
    PciAddress,
    vgpu::{MigAct, MigInstance, MigKind, MigProfile},
};

use super::{Error, change_root, open, question_of, vgpus::supported};

/// `NVML_ERROR_INSUFFICIENT_RESOURCES`, which the wrapper does not know.
const NO_ROOM: nvmlReturn_t = 23;

/// `NVML_STRUCT_VERSION`
fn version<T>(number: u32) -> u32 {
    (number << 24) | u32::try_from(size_of::<T>()).expect("NVML's structures should be small")
}

/// The answer of a call that fills a structure.
fn filled<T>(call: impl FnOnce(*mut T) -> nvmlReturn_t) -> Result<T, NvmlError> {
    let mut answer = MaybeUninit::<T>::zeroed();
    nvml_try(call(answer.as_mut_ptr()))?;
    // SAFETY: NVML's structures are of numbers and pointers, for which zeros are values, and the library has filled it.
    Ok(unsafe { answer.assume_init() })
}

fn handle(device: &Device<'_>) -> nvmlDevice_t {
    // SAFETY: the handle does not outlive the device: it is used in the same call only.
    unsafe { device.handle() }
}

/// A profile of GPU instances.
struct Profile {
    id: u32,
    slices: u32,
    most: u32,
    name: String,
}

/// What a MIG-backed type stands on; `None`: it shares time.
pub(super) fn stands_on(nvml: &Nvml, kind: u32) -> Option<MigKind> {
    let profile_of = nvml.lib().nvmlVgpuTypeGetGpuInstanceProfileId.as_ref().ok()?;
    // SAFETY: see the module.
    let profile = filled::<u32>(|answer| unsafe { profile_of(kind, answer) }).ok()?;
    // `INVALID_GPU_INSTANCE_PROFILE_ID`
    if profile == u32::MAX {
        return None;
    }
    let most = nvml.lib().nvmlVgpuTypeGetMaxInstancesPerGpuInstance.as_ref().ok().and_then(|most_of| {
        let version = version::<nvmlVgpuTypeMaxInstance_t>(1);
        let mut most = nvmlVgpuTypeMaxInstance_t { version, vgpuTypeId: kind, maxInstancePerGI: 0 };
        // SAFETY: see the module; the structure says its version and size.
        nvml_try(unsafe { most_of(&raw mut most) }).ok().map(|()| most.maxInstancePerGI)
    });
    // A driver that does not know the question has one vGPU an instance.
    Some(MigKind { profile, most: most.unwrap_or(1).max(1) })
}

/// Profiles, and what there is. `in_use`: instances that VMs run on.
pub(super) fn instances(
    nvml: &Nvml,
    device: &Device<'_>,
    in_use: &[u32],
) -> Result<(Vec<MigProfile>, Vec<MigInstance>), NvmlError> {
    let remaining_of = nvml_sym(nvml.lib().nvmlDeviceGetGpuInstanceRemainingCapacity.as_ref())?;
    let (mut profiles, mut found) = (Vec::new(), Vec::new());
    for profile in all_profiles(nvml, device)? {
        // SAFETY: see the module.
        let remaining = filled::<u32>(|answer| unsafe { remaining_of(handle(device), profile.id, answer) });
        let remaining = supported(remaining)?.unwrap_or(0);
        for instance in of_profile(nvml, device, &profile)? {
            let id = number(nvml, instance)?;
            let compute = !compute_instances(nvml, instance)?.is_empty();
            found.push(MigInstance { id, profile: profile.id, compute, in_use: in_use.contains(&id) });
        }
        profiles.push(MigProfile { id: profile.id, name: profile.name, remaining });
    }
    Ok((profiles, found))
}

fn all_profiles(nvml: &Nvml, device: &Device<'_>) -> Result<Vec<Profile>, NvmlError> {
    let info_of = nvml_sym(nvml.lib().nvmlDeviceGetGpuInstanceProfileInfoV.as_ref())?;
    let mut found = Vec::new();
    for index in 0..NVML_GPU_INSTANCE_PROFILE_COUNT {
        let info = filled::<nvmlGpuInstanceProfileInfo_v2_t>(|answer| {
            // SAFETY: `answer` is zeroed and writable; it says its version and size.
            unsafe { (*answer).version = version::<nvmlGpuInstanceProfileInfo_v2_t>(2) };
            // SAFETY: see the module.
            unsafe { info_of(handle(device), index, answer) }
        });
        let info = match info {
            // The board or the driver has no such profile.
            Err(NvmlError::InvalidArg) => continue,
            info => match supported(info)? {
                Some(info) => info,
                None => continue,
            },
        };
        // SAFETY: the library ends it with a zero, as it was before.
        let name = unsafe { CStr::from_ptr(info.name.as_ptr()) }.to_string_lossy();
        let name = name.strip_prefix("MIG ").unwrap_or(&name).to_owned();
        found.push(Profile { id: info.id, slices: info.sliceCount, most: info.instanceCount, name });
    }
    Ok(found)
}

fn of_profile(nvml: &Nvml, device: &Device<'_>, profile: &Profile) -> Result<Vec<nvmlGpuInstance_t>, NvmlError> {
    let list = nvml_sym(nvml.lib().nvmlDeviceGetGpuInstances.as_ref())?;
    let mut handles: Vec<nvmlGpuInstance_t> = vec![std::ptr::null_mut(); places(profile.most)];
    // SAFETY: see the module; there is room for as many as there can be of the profile (`nvml.h`).
    let count = filled::<u32>(|count| unsafe { list(handle(device), profile.id, handles.as_mut_ptr(), count) })?;
    handles.truncate(places(count));
    Ok(handles)
}

fn number(nvml: &Nvml, instance: nvmlGpuInstance_t) -> Result<u32, NvmlError> {
    let info_of = nvml_sym(nvml.lib().nvmlGpuInstanceGetInfo.as_ref())?;
    // SAFETY: see the module.
    Ok(filled::<nvmlGpuInstanceInfo_t>(|answer| unsafe { info_of(instance, answer) })?.id)
}

/// Profiles of compute instances that a GPU instance could have.
fn compute_profiles(
    nvml: &Nvml,
    instance: nvmlGpuInstance_t,
) -> Result<Vec<nvmlComputeInstanceProfileInfo_t>, NvmlError> {
    let info_of = nvml_sym(nvml.lib().nvmlGpuInstanceGetComputeInstanceProfileInfo.as_ref())?;
    let mut found = Vec::new();
    for index in 0..NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        let engines = NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // SAFETY: see the module.
        match filled(|answer| unsafe { info_of(instance, index, engines, answer) }) {
            Err(NvmlError::InvalidArg) => {}
            info => found.extend(supported(info)?),
        }
    }
    Ok(found)
}

fn compute_instances(nvml: &Nvml, instance: nvmlGpuInstance_t) -> Result<Vec<nvmlComputeInstance_t>, NvmlError> {
    let list = nvml_sym(nvml.lib().nvmlGpuInstanceGetComputeInstances.as_ref())?;
    let mut found = Vec::new();
    for profile in compute_profiles(nvml, instance)? {
        let mut handles: Vec<nvmlComputeInstance_t> = vec![std::ptr::null_mut(); places(profile.instanceCount)];
        // SAFETY: as in `of_profile`.
        let count = filled::<u32>(|count| unsafe { list(instance, profile.id, handles.as_mut_ptr(), count) })?;
        found.extend(handles.into_iter().take(places(count)));
    }
    Ok(found)
}

fn places(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// In the child: does one thing to a GPU.
pub fn act(root: &Path, gpu: PciAddress, act: &MigAct) -> Result<(), Error> {
    change_root(root)?;
    let nvml = open(false)?;
    let device = supported(nvml.device_by_pci_bus_id(gpu.to_string()))?.ok_or_else(|| Error::NoGpu(gpu.to_string()))?;
    match act {
        // Boards before Hopper tell that they need a reset; the mode that is asked for next says the same.
        MigAct::Mode { on } => drop(device.set_mig_mode(*on)?),
        MigAct::Create { profile, .. } => {
            let create = nvml_sym(nvml.lib().nvmlDeviceCreateGpuInstance.as_ref())?;
            // SAFETY: see the module.
            let made = filled::<nvmlGpuInstance_t>(|made| unsafe { create(handle(&device), *profile, made) });
            if matches!(made, Err(NvmlError::UnexpectedVariant(NO_ROOM))) {
                return Err(Error::Answer("NVML: insufficient resources".to_owned()));
            }
            made?;
        }
        MigAct::Compute { instance } => {
            let (profile, found) = instance_of(&nvml, &device, *instance)?;
            let whole = compute_profiles(&nvml, found)?.into_iter().filter(|of| of.sliceCount <= profile.slices);
            let whole = whole.max_by_key(|of| of.sliceCount).ok_or(NvmlError::NotFound)?;
            let create = nvml_sym(nvml.lib().nvmlGpuInstanceCreateComputeInstance.as_ref())?;
            // SAFETY: see the module.
            filled::<nvmlComputeInstance_t>(|made| unsafe { create(found, whole.id, made) })?;
        }
        MigAct::Destroy { instance, .. } => {
            let (_, found) = instance_of(&nvml, &device, *instance)?;
            let end = nvml_sym(nvml.lib().nvmlComputeInstanceDestroy.as_ref())?;
            for compute in compute_instances(&nvml, found)? {
                // SAFETY: the library has just given the handle.
                nvml_try(unsafe { end(compute) })?;
            }
            let end = nvml_sym(nvml.lib().nvmlGpuInstanceDestroy.as_ref())?;
            // SAFETY: the library has just given the handle.
            nvml_try(unsafe { end(found) })?;
        }
    }
    Ok(())
}

fn instance_of(nvml: &Nvml, device: &Device<'_>, id: u32) -> Result<(Profile, nvmlGpuInstance_t), NvmlError> {
    for profile in all_profiles(nvml, device)? {
        for instance in of_profile(nvml, device, &profile)? {
            if number(nvml, instance)? == id {
                return Ok((profile, instance));
            }
        }
    }
    Err(NvmlError::NotFound)
}

/// Has it done by a child of `helper`, this program.
pub async fn ask_act(
    helper: &OsStr,
    root: &Path,
    gpu: PciAddress,
    act: &MigAct,
    patience: Duration,
) -> Result<(), Error> {
    let text = serde_json::to_string(act).expect("an act should serialize");
    question_of(helper, root, &["--gpu", &gpu.to_string(), "--act", &text], patience).await
}
