//! GPU metrics: DCGM as a pod of its own, and the exporter for Prometheus.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{
            Container, ContainerPort, EnvVar, HTTPGetAction, PodSpec, Probe, Service, ServicePort, ServiceSpec,
            TCPSocketAction,
        },
    },
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::core::ObjectMeta;

use super::{
    Installation,
    pod::{config_map, env, env_from_field, host_path, mount, own_labels, read_only, sub_path},
    stack::{Seen, annotations, main, operand, runtime_class, wait_for_toolkit},
};
use crate::operator::policy::validate::{self, DcgmExporter, Settings};

pub(super) const NAME: &str = "nvidia-dcgm";
pub(super) const EXPORTER: &str = "nvidia-dcgm-exporter";
const CONTAINER: &str = "nvidia-dcgm-ctr";
const PORT: i32 = 5555;
const METRICS_PORT: i32 = 9400;
pub(super) const EXPORTER_PORT: &str = "gpu-metrics";
const REMOTE: &str = "DCGM_REMOTE_HOSTENGINE_INFO";
const METRICS: &str = "dcgm-metrics.csv";

pub(super) fn daemon_set(settings: &Settings, dcgm: &validate::Container, installation: &Installation) -> DaemonSet {
    let probe = Probe {
        tcp_socket: Some(TCPSocketAction { port: IntOrString::Int(PORT), host: None }),
        initial_delay_seconds: Some(15),
        ..Probe::default()
    };
    let pod = PodSpec {
        service_account_name: Some(NAME.to_owned()),
        automount_service_account_token: Some(false),
        runtime_class_name: runtime_class(settings),
        init_containers: Some(vec![wait_for_toolkit(Seen::Run, installation)]),
        containers: vec![Container {
            ports: Some(vec![port("dcgm", PORT)]),
            liveness_probe: Some(probe.clone()),
            readiness_probe: Some(probe),
            ..main(CONTAINER, dcgm, Vec::new(), Vec::new())
        }],
        volumes: Some(vec![host_path("run-nvidia", "/run/nvidia", Some("Directory"))]),
        ..PodSpec::default()
    };
    operand(NAME, "dcgm", dcgm, annotations(settings, CONTAINER), pod, settings, installation)
}

/// An exporter reaches the engine of its own node only.
pub(super) fn service(settings: &Settings, installation: &Installation) -> Service {
    let spec = ServiceSpec { internal_traffic_policy: Some("Local".to_owned()), ..ServiceSpec::default() };
    of(NAME, "dcgm", PORT, spec, BTreeMap::new(), settings, installation)
}

pub(super) fn exporter(settings: &Settings, exporter: &DcgmExporter, installation: &Installation) -> DaemonSet {
    let given = &exporter.container;
    let mut mounts = vec![read_only(mount("pod-gpu-resources", "/var/lib/kubelet/pod-resources", None))];
    let mut volumes = vec![
        host_path("pod-gpu-resources", &format!("{}/pod-resources", settings.common.kubelet_root), None),
        host_path("run-nvidia", "/run/nvidia", None),
    ];
    if let Some(directory) = &exporter.job_mapping {
        mounts.push(read_only(mount("hpc-job-mapping", directory, None)));
        volumes.push(host_path("hpc-job-mapping", directory, Some("DirectoryOrCreate")));
    }
    if let Some(name) = &exporter.metrics {
        let file = format!("/etc/dcgm-exporter/{METRICS}");
        mounts.push(sub_path(read_only(mount("metrics-config", &file, None)), METRICS));
        volumes.push(config_map("metrics-config", name, None, &[(METRICS, METRICS)]));
    }
    let healthy = |period| Probe {
        http_get: Some(HTTPGetAction {
            path: Some("/health".to_owned()),
            port: IntOrString::Int(METRICS_PORT),
            ..HTTPGetAction::default()
        }),
        initial_delay_seconds: Some(45),
        period_seconds: period,
        ..Probe::default()
    };
    let container = Container {
        ports: Some(vec![port("metrics", METRICS_PORT)]),
        liveness_probe: Some(healthy(Some(5))),
        readiness_probe: Some(healthy(None)),
        ..main(EXPORTER, given, environment(settings, exporter), mounts)
    };
    // An engine of the host listens on its loopback only.
    let hosts_engine = |entry: &EnvVar| {
        entry.name == REMOTE && entry.value.as_deref().is_some_and(|value| value.starts_with("localhost"))
    };
    let details = &exporter.pods;
    let pod = PodSpec {
        service_account_name: Some(EXPORTER.to_owned()),
        // Only what pods have a GPU comes from the kubelet; more about them comes from the API server.
        automount_service_account_token: Some(details.labels || details.uid),
        runtime_class_name: runtime_class(settings),
        host_pid: exporter.host_pid.then_some(true),
        host_network: given.env.iter().any(hosts_engine).then_some(true),
        init_containers: Some(vec![wait_for_toolkit(Seen::Run, installation)]),
        containers: vec![container],
        volumes: Some(volumes),
        ..PodSpec::default()
    };
    let mut annotations = annotations(settings, EXPORTER);
    annotations.extend(exporter.annotations.clone());
    operand(EXPORTER, "dcgm-exporter", given, annotations, pod, settings, installation)
}

