//! The container stack above the driver: toolkit, device plugin, GPU feature discovery, DCGM, MIG manager.

use std::collections::BTreeMap;

use crds::{
    conditions::Verdict,
    v1::{self, ClusterPolicySpec, MigStrategy},
};
use k8s_openapi::api::core::v1::{EnvVar, ResourceRequirements};

use super::{Facts, Problem, Runtime, Wish, container, container::Container, given, toolkit, toolkit::Toolkit};

/// What operands of the stack have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    pub cdi: Cdi,
    /// Name of the runtime class, and of the runtime's handler.
    pub runtime_class: String,
    /// How pods that manage GPUs come to see them all.
    pub management: Management,
    pub mig_strategy: Option<&'static str>,
    /// Below which the toolkit's programs are, where it is ours to install.
    pub toolkit_dir: Option<String>,
    /// Other modules that workloads need device files of.
    pub gds: bool,
    pub gdrcopy: bool,
    pub dcgm: bool,
    pub checks: Checks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cdi {
    Off,
    On,
    /// Devices are put into containers by the toolkit's NRI plugin: no runtime class is needed.
    OnByNri,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Management {
    RuntimeClass,
    NriAnnotation,
    /// CRI-O with an OCI hook gives GPUs to every container that asks by environment.
    Environment,
}

/// Environment that the user gives to the checks.
#[derive(Clone, Debug, PartialEq)]
pub struct Checks {
    pub driver: Vec<EnvVar>,
    pub toolkit: Vec<EnvVar>,
    pub cuda: Vec<EnvVar>,
    pub plugin: Vec<EnvVar>,
    pub container: Vec<EnvVar>,
    pub pull_secrets: Vec<String>,
}

/// The operands themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct Stacked {
    pub toolkit: Wish<Toolkit>,
    pub device_plugin: Wish<DevicePlugin>,
    pub gfd: Wish<Gfd>,
    pub dcgm: Wish<Container>,
    pub dcgm_exporter: Wish<DcgmExporter>,
    pub mig_manager: Wish<MigManager>,
    pub node_status: Option<NodeStatus>,
    /// Whether anything of the above is wanted: then so are the runtime classes and the checks.
    pub any: bool,
}

/// Our own program in our own image: of the section only what is said of the container counts.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeStatus {
    /// Behind ours.
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
    pub resources: ResourceRequirements,
    pub host_network: bool,
    /// The Prometheus operator is there to read it.
    pub monitored: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DevicePlugin {
    pub container: Container,
    pub configs: Option<Configs>,
    pub mps_root: String,
}

