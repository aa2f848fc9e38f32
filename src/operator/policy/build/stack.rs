//! What operands of the container stack have in common: they come up in the order of the node's checks, and see every GPU.

use std::collections::BTreeMap;

use crds::labels;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, EnvVar, LocalObjectReference, PodSpec, SecurityContext, Volume, VolumeMount},
};
use kube::core::ObjectMeta;

use super::{
    Installation,
    pod::{Operand, daemon_set, host_path, mount, override_env, own_labels, privileged, pull_secrets},
};
use crate::operator::policy::validate::{self, Cdi, Management, Settings};

pub(super) const VALIDATIONS: &str = "/run/nvidia/validations";
pub(super) const MADE: Option<&str> = Some("DirectoryOrCreate");
/// What the runtime's CDI files call all GPUs, for pods that manage them.
const ALL_GPUS: &str = "management.nvidia.com/gpu=all";

/// An operand's DaemonSet, gated by its deploy label.
pub(super) fn operand(
    name: &str,
    gate: &str,
    container: &validate::Container,
    annotations: BTreeMap<String, String>,
    pod: PodSpec,
    settings: &Settings,
    installation: &Installation,
) -> DaemonSet {
    let mut secrets = pull_secrets([&container.image]).unwrap_or_default();
    secrets.extend(check_secrets(settings));
    let host_network = container.host_network || pod.host_network == Some(true);
    daemon_set(
        Operand {
            name,
            component: name.trim_end_matches("-daemonset"),
            node_selector: [(format!("{}{gate}", labels::DEPLOY_PREFIX), "true".to_owned())].into(),
            rollout: settings.common.rollout.clone(),
            labels: &[],
            annotations,
            pod: PodSpec {
                image_pull_secrets: Some(secrets).filter(|secrets| !secrets.is_empty()),
                host_network: host_network.then_some(true),
                dns_policy: host_network.then(|| "ClusterFirstWithHostNet".to_owned()),
                ..pod
            },
        },
        settings,
        installation,
    )
}

pub(super) fn check_secrets(settings: &Settings) -> impl Iterator<Item = LocalObjectReference> {
    settings.stack.checks.pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() })
}

/// A container that manages GPUs is given all of them: by the pod's runtime class, or by an annotation.
pub(super) fn runtime_class(settings: &Settings) -> Option<String> {
    match settings.stack.management {
        Management::RuntimeClass => Some(settings.stack.runtime_class.clone()),
        Management::NriAnnotation | Management::Environment => None,
    }
}

pub(super) fn annotations(settings: &Settings, container: &str) -> BTreeMap<String, String> {
    match settings.stack.management {
        Management::NriAnnotation => [(format!("nvidia.cdi.k8s.io/container.{container}"), ALL_GPUS.to_owned())].into(),
        Management::RuntimeClass | Management::Environment => BTreeMap::new(),
    }
}

/// The operand's own container: the user's variables win over `env`.
pub(super) fn main(
    name: &str,
    given: &validate::Container,
    mut env: Vec<EnvVar>,
    mounts: Vec<VolumeMount>,
) -> Container {
    override_env(&mut env, &given.env);
    Container {
        name: name.to_owned(),
        image: Some(given.image.reference.to_string()),
        image_pull_policy: Some(given.image.pull_policy.clone()),
        args: Some(given.args.clone()).filter(|args| !args.is_empty()),
        env: Some(env).filter(|env| !env.is_empty()),
        resources: Some(given.resources.clone()),
        volume_mounts: Some(mounts).filter(|mounts| !mounts.is_empty()),
        security_context: Some(privileged()),
        ..Container::default()
    }
}

