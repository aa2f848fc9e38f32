//! NVIDIA's vGPU host driver: the user's own image, since NVIDIA's licence allows no public one.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, PodSpec},
};

use super::{
    Installation,
    driver::{
        prepare, select,
        volumes::{mounts_of, volumes_of},
    },
    openshift::adapt,
    pod::{Operand, daemon_set as operand, host_path, mount, privileged_s0, pull_secrets},
    stack::{self, MADE},
};
use crate::operator::policy::validate::{Rollout, Settings, VGPU_MANAGER, VgpuManager};

/// By which its pods are found, whatever their set is called.
pub const COMPONENT: &str = "nvidia-vgpu-manager";
const CONTAINER: &str = "nvidia-vgpu-manager-ctr";

pub(super) fn daemon_set(settings: &Settings, manager: &VgpuManager, installation: &Installation) -> DaemonSet {
    let mut set = operand(
        Operand {
            name: &manager.pool.set,
            component: COMPONENT,
            node_selector: [(format!("{}vgpu-manager", crds::labels::DEPLOY_PREFIX), "true".to_owned())].into(),
            // At its end the image disables all virtual functions, those of running VMs too.
            rollout: Rollout::OnDelete,
            labels: &[],
            annotations: [("kubectl.kubernetes.io/default-container".to_owned(), CONTAINER.to_owned())].into(),
            pod: pod(settings, manager, installation),
        },
        settings,
        installation,
    );
    select(&mut set, VGPU_MANAGER, &manager.pool);
    let resources = &manager.container.resources;
    adapt(&mut set, CONTAINER, &manager.pool, settings.openshift.as_ref(), resources);
    set
}

fn pod(settings: &Settings, manager: &VgpuManager, installation: &Installation) -> PodSpec {
    let given = &manager.container;
    let mut mounts = vec![
        mount("run-nvidia", "/run/nvidia", Some("Bidirectional")),
        mount("host-os-release", "/host-etc/os-release", None),
        mount("vfio", "/dev/vfio", None),
        mount("cgroup", "/sys/fs/cgroup", None),
        mount("var-log", "/var/log", None),
        mount("dev-log", "/dev/log", None),
        mount("firmware-search-path", "/sys/module/firmware_class/parameters/path", None),
        mount("nv-firmware", "/lib/firmware", None),
    ];
    mounts.extend(mounts_of(&manager.files));
    let mut main = stack::main(CONTAINER, given, Vec::new(), mounts);
    main.args.get_or_insert_with(|| vec!["init".to_owned()]);
    let install = &settings.common.driver_install_dir;
    let mut volumes = vec![
        host_path("run-nvidia", "/run/nvidia", MADE),
        host_path("host-os-release", "/etc/os-release", None),
        host_path("cgroup", "/sys/fs/cgroup", Some("Directory")),
        // The kernel makes it with the vfio module, which may be loaded later.
        host_path("vfio", "/dev/vfio", MADE),
        stack::host_root(settings),
        host_path("var-log", "/var/log", Some("Directory")),
        host_path("dev-log", "/dev/log", None),
        host_path("firmware-search-path", "/sys/module/firmware_class/parameters/path", None),
        host_path("nv-firmware", &format!("{install}/lib/firmware"), MADE),
    ];
    volumes.extend(volumes_of(&manager.files));
    PodSpec {
        service_account_name: Some(COMPONENT.to_owned()),
        automount_service_account_token: Some(false),
        host_pid: Some(true),
        host_ipc: Some(true),
        host_network: given.host_network.then_some(true),
        dns_policy: given.host_network.then(|| "ClusterFirstWithHostNet".to_owned()),
        // Disabling the virtual functions of several GPUs takes long.
        termination_grace_period_seconds: Some(120),
        image_pull_secrets: pull_secrets([&given.image]),
        init_containers: Some(vec![prepare(&main, installation)]),
        containers: vec![Container {
            command: Some(vec!["nvidia-driver".to_owned()]),
            security_context: Some(privileged_s0()),
            ..main
        }],
        volumes: Some(volumes),
        ..PodSpec::default()
    }
}
