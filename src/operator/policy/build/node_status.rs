//! Metrics of a container node's checks, by our own program under the peer's names.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, ContainerPort, PodSpec, Service, ServiceSpec},
};

use super::{
    Installation,
    dcgm::of,
    pod::{Operand, daemon_set as set, env, env_from_field, host_path, mount, override_env, privileged, read_only},
    stack::{check_secrets, host_root},
};
use crate::operator::policy::validate::{NodeStatus, Settings};

pub(super) const NAME: &str = "nvidia-node-status-exporter";
pub(super) const PORT: &str = "node-status";
const NUMBER: i32 = 8000;

pub(super) fn daemon_set(settings: &Settings, exporter: &NodeStatus, installation: &Installation) -> DaemonSet {
    let mut variables = vec![
        env("NVIDIA_VISIBLE_DEVICES", "void"),
        env_from_field("NODE_NAME", "spec.nodeName"),
        env("LOG_LEVEL", installation.log_level.clone()),
        env("LOG_FORMAT", installation.log_format.as_str()),
    ];
    override_env(&mut variables, &exporter.env);
    let mut args = vec!["node-status".to_owned(), format!("--listen=0.0.0.0:{NUMBER}")];
    args.extend(exporter.args.iter().cloned());
    let secrets: Vec<_> = check_secrets(settings).collect();
    let pod = PodSpec {
        service_account_name: Some(NAME.to_owned()),
        image_pull_secrets: Some(secrets).filter(|secrets| !secrets.is_empty()),
        host_network: exporter.host_network.then_some(true),
        dns_policy: exporter.host_network.then(|| "ClusterFirstWithHostNet".to_owned()),
        containers: vec![Container {
            name: NAME.to_owned(),
            image: Some(installation.image.clone()),
            image_pull_policy: Some(installation.pull_policy.clone()),
            args: Some(args),
            env: Some(variables),
            ports: Some(vec![ContainerPort {
                name: Some(PORT.to_owned()),
                container_port: NUMBER,
                ..ContainerPort::default()
            }]),
            resources: Some(exporter.resources.clone()),
            volume_mounts: Some(vec![
                mount("run-nvidia", "/run/nvidia", Some("HostToContainer")),
                read_only(mount("host-root", "/host", Some("HostToContainer"))),
            ]),
            security_context: Some(privileged()),
            ..Container::default()
        }],
        volumes: Some(vec![host_path("run-nvidia", "/run/nvidia", Some("Directory")), host_root(settings)]),
        ..PodSpec::default()
    };
    set(
        Operand {
            name: NAME,
            component: NAME,
            node_selector: [(format!("{}node-status-exporter", crds::labels::DEPLOY_PREFIX), "true".to_owned())].into(),
            rollout: settings.common.rollout.clone(),
            labels: &[],
            annotations: BTreeMap::new(),
            pod,
        },
        settings,
        installation,
    )
}

pub(super) fn service(settings: &Settings, installation: &Installation) -> Service {
    of(NAME, PORT, NUMBER, ServiceSpec::default(), BTreeMap::new(), settings, installation)
}
