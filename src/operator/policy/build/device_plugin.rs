//! NVIDIA's device plugin, and the MPS control daemon that shares GPUs with it.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, EnvVar, PodSpec, VolumeMount},
};

use super::{
    Installation, config_manager,
    pod::{config_map, env, env_from_field, host_path, mount, override_env, privileged, read_only, sub_path},
    stack::{
        MADE, Seen, VALIDATIONS, annotations, by_entrypoint, cdi, entrypoint, host_root, main, mig_env, operand,
        runtime_class, wait_for_toolkit,
    },
};
use crate::operator::policy::validate::{DevicePlugin, Settings};

pub const NAME: &str = "nvidia-device-plugin-daemonset";
pub(super) const ENTRYPOINT: &str = "nvidia-device-plugin-entrypoint";
pub const MPS: &str = "nvidia-device-plugin-mps-control-daemon";
const CONTAINER: &str = "nvidia-device-plugin";
const MPS_CONTAINER: &str = "mps-control-daemon-ctr";
const ACCOUNT: &str = "nvidia-device-plugin";
/// GPU feature discovery sets it where a configuration shares GPUs by MPS.
const MPS_CAPABLE: &str = "nvidia.com/mps.capable";

const SCRIPT: &str = r#"CONTAINER_DRIVER_ROOT=$DRIVER_ROOT_CTR_PATH
exec nvidia-device-plugin "$@"
"#;

pub(super) fn script(settings: &Settings, installation: &Installation) -> ConfigMap {
    entrypoint(ENTRYPOINT, NAME, SCRIPT, settings, installation)
}

pub(super) fn daemon_set(settings: &Settings, plugin: &DevicePlugin, installation: &Installation) -> DaemonSet {
    let container = main(CONTAINER, &plugin.container, environment(settings, plugin), mounts());
    let mut pod = PodSpec {
        service_account_name: Some(ACCOUNT.to_owned()),
        runtime_class_name: runtime_class(settings),
        share_process_namespace: plugin.configs.as_ref().map(|_| true),
        init_containers: Some(vec![wait_for_toolkit(Seen::Validations, installation)]),
        containers: vec![by_entrypoint(container)],
        volumes: Some(vec![
            config_map(ENTRYPOINT, ENTRYPOINT, Some(0o700), &[]),
            host_path("device-plugin", &format!("{}/device-plugins", settings.common.kubelet_root), None),
            host_path("run-nvidia-validations", VALIDATIONS, MADE),
            host_path("driver-install-dir", &settings.common.driver_install_dir, MADE),
            host_root(settings),
            host_path("cdi-root", "/var/run/cdi", MADE),
            host_path("mps-root", &plugin.mps_root, MADE),
            host_path("mps-shm", &format!("{}/shm", plugin.mps_root), None),
        ]),
        ..PodSpec::default()
    };
    if let Some(configs) = &plugin.configs {
        config_manager::add(&mut pod, CONTAINER, "nvidia-device-plugin", &plugin.container, configs);
    }
    operand(NAME, "device-plugin", &plugin.container, annotations(settings, CONTAINER), pod, settings, installation)
}

fn environment(settings: &Settings, plugin: &DevicePlugin) -> Vec<EnvVar> {
    let stack = &settings.stack;
    let strategy = if cdi(settings) { "cdi-annotations,cdi-cri" } else { "envvar" };
    let mut variables = vec![
        env("PASS_DEVICE_SPECS", "true"),
        env("FAIL_ON_INIT_ERROR", "true"),
        env("DEVICE_LIST_STRATEGY", strategy),
        env("DEVICE_ID_STRATEGY", "uuid"),
        env("NVIDIA_VISIBLE_DEVICES", "all"),
        env("NVIDIA_DRIVER_CAPABILITIES", "all"),
        env("MPS_ROOT", plugin.mps_root.clone()),
    ];
    // GDS needs the files of the network driver too.
    variables
        .extend(stack.gds.then(|| [env("GDS_ENABLED", "true"), env("MOFED_ENABLED", "true")]).into_iter().flatten());
    variables.extend(stack.gdrcopy.then(|| env("GDRCOPY_ENABLED", "true")));
    variables.extend(mig_env(settings));
    if cdi(settings) {
        variables.extend([env("CDI_ENABLED", "true"), env("CDI_ANNOTATION_PREFIX", "cdi.k8s.io/")]);
        variables.extend(cdi_hook(settings));
    }
    variables
}

