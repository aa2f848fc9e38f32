//! Every "no" to a ClusterPolicy. What passes is a [`Settings`], from which building cannot fail.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    labels,
    v1::{
        ClusterPolicy, ClusterPolicySpec, ContainerProbe, Daemonsets, HostPaths, ImageSpec, KernelModuleType,
        SandboxMode, UpdateStrategy,
    },
    v1alpha1::{Discovery, GPUVirtConfigSpec, ResourceAlias},
};
use k8s_openapi::{
    api::core::v1::{EnvVar, PodSecurityContext, ResourceRequirements, Toleration},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::image::{self, ImageRef};
use crate::operator::node::{
    gates,
    mode::{NodePolicy, Sandbox},
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
    pub driver: DriverWish,
}

/// Whether the driver is ours to bring. Removal needs proof: only [`DriverWish::NotWanted`] takes a running driver away.
#[derive(Clone, Debug, PartialEq)]
pub enum DriverWish {
    Wanted(Box<Driver>),
    /// The user has said so.
    NotWanted,
    /// The policy cannot be followed, or no node has said what it runs: what is there stays as it is.
    Unknown,
}

/// What all operand DaemonSets share.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
    pub priority_class: String,
    pub rollout: Rollout,
    pub pod_security_context: Option<PodSecurityContext>,
    pub root_fs: String,
    pub kubelet_root: String,
    pub driver_install_dir: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rollout {
    Rolling { max_unavailable: IntOrString },
    OnDelete,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    pub discovery: Discovery,
    pub resync_seconds: u32,
    /// The peer's VFIO manager settings that still mean something for our agent.
    pub resources: ResourceRequirements,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Driver {
    pub image: ImageRef,
    pub pull_policy: String,
    pub pull_secrets: Vec<String>,
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
    pub secret_env: Option<String>,
    pub resources: ResourceRequirements,
    pub host_network: bool,
    pub kernel_module_type: KernelModuleType,
    pub startup_probe: ContainerProbe,
    pub liveness_probe: Option<ContainerProbe>,
    pub readiness_probe: Option<ContainerProbe>,
}

/// What can be built, and what cannot.
#[derive(Clone, Debug, PartialEq)]
pub struct Validated {
    pub settings: Settings,
    pub problems: Vec<Problem>,
}

/// The part of the policy that nodes' modes depend on.
pub fn node_policy(policy: &ClusterPolicy, config: &GPUVirtConfigSpec) -> NodePolicy {
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
    }
}

/// `os`: operating systems of the nodes with GPUs, as agents report them.
pub fn validate(policy: &ClusterPolicy, config: &GPUVirtConfigSpec, os: &BTreeSet<String>) -> Validated {
    let spec = &policy.spec;
    let mut problems = not_built(spec);
    problems.extend(config.resource_aliases.iter().filter_map(reserved));
    problems.extend(without_effect(config));
    let driver = driver(spec, os).unwrap_or_else(|problem| {
        problems.push(problem);
        DriverWish::Unknown
    });
    let settings = Settings {
        policy: policy.name_any(),
        common: common(&spec.daemonsets, &spec.host_paths),
        agent: Agent {
            discovery: config.discovery,
            resync_seconds: config.resync_seconds,
            resources: (&spec.vfio_manager.component.container.resources).into(),
        },
        driver,
    };
    Validated { settings, problems }
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

/// Settings that are accepted for a later version.
fn without_effect(config: &GPUVirtConfigSpec) -> Option<Problem> {
    let default = GPUVirtConfigSpec::default();
    let set = [("evict", config.evict != default.evict), ("budget", config.budget != default.budget)];
    let set: Vec<&str> = set.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect();
    (!set.is_empty()).then(|| Problem {
        reason: "SettingNotSupported",
        message: format!(
            "GPUVirtConfig default: this version of gpuvirt does nothing with {}: nothing is evicted, and each node changes on its own; remove it",
            set.join(" and ")
        ),
    })
}

/// Operands of the peer that this version does not bring: asked for, they are a problem, never silence.
fn not_built(spec: &ClusterPolicySpec) -> Vec<Problem> {
    let sandbox = spec.sandbox_workloads.is_enabled();
    let kata = spec.sandbox_workloads.mode == SandboxMode::Kata;
    let asked = [
        ("toolkit", spec.toolkit.component.is_enabled(true)),
        ("devicePlugin", spec.device_plugin.component.is_enabled(true)),
        ("dcgm", spec.dcgm.component.is_enabled(false)),
        ("dcgmExporter", spec.dcgm_exporter.component.is_enabled(true)),
        ("gfd", spec.gfd.is_enabled(true)),
        ("migManager", spec.mig_manager.component.is_enabled(true)),
        ("nodeStatusExporter", spec.node_status_exporter.is_enabled(false)),
        ("gds", spec.gds.is_enabled()),
        ("gdrcopy", spec.gdrcopy.is_enabled()),
        ("vgpuManager", sandbox && spec.vgpu_manager.component.is_enabled(false)),
        ("kataSandboxDevicePlugin", sandbox && kata && spec.kata_sandbox_device_plugin.is_enabled(true)),
        ("ccManager", sandbox && kata && spec.cc_manager.component.is_enabled(false)),
        ("driver.useNvidiaDriverCRD", spec.driver.use_nvidia_driver_crd.unwrap_or(false)),
        ("driver.usePrecompiled", spec.driver.use_precompiled.unwrap_or(false)),
        ("driver.rdma", spec.driver.gpu_direct_rdma.enabled.unwrap_or(false)),
    ];
    let asked: Vec<&str> = asked.into_iter().filter(|(_, asked)| *asked).map(|(name, _)| name).collect();
    if asked.is_empty() {
        return Vec::new();
    }
    vec![Problem {
        reason: "OperandNotSupported",
        message: format!(
            "this version of gpuvirt does not bring {}: set enabled to false for each (or the field to false)",
            asked.join(", ")
        ),
    }]
}

fn driver(spec: &ClusterPolicySpec, os: &BTreeSet<String>) -> Result<DriverWish, Problem> {
    let driver = &spec.driver;
    if !driver.component.is_enabled(true) || driver.use_nvidia_driver_crd.unwrap_or(false) {
        return Ok(DriverWish::NotWanted);
    }
    let systems: Vec<&str> = os.iter().map(String::as_str).collect();
    if systems.len() > 1 {
        return Err(Problem {
            reason: "SeveralOperatingSystems",
            message: format!(
                "GPU nodes run {}, and this version brings the driver to one operating system: install the driver on the hosts and set spec.driver.enabled to false",
                systems.join(" and ")
            ),
        });
    }
    let container = &driver.component.container;
    // The triple is judged also while there is no node to run it on.
    let image = image::resolve(&container.image, systems.first().copied())
        .map_err(|error| Problem { reason: "InvalidImage", message: format!("spec.driver: {error}") })?;
    if systems.is_empty() {
        return Ok(DriverWish::Unknown);
    }
    Ok(DriverWish::Wanted(Box::new(Driver {
        image,
        pull_policy: pull_policy(&container.image),
        pull_secrets: container.image.image_pull_secrets.clone(),
        args: container.args.clone(),
        env: environment(&container.env),
        secret_env: driver.secret_env.clone().filter(|name| !name.is_empty()),
        resources: (&container.resources).into(),
        host_network: container.host_network.unwrap_or(false),
        kernel_module_type: kernel_module_type(spec),
        startup_probe: driver.startup_probe.clone().unwrap_or_default(),
        liveness_probe: driver.liveness_probe.clone(),
        readiness_probe: driver.readiness_probe.clone(),
    })))
}

fn kernel_module_type(spec: &ClusterPolicySpec) -> KernelModuleType {
    match (spec.driver.kernel_module_type, spec.driver.use_open_kernel_modules) {
        (KernelModuleType::Auto, Some(true)) => KernelModuleType::Open,
        (set @ (KernelModuleType::Auto | KernelModuleType::Open | KernelModuleType::Proprietary), _) => set,
    }
}

fn pull_policy(image: &ImageSpec) -> String {
    image.image_pull_policy.clone().filter(|policy| !policy.is_empty()).unwrap_or_else(|| "IfNotPresent".to_owned())
}

/// The last value of a name wins, in the place of the first: the API server refuses duplicates in an apply.
fn environment(env: &[crds::v1::EnvVar]) -> Vec<EnvVar> {
    let mut merged: Vec<EnvVar> = Vec::new();
    for entry in env {
        match merged.iter_mut().find(|known| known.name == entry.name) {
            Some(known) => known.value = Some(entry.value.clone()),
            None => merged.push(entry.into()),
        }
    }
    merged
}

fn common(daemonsets: &Daemonsets, paths: &HostPaths) -> Common {
    let non_empty = |text: &Option<String>, default: &str| {
        text.clone().filter(|t| !t.is_empty()).unwrap_or_else(|| default.to_owned())
    };
    let tolerations = match daemonsets.tolerations.is_empty() {
        false => daemonsets.tolerations.clone(),
        true => vec![Toleration {
            key: Some("nvidia.com/gpu".to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some("NoSchedule".to_owned()),
            ..Toleration::default()
        }],
    };
    let max_unavailable = non_empty(&daemonsets.rolling_update.max_unavailable, "1");
    Common {
        labels: daemonsets.labels.clone(),
        annotations: daemonsets.annotations.clone(),
        tolerations,
        priority_class: non_empty(&daemonsets.priority_class_name, "system-node-critical"),
        rollout: match daemonsets.update_strategy {
            UpdateStrategy::OnDelete => Rollout::OnDelete,
            UpdateStrategy::RollingUpdate => Rollout::Rolling {
                max_unavailable: max_unavailable.parse().map_or(IntOrString::String(max_unavailable), IntOrString::Int),
            },
        },
        pod_security_context: daemonsets.pod_security_context.clone(),
        root_fs: non_empty(&paths.root_fs, "/"),
        kubelet_root: non_empty(&Some(paths.kubelet_root_dir.clone()), "/var/lib/kubelet"),
        driver_install_dir: non_empty(&paths.driver_install_dir, "/run/nvidia/driver"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A policy with which nothing is wrong.
    fn valid() -> ClusterPolicy {
        let mut policy = ClusterPolicy::new("cluster-policy", ClusterPolicySpec::default());
        let spec = &mut policy.spec;
        for component in [
            &mut spec.toolkit.component,
            &mut spec.device_plugin.component,
            &mut spec.dcgm_exporter.component,
            &mut spec.gfd,
            &mut spec.mig_manager.component,
        ] {
            component.enabled = Some(false);
        }
        spec.sandbox_workloads.enabled = Some(true);
        spec.driver.component.container.image = ImageSpec {
            repository: Some("nvcr.io/nvidia".to_owned()),
            image: Some("driver".to_owned()),
            version: Some("595.91.07".to_owned()),
            ..ImageSpec::default()
        };
        policy
    }

    fn wanted(validated: &Validated) -> &Driver {
        match &validated.settings.driver {
            DriverWish::Wanted(driver) => driver,
            other @ (DriverWish::NotWanted | DriverWish::Unknown) => panic!("no driver: {other:?}"),
        }
    }

    fn ubuntu() -> BTreeSet<String> {
        ["ubuntu24.04".to_owned()].into()
    }

    fn checked(change: impl FnOnce(&mut ClusterPolicySpec)) -> Validated {
        let mut policy = valid();
        change(&mut policy.spec);
        validate(&policy, &GPUVirtConfigSpec::default(), &ubuntu())
    }

    #[test]
    fn a_valid_policy_has_no_problem_and_one_driver_for_its_os() {
        let validated = checked(|_| {});
        assert_eq!(validated.problems, []);
        assert_eq!(wanted(&validated).image.to_string(), "nvcr.io/nvidia/driver:595.91.07-ubuntu24.04");
    }

    #[test]
    fn a_partial_image_is_a_problem_and_the_agent_is_built_all_the_same() {
        let validated = checked(|spec| spec.driver.component.container.image.version = None);
        assert_eq!(validated.problems[0].reason, "InvalidImage");
        assert!(validated.problems[0].message.contains("spec.driver"), "{}", validated.problems[0].message);
        assert_eq!(validated.settings.driver, DriverWish::Unknown, "what runs is not taken away by a typing error");
    }

    #[test]
    fn a_partial_image_is_a_problem_before_any_node_has_reported() {
        let mut policy = valid();
        policy.spec.driver.component.container.image.version = None;
        let validated = validate(&policy, &GPUVirtConfigSpec::default(), &BTreeSet::new());
        assert_eq!(validated.problems[0].reason, "InvalidImage");
    }

    #[test]
    fn a_cluster_whose_nodes_have_not_reported_keeps_its_driver() {
        let validated = validate(&valid(), &GPUVirtConfigSpec::default(), &BTreeSet::new());
        assert_eq!((validated.problems, validated.settings.driver), (vec![], DriverWish::Unknown));
    }

    #[test]
    fn nodes_of_two_operating_systems_are_a_problem_that_names_both() {
        let os = ["rhel9.4".to_owned(), "ubuntu24.04".to_owned()].into();
        let message = &validate(&valid(), &GPUVirtConfigSpec::default(), &os).problems[0].message;
        assert!(message.contains("rhel9.4 and ubuntu24.04"), "{message}");
    }

    #[test]
    fn an_operand_that_is_not_built_is_named() {
        let validated = checked(|spec| spec.toolkit.component.enabled = None);
        assert_eq!(validated.problems[0].reason, "OperandNotSupported");
        assert!(validated.problems[0].message.contains("toolkit"), "{}", validated.problems[0].message);
    }

    #[test]
    fn a_reserved_alias_is_a_problem_and_reaches_no_agent() {
        let alias = |name: &str| ResourceAlias { selector: "10de:1eb8".to_owned(), name: name.to_owned() };
        let config =
            GPUVirtConfigSpec { resource_aliases: vec![alias("nvidia.com/mig-1g")], ..GPUVirtConfigSpec::default() };
        assert_eq!(validate(&valid(), &config, &ubuntu()).problems[0].reason, "ReservedResourceName");
        assert_eq!(node_policy(&valid(), &config).aliases, []);
        let config = GPUVirtConfigSpec { resource_aliases: vec![alias("nvidia.com/T4")], ..config };
        assert_eq!(node_policy(&valid(), &config).aliases, [alias("nvidia.com/T4")]);
    }

    #[test]
    fn a_setting_that_has_no_effect_yet_is_named() {
        let config = GPUVirtConfigSpec { evict: crds::v1alpha1::Evict::Pods, ..GPUVirtConfigSpec::default() };
        let problems = validate(&valid(), &config, &ubuntu()).problems;
        assert!(problems[0].message.contains("evict"), "{}", problems[0].message);
    }

    #[test]
    fn a_disabled_driver_needs_no_image() {
        let validated = checked(|spec| {
            spec.driver.component.enabled = Some(false);
            spec.driver.component.container.image = ImageSpec::default();
        });
        assert_eq!((validated.problems, validated.settings.driver), (vec![], DriverWish::NotWanted));
    }

    #[test]
    fn the_last_of_two_environment_entries_wins() {
        let entry = |value: &str| crds::v1::EnvVar { name: "A".to_owned(), value: value.to_owned() };
        let validated = checked(|spec| spec.driver.component.container.env = vec![entry("1"), entry("2")]);
        let env = &wanted(&validated).env;
        assert_eq!((env.len(), env[0].value.as_deref()), (1, Some("2")));
    }

    #[test]
    fn a_count_and_a_share_of_unavailable_nodes_both_parse() {
        let rollout = |text: &str| {
            checked(|spec| spec.daemonsets.rolling_update.max_unavailable = Some(text.to_owned()))
                .settings
                .common
                .rollout
        };
        assert_eq!(rollout("2"), Rollout::Rolling { max_unavailable: IntOrString::Int(2) });
        assert_eq!(rollout("10%"), Rollout::Rolling { max_unavailable: IntOrString::String("10%".to_owned()) });
    }
}
