//! Whether a node serves its mode, and if not, why.

use crds::{
    WorkloadMode,
    conditions::CHAIN,
    v1alpha1::{Advertise, AgentFunction, AgentStatus, DriverOrigin, GPUStatus, VgpuProgress},
};

use crate::operator::vgpu;

/// Reason of a node that the operator has left.
pub use crds::v1alpha1::TORN_DOWN;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    pub ready: bool,
    /// One CamelCase word.
    pub reason: String,
    pub message: String,
}

impl Readiness {
    pub fn yes(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { ready: true, reason: reason.into(), message: message.into() }
    }

    pub fn no(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { ready: false, reason: reason.into(), message: message.into() }
    }
}

/// Of a node that should be serving `mode`.
///
/// `checked`: verdicts of a container node's checks count.
pub fn of(
    agent: &AgentStatus,
    mode: WorkloadMode,
    advertise: Advertise,
    disabled: &[AgentFunction],
    vgpus: Option<&vgpu::Standing>,
    checked: bool,
) -> Readiness {
    // A layout that cannot be followed tells more than what comes of it.
    if let Some(standing) = vgpus.filter(|standing| standing.progress == VgpuProgress::Failed) {
        return Readiness::no(standing.reason, standing.message.clone());
    }
    if let Some(gpu) = agent.gpus.iter().find(|gpu| gpu.mode != Some(mode)) {
        return away_from(gpu, mode);
    }
    if let Some(standing) = vgpus.filter(|standing| standing.progress == VgpuProgress::Pending) {
        return Readiness::no(standing.reason, standing.message.clone());
    }
    match mode {
        WorkloadMode::Container => container(agent, checked),
        WorkloadMode::VmPassthrough | WorkloadMode::VmVgpu => advertised(agent, mode, advertise, disabled),
    }
}

/// Of a node whose agent has been asked for `mode` and is not there yet.
pub fn switching(agent: &AgentStatus, mode: WorkloadMode) -> Readiness {
    match agent.gpus.iter().find(|gpu| gpu.mode != Some(mode) && gpu.refusal.is_some()) {
        Some(gpu) => away_from(gpu, mode),
        None => Readiness::no("Switching", format!("the agent is bringing {} GPU(s) into {mode}", agent.gpus.len())),
    }
}

fn away_from(gpu: &GPUStatus, mode: WorkloadMode) -> Readiness {
    match &gpu.refusal {
        Some(refusal) => Readiness::no(refusal.reason.clone(), refusal.message.clone()),
        None => Readiness::no(
            "GPUNotInMode",
            format!("GPU {} is not in {mode}: its driver is {}", gpu.address, gpu.driver.as_deref().unwrap_or("none")),
        ),
    }
}

/// The first check that has failed.
fn failed_check(agent: &AgentStatus) -> Option<Readiness> {
    let failed = |type_: &str| agent.conditions.iter().find(|c| c.type_ == type_ && c.reason == "Failed");
    let failed = CHAIN.into_iter().find_map(failed)?;
    let reason = failed.type_.replace("Validated", "NotValidated");
    Some(Readiness::no(reason, failed.message.clone()))
}

fn container(agent: &AgentStatus, checked: bool) -> Readiness {
    let other = agent.gpus.iter().find(|gpu| gpu.driver.as_deref() != Some("nvidia"));
    let failed = checked.then(|| failed_check(agent)).flatten();
    match (other.map(|gpu| (&gpu.address, gpu.driver.as_deref())), failed) {
        // A check that has failed knows better why.
        (None | Some((_, None)), Some(failed)) => failed,
        (Some((address, None)), None) => Readiness::no("DriverNotLoaded", without_driver(agent, address)),
        (Some((address, Some(driver))), _) => Readiness::no(
            "OtherDriver",
            format!(
                "GPU {address} has driver {driver} instead of nvidia: unbind it from {driver} on the node, and the nvidia driver takes it"
            ),
        ),
        (None, None) => Readiness::yes("Serving", format!("{} GPU(s) in container", agent.gpus.len())),
    }
}

fn without_driver(agent: &AgentStatus, address: &str) -> String {
    let step = match agent.host.driver.as_ref().map(|driver| driver.origin) {
        Some(DriverOrigin::HostIdle) => "a driver is installed on this host and not loaded: modprobe nvidia, see dmesg",
        Some(DriverOrigin::Host) => "the host's own driver has not taken it: see nvidia-smi and dmesg there",
        Some(DriverOrigin::Pod) | None => "see the pods of nvidia-driver-daemonset on this node",
    };
    format!("GPU {address} has no driver: {step}")
}

fn advertised(agent: &AgentStatus, mode: WorkloadMode, advertise: Advertise, disabled: &[AgentFunction]) -> Readiness {
    if advertise == Advertise::Withdrawn || disabled.contains(&AgentFunction::SandboxDevicePlugin) {
        return Readiness::yes("Bound", format!("{} GPU(s) in {mode}, not advertised by gpuvirt", agent.gpus.len()));
    }
    if let Some(resource) = agent.resources.iter().find(|resource| !resource.registered) {
        return Readiness::no(
            "NotRegistered",
            format!("resource {} is not registered: the agent waits for the kubelet", resource.name),
        );
    }
    let offered: Vec<&String> = agent.resources.iter().flat_map(|resource| &resource.devices).collect();
    let hidden = |gpu: &&GPUStatus| mode == WorkloadMode::VmPassthrough && !offered.contains(&&gpu.address);
    match agent.gpus.iter().find(hidden) {
        Some(gpu) => Readiness::no("NotAdvertised", format!("GPU {} is not offered to the kubelet yet", gpu.address)),
        None => Readiness::yes("Serving", format!("{} GPU(s) in {mode}", agent.gpus.len())),
    }
}
