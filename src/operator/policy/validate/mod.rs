//! Every "no" to a ClusterPolicy. What passes is a [`Settings`], from which building cannot fail.

mod common;
mod container;
mod driver;
mod facts;
mod nvidia_driver;
mod pools;
mod sandbox;
mod stack;
#[cfg(test)]
pub(super) mod tests;
mod toolkit;
mod vgpu;

use std::collections::BTreeMap;

use crds::{
    labels,
    v1::{ClusterPolicy, ClusterPolicySpec, SandboxMode},
    v1alpha1::{AgentFunction, Discovery, GPUVirtConfigSpec, ResourceAlias},
};
use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::ResourceExt;

pub use self::{
    common::{Common, PRIORITY_CLASS, Rollout, gpu_nodes},
    container::{Container, Image},
    driver::{DRIVER, Driver, Files, Rdma, Sidecar, Source, Subscription},
    facts::{Facts, GPUNodeFacts, Host, NVIDIADrivers, OSTREE_VERSION, OpenShift, Platform, Proxy, Runtime},
    nvidia_driver::{Asked, Placement, fnv1a},
    pools::{LiveSet, Pool},
    sandbox::{CcManager, Sandboxed, VGPU_MANAGER, VgpuManager},
    stack::{
        Cdi, Configs, DcgmExporter, DevicePlugin, Gfd, MONITORED, Management, MigManager, Monitor, NodeStatus, Stack,
        Stacked, monitored,
    },
    toolkit::{HostFile, Toolkit},
};
use crate::{
    operator::{
        host::label_value,
        node::{
            gates,
            mode::{NodePolicy, Sandbox},
        },
        transition::{Unusable, Upgrade, Upgrades, rules::Rules, windows::Windows},
        vgpu::LayoutSource,
    },
    telemetry::readable,
};

/// A setting that cannot be followed; the operands that do not depend on it are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub reason: &'static str,
    /// Field, value, next step.
    pub message: String,
}

/// A policy that can be built.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub policy: String,
    pub common: Common,
    pub agent: Agent,
    pub openshift: Option<OpenShift>,
    pub drivers: Drivers<Driver>,
    /// Names of driver sets that go, and whose pods stay.
    pub orphaned: Vec<String>,
    pub stack: Stack,
    pub stacked: Stacked,
    pub sandboxed: Sandboxed,
    /// Of which the operator shows its own.
    pub vgpu_layouts: Wish<LayoutSource>,
}

/// Drivers of one kind, one a pool of nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Drivers<T> {
    pub wish: Wish<Vec<T>>,
    /// Names of sets that are not asked for any more, and that a node still wants.
    pub kept: Vec<String>,
}

impl<T> Drivers<T> {
    /// Without a pool nothing is known: no node has reported.
    fn of(
        base: &str,
        wanted: Result<Vec<T>, Problem>,
        pool: fn(&T) -> &Pool,
        facts: &Facts,
        problems: &mut Vec<Problem>,
    ) -> Self {
        let wish = wanted.map(|all| if all.is_empty() { Wish::Unknown } else { Wish::Wanted(Box::new(all)) });
        let wish = Wish::or_problem(wish, problems);
        let kept = match &wish {
            Wish::Wanted(all) => {
                pools::kept(base, Some(&all.iter().map(|one| pool(one).clone()).collect::<Vec<_>>()), facts)
            }
            Wish::Unknown => pools::kept(base, None, facts),
            Wish::NotWanted => Vec::new(),
        };
        Self { wish, kept }
    }
}

/// Whether an operand is ours to bring. Removal needs proof: only [`Wish::NotWanted`] takes a running one away.
#[derive(Clone, Debug, PartialEq)]
pub enum Wish<T> {
    Wanted(Box<T>),
    /// The user has said so.
    NotWanted,
    /// The policy cannot be followed, or no node has said what it runs: what is there stays as it is.
    Unknown,
}

