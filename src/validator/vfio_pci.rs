//! Whether the GPUs of this node are bound for virtual machines: the kernel's links say it.

use std::{fs, io, path::PathBuf, time::Duration};

use tokio::time::{Instant, sleep};
use vfio::driver::is_vfio;

use super::{Error, Validations};
use crate::shutdown::Shutdown;

const READY: &str = "vfio-pci-ready";
const NVIDIA: &str = "0x10de";
/// The kernel tells of a binding by netlink in the host's network only, where this container is not.
const PAUSE: Duration = Duration::from_secs(2);

pub struct VfioPci {
    pub validations: Validations,
    /// `/sys/bus/pci/devices`.
    pub devices: PathBuf,
    pub patience: Duration,
}

impl VfioPci {
    pub async fn run(&self, shutdown: &Shutdown) -> Result<(), Error> {
        self.validations.remove(READY)?;
        let begun = Instant::now();
        let mut said = String::new();
        loop {
            let reason = match self.look() {
                Ok(bound) => {
                    self.validations.write(READY, "")?;
                    tracing::info!(gpus = bound, "all GPUs are bound for virtual machines");
                    return Ok(());
                }
                Err(reason) => reason,
            };
            if begun.elapsed() + PAUSE > self.patience {
                return Err(Error::Late { waited: begun.elapsed(), reason });
            }
            if reason != said {
                tracing::warn!("not yet: {reason}");
                said = reason;
            }
            tokio::select! {
                () = sleep(PAUSE) => {}
                () = shutdown.begun() => return Err(Error::Interrupted),
            }
        }
    }

    /// How many GPUs there are, all of them bound.
    fn look(&self) -> Result<usize, String> {
        let mut gpus = 0;
        let listed = fs::read_dir(&self.devices).map_err(|error| format!("{}: {error}", self.devices.display()))?;
        for device in listed.flatten().map(|entry| entry.path()) {
            let read = |name: &str| fs::read_to_string(device.join(name)).unwrap_or_default().trim().to_owned();
            // Display controllers: VGA compatible, and 3D without a display. Virtual functions are no GPUs of their own.
            let is_gpu =
                read("vendor") == NVIDIA && read("class").starts_with("0x03") && !device.join("physfn").exists();
            if !is_gpu {
                continue;
            }
            gpus += 1;
            let address = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let driver = match fs::read_link(device.join("driver")) {
                Ok(link) => link.file_name().map(|name| name.to_string_lossy().into_owned()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(format!("driver of GPU {address}: {error}")),
            };
            match driver {
                Some(driver) if is_vfio(&driver) => {}
                other => {
                    return Err(format!(
                        "GPU {address} has driver {}: kubectl describe gpunode says why the agent has not bound it",
                        other.as_deref().unwrap_or("none")
                    ));
                }
            }
        }
        match gpus {
            0 => Err(format!("there is no NVIDIA GPU in {}", self.devices.display())),
            gpus => Ok(gpus),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, path::Path};

    use super::*;

    fn device(devices: &Path, address: &str, class: &str, driver: Option<&str>) {
        let device = devices.join(address);
        fs::create_dir_all(&device).expect("a directory");
        fs::write(device.join("vendor"), "0x10de\n").expect("a file");
        fs::write(device.join("class"), format!("{class}\n")).expect("a file");
        if let Some(driver) = driver {
            symlink(Path::new("../drivers").join(driver), device.join("driver")).expect("a link");
        }
    }

    fn check(dir: &Path) -> VfioPci {
        let devices = dir.join("devices");
        device(&devices, "0000:01:00.0", "0x030200", Some("vfio-pci"));
        device(&devices, "0000:01:00.1", "0x040300", None);
        VfioPci { validations: Validations::new(dir.join("validations")), devices, patience: Duration::ZERO }
    }

    #[tokio::test]
    async fn it_passes_when_every_gpu_is_bound_whatever_else_the_card_has() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_stop, shutdown) = Shutdown::manual();
        let check = check(dir.path());
        device(&check.devices, "0000:02:00.0", "0x030000", Some("nvgrace_gpu_vfio_pci"));
        check.run(&shutdown).await.expect("passed");
        assert!(check.validations.path(READY).exists());
    }

    #[tokio::test]
    async fn one_gpu_with_another_driver_is_named_and_an_old_verdict_is_taken_back() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_stop, shutdown) = Shutdown::manual();
        let check = check(dir.path());
        check.validations.write(READY, "").expect("writable");
        device(&check.devices, "0000:02:00.0", "0x030000", Some("nvidia"));
        let error = check.run(&shutdown).await.expect_err("not bound").to_string();
        assert!(error.contains("GPU 0000:02:00.0 has driver nvidia"), "{error}");
        assert!(!check.validations.path(READY).exists());
    }
}
