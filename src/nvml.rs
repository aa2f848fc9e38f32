//! NVML: what the driver's library says of the GPUs, asked in a child process.
//!
//! The library keeps device files open and can hang on a GPU that has gone, so no long-lived process has it: the child
//! `gpuvirt nvml` opens it, prints JSON and ends. The driver may be in another root (the host's, or the driver pod's):
//! the child changes into it, so that library, device files and `/proc` are of one driver.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nvml_wrapper::{Nvml, bitmasks::InitFlags, error::NvmlError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{process::Command, time::timeout};

mod mig;
mod vgpus;

pub use self::{
    mig::{act, ask_act},
    vgpus::{ActiveVgpu, MigMode, VgpuGpu, VgpuKind, VgpuReport, ask_vgpus, vgpus},
};

/// The child's command.
pub const COMMAND: &str = "nvml";
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Where distributions put it, if the loader's cache does not know it.
const DIRECTORIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// Exit codes of the child beside 0 and 1.
const NO_LIBRARY: u8 = 10;
const VERSION_MISMATCH: u8 = 11;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// As in `595.91.07`.
    pub driver: String,
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// As the kernel writes it: `0000:01:00.0`.
    pub address: String,
    pub name: String,
    pub uuid: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{root} cannot become the root", root = root.display())]
    Root { root: PathBuf, source: nix::errno::Errno },
    #[error("{LIBRARY} is not there or does not load: {0}")]
    Library(NvmlError),
    #[error("NVML: {0}")]
    Nvml(#[from] NvmlError),
    #[error("NVML has no GPU {0}")]
    NoGpu(String),
    /// The child has no library.
    #[error("{0}")]
    NoLibrary(String),
    /// The child's library is of another version than the module.
    #[error("{0}; reboot, or load the module of the library's version")]
    VersionMismatch(String),
    #[error("{0}")]
    Answer(String),
    #[error("NVML has not answered within {} s: a GPU may have fallen off the bus, see dmesg for Xid messages", after.as_secs())]
    Late { after: Duration },
    #[error("the child that asks NVML does not start")]
    Spawn(#[source] std::io::Error),
}

impl Error {
    /// The child's way to tell its parent what sort of error it is.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Library(_) | Self::NoLibrary(_) => NO_LIBRARY,
            Self::Nvml(NvmlError::LibRmVersionMismatch) | Self::VersionMismatch(_) => VERSION_MISMATCH,
            Self::Root { .. }
            | Self::Nvml(_)
            | Self::NoGpu(_)
            | Self::Answer(_)
            | Self::Late { .. }
            | Self::Spawn(_) => 1,
        }
    }
}

/// In the child: the answer of the library below `root`. Its version alone opens no GPU.
pub fn answer(root: &Path, version_only: bool) -> Result<Report, Error> {
    change_root(root)?;
    let nvml = open(version_only)?;
    let count = if version_only { 0 } else { nvml.device_count()? };
    let gpus = (0..count).map(|index| {
        let device = nvml.device_by_index(index)?;
        let pci = device.pci_info()?;
        Ok(Gpu { address: address(&pci.bus_id), name: device.name()?, uuid: device.uuid()? })
    });
    Ok(Report { driver: nvml.sys_driver_version()?, gpus: gpus.collect::<Result<_, NvmlError>>()? })
}

/// NVML writes the domain in eight digits, and in capitals.
fn address(bus_id: &str) -> String {
    bus_id.parse().map_or_else(|_| bus_id.to_owned(), |address: vfio::PciAddress| address.to_string())
}

fn change_root(root: &Path) -> Result<(), Error> {
    if root != Path::new("/") {
        let failed = |source| Error::Root { root: root.to_owned(), source };
        nix::unistd::chroot(root).map_err(failed)?;
        nix::unistd::chdir("/").map_err(failed)?;
    }
    Ok(())
}

fn open(version_only: bool) -> Result<Nvml, Error> {
    let flags = if version_only { InitFlags::NO_GPUS | InitFlags::NO_ATTACH } else { InitFlags::empty() };
    let elsewhere = DIRECTORIES.map(|directory| Path::new(directory).join(LIBRARY).into_os_string());
    let mut last = None;
    for path in std::iter::once(OsString::from(LIBRARY)).chain(elsewhere) {
        match Nvml::builder().lib_path(&path).flags(flags).init() {
            Ok(nvml) => return Ok(nvml),
            // A library that loads and refuses has the better reason.
            Err(error @ NvmlError::LibloadingError(_)) => {
                last.get_or_insert(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Library(last.expect("at least one path should have been tried")))
}

/// Asks through a child of `helper`, this program.
pub async fn ask(helper: &OsStr, root: &Path, version_only: bool, patience: Duration) -> Result<Report, Error> {
    let question = if version_only { &["--version-only"][..] } else { &[] };
    question_of(helper, root, question, patience).await
}

async fn question_of<T: DeserializeOwned>(
    helper: &OsStr,
    root: &Path,
    question: &[&str],
    patience: Duration,
) -> Result<T, Error> {
    let child = Command::new(helper)
        .arg(COMMAND)
        .arg("--root")
        .arg(root)
        .args(question)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(patience, child).await.map_err(|_| Error::Late { after: patience })?.map_err(Error::Spawn)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("the child ended without a word");
        let line = line.trim().to_owned();
        return Err(match output.status.code().map(u8::try_from) {
            Some(Ok(NO_LIBRARY)) => Error::NoLibrary(line),
            Some(Ok(VERSION_MISMATCH)) => Error::VersionMismatch(line),
            Some(_) | None => Error::Answer(line),
        });
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::Answer(format!("the child's answer is no report: {error}")))
}