impl<T> Wish<T> {
    /// An operand that cannot be brought is a problem, and what runs of it stays.
    fn or_problem(wish: Result<Self, Problem>, problems: &mut Vec<Problem>) -> Self {
        wish.unwrap_or_else(|problem| {
            problems.push(problem);
            Self::Unknown
        })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub discovery: Discovery,
    pub resync_seconds: u32,
    /// The peer's VFIO manager settings that still mean something for our agent.
    pub resources: ResourceRequirements,
}

/// What can be built, and what cannot.
#[derive(Clone, Debug, PartialEq)]
pub struct Validated {
    pub settings: Settings,
    pub problems: Vec<Problem>,
    /// What comes of each `NVIDIADriver`.
    pub asked: Vec<Asked>,
}

/// The part of the policy that nodes' modes depend on.
pub fn node_policy(policy: &ClusterPolicy, config: &GPUVirtConfigSpec, drivers: Option<&NVIDIADrivers>) -> NodePolicy {
    let sandbox = &policy.spec.sandbox_workloads;
    let mode = match sandbox.mode {
        SandboxMode::Kubevirt => gates::SandboxMode::KubeVirt,
        SandboxMode::Kata => gates::SandboxMode::Kata,
    };
    NodePolicy {
        name: policy.name_any(),
        sandbox: match sandbox.is_enabled() {
            true => Sandbox::On { default: sandbox.default_workload, mode },
            false => Sandbox::Off,
        },
        teardown: policy.metadata.deletion_timestamp.is_some(),
        aliases: config.resource_aliases.iter().filter(|alias| reserved(alias).is_none()).cloned().collect(),
        log_level: config.logging.of_agents().filter(|filter| readable(filter).is_ok()).map(str::to_owned),
        disabled: switched_off(&policy.spec),
        mig_default: mig_default(&policy.spec),
        named: Vec::new(),
        checks: stack::enabled(&policy.spec).contains(&true),
        driver: policy.spec.driver.component.is_enabled(true),
        vgpu: vgpu::source(&policy.spec),
        rules: Rules { windows: windows(config).unwrap_or(Windows::Unknown), ..rules(config).unwrap_or_default() },
        upgrades: upgrades(&policy.spec, config, drivers, &mut Vec::new()),
        claims: match uses_objects(&policy.spec) {
            true => drivers.map(NVIDIADrivers::claims),
            false => Some(Vec::new()),
        },
    }
}

/// Functions of the agent that stand for operands of the peer: an operand that is off is off on every node.
fn switched_off(spec: &ClusterPolicySpec) -> Vec<AgentFunction> {
    [
        (&spec.vfio_manager.component, AgentFunction::VfioManager),
        (&spec.sandbox_device_plugin, AgentFunction::SandboxDevicePlugin),
        (&spec.vgpu_device_manager.component, AgentFunction::VgpuDeviceManager),
    ]
    .into_iter()
    .filter(|(component, _)| !component.is_enabled(true))
    .map(|(_, function)| function)
    .collect()
}

/// Whether `NVIDIADriver` objects say what driver nodes get.
pub fn uses_objects(spec: &ClusterPolicySpec) -> bool {
    spec.driver.use_nvidia_driver_crd.unwrap_or(false)
}

/// The schema knows one layout to start from, and none.
fn mig_default(spec: &ClusterPolicySpec) -> Option<&'static str> {
    let manager = &spec.mig_manager;
    (manager.component.is_enabled(true) && manager.config.default == "all-disabled").then_some("all-disabled")
}

