//! Named configurations of the device plugin: a container that copies the one that the node's label picks, before the
//! program starts and again whenever the label changes.

use crds::labels;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, EnvVar, PodSpec, Volume, VolumeMount};

use super::pod::{config_map, env, env_from_field, mount, privileged};
use crate::operator::policy::validate::{self, Configs};

const FILE: &str = "/config/config.yaml";

/// `process`: what is signalled when another configuration has been picked.
pub(super) fn add(pod: &mut PodSpec, main: &str, process: &str, given: &validate::Container, configs: &Configs) {
    for container in pod.containers.iter_mut().filter(|container| container.name == main) {
        container.env.get_or_insert_default().push(env("CONFIG_FILE", FILE));
        container.volume_mounts.get_or_insert_default().extend(mounts(configs));
    }
    pod.init_containers.get_or_insert_default().push(manager("config-manager-init", given, configs, None));
    let beside = manager("config-manager", given, configs, Some(process));
    pod.containers.push(Container { security_context: Some(privileged()), ..beside });
    pod.volumes.get_or_insert_default().extend([
        config_map(&volume(configs), &configs.name, None, &[]),
        Volume { name: "config".to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() },
    ]);
}

/// A ConfigMap's name may have dots and be long; a volume's may not.
fn volume(configs: &Configs) -> String {
    configs.name.replace('.', "-").chars().take(63).collect::<String>().trim_end_matches('-').to_owned()
}

fn mounts(configs: &Configs) -> [VolumeMount; 2] {
    [mount("config", "/config", None), mount(&volume(configs), "/available-configs", None)]
}

fn manager(name: &str, given: &validate::Container, configs: &Configs, process: Option<&str>) -> Container {
    let once = if process.is_none() { "true" } else { "false" };
    Container {
        name: name.to_owned(),
        image: Some(given.image.reference.to_string()),
        image_pull_policy: Some(given.image.pull_policy.clone()),
        command: Some(vec!["config-manager".to_owned()]),
        env: Some(environment(configs, once, process)),
        resources: process.map(|_| given.resources.clone()),
        volume_mounts: Some(mounts(configs).to_vec()),
        ..Container::default()
    }
}

fn environment(configs: &Configs, once: &str, process: Option<&str>) -> Vec<EnvVar> {
    let (send, signal) = if process.is_some() { ("true", "1") } else { ("false", "") };
    vec![
        env("ONESHOT", once),
        env("KUBECONFIG", ""),
        env_from_field("NODE_NAME", "spec.nodeName"),
        env("NODE_LABEL", labels::DEVICE_PLUGIN_CONFIG),
        env("CONFIG_FILE_SRCDIR", "/available-configs"),
        env("CONFIG_FILE_DST", FILE),
        env("DEFAULT_CONFIG", configs.default.clone()),
        env("SEND_SIGNAL", send),
        env("SIGNAL", signal),
        env("PROCESS_TO_SIGNAL", process.unwrap_or_default()),
        // A node without a label and without a default runs with nothing configured.
        env("FALLBACK_STRATEGIES", "empty"),
    ]
}
