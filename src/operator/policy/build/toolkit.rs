//! NVIDIA's container toolkit: installed on the host, and the container runtime told of it.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, EnvVar, PodSpec, SecurityContext, Volume, VolumeMount},
};

use super::{
    Installation,
    pod::{config_map, env, env_from_field, host_path, mount, override_env, privileged_s0, read_only, sub_path},
    stack::{MADE, VALIDATIONS, by_entrypoint, cdi, check, entrypoint, host_root, main, operand},
};
use crate::operator::policy::validate::{Cdi, HostFile, Runtime, Settings, Toolkit};

pub const NAME: &str = "nvidia-container-toolkit-daemonset";
pub(super) const ENTRYPOINT: &str = "nvidia-container-toolkit-entrypoint";
const CONTAINER: &str = "nvidia-container-toolkit-ctr";

/// Where the runtime's directories are in the container.
const CONFIG: &str = "/runtime/config-dir/";
const DROP_IN: &str = "/runtime/config-dir.d/";
const SOCKET: &str = "/runtime/sock-dir/";
const NRI: &str = "/runtime/nri-dir/";

/// containerd 1.6.9 and later may lose a container that it has started right before a restart, and this one restarts it.
const SCRIPT: &str = r#"echo "waiting 5 s, so that the runtime's restart does not lose this container"
sleep 5
if command -v nvidia-toolkit >/dev/null; then
  exec nvidia-toolkit "$@"
fi
exec nvidia-ctk-installer "$@"
"#;

pub(super) fn script(settings: &Settings, installation: &Installation) -> ConfigMap {
    entrypoint(ENTRYPOINT, NAME, SCRIPT, settings, installation)
}

pub(super) fn daemon_set(settings: &Settings, toolkit: &Toolkit, installation: &Installation) -> DaemonSet {
    let container = main(CONTAINER, &toolkit.container, environment(settings, toolkit), mounts(settings, toolkit));
    let pod = PodSpec {
        service_account_name: Some("nvidia-container-toolkit".to_owned()),
        automount_service_account_token: Some(false),
        host_pid: Some(true),
        init_containers: Some(vec![driver_check(settings, installation)]),
        containers: vec![Container {
            security_context: Some(privileged_s0()),
            ..by_entrypoint(of_runtime(container, toolkit))
        }],
        volumes: Some(volumes(settings, toolkit)),
        ..PodSpec::default()
    };
    operand(NAME, "container-toolkit", &toolkit.container, [].into(), pod, settings, installation)
}

/// The same check as the validator's: this pod needs its verdict before the validator can run at all.
pub(super) fn driver_check(settings: &Settings, installation: &Installation) -> Container {
    let common = &settings.common;
    let (root, install) =
        (format!("--root-fs={}", common.root_fs), format!("--install-dir-on-host={}", common.driver_install_dir));
    let mut variables = Vec::new();
    override_env(&mut variables, &settings.stack.checks.driver);
    let mounts = vec![
        mount("driver-install-dir", "/run/nvidia/driver", Some("HostToContainer")),
        mount("run-nvidia-validations", VALIDATIONS, Some("Bidirectional")),
        read_only(mount("host-root", "/host", Some("HostToContainer"))),
        mount("host-dev-char", "/host-dev-char", None),
    ];
    Container {
        security_context: Some(SecurityContext { run_as_user: Some(0), ..privileged_s0() }),
        ..check("driver-validation", &["validate", "driver", &root, &install], variables, mounts, installation)
    }
}

fn environment(settings: &Settings, toolkit: &Toolkit) -> Vec<EnvVar> {
    let mut variables = vec![
        env("ROOT", toolkit.install_dir.clone()),
        env("NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND", "management.nvidia.com/gpu"),
        env("NVIDIA_VISIBLE_DEVICES", "void"),
        env("TOOLKIT_PID_FILE", "/run/nvidia/toolkit/toolkit.pid"),
        env_from_field("NRI_NAMESPACE", "metadata.namespace"),
    ];
    if cdi(settings) {
        variables.extend([
            env("CDI_ENABLED", "true"),
            // Workloads get GPUs by CDI; only pods that ask for the class get NVIDIA's runtime.
            env("NVIDIA_RUNTIME_SET_AS_DEFAULT", "false"),
            env("NVIDIA_CONTAINER_RUNTIME_MODE", "cdi"),
            env("CRIO_CONFIG_MODE", "config"),
        ]);
    } else if toolkit.runtime == Runtime::CriO {
        variables.push(env("CRIO_CONFIG_MODE", "hook"));
    }
    if settings.stack.cdi == Cdi::OnByNri {
        variables.push(env("ENABLE_NRI_PLUGIN", "true"));
        variables.push(env("NRI_SOCKET", format!("{NRI}{}", toolkit.nri_socket.name)));
    }
    variables.push(env("RUNTIME", name(toolkit.runtime)));
    if toolkit.runtime == Runtime::Containerd {
        variables.push(env("CONTAINERD_RUNTIME_CLASS", settings.stack.runtime_class.clone()));
    }
    variables
}

