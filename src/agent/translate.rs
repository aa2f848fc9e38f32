//! The one file that knows both vocabularies: the host library's and the cluster's.

use std::{collections::BTreeMap, path::PathBuf};

use crds::{
    WorkloadMode,
    conditions::merge,
    v1alpha1::{
        AgentStatus, Ailment, FunctionStatus, GPUStatus, Holder, HostFacts, Obstacle, Refusal, ResourceStatus, Summary,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use vfio::{Binding, ExecuteError, Function, Gpu, Inventory, KernelError, deviations, journal::JournalError};

use super::{
    conditions,
    container_node::ContainerNode,
    device_plugin::{Offer, ResourceName, States, names},
    health,
    offer::{self, Offered},
    pod_resources::Allocation,
    vfio_manager::Observation,
    wish::Wish,
};

mod vgpus;

pub use vgpus::{vgpu_failure, vgpu_refusal};

pub fn refusal(refusal: &vfio::Refusal) -> Refusal {
    Refusal { reason: refusal.reason().to_owned(), message: refusal.to_string() }
}

pub fn failure(reason: &str, error: &dyn std::error::Error) -> Refusal {
    Refusal { reason: reason.to_owned(), message: crate::chain(error) }
}

pub fn journal(error: &JournalError) -> Refusal {
    let reason = match error {
        JournalError::OldEpoch { .. } => "StaleOrder",
        JournalError::Io { .. } | JournalError::Corrupt { .. } => "JournalNotWritten",
    };
    failure(reason, error)
}

pub fn execution(error: &ExecuteError) -> Refusal {
    let reason = match error {
        ExecuteError::Kernel { source: KernelError::Hung { .. }, .. } => "NeedsReboot",
        ExecuteError::Kernel { source: KernelError::Module { .. }, .. } => "ModuleNotLoaded",
        ExecuteError::Kernel { source: KernelError::Refused { .. }, .. } => "KernelRefused",
        ExecuteError::Kernel { source: KernelError::Child { .. }, .. } => "WriteFailed",
        ExecuteError::Journal { .. } => "JournalNotWritten",
    };
    failure(reason, error)
}

/// The mode that the kernel shows for a GPU and its group, if it shows one whole.
pub fn shown(inventory: &Inventory, gpu: &Gpu<'_>) -> Option<WorkloadMode> {
    let address = gpu.primary.address;
    if deviations(inventory, address, Binding::Vfio).is_empty() {
        Some(WorkloadMode::VmPassthrough)
    } else if deviations(inventory, address, Binding::Host).is_empty() {
        Some(WorkloadMode::Container)
    } else {
        None
    }
}

/// As [`shown`], with the two modes told apart that leave a GPU to drivers of the host: it has vGPUs, or it is asked to.
pub fn mode(wish: &Wish, observation: &Observation, gpu: &Gpu<'_>) -> Option<WorkloadMode> {
    let address = gpu.primary.address;
    let has = observation.vgpus.gpus.get(&address).is_some_and(|found| !found.instances.is_empty());
    let asked = wish.mode(address) == Some(WorkloadMode::VmVgpu);
    let mode = shown(&observation.inventory, gpu)?;
    let on_host = mode != WorkloadMode::VmPassthrough;
    Some(if on_host && (has || asked) { WorkloadMode::VmVgpu } else { mode })
}

/// Everything about a round that the cluster is told.
pub struct Report<'a> {
    pub wish: &'a Wish,
    pub observation: &'a Observation,
    pub plugins: &'a States,
    pub offered: &'a Offered,
    pub container: &'a ContainerNode,
    pub generation: i64,
    pub old: Option<&'a AgentStatus>,
}

pub fn status(report: &Report<'_>, now: &Time) -> AgentStatus {
    let inventory = &report.observation.inventory;
    let gpus: Vec<GPUStatus> = inventory.gpus().iter().map(|gpu| gpu_status(report, gpu)).collect();
    let verdicts = conditions::verdicts(report, &gpus);
    let mut old = report.old.map(|old| old.conditions.clone()).unwrap_or_default();
    // A node that is not checked any more has no verdict either.
    old.retain(|condition| verdicts.iter().any(|verdict| verdict.type_ == condition.type_));
    AgentStatus {
        observed_generation: report.generation,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        summary: summary(&gpus),
        host: HostFacts { driver: report.container.driver.clone(), ..host(inventory) },
        conditions: merge(&old, &verdicts, Some(report.generation), now),
        gpus,
        vgpu: vgpus::state(report),
        resources: resources(report.plugins, &report.offered.offer),
        plan: report.observation.plan.clone(),
        errors: inventory.errors.iter().map(ToString::to_string).collect(),
    }
}

fn gpu_status(report: &Report<'_>, gpu: &Gpu<'_>) -> GPUStatus {
    let observation = report.observation;
    let primary = gpu.primary;
    let mode = mode(report.wish, observation, gpu);
    let obstacles = WorkloadMode::ALL.into_iter().filter(|m| Some(*m) != mode).filter_map(|mode| {
        let refusal = observation.obstacles.get(&(primary.address, mode))?;
        Some(Obstacle { mode, reason: refusal.reason.clone(), message: refusal.message.clone() })
    });
    let holders = observation.holders.get(&primary.address).into_iter().flatten();
    let resource = offer::resource_name(report.wish, primary).ok();
    let mut ailments: Vec<Ailment> =
        report.offered.ailments.get(&primary.address).into_iter().flatten().map(health::Ailment::told).collect();
    ailments.sort_by_key(|ailment| ailment.severity);
    GPUStatus {
        address: primary.address.to_string(),
        id: id(primary),
        subsystem: Some(format!("{:04x}:{:04x}", primary.subsystem_vendor, primary.subsystem_device)),
        class: format!("0x{:06x}", primary.class),
        product: names::product(primary.vendor, primary.device).unwrap_or("unknown").to_owned(),
        mode,
        driver: primary.driver.clone(),
        iommu_group: gpu.group.and_then(|group| i32::try_from(group).ok()),
        companions: gpu.companions.iter().map(|f| companion(f)).collect(),
        numa_node: primary.numa_node.map(i32::from),
        resource: resource.map(|name| name.as_str().to_owned()),
        holders: holders.map(holder).collect(),
        vgpu: vgpus::status(report, primary.address),
        withheld: report.offered.withheld.get(&primary.address).cloned(),
        ailments,
        obstacles: obstacles.collect(),
        refusal: observation.refusals.get(&primary.address).cloned(),
    }
}

fn id(function: &Function) -> String {
    format!("{:04x}:{:04x}", function.vendor, function.device)
}

fn companion(function: &Function) -> FunctionStatus {
    FunctionStatus { address: function.address.to_string(), id: id(function), driver: function.driver.clone() }
}

/// A GPU that the kubelet has given to a pod, whether its VM has opened it or not.
pub fn allocation(allocation: &Allocation) -> vfio::Holder {
    vfio::Holder {
        pid: 0,
        command: "kubelet".to_owned(),
        path: PathBuf::from("pod-resources"),
        pod: Some(allocation.pod.clone()),
        vm: None,
    }
}

fn holder(holder: &vfio::Holder) -> Holder {
    Holder {
        pid: holder.pid,
        command: holder.command.clone(),
        path: holder.path.display().to_string(),
        pod: holder.pod.clone(),
        vm: holder.vm.clone(),
    }
}

fn summary(gpus: &[GPUStatus]) -> Summary {
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let mut drivers: Vec<&str> = gpus.iter().map(|gpu| gpu.driver.as_deref().unwrap_or("none")).collect();
    drivers.sort_unstable();
    drivers.dedup();
    let driver = match drivers.as_slice() {
        [] => "none",
        [one] => one,
        [_, ..] => "mixed",
    };
    Summary {
        gpus: count(gpus.len()),
        in_use: count(gpus.iter().filter(|gpu| !gpu.holders.is_empty()).count()),
        driver: driver.to_owned(),
    }
}

fn host(inventory: &Inventory) -> HostFacts {
    let facts = &inventory.facts;
    HostFacts {
        kernel: facts.kernel_release.clone(),
        architecture: facts.architecture.clone(),
        os: format!("{}{}", facts.os_id, facts.os_version),
        iommu: facts.iommu,
        iommufd: facts.iommufd,
        driver: None,
    }
}

/// What the kubelet has been told, also what is on its way out: it counts as gone only when the plugin is.
fn resources(plugins: &States, offered: &Offer) -> Vec<ResourceStatus> {
    let devices: BTreeMap<&ResourceName, Vec<String>> =
        offered.iter().map(|(name, devices)| (name, devices.iter().map(|d| d.id.clone()).collect())).collect();
    plugins
        .iter()
        .map(|(name, state)| ResourceStatus {
            name: name.as_str().to_owned(),
            devices: devices.get(name).cloned().unwrap_or_default(),
            registered: state.registered,
        })
        .collect()
}
