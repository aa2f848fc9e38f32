//! `/run/nvidia/validations`: one file a check that has passed, named and filled as NVIDIA's images read them, and one of
//! our own for a check that has not, which says why. The agent reads both and tells the cluster.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{Check, Error};

/// On the host, and in every container that waits or checks.
pub const DIRECTORY: &str = "/run/nvidia/validations";

/// What the files say of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Passed,
    /// Why not, and the next step.
    Failed(String),
    /// It has not come to this one yet, or nobody checks.
    Nothing,
}

#[derive(Clone, Debug)]
pub struct Validations(PathBuf);

impl Validations {
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    pub fn directory(&self) -> &Path {
        &self.0
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Whole or not at all: others source these files.
    pub fn write(&self, name: &str, content: &str) -> Result<(), Error> {
        let path = self.path(name);
        let draft = self.path(&format!(".{name}.draft"));
        let written = fs::create_dir_all(&self.0)
            .and_then(|()| fs::write(&draft, content))
            .and_then(|()| fs::rename(&draft, &path));
        written.map_err(|source| Error::Write { path, source })
    }

    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::Write { path, source }),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub fn passed(&self, check: Check, content: &str) -> Result<(), Error> {
        self.write(check.file(), content)?;
        self.remove(check.failure())
    }

    /// An older verdict does not hold any more.
    pub fn failed(&self, check: Check, reason: &str) -> Result<(), Error> {
        self.remove(check.file())?;
        self.write(check.failure(), reason)
    }

    pub fn found(&self, check: Check) -> Found {
        match fs::read_to_string(self.path(check.failure())) {
            Ok(reason) => Found::Failed(reason.trim().to_owned()),
            Err(_) if self.path(check.file()).exists() => Found::Passed,
            Err(_) => Found::Nothing,
        }
    }

    /// Every verdict goes; what the driver's container says of itself (a dot first) stays.
    pub fn clear(&self) -> Result<(), Error> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Ok(()) };
        for name in entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            if (name.ends_with("-ready") || name.ends_with("-failed")) && !name.starts_with('.') {
                self.remove(&name)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clearing_leaves_what_the_drivers_container_says_of_itself() {
        let dir = tempfile::tempdir().expect("tempdir");
        let validations = Validations::new(dir.path().join("validations"));
        for name in ["driver-ready", "toolkit-ready", "cuda-failed", ".driver-ctr-ready", "workload-type"] {
            validations.write(name, "").expect("writable");
        }
        validations.clear().expect("removable");
        let mut left: Vec<_> = fs::read_dir(validations.directory())
            .expect("readable")
            .map(|entry| entry.expect("entry").file_name().into_string().expect("utf-8"))
            .collect();
        left.sort();
        assert_eq!(left, [".driver-ctr-ready", "workload-type"]);
    }

    #[test]
    fn the_last_verdict_counts() {
        let dir = tempfile::tempdir().expect("tempdir");
        let validations = Validations::new(dir.path().join("validations"));
        assert_eq!(validations.found(Check::Cuda), Found::Nothing);
        validations.failed(Check::Cuda, "GPU 0 computes wrongly\n").expect("writable");
        assert_eq!(validations.found(Check::Cuda), Found::Failed("GPU 0 computes wrongly".to_owned()));
        validations.passed(Check::Cuda, "").expect("writable");
        assert_eq!(validations.found(Check::Cuda), Found::Passed);
        validations.failed(Check::Cuda, "again").expect("writable");
        assert!(!validations.path("cuda-ready").exists(), "what waits for it must not go on");
    }
}
