//! The agent: our one pod on a GPU node, whatever the node's mode.

use std::collections::BTreeMap;

use crds::{labels, v1alpha1::Discovery};
use k8s_openapi::{
    api::core::v1::{
        Affinity, Container, ContainerPort, HTTPGetAction, NodeAffinity, NodeSelector, NodeSelectorRequirement,
        NodeSelectorTerm, PodSpec, Probe, ResourceRequirements, SecretVolumeSource, Toleration, Volume,
    },
    apimachinery::pkg::{api::resource::Quantity, util::intstr::IntOrString},
};

use super::{
    AGENT, AgentMetrics, Installation,
    pod::{Operand, daemon_set as operand, env, env_from_field, host_path, mount, privileged, read_only},
};
use crate::operator::policy::validate::{Rollout, Settings};
use k8s_openapi::api::apps::v1::DaemonSet;

const PORT: i32 = 8080;
const METRICS_PORT: i32 = 8443;
const CERTIFICATE: &str = "metrics-certificate";
const CERTIFICATE_FOLDER: &str = "/metrics-certificate";

pub(super) fn daemon_set(settings: &Settings, installation: &Installation) -> DaemonSet {
    let mut set = operand(
        Operand {
            name: AGENT,
            component: "agent",
            node_selector: [("kubernetes.io/os".to_owned(), "linux".to_owned())].into(),
            // A new agent takes over from the old one's journal; GPUs are not touched by its restart. When it comes to a
            // node is the operator's to say: not in the middle of a change, and not before a first one works.
            rollout: Rollout::OnDelete,
            labels: &[],
            annotations: BTreeMap::new(),
            pod: pod(settings, installation),
        },
        settings,
        installation,
    );
    // A node that is full, cordoned or tainted for GPUs still has VMs to look after.
    if let Some(spec) = set.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()) {
        spec.tolerations = Some(vec![Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() }]);
    }
    set
}

fn pod(settings: &Settings, installation: &Installation) -> PodSpec {
    let secret = match &installation.metrics {
        AgentMetrics::Tls { secret } => secret.as_deref(),
        AgentMetrics::Off | AgentMetrics::Plain => None,
    };
    PodSpec {
        service_account_name: Some("gpuvirt-agent".to_owned()),
        affinity: Some(Affinity { node_affinity: Some(nodes(settings.agent.discovery)), ..Affinity::default() }),
        // Pids in the journal and in messages are the host's.
        host_pid: Some(true),
        termination_grace_period_seconds: Some(10),
        volumes: Some(
            [host_path("host-root", &settings.common.root_fs, None)]
                .into_iter()
                .chain(secret.map(certificate))
                .collect(),
        ),
        containers: vec![Container {
            name: "agent".to_owned(),
            image: Some(installation.image.clone()),
            image_pull_policy: Some(installation.pull_policy.clone()),
            args: Some(
                [
                    "agent".to_owned(),
                    "--host-root=/host".to_owned(),
                    format!("--kubelet-root={}", settings.common.kubelet_root),
                    format!("--driver-root={}", settings.common.driver_install_dir),
                    format!("--resync-seconds={}", settings.agent.resync_seconds),
                    format!("--listen=0.0.0.0:{PORT}"),
                ]
                .into_iter()
                .chain(metrics_args(&installation.metrics))
                .collect(),
            ),
            env: Some(vec![
                env_from_field("NODE_NAME", "spec.nodeName"),
                env_from_field("POD_NAME", "metadata.name"),
                env("LOG_LEVEL", installation.log_level.clone()),
                env("LOG_FORMAT", installation.log_format.as_str()),
            ]),
            ports: Some(ports(&installation.metrics)),
            // New devices and the kubelet's sockets appear below the host's own mounts.
            volume_mounts: Some(
                [mount("host-root", "/host", Some("HostToContainer"))]
                    .into_iter()
                    .chain(secret.map(|_| read_only(mount(CERTIFICATE, CERTIFICATE_FOLDER, None))))
                    .collect(),
            ),
            liveness_probe: Some(probe("/livez", 10, 3)),
            readiness_probe: Some(probe("/readyz", 2, 3)),
            resources: Some(resources(&settings.agent.resources)),
            security_context: Some(privileged()),
            ..Container::default()
        }],
        ..PodSpec::default()
    }
}

fn metrics_args(metrics: &AgentMetrics) -> Vec<String> {
    match metrics {
        AgentMetrics::Off => vec!["--metrics=off".to_owned()],
        AgentMetrics::Plain => vec!["--metrics=plain".to_owned()],
        AgentMetrics::Tls { secret } => {
            let certificate = secret.iter().map(|_| format!("--metrics-certificate={CERTIFICATE_FOLDER}"));
            let own = ["--metrics=tls".to_owned(), format!("--metrics-listen=0.0.0.0:{METRICS_PORT}")];
            own.into_iter().chain(certificate).collect()
        }
    }
}

fn ports(metrics: &AgentMetrics) -> Vec<ContainerPort> {
    let port = |name: &str, number| ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        ..ContainerPort::default()
    };
    match metrics {
        AgentMetrics::Off | AgentMetrics::Plain => vec![port("probes", PORT)],
        AgentMetrics::Tls { .. } => vec![port("probes", PORT), port("metrics", METRICS_PORT)],
    }
}

fn certificate(secret: &str) -> Volume {
    let secret = SecretVolumeSource { secret_name: Some(secret.to_owned()), ..SecretVolumeSource::default() };
    Volume { name: CERTIFICATE.to_owned(), secret: Some(secret), ..Volume::default() }
}

fn probe(path: &str, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(PORT),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        failure_threshold: Some(failures),
        timeout_seconds: Some(5),
        ..Probe::default()
    }
}

fn resources(given: &ResourceRequirements) -> ResourceRequirements {
    let requests: BTreeMap<String, Quantity> =
        [("cpu", "10m"), ("memory", "16Mi")].map(|(k, v)| (k.to_owned(), Quantity(v.to_owned()))).into();
    ResourceRequirements {
        requests: given.requests.clone().or(Some(requests)),
        limits: given.limits.clone(),
        claims: None,
    }
}

/// Terms are alternatives; each keeps nodes out whose admin wants no operand.
fn nodes(discovery: Discovery) -> NodeAffinity {
    let requirement = |key: &str, operator: &str, value: &str| NodeSelectorRequirement {
        key: key.to_owned(),
        operator: operator.to_owned(),
        values: Some(vec![value.to_owned()]),
    };
    let allowed = || requirement(labels::DEPLOY_OPERANDS, "NotIn", "false");
    let terms = match discovery {
        Discovery::AllNodes => vec![vec![allowed()]],
        Discovery::Labels => labels::NFD_HINTS
            .iter()
            .chain([&labels::GPU_PRESENT])
            .map(|key| vec![requirement(key, "In", "true"), allowed()])
            .collect(),
    };
    NodeAffinity {
        required_during_scheduling_ignored_during_execution: Some(NodeSelector {
            node_selector_terms: terms
                .into_iter()
                .map(|term| NodeSelectorTerm { match_expressions: Some(term), match_fields: None })
                .collect(),
        }),
        preferred_during_scheduling_ignored_during_execution: None,
    }
}
