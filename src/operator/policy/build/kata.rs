//! What Kata containers have in place of KubeVirt: a device plugin for the GPUs that the agent has bound, and the manager
//! of confidential computing.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, ExecAction, Lifecycle, LifecycleHandler, PodSpec},
};

use super::{
    Installation,
    pod::{by_name, env, env_from_field, host_path, mount, privileged_s0},
    stack::{MADE, VALIDATIONS, check, main, operand},
};
use crate::operator::policy::validate::{self, CcManager, Settings};

pub(super) const PLUGIN: &str = "nvidia-kata-sandbox-device-plugin-daemonset";
pub(super) const CC_MANAGER: &str = "nvidia-cc-manager";

pub(super) fn plugin(settings: &Settings, given: &validate::Container, installation: &Installation) -> DaemonSet {
    let variables = vec![
        env_from_field("NODE_NAME", "spec.nodeName"),
        env_from_field("POD_NAMESPACE", "metadata.namespace"),
        env_from_field("POD_SERVICE_ACCOUNT", "spec.serviceAccountName"),
    ];
    let mounts =
        vec![mount("device-plugin", "/var/lib/kubelet/device-plugins", None), mount("cdi-root", "/var/run/cdi", None)];
    let validations = vec![mount("run-nvidia-validations", VALIDATIONS, Some("Bidirectional"))];
    let variables_of_check = vec![env("NVIDIA_VISIBLE_DEVICES", "void")];
    let pod = PodSpec {
        service_account_name: Some("nvidia-kata-sandbox-device-plugin".to_owned()),
        // It looks for devices when it starts, and after a boot they are bound later than that.
        init_containers: Some(vec![check(
            "vfio-pci-validation",
            &["validate", "vfio-pci"],
            variables_of_check,
            validations,
            installation,
        )]),
        containers: vec![main("nvidia-kata-sandbox-device-plugin-ctr", given, variables, mounts)],
        volumes: Some(vec![
            host_path("device-plugin", &format!("{}/device-plugins", settings.common.kubelet_root), None),
            host_path("run-nvidia-validations", VALIDATIONS, MADE),
            host_path("cdi-root", "/var/run/cdi", MADE),
        ]),
        ..PodSpec::default()
    };
    operand(PLUGIN, "kata-sandbox-device-plugin", given, BTreeMap::new(), pod, settings, installation)
}

pub(super) fn cc_manager(settings: &Settings, manager: &CcManager, installation: &Installation) -> DaemonSet {
    let mut variables = vec![env_from_field("NODE_NAME", "spec.nodeName"), env("NVIDIA_VISIBLE_DEVICES", "void")];
    variables.extend(manager.default_mode.map(|mode| env("DEFAULT_CC_MODE", mode)));
    let given = &manager.container;
    let stale = format!("{VALIDATIONS}/.cc-manager-ctr-ready");
    let stop = ExecAction { command: Some(["/bin/rm", "-f", &stale].map(str::to_owned).to_vec()) };
    let container = Container {
        security_context: Some(privileged_s0()),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler { exec: Some(stop), ..LifecycleHandler::default() }),
            ..Lifecycle::default()
        }),
        ..main(
            CC_MANAGER,
            given,
            variables,
            vec![mount("host-sys", "/sys", None), mount("run-nvidia", "/run/nvidia", None)],
        )
    };
    let pod = PodSpec {
        service_account_name: Some(CC_MANAGER.to_owned()),
        termination_grace_period_seconds: Some(30),
        containers: vec![container],
        volumes: Some(vec![
            host_path("host-sys", "/sys", Some("Directory")),
            host_path("run-nvidia", "/run/nvidia", MADE),
        ]),
        ..PodSpec::default()
    };
    let mut set = operand(CC_MANAGER, "cc-manager", given, BTreeMap::new(), pod, settings, installation);
    by_name(&mut set);
    set
}