fn name(runtime: Runtime) -> &'static str {
    match runtime {
        Runtime::Containerd => "containerd",
        Runtime::CriO => "crio",
        Runtime::Docker => "docker",
    }
}

/// Where the runtime's files are in this container: whatever the user's variables said, they named the host's.
fn of_runtime(mut container: Container, toolkit: &Toolkit) -> Container {
    let prefix = name(toolkit.runtime).to_uppercase();
    let mut set = vec![];
    let config = format!("{CONFIG}{}", toolkit.config.name);
    set.extend([env("RUNTIME_CONFIG", config.clone()), env(&format!("{prefix}_CONFIG"), config)]);
    if let Some(file) = &toolkit.drop_in {
        set.push(env("RUNTIME_DROP_IN_CONFIG", format!("{DROP_IN}{}", file.name)));
        set.push(env("RUNTIME_DROP_IN_CONFIG_HOST_PATH", file.path()));
    }
    if let Some(file) = &toolkit.socket {
        let socket = format!("{SOCKET}{}", file.name);
        set.extend([env("RUNTIME_SOCKET", socket.clone()), env(&format!("{prefix}_SOCKET"), socket)]);
    }
    let variables = container.env.get_or_insert_default();
    override_env(variables, &set);
    // Further sources of configuration are files of the host, which this container has below /host.
    for source in variables.iter_mut().filter(|entry| entry.name == "RUNTIME_CONFIG_SOURCE") {
        source.value = source.value.as_deref().map(|sources| {
            let below = |source: &str| source.strip_prefix("file=").map(|path| format!("file=/host{path}"));
            sources.split(',').map(|s| below(s).unwrap_or_else(|| s.to_owned())).collect::<Vec<_>>().join(",")
        });
    }
    container
}

fn mounts(settings: &Settings, toolkit: &Toolkit) -> Vec<VolumeMount> {
    let runtime = name(toolkit.runtime);
    let mut mounts = vec![
        sub_path(read_only(mount(ENTRYPOINT, "/bin/entrypoint.sh", None)), "entrypoint.sh"),
        mount("toolkit-root", "/run/nvidia/toolkit", None),
        mount("run-nvidia-validations", VALIDATIONS, None),
        mount("toolkit-install-dir", &toolkit.install_dir, None),
        mount("crio-hooks", "/usr/share/containers/oci/hooks.d", None),
        mount("driver-install-dir", "/driver-root", Some("HostToContainer")),
        read_only(mount("host-root", "/host", Some("HostToContainer"))),
        mount("cdi-root", "/var/run/cdi", None),
        mount(&format!("{runtime}-config"), CONFIG, None),
    ];
    mounts.extend(toolkit.drop_in.as_ref().map(|_| mount(&format!("{runtime}-drop-in-config"), DROP_IN, None)));
    mounts.extend(toolkit.socket.as_ref().map(|_| mount(&format!("{runtime}-socket"), SOCKET, None)));
    mounts.extend((settings.stack.cdi == Cdi::OnByNri).then(|| mount("nri-socket", NRI, None)));
    mounts
}

fn volumes(settings: &Settings, toolkit: &Toolkit) -> Vec<Volume> {
    let runtime = name(toolkit.runtime);
    let directory =
        |suffix: &str, file: &HostFile, kind| host_path(&format!("{runtime}-{suffix}"), &file.directory, kind);
    let hooks = match toolkit.runtime {
        Runtime::CriO => "/usr/share/containers/oci/hooks.d",
        Runtime::Containerd | Runtime::Docker => "/run/containers/oci/hooks.d",
    };
    let mut volumes = vec![
        config_map(ENTRYPOINT, ENTRYPOINT, Some(0o700), &[]),
        host_path("toolkit-root", "/run/nvidia/toolkit", MADE),
        host_path("run-nvidia-validations", VALIDATIONS, MADE),
        host_path("driver-install-dir", &settings.common.driver_install_dir, MADE),
        host_root(settings),
        host_path("toolkit-install-dir", &toolkit.install_dir, None),
        host_path("crio-hooks", hooks, None),
        host_path("host-dev-char", "/dev/char", None),
        host_path("cdi-root", "/var/run/cdi", MADE),
        directory("config", &toolkit.config, MADE),
    ];
    volumes.extend(toolkit.drop_in.as_ref().map(|file| directory("drop-in-config", file, MADE)));
    volumes.extend(toolkit.socket.as_ref().map(|file| directory("socket", file, None)));
    let nri = settings.stack.cdi == Cdi::OnByNri;
    volumes.extend(nri.then(|| host_path("nri-socket", &toolkit.nri_socket.directory, MADE)));
    volumes
}
