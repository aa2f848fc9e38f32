//! Whose NVIDIA driver a host runs: its own, installed by its admin, or the driver pod's.
//!
//! A host that has a driver of its own needs no driver pod, and a pod that came there would unload it. A file alone proves
//! nothing, since an admin's packages stay behind when the module is another's: the library has the module's version in
//! its name.

use std::path::{Path, PathBuf};

use vfio::Host;

/// Where the peer looks for a host's own driver (gpu-operator 26.7, `cmd/nvidia-validator`).
pub const PROGRAMS: [&str; 5] =
    ["/usr/bin/nvidia-smi", "/usr/sbin/nvidia-smi", "/bin/nvidia-smi", "/sbin/nvidia-smi", "/opt/bin/nvidia-smi"];
/// Where distributions put the driver's libraries.
const LIBRARIES: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib64/nvidia",
    "/run/opengl-driver/lib",
    "/opt/lib64",
];
/// What a driver pod leaves in place for as long as it runs.
const POD: [&str; 3] =
    ["/run/nvidia/nvidia-driver.pid", "/run/nvidia/validations/.driver-ctr-ready", "/run/nvidia/driver/usr"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The loaded module is of the driver that is installed on the host.
    Host,
    /// A driver is installed on the host, and no module is loaded.
    HostIdle,
    /// The loaded module is not of the host's own driver: a driver pod's, or one that was left.
    Pod,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDriver {
    /// Of the loaded module, as in `595.91.07`; empty while none is.
    pub version: String,
    pub origin: Origin,
}

/// `None`: no module is loaded, and the host has no driver.
pub fn look(host: &impl Host) -> Option<HostDriver> {
    let installed = PROGRAMS.iter().any(|path| host.exists(Path::new(path)));
    if !host.exists(Path::new("/sys/module/nvidia/refcnt")) {
        return installed.then(|| HostDriver { version: String::new(), origin: Origin::HostIdle });
    }
    let version = host.read(Path::new("/sys/module/nvidia/version")).unwrap_or_default();
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    let origin = match installed && !of_a_pod(host) && library(host, &version).is_some() {
        true => Origin::Host,
        false => Origin::Pod,
    };
    Some(HostDriver { version, origin })
}

/// Whether a driver pod runs on the host, or has left its things there.
pub fn of_a_pod(host: &impl Host) -> bool {
    POD.iter().any(|path| host.exists(Path::new(path)))
}

fn library(host: &impl Host, version: &str) -> Option<PathBuf> {
    let name = format!("libnvidia-ml.so.{version}");
    let paths = LIBRARIES.iter().map(|directory| Path::new(directory).join(&name));
    paths.filter(|_| !version.is_empty()).find(|path| host.exists(path))
}

#[cfg(test)]
mod tests {
    use vfio::testing::Machine;

    use super::*;

    /// A host whose admin has installed a driver, which is loaded.
    fn own() -> Machine {
        let machine = Machine::described("eight-t4");
        machine.write("/usr/bin/nvidia-smi", "");
        machine.write("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.1", "");
        machine.write("/sys/module/nvidia/refcnt", "0\n");
        machine.write("/sys/module/nvidia/version", "570.1\n");
        machine
    }

    fn origin(machine: &Machine) -> Option<Origin> {
        look(&vfio::Root::new(machine.path()).expect("a root")).map(|driver| driver.origin)
    }

    #[test]
    fn a_loaded_driver_of_the_host_is_its_own() {
        let machine = own();
        let driver = look(&vfio::Root::new(machine.path()).expect("a root"));
        assert_eq!(driver, Some(HostDriver { version: "570.1".to_owned(), origin: Origin::Host }));
    }

    #[test]
    fn a_driver_pod_on_a_host_with_old_packages_is_no_driver_of_the_host() {
        let machine = own();
        machine.write("/sys/module/nvidia/version", "595.91.07\n");
        assert_eq!(origin(&machine), Some(Origin::Pod), "the host's library is of another version");
        let machine = own();
        machine.write("/run/nvidia/validations/.driver-ctr-ready", "");
        assert_eq!(origin(&machine), Some(Origin::Pod), "a driver pod runs");
    }

    #[test]
    fn an_installed_driver_that_is_not_loaded_is_idle_and_without_either_there_is_none() {
        let machine = own();
        machine.remove("/sys/module/nvidia/refcnt");
        assert_eq!(origin(&machine), Some(Origin::HostIdle));
        machine.remove("/usr/bin/nvidia-smi");
        assert_eq!(origin(&machine), None);
    }
}
