//! GPU feature discovery: the labels that describe a node's GPUs, through NFD.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, PodSpec},
};

use super::{
    Installation, config_manager,
    pod::{env, env_from_field, host_path, mount, part_of, read_only},
    stack::{Seen, annotations, main, mig_env, operand, runtime_class, wait_for_toolkit},
};
use crate::operator::policy::validate::{Gfd, Settings};

pub(super) const NAME: &str = "gpu-feature-discovery";
const FEATURES: &str = "/etc/kubernetes/node-feature-discovery/features.d";

pub(super) fn daemon_set(settings: &Settings, gfd: &Gfd, installation: &Installation) -> DaemonSet {
    let mut variables = vec![
        env("GFD_SLEEP_INTERVAL", "60s"),
        env("GFD_FAIL_ON_INIT_ERROR", "true"),
        env_from_field("NAMESPACE", "metadata.namespace"),
        env_from_field("NODE_NAME", "spec.nodeName"),
        env_from_field("POD_NAME", "metadata.name"),
    ];
    variables.extend(mig_env(settings));
    let mounts = vec![mount("output-dir", FEATURES, None), read_only(mount("host-sys", "/sys", None))];
    let container = main(NAME, &gfd.container, variables, mounts);
    let mut pod = PodSpec {
        service_account_name: Some("nvidia-gpu-feature-discovery".to_owned()),
        runtime_class_name: runtime_class(settings),
        share_process_namespace: gfd.configs.as_ref().map(|_| true),
        init_containers: Some(vec![wait_for_toolkit(Seen::Run, installation)]),
        containers: vec![Container { command: Some(vec![NAME.to_owned()]), ..container }],
        volumes: Some(vec![
            host_path("output-dir", FEATURES, None),
            host_path("host-sys", "/sys", None),
            host_path("run-nvidia", "/run/nvidia", Some("Directory")),
        ]),
        ..PodSpec::default()
    };
    if let Some(configs) = &gfd.configs {
        config_manager::add(&mut pod, NAME, NAME, &gfd.container, configs);
    }
    let annotations = annotations(settings, NAME);
    let mut set = operand(NAME, "gpu-feature-discovery", &gfd.container, annotations, pod, settings, installation);
    part_of(&mut set, "nvidia-gpu");
    set
}
