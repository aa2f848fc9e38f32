//! The checks of a container node, one after the other: driver → toolkit → cuda → plugin. The pod is ready when all have
//! passed, and takes their verdicts back when it ends.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, EnvVar, PodSpec},
};

use super::{
    Installation,
    pod::{Operand, daemon_set as set, env, env_from_field, host_path, mount, override_env, part_of},
    stack::{MADE, VALIDATIONS, annotations, check, check_secrets, host_root, runtime_class},
    toolkit::driver_check,
};
use crate::operator::policy::validate::Settings;

pub(super) const NAME: &str = "nvidia-operator-validator";

pub(super) fn daemon_set(settings: &Settings, installation: &Installation) -> DaemonSet {
    let checks = &settings.stack.checks;
    let link = |name: &str, args: &[&str], mut own: Vec<EnvVar>, given: &[EnvVar]| {
        override_env(&mut own, given);
        let mounts = vec![mount("run-nvidia-validations", VALIDATIONS, Some("Bidirectional"))];
        check(name, args, own, mounts, installation)
    };
    // A pod of its own is made like this one.
    let own = |given: &[EnvVar]| {
        let asked = given.iter().any(|v| v.name == "WITH_WORKLOAD" && v.value.as_deref() == Some("true"));
        let own = [("POD_NAME", "metadata.name"), ("OPERATOR_NAMESPACE", "metadata.namespace")];
        own.into_iter().filter(move |_| asked).map(|(name, field)| env_from_field(name, field))
    };
    let all_gpus = || env("NVIDIA_VISIBLE_DEVICES", "all");
    let node = env_from_field("NODE_NAME", "spec.nodeName");
    let chain = vec![
        driver_check(settings, installation),
        link("toolkit-validation", &["validate", "toolkit"], vec![all_gpus()], &checks.toolkit),
        link(
            "cuda-validation",
            &["validate", "cuda"],
            [vec![all_gpus()], own(&checks.cuda).collect()].concat(),
            &checks.cuda,
        ),
        link(
            "plugin-validation",
            &["validate", "plugin"],
            [vec![node], own(&checks.plugin).collect()].concat(),
            &checks.plugin,
        ),
    ];
    let secrets: Vec<_> = check_secrets(settings).collect();
    let pod = PodSpec {
        service_account_name: Some(NAME.to_owned()),
        runtime_class_name: runtime_class(settings),
        image_pull_secrets: Some(secrets).filter(|secrets| !secrets.is_empty()),
        init_containers: Some(chain),
        containers: vec![Container {
            termination_message_policy: None,
            ..link(NAME, &["validate", "hold"], Vec::new(), &checks.container)
        }],
        volumes: Some(vec![
            host_path("run-nvidia-validations", VALIDATIONS, MADE),
            host_path("driver-install-dir", &settings.common.driver_install_dir, None),
            host_root(settings),
            host_path("host-dev-char", "/dev/char", None),
        ]),
        ..PodSpec::default()
    };
    // Every container that looks at GPUs is given them.
    let given = ["toolkit-validation", "cuda-validation"].into_iter().flat_map(|name| annotations(settings, name));
    let mut validator = set(
        Operand {
            name: NAME,
            component: NAME,
            node_selector: [(format!("{}operator-validator", crds::labels::DEPLOY_PREFIX), "true".to_owned())].into(),
            rollout: settings.common.rollout.clone(),
            labels: &[],
            annotations: given.collect(),
            pod,
        },
        settings,
        installation,
    );
    part_of(&mut validator, "gpu-operator");
    validator
}
