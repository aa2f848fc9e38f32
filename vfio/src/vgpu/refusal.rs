//! Why a GPU's vGPUs stay as they are.

use serde::Serialize;

use super::framework::NoVgpu;
use crate::address::PciAddress;
use crate::holders::Holder;
use crate::refusal::{Refusal, list, next_steps};

/// Why nothing (more) is done. Each names the device, what stands in the way, and the next step.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
pub enum VgpuRefusal {
    /// The GPU is in no condition to be worked on.
    #[error(transparent)]
    Gpu(#[from] Refusal),
    /// It makes none.
    #[error(transparent)]
    NoFramework(#[from] NoVgpu),
    /// The layout has no place for a vGPU that somebody has.
    #[error(
        "gpu {gpu}: vGPU {id} ({kind}) is not in the layout and in use by {}; {}, or choose a layout that has it",
        list(holders),
        next_steps(holders)
    )]
    InUse { gpu: PciAddress, id: String, kind: String, holders: Vec<Holder> },
    /// Making more virtual functions takes away those that are there.
    #[error(
        "gpu {gpu} has {count} virtual functions of {possible} and {wanted} vGPUs are asked for, but making more takes away those that are there: {}",
        cause(holders, *count)
    )]
    VfsInUse { gpu: PciAddress, count: u16, possible: u16, wanted: u32, holders: Vec<Holder> },
    /// Not among the driver's types for this board and mode.
    #[error(
        "gpu {gpu} has no vGPU type {kind}{}; it has {}",
        mode(*mig), offered(kinds)
    )]
    UnknownType {
        gpu: PciAddress,
        kind: String,
        kinds: Vec<String>,
        /// In MIG mode only MIG-backed types are listed, and without it none of them. `None`: that is not the reason.
        mig: Option<bool>,
    },
    /// All vGPUs of a GPU have the same framebuffer, unless it was told otherwise.
    #[error(
        "gpu {gpu}: {kind} cannot be beside {beside}: all vGPUs of a GPU have the same framebuffer size, unless it is in heterogeneous mode (nvidia-smi vgpu -i {gpu} -shm 1 while it has none); use one size, or switch that mode on"
    )]
    Homogeneous { gpu: PciAddress, kind: String, beside: String },
    /// MIG mode is a property of the whole GPU.
    #[error("gpu {gpu}: the layout mixes {mig}, which needs MIG mode, and {shared}, which needs it off; use one sort")]
    MixedMig { gpu: PciAddress, mig: String, shared: String },
    /// Boards before Hopper take another MIG mode with a reset only.
    #[error(
        "gpu {gpu}: MIG mode is to be {} and waits for a reset of the GPU: end what uses it and run nvidia-smi --gpu-reset -i {gpu}, or reboot the node",
        if *on { "on" } else { "off" }
    )]
    MigNeedsReset { gpu: PciAddress, on: bool },
    /// GPU instances that are there, or in use, leave no place.
    #[error(
        "gpu {gpu}: {wanted} GPU instances {name} are needed, {made} are there, and there is room for {most} at most beside the others: ask for fewer, or remove others that no VM uses (nvidia-smi mig -i {gpu} -lgi lists them)"
    )]
    NoGpuInstance { gpu: PciAddress, name: String, wanted: u32, made: u32, most: u32 },
    /// The kernel lists no place for one more.
    #[error("gpu {gpu} is full: {wanted} {kind} are asked for, {made} are there, and {}; ask for fewer", limit(*most, *wanted, offered))]
    Full { gpu: PciAddress, kind: String, wanted: u32, made: u32, most: Option<u32>, offered: Vec<String> },
}

impl VgpuRefusal {
    /// One word for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Gpu(refusal) => refusal.reason(),
            Self::NoFramework(none) => none.reason(),
            Self::InUse { .. } => "VgpuInUse",
            Self::VfsInUse { .. } => "VirtualFunctionsInUse",
            Self::UnknownType { .. } => "UnknownVgpuType",
            Self::Homogeneous { .. } => "FramebufferSizesDiffer",
            Self::MixedMig { .. } => "MigAndTimeSliced",
            Self::MigNeedsReset { .. } => "MigNeedsReset",
            Self::NoGpuInstance { .. } => "NoGpuInstance",
            Self::Full { .. } => "GpuFull",
        }
    }

    /// Whether waiting alone may end it.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::NoFramework(none) => none.is_passing(),
            Self::Gpu(_)
            | Self::InUse { .. }
            | Self::VfsInUse { .. }
            | Self::UnknownType { .. }
            | Self::Homogeneous { .. }
            | Self::MixedMig { .. }
            | Self::MigNeedsReset { .. }
            | Self::NoGpuInstance { .. }
            | Self::Full { .. } => false,
        }
    }
}

fn cause(holders: &[Holder], count: u16) -> String {
    match holders.is_empty() {
        true => format!("a vGPU on one of the {count} is to stay; clear the layout first"),
        false => format!("they are in use by {}; {}", list(holders), next_steps(holders)),
    }
}

fn limit(most: Option<u32>, wanted: u32, offered: &[String]) -> String {
    match most.filter(|most| wanted > *most) {
        Some(most) => format!("it takes {most} at most"),
        None if offered.is_empty() => "the kernel lists no place for another one, nor for any other type".to_owned(),
        None => format!("the kernel lists a place only for {}", offered.join(", ")),
    }
}

fn mode(mig: Option<bool>) -> &'static str {
    match mig {
        Some(true) => " while it is in MIG mode, which has only MIG-backed types (nvidia-smi -mig 0 ends it)",
        Some(false) => " while MIG mode is off (nvidia-smi -mig 1 begins it)",
        None => "",
    }
}

fn offered(kinds: &[String]) -> String {
    /// A board has up to 75; a person needs the sort of names, not all.
    const MOST: usize = 12;
    match kinds.len() {
        0 => "none: see that its vGPU manager runs, and in MIG mode that it has GPU instances".to_owned(),
        count if count > MOST => format!("{} and {} more", kinds[..MOST].join(", "), count - MOST),
        _ => kinds.join(", "),
    }
}
