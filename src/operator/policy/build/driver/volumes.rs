//! What the driver's container sees of the host, and of the user's files.

use k8s_openapi::api::core::v1::{ConfigMapVolumeSource, KeyToPath, SecretVolumeSource, Volume, VolumeMount};

use super::{PROBE_SCRIPT, read_only};
use crate::operator::policy::{
    build::pod::{host_path, mount},
    validate::{Driver, Files, Rdma, Settings, Source, Subscription},
};

const MADE: Option<&str> = Some("DirectoryOrCreate");

pub(super) fn mounts(driver: &Driver) -> Vec<VolumeMount> {
    let probe = mount("driver-startup-probe-script", "/usr/local/bin/startup-probe.sh", None);
    let mut mounts = vec![
        mount("run-nvidia", "/run/nvidia", Some("Bidirectional")),
        mount("run-nvidia-fabricmanager", "/run/nvidia-fabricmanager", None),
        mount("run-nvidia-topologyd", "/run/nvidia-topologyd", None),
        mount("var-log", "/var/log", None),
        mount("dev-log", "/dev/log", None),
        read_only(mount("host-os-release", "/host-etc/os-release", None)),
        mount("mlnx-ofed-usr-src", "/run/mellanox/drivers/usr/src", Some("HostToContainer")),
        mount("run-mellanox-drivers", "/run/mellanox/drivers", Some("HostToContainer")),
        mount("host-sys-devices-system", "/sys/devices/system", None),
        mount("firmware-search-path", "/sys/module/firmware_class/parameters/path", None),
        mount("nv-firmware", "/lib/firmware", None),
        VolumeMount { sub_path: Some("startup-probe.sh".to_owned()), ..probe },
    ];
    for files in &driver.files {
        // By sub-path: what else is in the directory stays visible.
        mounts.extend(files.paths.iter().map(|(key, path)| {
            let file = read_only(mount(&files.volume, path, None));
            VolumeMount { sub_path: Some(key.clone()), ..file }
        }));
    }
    let subscriptions = subscriptions(driver.subscription).iter().enumerate();
    mounts.extend(subscriptions.map(|(n, (_, inside, _))| read_only(mount(&subscription(n), inside, None))));
    mounts
}

pub(super) fn volumes(settings: &Settings, driver: &Driver) -> Vec<Volume> {
    let root = settings.common.root_fs.trim_end_matches('/');
    let install = &settings.common.driver_install_dir;
    let mofed = match driver.rdma {
        Rdma::Off | Rdma::On => ("/run/mellanox/drivers/usr/src", MADE),
        Rdma::WithHostMofed => ("/usr/src", MADE),
    };
    let script = ConfigMapVolumeSource {
        name: PROBE_SCRIPT.to_owned(),
        default_mode: Some(0o755),
        ..ConfigMapVolumeSource::default()
    };
    let mut volumes = vec![
        host_path("run-nvidia", "/run/nvidia", MADE),
        host_path("var-log", "/var/log", None),
        host_path("dev-log", "/dev/log", None),
        host_path("host-os-release", "/etc/os-release", None),
        host_path("run-nvidia-fabricmanager", "/run/nvidia-fabricmanager", MADE),
        host_path("run-nvidia-topologyd", "/run/nvidia-topologyd", MADE),
        host_path("mlnx-ofed-usr-src", mofed.0, mofed.1),
        host_path("run-mellanox-drivers", "/run/mellanox/drivers", MADE),
        host_path("host-root", if root.is_empty() { "/" } else { root }, None),
        host_path("firmware-search-path", "/sys/module/firmware_class/parameters/path", None),
        host_path("host-sys-devices-system", "/sys/devices/system", Some("Directory")),
        host_path("nv-firmware", &format!("{install}/lib/firmware"), MADE),
        Volume { name: "driver-startup-probe-script".to_owned(), config_map: Some(script), ..Volume::default() },
    ];
    volumes.extend(driver.files.iter().map(of_files));
    let subscriptions = subscriptions(driver.subscription).iter().enumerate();
    volumes.extend(subscriptions.map(|(n, (outside, _, kind))| host_path(&subscription(n), outside, Some(kind))));
    volumes
}

fn of_files(files: &Files) -> Volume {
    let items: Vec<KeyToPath> =
        files.paths.iter().map(|(key, _)| KeyToPath { key: key.clone(), path: key.clone(), mode: None }).collect();
    let volume = Volume { name: files.volume.clone(), ..Volume::default() };
    match &files.source {
        Source::ConfigMap(name) => Volume {
            config_map: Some(ConfigMapVolumeSource {
                name: name.clone(),
                items: Some(items),
                ..ConfigMapVolumeSource::default()
            }),
            ..volume
        },
        Source::Secret(name) => Volume {
            secret: Some(SecretVolumeSource {
                secret_name: Some(name.clone()),
                items: Some(items),
                ..SecretVolumeSource::default()
            }),
            ..volume
        },
    }
}

fn subscription(number: usize) -> String {
    format!("subscription-config-{number}")
}

/// On the host, in the container, and of what kind: in the order of the places in the container.
fn subscriptions(subscription: Subscription) -> &'static [(&'static str, &'static str, &'static str)] {
    match subscription {
        Subscription::None => &[],
        Subscription::RedHat => &[
            ("/etc/pki/entitlement", "/run/secrets/etc-pki-entitlement", "Directory"),
            ("/etc/yum.repos.d/redhat.repo", "/run/secrets/redhat.repo", "File"),
            ("/etc/rhsm", "/run/secrets/rhsm", "Directory"),
        ],
        Subscription::Suse => &[
            ("/etc/SUSEConnect", "/etc/SUSEConnect", "FileOrCreate"),
            ("/etc/zypp/credentials.d", "/etc/zypp/credentials.d", "Directory"),
        ],
    }
}
