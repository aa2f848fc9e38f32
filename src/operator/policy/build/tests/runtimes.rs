//! The toolkit on other runtimes than the recorded one, and on a containerd that is elsewhere.

use k8s_openapi::api::core::v1::PodSpec;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::scripts::stack_on;

fn pod(runtime: &str, patch: &Value, set: &str) -> PodSpec {
    let operands = stack_on(runtime, patch);
    let set = operands.daemon_sets.into_iter().find(|candidate| candidate.name_any() == set).expect("a DaemonSet");
    set.spec.and_then(|spec| spec.template.spec).expect("a pod")
}

fn toolkit(runtime: &str, patch: &Value) -> PodSpec {
    pod(runtime, patch, "nvidia-container-toolkit-daemonset")
}

fn variable<'a>(pod: &'a PodSpec, name: &str) -> Option<&'a str> {
    let variables = pod.containers[0].env.as_ref().expect("variables");
    variables.iter().find(|entry| entry.name == name).and_then(|entry| entry.value.as_deref())
}

fn on_host<'a>(pod: &'a PodSpec, volume: &str) -> Option<&'a str> {
    let volumes = pod.volumes.as_ref().expect("volumes");
    let volume = volumes.iter().find(|candidate| candidate.name == volume)?;
    volume.host_path.as_ref().map(|path| path.path.as_str())
}

#[test]
fn a_containerd_that_is_elsewhere_is_mounted_from_there() {
    let env = |name: &str, value: &str| json!({"name": name, "value": value});
    let k3s = json!({"toolkit": {"env": [
        env("CONTAINERD_CONFIG", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl"),
        env("CONTAINERD_SOCKET", "/run/k3s/containerd/containerd.sock"),
        env("RUNTIME_CONFIG_SOURCE", "command,file=/etc/base.toml"),
    ]}});
    let pod = toolkit("containerd://2.1.0-k3s1", &k3s);
    assert_eq!(on_host(&pod, "containerd-config"), Some("/var/lib/rancher/k3s/agent/etc/containerd"));
    assert_eq!(on_host(&pod, "containerd-socket"), Some("/run/k3s/containerd"));
    for name in ["CONTAINERD_CONFIG", "RUNTIME_CONFIG"] {
        assert_eq!(variable(&pod, name), Some("/runtime/config-dir/config.toml.tmpl"), "{name}");
    }
    assert_eq!(variable(&pod, "RUNTIME_SOCKET"), Some("/runtime/sock-dir/containerd.sock"));
    assert_eq!(variable(&pod, "RUNTIME_CONFIG_SOURCE"), Some("command,file=/host/etc/base.toml"));
}

#[test]
fn cri_o_is_told_by_a_file_beside_its_own_and_has_no_socket() {
    let pod = toolkit("cri-o://1.33.0", &json!({}));
    assert_eq!(variable(&pod, "RUNTIME"), Some("crio"));
    assert_eq!(variable(&pod, "CRIO_CONFIG_MODE"), Some("config"));
    assert_eq!(variable(&pod, "RUNTIME_DROP_IN_CONFIG_HOST_PATH"), Some("/etc/crio/conf.d/99-nvidia.toml"));
    assert_eq!(on_host(&pod, "crio-config"), Some("/etc/crio"));
    assert_eq!(on_host(&pod, "crio-hooks"), Some("/usr/share/containers/oci/hooks.d"));
    assert_eq!((variable(&pod, "RUNTIME_SOCKET"), on_host(&pod, "crio-socket")), (None, None));
}

#[test]
fn cri_o_without_cdi_gives_gpus_by_a_hook_and_needs_no_runtime_class() {
    let off = json!({"cdi": {"enabled": false}});
    assert_eq!(variable(&toolkit("cri-o://1.33.0", &off), "CRIO_CONFIG_MODE"), Some("hook"));
    assert_eq!(pod("cri-o://1.33.0", &off, "nvidia-device-plugin-daemonset").runtime_class_name, None);
    let containerd = pod("containerd://2.1.0", &off, "nvidia-device-plugin-daemonset");
    assert_eq!(containerd.runtime_class_name.as_deref(), Some("nvidia"));
}

#[test]
fn docker_has_one_file_and_a_socket() {
    let pod = toolkit("docker://28.0", &json!({}));
    assert_eq!(variable(&pod, "DOCKER_CONFIG"), Some("/runtime/config-dir/daemon.json"));
    assert_eq!(on_host(&pod, "docker-config"), Some("/etc/docker"));
    assert_eq!(on_host(&pod, "docker-socket"), Some("/var/run"));
    assert_eq!(variable(&pod, "RUNTIME_DROP_IN_CONFIG"), None);
}

#[test]
fn with_the_nri_plugin_pods_ask_by_annotation() {
    let operands = stack_on("containerd://2.1.0", &json!({"cdi": {"nriPluginEnabled": true}}));
    assert_eq!(operands.runtime_classes, []);
    let set =
        operands.daemon_sets.iter().find(|set| set.name_any() == "nvidia-device-plugin-daemonset").expect("a set");
    let template = &set.spec.as_ref().expect("a spec").template;
    let annotations = template.metadata.as_ref().and_then(|meta| meta.annotations.as_ref()).expect("annotations");
    let asked = &annotations["nvidia.cdi.k8s.io/container.nvidia-device-plugin"];
    assert_eq!(asked, "management.nvidia.com/gpu=all");
    assert_eq!(template.spec.as_ref().and_then(|pod| pod.runtime_class_name.as_deref()), None);
}
