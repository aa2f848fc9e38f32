//! What the driver's library (NVML) says beyond what the kernel shows, and what only it can do: MIG.
//!
//! The library keeps device files open and can hang, so that a child process has it; here are its answers only. Each may be
//! missing: an older driver, a board without the feature, or no library at all.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::address::PciAddress;

/// One answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LibraryFacts {
    /// By address of the physical GPU.
    pub gpus: BTreeMap<PciAddress, GpuFacts>,
    /// vGPUs that VMs run with.
    pub active: Vec<ActiveVgpu>,
    /// Why there is no answer, while there is none.
    pub silence: Option<Silence>,
}

impl LibraryFacts {
    /// The id of the VM that runs with a mediated device.
    pub fn vm(&self, mdev: &str) -> Option<&str> {
        self.active.iter().find(|vgpu| vgpu.mdev.as_deref() == Some(mdev)).map(|vgpu| vgpu.vm.as_str())
    }
}

/// Why the library says nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Silence {
    /// One word.
    pub reason: SilenceReason,
    /// With the next step.
    pub message: String,
}

/// See [`Silence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum SilenceReason {
    /// There is no library, or it does not load.
    NoLibrary,
    /// The library is of another version than the module.
    VersionMismatch,
    /// No answer in time.
    Late,
    /// Anything else.
    Failed,
}

impl SilenceReason {
    /// For conditions and status.
    pub fn word(self) -> &'static str {
        match self {
            Self::NoLibrary => "NoLibrary",
            Self::VersionMismatch => "VersionMismatch",
            Self::Late => "LibraryLate",
            Self::Failed => "LibraryFailed",
        }
    }
}

/// Of one GPU. `None` and empty: it does not say, or the board has no such thing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFacts {
    /// A property of the whole GPU: with it there are only MIG-backed types.
    pub mig: Option<MigMode>,
    /// Whether its vGPUs may differ in framebuffer size.
    pub heterogeneous: Option<bool>,
    /// Whether a display is connected or driven.
    pub display: Option<bool>,
    /// Whether memory errors are corrected, which costs memory on some boards.
    pub ecc: Option<bool>,
    /// What GPU instances it could have.
    pub profiles: Vec<MigProfile>,
    /// Those that it has.
    pub instances: Vec<MigInstance>,
    /// MIG-backed types, as config files name them.
    pub kinds: BTreeMap<String, MigKind>,
    /// Why the rest is not known.
    pub error: Option<String>,
}

impl GpuFacts {
    pub(super) fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }
}

/// MIG mode now, and after the GPU's next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigMode {
    /// Now.
    pub on: bool,
    /// What was asked for: boards before Hopper need a reset in between.
    pub next: bool,
}

/// A GPU instance profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigProfile {
    /// NVML's number, which types name.
    pub id: u32,
    /// As `nvidia-smi mig` has it: `1g.5gb`.
    pub name: String,
    /// How many more the GPU has room for.
    pub remaining: u32,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// NVML's number.
    pub id: u32,
    /// See [`MigProfile::id`].
    pub profile: u32,
    /// Whether it has a compute instance, without which a VM's programs would find no device to compute on.
    pub compute: bool,
    /// Whether a VM runs with a vGPU on it.
    pub in_use: bool,
}

/// What a MIG-backed type stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigKind {
    /// See [`MigProfile::id`].
    pub profile: u32,
    /// How many of its vGPUs one GPU instance carries.
    pub most: u32,
}

/// A vGPU that a VM runs with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ActiveVgpu {
    /// The physical GPU.
    pub gpu: PciAddress,
    /// As config files name its type, where the library knows it.
    pub kind: Option<String>,
    /// The VM's UUID, or its number among the hypervisor's domains.
    pub vm: String,
    /// Its mediated device, where it is one.
    pub mdev: Option<String>,
}

/// What only the library does.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "act", rename_all = "camelCase")]
pub enum MigAct {
    /// Turn MIG mode on or off.
    Mode { on: bool },
    /// Make a GPU instance.
    Create { profile: u32, name: String, nth: u32 },
    /// Make the compute instance that has all of a GPU instance.
    Compute { instance: u32 },
    /// Remove a GPU instance with its compute instances.
    Destroy { instance: u32, name: String },
}

impl fmt::Display for MigAct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mode { on: true } => f.write_str("turn MIG mode on"),
            Self::Mode { on: false } => f.write_str("turn MIG mode off"),
            Self::Create { name, nth, .. } => write!(f, "make GPU instance {name}, number {nth} of its kind"),
            Self::Compute { instance } => write!(f, "make the compute instance of GPU instance {instance}"),
            Self::Destroy { instance, name } => write!(f, "remove GPU instance {instance} ({name})"),
        }
    }
}

/// The library, behind whatever keeps it out of this process.
pub trait Library {
    /// What it says now. Never fails: silence is an answer.
    fn ask(&mut self) -> LibraryFacts;

    /// Does one thing.
    ///
    /// # Errors
    /// The library's own words.
    fn act(&mut self, gpu: PciAddress, act: &MigAct) -> Result<(), String>;
}

/// Where nobody asks: MIG is left as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLibrary;

impl Library for NoLibrary {
    fn ask(&mut self) -> LibraryFacts {
        LibraryFacts::default()
    }

    fn act(&mut self, gpu: PciAddress, act: &MigAct) -> Result<(), String> {
        Err(format!("no driver library can be asked to {act} on {gpu}"))
    }
}
