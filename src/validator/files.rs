//! `/run/nvidia/validations`: one file a check that has passed, named and filled as NVIDIA's images read them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::Error;

/// On the host, and in every container that waits or checks.
pub const DIRECTORY: &str = "/run/nvidia/validations";

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

    /// Every verdict goes; what the driver's container says of itself (a dot first) stays.
    pub fn clear(&self) -> Result<(), Error> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Ok(()) };
        for name in entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            if name.ends_with("-ready") && !name.starts_with('.') {
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
        for name in ["driver-ready", "toolkit-ready", ".driver-ctr-ready", "workload-type"] {
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
}