pub fn validate(policy: &ClusterPolicy, config: &GPUVirtConfigSpec, facts: &Facts) -> Validated {
    let spec = &policy.spec;
    let mut problems: Vec<Problem> = config.resource_aliases.iter().filter_map(reserved).collect();
    problems.extend(rules(config).err());
    upgrades(spec, config, facts.nvidia_drivers.as_ref(), &mut problems);
    problems.extend(windows(config).err());
    problems.extend(log_levels(config));
    let by_objects = uses_objects(spec);
    let (drivers, asked) = match by_objects {
        true => nvidia_driver::drivers(spec.operator.use_ocp_driver_toolkit.unwrap_or(false), facts, &mut problems),
        false => (driver::drivers(spec, facts, &mut problems), Vec::new()),
    };
    // Pods go on while whoever brings the driver changes: only a driver that nobody asks for any more is taken away.
    let others = facts.live.iter().filter(|(_, live)| live.owner.is_some() != by_objects);
    let others = others.filter(|_| by_objects || spec.driver.component.is_enabled(true));
    let orphaned = others.map(|(name, _)| name.clone()).collect();
    let stack = stack::stack(spec, facts, &mut problems);
    let stacked = stack::stacked(spec, facts, &mut problems);
    let sandboxed = sandbox::sandboxed(spec, facts, &mut problems);
    let settings = Settings {
        policy: policy.name_any(),
        common: common::common(&spec.daemonsets, &spec.host_paths),
        agent: Agent {
            discovery: config.discovery,
            resync_seconds: config.resync_seconds,
            resources: (&spec.vfio_manager.component.container.resources).into(),
        },
        openshift: facts.openshift().cloned(),
        drivers,
        orphaned,
        stack,
        stacked,
        sandboxed,
        vgpu_layouts: vgpu::layouts(spec, facts, &mut problems),
    };
    Validated { settings, problems, asked }
}

/// Why a resource name may not be used for whole GPUs: the container stack's plugin owns it.
fn reserved(alias: &ResourceAlias) -> Option<Problem> {
    labels::is_container_resource(&alias.name).then(|| Problem {
        reason: "ReservedResourceName",
        message: format!(
            "GPUVirtConfig default: alias {} for {} is not used: NVIDIA's device plugin owns that name; choose another one",
            alias.name, alias.selector
        ),
    })
}

/// Drivers whose upgrades cannot be followed are renewed by hand.
fn upgrades(
    spec: &ClusterPolicySpec,
    config: &GPUVirtConfigSpec,
    drivers: Option<&NVIDIADrivers>,
    problems: &mut Vec<Problem>,
) -> Upgrades {
    let mut usable = |field: String, upgrade: Result<Option<Upgrade>, Unusable>| {
        upgrade.unwrap_or_else(|error| {
            let message =
                format!("{field} is not used, and drivers are not upgraded by themselves: {error}; correct it");
            problems.push(Problem { reason: "InvalidUpgradePolicy", message });
            None
        })
    };
    let policy = usable("spec.driver.upgradePolicy".to_owned(), Upgrade::new(&spec.driver.upgrade_policy, config));
    let mut objects = BTreeMap::new();
    for driver in drivers.into_iter().flat_map(|drivers| &drivers.all).filter(|_| uses_objects(spec)) {
        let name = driver.name_any();
        let upgrade = Upgrade::of_object(&driver.spec.upgrade_policy, config);
        // As the set's label has it.
        objects.insert(label_value(&name), usable(format!("NVIDIADriver {name}: spec.upgradePolicy"), upgrade));
    }
    Upgrades { policy, objects }
}

fn rules(config: &GPUVirtConfigSpec) -> Result<Rules, Problem> {
    Rules::new(config.evict, &config.budget).map_err(|error| Problem {
        reason: "InvalidBudget",
        message: format!(
            "GPUVirtConfig default: budget is not used, and nodes change one at a time: {error}; correct it"
        ),
    })
}

fn log_levels(config: &GPUVirtConfigSpec) -> Option<Problem> {
    let levels = [config.logging.of_operator(), config.logging.of_agents()];
    let (level, why) = levels.into_iter().flatten().find_map(|level| Some((level, readable(level).err()?)))?;
    Some(Problem {
        reason: "InvalidLogLevel",
        message: format!(
            "GPUVirtConfig default: log level {level:?} is not used ({why}): use error, warn, info, debug or trace, or a filter such as info,vfio=debug"
        ),
    })
}

fn windows(config: &GPUVirtConfigSpec) -> Result<Windows, Problem> {
    Windows::read(&config.maintenance_windows).map_err(|error| Problem {
        reason: "InvalidMaintenanceWindow",
        message: format!(
            "GPUVirtConfig default: maintenanceWindows are not used, and those before them count (after a restart of the operator: none opens): {error}; correct it"
        ),
    })
}

/// An empty text is as good as none.
fn given(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}