/// Where the toolkit has its CDI hook on the host; a host's own toolkit is found by the program itself.
pub(super) fn cdi_hook(settings: &Settings) -> Option<EnvVar> {
    let directory = settings.stack.toolkit_dir.as_ref()?;
    Some(env("NVIDIA_CDI_HOOK_PATH", format!("{}/toolkit/nvidia-cdi-hook", directory.trim_end_matches('/'))))
}

fn mounts() -> Vec<VolumeMount> {
    vec![
        sub_path(read_only(mount(ENTRYPOINT, "/bin/entrypoint.sh", None)), "entrypoint.sh"),
        mount("device-plugin", "/var/lib/kubelet/device-plugins", None),
        mount("run-nvidia-validations", VALIDATIONS, None),
        mount("driver-install-dir", "/driver-root", Some("HostToContainer")),
        read_only(mount("host-root", "/host", Some("HostToContainer"))),
        mount("cdi-root", "/var/run/cdi", None),
        mount("mps-shm", "/dev/shm", None),
        mount("mps-root", "/mps", None),
    ]
}

/// Runs only where GPU feature discovery says that the node's configuration shares GPUs by MPS.
pub(super) fn mps(settings: &Settings, plugin: &DevicePlugin, installation: &Installation) -> DaemonSet {
    let mut variables = vec![
        env_from_field("NODE_NAME", "spec.nodeName"),
        env("NVIDIA_VISIBLE_DEVICES", "all"),
        env("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
    ];
    override_env(&mut variables, &mig_env(settings));
    let program = |name: &str, command: &[&str], variables: Vec<EnvVar>, mounts| Container {
        name: name.to_owned(),
        image: Some(plugin.container.image.reference.to_string()),
        image_pull_policy: Some(plugin.container.image.pull_policy.clone()),
        command: Some(command.iter().map(|part| (*part).to_owned()).collect()),
        env: Some(variables).filter(|variables| !variables.is_empty()),
        volume_mounts: Some(mounts),
        security_context: Some(privileged()),
        ..Container::default()
    };
    let mounts = vec![mount("mps-shm", "/dev/shm", None), mount("mps-root", "/mps", None)];
    let daemon = program(MPS_CONTAINER, &["mps-control-daemon"], variables, mounts);
    let shared = vec![mount("mps-root", "/mps", Some("Bidirectional"))];
    let mut pod = PodSpec {
        service_account_name: Some(ACCOUNT.to_owned()),
        runtime_class_name: runtime_class(settings),
        host_pid: Some(true),
        init_containers: Some(vec![
            wait_for_toolkit(Seen::Run, installation),
            program("mps-control-daemon-mounts", &["mps-control-daemon", "mount-shm"], Vec::new(), shared),
        ]),
        containers: vec![Container { resources: Some(plugin.container.resources.clone()), ..daemon }],
        volumes: Some(vec![
            host_path("run-nvidia", "/run/nvidia", Some("Directory")),
            host_path("mps-root", &plugin.mps_root, MADE),
            host_path("mps-shm", &format!("{}/shm", plugin.mps_root), None),
        ]),
        ..PodSpec::default()
    };
    if let Some(configs) = &plugin.configs {
        config_manager::add(&mut pod, MPS_CONTAINER, "/usr/bin/mps-control-daemon", &plugin.container, configs);
    }
    let annotations = annotations(settings, MPS_CONTAINER);
    let mut set = operand(MPS, "device-plugin", &plugin.container, annotations, pod, settings, installation);
    let selector =
        set.spec.as_mut().and_then(|spec| spec.template.spec.as_mut()).and_then(|pod| pod.node_selector.as_mut());
    selector.expect("an operand should have a gate").insert(MPS_CAPABLE.to_owned(), "true".to_owned());
    set
}
