//! What the driver's container sees of the host, and of the user's files.

use crds::v1alpha1::DriverType;
use k8s_openapi::api::core::v1::{KeyToPath, SecretVolumeSource, Volume, VolumeMount};

use super::{PROBE_SCRIPT, kind};
use crate::operator::policy::{
    build::pod::{config_map, host_path, mount, read_only, sub_path},
    validate::{Driver, Files, Rdma, Settings, Source, Subscription},
};

const MADE: Option<&str> = Some("DirectoryOrCreate");

pub(super) fn mounts(driver: &Driver) -> Vec<VolumeMount> {
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
        sub_path(mount("driver-startup-probe-script", "/usr/local/bin/startup-probe.sh", None), "startup-probe.sh"),
    ];
    if kind(driver) == DriverType::VgpuHostManager {
        mounts.extend([mount("cgroup", "/sys/fs/cgroup", None), mount("vfio", "/dev/vfio", None)]);
    }
    mounts.extend(mounts_of(&driver.files));
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
        config_map("driver-startup-probe-script", PROBE_SCRIPT, Some(0o755), &[]),
    ];
    if kind(driver) == DriverType::VgpuHostManager {
        volumes.extend([host_path("cgroup", "/sys/fs/cgroup", None), host_path("vfio", "/dev/vfio", MADE)]);
    }
    volumes.extend(volumes_of(&driver.files));
    let subscriptions = subscriptions(driver.subscription).iter().enumerate();
    volumes.extend(subscriptions.map(|(n, (outside, _, kind))| host_path(&subscription(n), outside, Some(kind))));
    volumes
}

/// By sub-path: what else is in the directory stays visible.
pub(in crate::operator::policy::build) fn mounts_of(files: &[Files]) -> impl Iterator<Item = VolumeMount> {
    let mounted = |files: &Files, key: &str, path: &str| sub_path(read_only(mount(&files.volume, path, None)), key);
    files.iter().flat_map(move |files| files.paths.iter().map(move |(key, path)| mounted(files, key, path)))
}

pub(in crate::operator::policy::build) fn volumes_of(files: &[Files]) -> impl Iterator<Item = Volume> {
    files.iter().map(of_files)
}

fn of_files(files: &Files) -> Volume {
    let items: Vec<(&str, &str)> = files.paths.iter().map(|(key, _)| (key.as_str(), key.as_str())).collect();
    match &files.source {
        Source::ConfigMap(name) => config_map(&files.volume, name, None, &items),
        Source::Secret(name) => {
            let items = items.into_iter().map(|(key, path)| KeyToPath {
                key: key.to_owned(),
                path: path.to_owned(),
                mode: None,
            });
            let secret = SecretVolumeSource {
                secret_name: Some(name.clone()),
                items: Some(items.collect()),
                ..SecretVolumeSource::default()
            };
            Volume { name: files.volume.clone(), secret: Some(secret), ..Volume::default() }
        }
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