/// A ConfigMap with one key a configuration, picked by a node's label `nvidia.com/device-plugin.config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configs {
    pub name: String,
    /// Empty: nodes without the label get none.
    pub default: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Gfd {
    pub container: Container,
    pub configs: Option<Configs>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DcgmExporter {
    pub container: Container,
    pub annotations: BTreeMap<String, String>,
    pub host_pid: bool,
    /// ConfigMap with `dcgm-metrics.csv`.
    pub metrics: Option<String>,
    pub service_type: Option<String>,
    pub internal_traffic_policy: Option<String>,
    /// Where the scheduler says which job has which GPU.
    pub job_mapping: Option<String>,
    pub pods: PodDetails,
    /// Where the Prometheus operator is there to read it.
    pub monitor: Option<Monitor>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Monitor {
    pub interval: Option<String>,
    pub scrape_timeout: Option<String>,
    pub honor_labels: Option<bool>,
    pub additional_labels: BTreeMap<String, String>,
    pub relabelings: Vec<serde_json::Value>,
}

/// What metrics say of the pod that has a GPU; anything but nothing needs the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodDetails {
    pub labels: bool,
    pub uid: bool,
    /// Regular expressions of labels, all when empty.
    pub allowed: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MigManager {
    pub container: Container,
    /// The user's ConfigMap of layouts; `None`: ours.
    pub layouts: Option<String>,
    /// The user's ConfigMap of host programs that have GPUs open; `None`: ours.
    pub clients: Option<String>,
}

pub(super) const METRICS_FILE: &str = "dcgm-metrics.csv";

pub(super) fn stack(spec: &ClusterPolicySpec, facts: &Facts, problems: &mut Vec<Problem>) -> Stack {
    let toolkit = spec.toolkit.component.is_enabled(true);
    let cdi = match (spec.cdi.enabled, spec.cdi.nri_plugin_enabled, toolkit) {
        (true, true, true) => Cdi::OnByNri,
        (enabled, nri, toolkit) => {
            if nri {
                problems.push(Problem {
                    reason: "InvalidCDI",
                    message: format!(
                        "spec.cdi.nriPluginEnabled has no effect: it needs {}",
                        if toolkit { "spec.cdi.enabled" } else { "spec.toolkit.enabled and spec.cdi.enabled" }
                    ),
                });
            }
            if enabled { Cdi::On } else { Cdi::Off }
        }
    };
    let crio = facts.runtime() == Ok(Some(Runtime::CriO));
    Stack {
        cdi,
        runtime_class: given(Some(&spec.operator.runtime_class)).unwrap_or("nvidia").to_owned(),
        management: match cdi {
            Cdi::OnByNri => Management::NriAnnotation,
            Cdi::Off if crio => Management::Environment,
            Cdi::Off | Cdi::On => Management::RuntimeClass,
        },
        mig_strategy: spec.mig.strategy.map(|strategy| match strategy {
            MigStrategy::None => "none",
            MigStrategy::Single => "single",
            MigStrategy::Mixed => "mixed",
        }),
        toolkit_dir: toolkit.then(|| toolkit::install_dir(spec)),
        gds: spec.gds.is_enabled(),
        gdrcopy: spec.gdrcopy.is_enabled(),
        dcgm: spec.dcgm.component.is_enabled(false),
        checks: Checks {
            driver: container::environment(&spec.validator.driver.env),
            toolkit: container::environment(&spec.validator.toolkit.env),
            cuda: container::environment(&spec.validator.cuda.env),
            plugin: container::environment(&spec.validator.plugin.env),
            container: container::environment(&spec.validator.container.env),
            pull_secrets: spec.validator.container.image.image_pull_secrets.clone(),
        },
    }
}

/// Which operands of the stack are asked for.
pub(super) fn enabled(spec: &ClusterPolicySpec) -> [bool; 6] {
    [
        spec.toolkit.component.is_enabled(true),
        spec.device_plugin.component.is_enabled(true),
        spec.gfd.is_enabled(true),
        spec.dcgm.component.is_enabled(false),
        spec.dcgm_exporter.component.is_enabled(true),
        spec.mig_manager.component.is_enabled(true),
    ]
}

pub(super) fn stacked(spec: &ClusterPolicySpec, facts: &Facts, problems: &mut Vec<Problem>) -> Stacked {
    let enabled = enabled(spec);
    let [toolkit, device_plugin, gfd, dcgm, dcgm_exporter, mig_manager] = enabled;
    Stacked {
        toolkit: wish(toolkit, problems, || toolkit::toolkit(spec, facts)),
        device_plugin: wish(device_plugin, problems, || self::device_plugin(spec, facts).map(Some)),
        gfd: wish(gfd, problems, || {
            let container = container::container("gfd", &spec.gfd.container, None, facts)?;
            Ok(Some(Gfd { container, configs: configs(spec, facts)? }))
        }),
        dcgm: wish(dcgm, problems, || {
            container::container("dcgm", &spec.dcgm.component.container, None, facts).map(Some)
        }),
        dcgm_exporter: wish(dcgm_exporter, problems, || self::dcgm_exporter(spec, facts).map(Some)),
        mig_manager: wish(mig_manager, problems, || self::mig_manager(spec, facts).map(Some)),
        node_status: spec.node_status_exporter.is_enabled(false).then(|| {
            let given = &spec.node_status_exporter.container;
            NodeStatus {
                args: given.args.clone(),
                env: container::environment(&given.env),
                resources: (&given.resources).into(),
                host_network: given.host_network.unwrap_or(false),
                monitored: facts.service_monitors,
            }
        }),
        any: enabled.contains(&true),
    }
}

/// `None`: it is not known yet how.
pub(super) fn wish<T>(
    enabled: bool,
    problems: &mut Vec<Problem>,
    wanted: impl FnOnce() -> Result<Option<T>, Problem>,
) -> Wish<T> {
    if !enabled {
        return Wish::NotWanted;
    }
    let wish = wanted().map(|wanted| wanted.map_or(Wish::Unknown, |wanted| Wish::Wanted(Box::new(wanted))));
    match &wish {
        // Several operands may fail for one reason.
        Err(problem) if problems.contains(problem) => Wish::Unknown,
        Ok(_) | Err(_) => Wish::or_problem(wish, problems),
    }
}

fn device_plugin(spec: &ClusterPolicySpec, facts: &Facts) -> Result<DevicePlugin, Problem> {
    let plugin = &spec.device_plugin;
    Ok(DevicePlugin {
        container: container::container("devicePlugin", &plugin.component.container, None, facts)?,
        configs: configs(spec, facts)?,
        mps_root: given(Some(&plugin.mps.root)).unwrap_or("/run/nvidia/mps").to_owned(),
    })
}

fn configs(spec: &ClusterPolicySpec, facts: &Facts) -> Result<Option<Configs>, Problem> {
    let config = &spec.device_plugin.config;
    let Some(name) = given(config.name.as_deref()) else { return Ok(None) };
    let default = given(config.default.as_deref()).unwrap_or_default();
    match default {
        "" => facts.keys("devicePlugin.config.name", name).map(drop)?,
        key => has_key("devicePlugin.config.name", name, key, facts)?,
    }
    Ok(Some(Configs { name: name.to_owned(), default: default.to_owned() }))
}

fn dcgm_exporter(spec: &ClusterPolicySpec, facts: &Facts) -> Result<DcgmExporter, Problem> {
    let exporter = &spec.dcgm_exporter;
    let metrics = given(exporter.config.name.as_deref());
    if let Some(name) = metrics {
        has_key("dcgmExporter.config.name", name, METRICS_FILE, facts)?;
    }
    let jobs = &exporter.hpc_job_mapping;
    let directory = given(jobs.directory.as_deref()).unwrap_or("/var/lib/dcgm-exporter/job-mapping");
    Ok(DcgmExporter {
        container: container::container("dcgmExporter", &exporter.component.container, None, facts)?,
        annotations: exporter.annotations.clone(),
        host_pid: exporter.host_pid.unwrap_or(false),
        metrics: metrics.map(str::to_owned),
        service_type: given(exporter.service.type_.as_deref()).map(str::to_owned),
        internal_traffic_policy: given(exporter.service.internal_traffic_policy.as_deref()).map(str::to_owned),
        job_mapping: jobs.enabled.unwrap_or(false).then(|| directory.to_owned()),
        pods: PodDetails {
            labels: exporter.enable_pod_labels.unwrap_or(false),
            uid: exporter.enable_pod_uid.unwrap_or(false),
            allowed: exporter.pod_label_allowlist_regex.clone(),
        },
        monitor: monitor(&exporter.service_monitor).filter(|_| facts.service_monitors),
    })
}

/// Condition: an exporter's monitor that was asked for is there.
pub const MONITORED: &str = "ServiceMonitorApplied";

/// Nothing to say where none was asked for, or none can be missing.
pub fn monitored(spec: &ClusterPolicySpec, facts: &Facts) -> Option<Verdict> {
    let exporter = &spec.dcgm_exporter;
    let asked = exporter.component.is_enabled(true) && exporter.service_monitor.enabled.unwrap_or(false);
    (asked && !facts.service_monitors).then(|| {
        Verdict::no(
            MONITORED,
            "NotServed",
            "spec.dcgmExporter.serviceMonitor is enabled, and the cluster has no CRD servicemonitors.monitoring.coreos.com: install the Prometheus operator, or disable it",
        )
    })
}

fn monitor(monitor: &v1::ServiceMonitor) -> Option<Monitor> {
    monitor.enabled.unwrap_or(false).then(|| Monitor {
        interval: given(monitor.interval.as_deref()).map(str::to_owned),
        scrape_timeout: given(monitor.scrape_timeout.as_deref()).map(str::to_owned),
        honor_labels: monitor.honor_labels,
        additional_labels: monitor.additional_labels.clone(),
        relabelings: monitor.relabelings.clone(),
    })
}

fn mig_manager(spec: &ClusterPolicySpec, facts: &Facts) -> Result<MigManager, Problem> {
    let manager = &spec.mig_manager;
    let layouts = given(manager.config.name.as_deref());
    let clients = given(manager.gpu_clients_config.name.as_deref());
    if let Some(name) = layouts {
        has_key("migManager.config.name", name, "config.yaml", facts)?;
    }
    if let Some(name) = clients {
        has_key("migManager.gpuClientsConfig.name", name, "clients.yaml", facts)?;
    }
    Ok(MigManager {
        container: container::container("migManager", &manager.component.container, None, facts)?,
        layouts: layouts.map(str::to_owned),
        clients: clients.map(str::to_owned),
    })
}

pub(super) fn has_key(field: &str, name: &str, key: &str, facts: &Facts) -> Result<(), Problem> {
    let keys = facts.keys(field, name)?;
    match keys.iter().any(|known| known == key) {
        true => Ok(()),
        false => Err(Problem {
            reason: "ConfigMapKeyMissing",
            message: format!("spec.{field}: ConfigMap {name} has no key {key}: it has {}", keys.join(", ")),
        }),
    }
}
