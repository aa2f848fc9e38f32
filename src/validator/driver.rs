//! Whether the NVIDIA driver of this node works: the kernel's module, the library, the GPUs, what else was asked for.
//!
//! The driver is the host's own where `nvidia-smi` is installed on the host, else the driver pod's. Others learn which
//! from `driver-ready`, a file of variables for the shell.

use std::{
    ffi::OsString,
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use vfio::{Host, Root};

use super::{Check, Error, Validations, until_passed};
use crate::{host_driver::PROGRAMS, nvml, shutdown::Shutdown};

mod device_nodes;

/// Written by the driver pod's startup probe.
const CONTAINER_READY: &str = ".driver-ctr-ready";
/// What the driver pod was asked for: its variable, the kernel's module, the file that says that it is there.
const MODULES: [(&str, &str, &str); 3] = [
    ("GDRCOPY_ENABLED", "gdrdrv", "gdrcopy-ready"),
    ("GDS_ENABLED", "nvidia_fs", "nvidia-fs-ready"),
    ("GPU_DIRECT_RDMA_ENABLED", "nvidia_peermem", "nvidia-peermem-ready"),
];
/// Where operands' containers have the host's root, and the driver pod's.
const HOST_IN_OPERANDS: &str = "/host";
const DRIVER_IN_OPERANDS: &str = "/driver-root";
const NVML_PATIENCE: Duration = Duration::from_secs(120);

pub struct Driver {
    pub validations: Validations,
    /// Where this container has the host's root.
    pub host_root: PathBuf,
    /// That root, as the host calls it.
    pub root_fs: String,
    /// Where this container has the driver pod's root.
    pub install_dir: PathBuf,
    /// That root, as the host calls it.
    pub install_dir_on_host: String,
    /// The host's `/dev/char`, for links that containers under systemd's cgroup driver need; `None` makes none.
    pub dev_char: Option<PathBuf>,
    /// GPUs are not opened, only the library is asked for its version: for nodes where VMs have some of them.
    pub skip_gpus: bool,
    pub patience: Duration,
    /// This program, to be run as a child.
    pub helper: OsString,
}

/// Where a driver is: in this container, on the host, and in operands' containers.
struct Place {
    host: bool,
    here: PathBuf,
    on_host: String,
    in_operands: &'static str,
}

struct Passed {
    place: Place,
    modules: Vec<&'static str>,
    report: nvml::Report,
}

impl Driver {
    pub async fn run(&self, shutdown: &Shutdown) -> Result<(), Error> {
        let tell = |reason: &str| self.validations.failed(Check::Driver, reason);
        let passed = until_passed(self.patience, shutdown, async || self.attempt().await, tell).await?;
        if let Some(dev_char) = &self.dev_char {
            let (here, on_host, _) = self.devices(&passed.place);
            device_nodes::link(&here, &on_host, dev_char)?;
        }
        for file in &passed.modules {
            self.validations.write(file, "")?;
        }
        self.validations.passed(Check::Driver, &self.variables(&passed.place))?;
        let gpus: Vec<String> = passed.report.gpus.iter().map(|gpu| format!("{} {}", gpu.address, gpu.name)).collect();
        tracing::info!(driver = passed.report.driver, gpus = gpus.join(", "), "the driver works");
        Ok(())
    }

    async fn attempt(&self) -> Result<Passed, String> {
        let host = Root::new(&self.host_root).map_err(|error| error.to_string())?;
        let place = self.place(&host)?;
        if !host.exists(Path::new("/sys/module/nvidia/refcnt")) {
            return Err(format!("the kernel module nvidia is not loaded: {}", place.next_step()));
        }
        let report = nvml::ask(&self.helper, &place.here, self.skip_gpus, NVML_PATIENCE)
            .await
            .map_err(|error| format!("{}: {}", crate::chain(&error), place.next_step()))?;
        if report.gpus.is_empty() && !self.skip_gpus {
            return Err(format!("the driver {} has no GPU: {}", report.driver, place.next_step()));
        }
        let modules = if place.host { Vec::new() } else { self.modules(&host)? };
        Ok(Passed { place, modules, report })
    }

    fn place(&self, host: &Root) -> Result<Place, String> {
        if PROGRAMS.iter().any(|path| host.exists(Path::new(path))) {
            return Ok(Place {
                host: true,
                here: self.host_root.clone(),
                on_host: self.root_fs.clone(),
                in_operands: HOST_IN_OPERANDS,
            });
        }
        if !self.validations.path(CONTAINER_READY).exists() {
            return Err(
                "no driver is installed on the host, and the driver pod of this node is not ready: see kubectl logs ds/nvidia-driver-daemonset"
                    .to_owned(),
            );
        }
        Ok(Place {
            host: false,
            here: self.install_dir.clone(),
            on_host: self.install_dir_on_host.clone(),
            in_operands: DRIVER_IN_OPERANDS,
        })
    }

    /// Files for the modules that were asked for; all of them must be loaded.
    fn modules(&self, host: &Root) -> Result<Vec<&'static str>, String> {
        let path = self.validations.path(CONTAINER_READY);
        let asked = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut files = Vec::new();
        for (variable, module, file) in MODULES {
            let wanted = asked
                .lines()
                .filter_map(|line| line.split_once(':'))
                .any(|(name, value)| name.trim() == variable && value.trim().trim_matches('"') == "true");
            if wanted && !host.exists(&Path::new("/sys/module").join(module)) {
                return Err(format!(
                    "{variable} is true, and the kernel module {module} is not loaded: see kubectl logs ds/nvidia-driver-daemonset --all-containers"
                ));
            }
            files.extend(wanted.then_some(file));
        }
        Ok(files)
    }

    /// A driver pod may have no `/dev` of its own: then its devices are the host's.
    fn devices(&self, place: &Place) -> (PathBuf, String, &'static str) {
        match place.here.join("dev").is_dir() {
            true => (place.here.clone(), place.on_host.clone(), place.in_operands),
            false => (self.host_root.clone(), self.root_fs.clone(), HOST_IN_OPERANDS),
        }
    }

    fn variables(&self, place: &Place) -> String {
        let (_, devices, devices_in_operands) = self.devices(place);
        let mut text = String::new();
        for (name, value) in [
            ("IS_HOST_DRIVER", if place.host { "true" } else { "false" }),
            ("NVIDIA_DRIVER_ROOT", &place.on_host),
            ("DRIVER_ROOT_CTR_PATH", place.in_operands),
            ("NVIDIA_DEV_ROOT", &devices),
            ("DEV_ROOT_CTR_PATH", devices_in_operands),
        ] {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name}={value}");
        }
        text
    }
}

impl Place {
    fn next_step(&self) -> &'static str {
        match self.host {
            true => "it is the host's own driver, run nvidia-smi and dmesg there",
            false => "see kubectl logs ds/nvidia-driver-daemonset and dmesg on the node",
        }
    }
}
