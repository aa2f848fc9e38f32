//! Kernel modules beside the driver's: nvidia-peermem, nvidia-fs and gdrdrv.

use k8s_openapi::api::core::v1::{Container, ExecAction, Probe, ResourceRequirements};

use crate::operator::policy::{
    build::pod::{mount, override_env, privileged_s0, read_only},
    validate::{Driver, Rdma, Sidecar},
};

pub(super) fn sidecars(driver: &Driver) -> Vec<Container> {
    let resources = &driver.container.resources;
    let peermem = match driver.rdma {
        Rdma::Off => None,
        Rdma::On | Rdma::WithHostMofed => Some(peermem(driver)),
    };
    let gds = driver.gds.as_ref().map(|gds| module("nvidia-fs-ctr", "nvidia_fs", "nvidia-gds-driver", gds, resources));
    let gdrcopy = driver
        .gdrcopy
        .as_ref()
        .map(|gdrcopy| module("nvidia-gdrcopy-ctr", "gdrdrv", "gdrcopy-driver", gdrcopy, resources));
    [peermem, gds, gdrcopy].into_iter().flatten().collect()
}

/// The driver's own image has the module and the commands.
fn peermem(driver: &Driver) -> Container {
    let probe = ["sh", "-c", "nvidia-driver probe_nvidia_peermem"].map(str::to_owned).to_vec();
    Container {
        name: "nvidia-peermem-ctr".to_owned(),
        image: Some(driver.container.image.reference.to_string()),
        image_pull_policy: Some(driver.container.image.pull_policy.clone()),
        command: Some(vec!["nvidia-driver".to_owned()]),
        args: Some(vec!["reload_nvidia_peermem".to_owned()]),
        resources: Some(driver.container.resources.clone()),
        security_context: Some(privileged_s0()),
        volume_mounts: Some(vec![
            mount("run-nvidia", "/run/nvidia", Some("Bidirectional")),
            mount("var-log", "/var/log", None),
            read_only(mount("dev-log", "/dev/log", None)),
            mount("run-mellanox-drivers", "/run/mellanox/drivers", Some("HostToContainer")),
        ]),
        startup_probe: Some(started(probe.clone())),
        liveness_probe: Some(Probe {
            initial_delay_seconds: Some(30),
            period_seconds: Some(30),
            failure_threshold: Some(1),
            ..started(probe)
        }),
        ..Container::default()
    }
}

/// Built against the driver's sources, so it waits for them; its image has a shell, and `installer`.
fn module(name: &str, module: &str, installer: &str, sidecar: &Sidecar, resources: &ResourceRequirements) -> Container {
    let script = format!(
        "until [ -d /run/nvidia/driver/usr/src ] && [ -d /sys/module/nvidia ]; do echo \"{module} waits for the nvidia driver\"; sleep 10; done; exec {installer} install"
    );
    let mut env = Vec::new();
    override_env(&mut env, &sidecar.env);
    Container {
        name: name.to_owned(),
        image: Some(sidecar.image.reference.to_string()),
        image_pull_policy: Some(sidecar.image.pull_policy.clone()),
        command: Some(vec!["bash".to_owned(), "-xc".to_owned()]),
        args: Some(if sidecar.args.is_empty() { vec![script] } else { sidecar.args.clone() }),
        env: Some(env).filter(|env| !env.is_empty()),
        resources: Some(resources.clone()),
        security_context: Some(privileged_s0()),
        volume_mounts: Some(vec![
            mount("run-nvidia", "/run/nvidia", Some("HostToContainer")),
            mount("var-log", "/var/log", None),
            read_only(mount("dev-log", "/dev/log", None)),
        ]),
        startup_probe: Some(started(vec!["sh".to_owned(), "-c".to_owned(), format!("lsmod | grep {module}")])),
        ..Container::default()
    }
}

fn started(command: Vec<String>) -> Probe {
    Probe {
        exec: Some(ExecAction { command: Some(command) }),
        initial_delay_seconds: Some(10),
        period_seconds: Some(10),
        timeout_seconds: Some(10),
        failure_threshold: Some(120),
        success_threshold: Some(1),
        ..Probe::default()
    }
}
