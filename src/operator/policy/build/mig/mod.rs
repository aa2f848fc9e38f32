//! The MIG manager: slices GPUs by the node's label `nvidia.com/mig.config`.

mod layouts;

use std::collections::BTreeSet;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, PodSpec},
};

use super::{
    Installation,
    device_plugin::cdi_hook,
    pod::{config_map, env, env_from_field, host_path, mount, read_only, sub_path},
    stack::{
        self, MADE, Seen, VALIDATIONS, annotations, by_entrypoint, cdi, entrypoint, host_root, main, operand,
        runtime_class, wait_for_toolkit,
    },
};
use crate::operator::{
    named::mig_names,
    policy::validate::{MigManager, Settings},
};

pub(super) const NAME: &str = "nvidia-mig-manager";
pub(super) const ENTRYPOINT: &str = "nvidia-mig-manager-entrypoint";
pub(super) const LAYOUTS: &str = "default-mig-parted-config";
pub(super) const CLIENTS: &str = "default-gpu-clients";

/// Programs of the host have GPUs open only where the driver is the host's own.
const SCRIPT: &str = r#"WITH_SHUTDOWN_HOST_GPU_CLIENTS=$IS_HOST_DRIVER
exec nvidia-mig-manager "$@"
"#;

/// Services of a host that have GPUs open, as DGX OS and NVIDIA's packages name them.
const HOST_CLIENTS: [&str; 9] = [
    "nvsm.service",
    "nvsm-mqtt.service",
    "nvsm-core.service",
    "nvsm-api-gateway.service",
    "nvsm-notifier.service",
    "nv_peer_mem.service",
    "nvidia-dcgm.service",
    "dcgm.service",
    "dcgm-exporter.service",
];

/// Of our own layouts.
pub(super) fn names() -> BTreeSet<String> {
    mig_names(&layouts::yaml())
}

pub(super) fn config_maps(settings: &Settings, manager: &MigManager, installation: &Installation) -> Vec<ConfigMap> {
    let ours = |name: &str, file: &str, text: String| {
        stack::config_map(name, NAME, [(file.to_owned(), text)].into(), settings, installation)
    };
    let mut maps = vec![entrypoint(ENTRYPOINT, NAME, SCRIPT, settings, installation)];
    if manager.layouts.is_none() {
        maps.push(ours(LAYOUTS, "config.yaml", layouts::yaml()));
    }
    if manager.clients.is_none() {
        let services = HOST_CLIENTS.join("\n  - ");
        maps.push(ours(CLIENTS, "clients.yaml", format!("version: v1\nsystemd-services:\n  - {services}\n")));
    }
    maps
}

pub(super) fn daemon_set(settings: &Settings, manager: &MigManager, installation: &Installation) -> DaemonSet {
    let mut variables = vec![
        env_from_field("NODE_NAME", "spec.nodeName"),
        env_from_field("POD_NAME", "metadata.name"),
        env_from_field("POD_NAMESPACE", "metadata.namespace"),
        env("GPU_CLIENTS_FILE", "/gpu-clients/clients.yaml"),
        env_from_field("DEFAULT_GPU_CLIENTS_NAMESPACE", "metadata.namespace"),
    ];
    // The manager knows the layouts of the GPUs at hand; ours are for those that it cannot ask. A user's own come first.
    let (file, items): (_, &[(&str, &str)]) = match manager.layouts {
        Some(_) => (env("CONFIG_FILE", "/mig-parted-config/config.yaml"), &[]),
        None => (
            env("DEFAULT_CONFIG_FILE", "/mig-parted-config/config-default.yaml"),
            &[("config.yaml", "config-default.yaml")],
        ),
    };
    variables.push(file);
    if cdi(settings) {
        variables.push(env("CDI_ENABLED", "true"));
        variables.extend(cdi_hook(settings));
    }
    let mounts = vec![
        sub_path(read_only(mount(ENTRYPOINT, "/bin/entrypoint.sh", None)), "entrypoint.sh"),
        mount("run-nvidia-validations", VALIDATIONS, None),
        mount("host-sys", "/sys", None),
        mount("host-root", "/host", Some("HostToContainer")),
        mount("gpu-clients", "/gpu-clients", None),
        mount("mig-parted-config", "/mig-parted-config", None),
        mount("driver-install-dir", "/driver-root", Some("HostToContainer")),
        mount("cdi-root", "/var/run/cdi", None),
    ];
    let pod = PodSpec {
        service_account_name: Some(NAME.to_owned()),
        runtime_class_name: runtime_class(settings),
        host_pid: Some(true),
        host_ipc: Some(true),
        init_containers: Some(vec![wait_for_toolkit(Seen::Validations, installation)]),
        containers: vec![by_entrypoint(main(NAME, &manager.container, variables, mounts))],
        volumes: Some(vec![
            config_map(ENTRYPOINT, ENTRYPOINT, Some(0o700), &[]),
            host_path("host-sys", "/sys", Some("Directory")),
            host_path("run-nvidia-validations", VALIDATIONS, MADE),
            host_path("driver-install-dir", &settings.common.driver_install_dir, MADE),
            host_root(settings),
            config_map("gpu-clients", manager.clients.as_deref().unwrap_or(CLIENTS), None, &[]),
            config_map("mig-parted-config", manager.layouts.as_deref().unwrap_or(LAYOUTS), None, items),
            host_path("cdi-root", "/var/run/cdi", MADE),
        ]),
        ..PodSpec::default()
    };
    operand(NAME, "mig-manager", &manager.container, annotations(settings, NAME), pod, settings, installation)
}
