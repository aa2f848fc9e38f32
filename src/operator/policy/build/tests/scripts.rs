//! The scripts that NVIDIA's images are started by, run by a real shell with stand-ins for what is in those images.
#![allow(clippy::disallowed_methods, reason = "a script is a program")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crds::{v1::ClusterPolicy, v1alpha1::GPUVirtConfigSpec};
use k8s_openapi::api::core::v1::Container;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{super::Operands, build, installation};
use crate::operator::policy::validate::{Facts, validate};

fn stack(patch: &Value) -> Operands {
    stack_on("containerd://2.1.0", patch)
}

/// The peer's default policy with a patch, on nodes of this runtime.
pub(super) fn stack_on(runtime: &str, patch: &Value) -> Operands {
    let text = include_str!("../../../../../crds/tests/fixtures/peer-default.yaml");
    let mut policy: Value = serde_saphyr::from_str(text).expect("the peer's default policy should be YAML");
    super::super::parity::merge(&mut policy, &json!({"spec": patch}));
    let policy: ClusterPolicy = serde_json::from_value(policy).expect("a ClusterPolicy");
    let facts = Facts { runtimes: [runtime.to_owned()].into(), ..Facts::default() };
    build(&validate(&policy, &GPUVirtConfigSpec::default(), &facts).settings, &installation())
}

/// A container's file system, as far as its script looks at it.
struct Image(tempfile::TempDir);

impl Image {
    /// With these programs, which say how they were started.
    fn with(programs: &[&str]) -> Self {
        let image = Self(tempfile::tempdir().expect("tempdir"));
        for program in programs {
            image.program(program, "echo \"$(basename \"$0\") $*\"; env");
        }
        image.program("sleep", ":");
        image
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn program(&self, name: &str, body: &str) {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    }

    fn driver_is_ready(self) -> Self {
        let text = "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\n";
        fs::write(self.path("driver-ready"), text).expect("a file");
        self
    }

    /// Runs the container of this operand with its script, whose absolute paths lead here.
    fn run(&self, operands: &Operands, set: &str, script: &str) -> Output {
        let text = operands.config_maps.iter().find(|map| map.name_any() == script).and_then(|map| map.data.as_ref());
        let here = |text: &str, path: &str, to: &Path| text.replace(path, to.to_str().expect("UTF-8"));
        let text = here(&text.expect("a script")["entrypoint.sh"], "/run/nvidia/validations", self.0.path());
        fs::write(self.path("entrypoint.sh"), text).expect("a script");
        fs::set_permissions(self.path("entrypoint.sh"), fs::Permissions::from_mode(0o700)).expect("executable");
        let container = container(operands, set);
        let command = container.command.expect("a command");
        let args = container.args.expect("arguments");
        Command::new(&command[0])
            .args(&command[1..])
            .args(args.iter().map(|arg| here(arg, "/bin/entrypoint.sh", &self.path("entrypoint.sh"))))
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.0.path().display()))
            .output()
            .expect("a shell")
    }
}

fn container(operands: &Operands, set: &str) -> Container {
    let set = operands.daemon_sets.iter().find(|candidate| candidate.name_any() == set).expect("a DaemonSet");
    let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).expect("a pod");
    pod.containers[0].clone()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn says(output: &Output, parts: &[&str]) {
    let said = said(output);
    for part in parts {
        assert!(said.lines().any(|line| line == *part), "{part:?} is no line of: {said}");
    }
}

const PLUGIN: (&str, &str) = ("nvidia-device-plugin-daemonset", "nvidia-device-plugin-entrypoint");

#[test]
fn the_device_plugin_is_told_where_the_driver_is_and_gets_the_users_arguments() {
    let image = Image::with(&["nvidia-device-plugin"]).driver_is_ready();
    let output = image.run(&stack(&json!({})), PLUGIN.0, PLUGIN.1);
    let told = ["NVIDIA_DRIVER_ROOT=/run/nvidia/driver", "CONTAINER_DRIVER_ROOT=/driver-root"];
    says(&output, &[&told[..], &["nvidia-device-plugin "]].concat());
    let given = stack(&json!({"devicePlugin": {"args": ["--a=1", "two words"]}}));
    says(&image.run(&given, PLUGIN.0, PLUGIN.1), &["nvidia-device-plugin --a=1 two words"]);
}

#[test]
fn a_program_is_not_started_before_the_driver_check_has_passed() {
    let output = Image::with(&["nvidia-device-plugin"]).run(&stack(&json!({})), PLUGIN.0, PLUGIN.1);
    assert!(!output.status.success());
    assert!(said(&output).contains("driver-ready is not there: the driver check of this node has not passed"));
}

#[test]
fn the_toolkits_installer_is_started_under_its_old_and_its_new_name() {
    for name in ["nvidia-toolkit", "nvidia-ctk-installer"] {
        let image = Image::with(&[name]).driver_is_ready();
        let toolkit = ("nvidia-container-toolkit-daemonset", "nvidia-container-toolkit-entrypoint");
        let output = image.run(&stack(&json!({})), toolkit.0, toolkit.1);
        says(&output, &["DRIVER_ROOT_CTR_PATH=/driver-root", &format!("{name} ")]);
    }
}

#[test]
fn the_mig_manager_stops_host_programs_only_where_the_driver_is_the_hosts() {
    let image = Image::with(&["nvidia-mig-manager"]).driver_is_ready();
    let output = image.run(&stack(&json!({})), "nvidia-mig-manager", "nvidia-mig-manager-entrypoint");
    says(&output, &["WITH_SHUTDOWN_HOST_GPU_CLIENTS=false", "nvidia-mig-manager "]);
}