/// Runs the script of [`entrypoint`], with the user's arguments for the program that it becomes.
pub(super) fn by_entrypoint(container: Container) -> Container {
    let command = ["/bin/sh", "-c"].map(str::to_owned).to_vec();
    let args = match container.args {
        None => vec!["/bin/entrypoint.sh".to_owned()],
        Some(given) => {
            let mut args = vec!["exec /bin/entrypoint.sh \"$@\"".to_owned(), "entrypoint".to_owned()];
            args.extend(given);
            args
        }
    };
    Container { command: Some(command), args: Some(args), ..container }
}

/// NVIDIA's images do not know where the driver is: a script tells their program. The init containers have seen to it
/// that the file with the answer is there.
pub(super) fn entrypoint(
    name: &str,
    component: &str,
    script: &str,
    settings: &Settings,
    installation: &Installation,
) -> ConfigMap {
    let script = format!(
        "#!/bin/sh\nset -e\nready={VALIDATIONS}/driver-ready\nif [ ! -f \"$ready\" ]; then\n  echo \"$ready is not there: the driver check of this node has not passed\" >&2\n  exit 1\nfi\ncat \"$ready\"\nset -a\n. \"$ready\"\n{script}"
    );
    config_map(name, component, [("entrypoint.sh".to_owned(), script)].into(), settings, installation)
}

pub(super) fn config_map(
    name: &str,
    component: &str,
    data: BTreeMap<String, String>,
    settings: &Settings,
    installation: &Installation,
) -> ConfigMap {
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(installation.namespace.clone()),
            labels: Some(own_labels(component, component.trim_end_matches("-daemonset"), settings)),
            ..ObjectMeta::default()
        },
        data: Some(data),
        ..ConfigMap::default()
    }
}

/// An init container that runs this program; its last words are shown by `kubectl describe`.
pub(super) fn check(
    name: &str,
    args: &[&str],
    env: Vec<EnvVar>,
    mounts: Vec<VolumeMount>,
    installation: &Installation,
) -> Container {
    Container {
        name: name.to_owned(),
        image: Some(installation.image.clone()),
        image_pull_policy: Some(installation.pull_policy.clone()),
        args: Some(args.iter().map(|arg| (*arg).to_owned()).collect()),
        env: Some(env).filter(|env| !env.is_empty()),
        volume_mounts: Some(mounts),
        security_context: Some(SecurityContext { run_as_user: Some(0), ..privileged() }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// Waits until containers get GPUs on this node.
pub(super) fn wait_for_toolkit(seen: Seen, installation: &Installation) -> Container {
    let (volume, path) = seen.mount();
    check(
        "toolkit-validation",
        &["wait", "toolkit"],
        Vec::new(),
        vec![mount(volume, path, Some("HostToContainer"))],
        installation,
    )
}

/// What a pod has of the node's verdicts: their directory, or the one above it.
#[derive(Clone, Copy)]
pub(super) enum Seen {
    Validations,
    Run,
}

impl Seen {
    fn mount(self) -> (&'static str, &'static str) {
        match self {
            Self::Validations => ("run-nvidia-validations", VALIDATIONS),
            Self::Run => ("run-nvidia", "/run/nvidia"),
        }
    }
}

pub(super) fn host_root(settings: &Settings) -> Volume {
    let root = settings.common.root_fs.trim_end_matches('/');
    host_path("host-root", if root.is_empty() { "/" } else { root }, None)
}

/// Whether workloads name devices by CDI.
pub(super) fn cdi(settings: &Settings) -> bool {
    match settings.stack.cdi {
        Cdi::Off => false,
        Cdi::On | Cdi::OnByNri => true,
    }
}

/// How MIG devices are named, and that the container may watch them.
pub(super) fn mig_env(settings: &Settings) -> Vec<EnvVar> {
    let strategy = settings.stack.mig_strategy;
    let mut env: Vec<EnvVar> = strategy.map(|strategy| super::pod::env("MIG_STRATEGY", strategy)).into_iter().collect();
    if strategy != Some("none") {
        env.push(super::pod::env("NVIDIA_MIG_MONITOR_DEVICES", "all"));
    }
    env
}