fn environment(settings: &Settings, exporter: &DcgmExporter) -> Vec<EnvVar> {
    let collectors = match exporter.metrics {
        Some(_) => format!("/etc/dcgm-exporter/{METRICS}"),
        None => "/etc/dcgm-exporter/dcp-metrics-included.csv".to_owned(),
    };
    let mut variables = vec![
        env("DCGM_EXPORTER_LISTEN", format!(":{METRICS_PORT}")),
        env("DCGM_EXPORTER_KUBERNETES", "true"),
        env("DCGM_EXPORTER_COLLECTORS", collectors),
        env_from_field("NODE_NAME", "spec.nodeName"),
    ];
    let details = &exporter.pods;
    variables.extend(settings.stack.dcgm.then(|| env(REMOTE, format!("{NAME}:{PORT}"))));
    variables.extend(exporter.job_mapping.as_ref().map(|directory| env("DCGM_HPC_JOB_MAPPING_DIR", directory.clone())));
    variables.extend(details.labels.then(|| env("DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS", "true")));
    variables.extend(details.uid.then(|| env("DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID", "true")));
    let allowed = details.allowed.join(",");
    let filtered = details.labels && !allowed.is_empty();
    variables.extend(filtered.then(|| env("DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX", allowed)));
    variables
}

pub(super) fn exporter_service(settings: &Settings, exporter: &DcgmExporter, installation: &Installation) -> Service {
    let spec = ServiceSpec {
        type_: exporter.service_type.clone(),
        internal_traffic_policy: exporter.internal_traffic_policy.clone(),
        ..ServiceSpec::default()
    };
    let scraped = [("prometheus.io/scrape".to_owned(), "true".to_owned())].into();
    of(EXPORTER, EXPORTER_PORT, METRICS_PORT, spec, scraped, settings, installation)
}

pub(super) fn of(
    name: &str,
    port: &str,
    number: i32,
    spec: ServiceSpec,
    annotations: BTreeMap<String, String>,
    settings: &Settings,
    installation: &Installation,
) -> Service {
    Service {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(installation.namespace.clone()),
            labels: Some(own_labels(name, name, settings)),
            annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
            ..ObjectMeta::default()
        },
        spec: Some(ServiceSpec {
            selector: Some([(crds::labels::APP.to_owned(), name.to_owned())].into()),
            ports: Some(vec![ServicePort {
                name: Some(port.to_owned()),
                port: number,
                target_port: Some(IntOrString::Int(number)),
                protocol: Some("TCP".to_owned()),
                ..ServicePort::default()
            }]),
            ..spec
        }),
        status: None,
    }
}

fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort { name: Some(name.to_owned()), container_port: number, ..ContainerPort::default() }
}
