//! The last order, kept on the host: used after a boot while the API server is away.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use crds::v1alpha1::GPUNodeSpec;

const FILE: &str = "var/lib/gpuvirt/desired.json";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("last order {path} cannot be read or written")]
    Io { path: PathBuf, source: io::Error },
    #[error("last order {path} is damaged: it is ignored, and replaced by the next order")]
    Damaged { path: PathBuf, source: serde_json::Error },
}

pub struct Desired {
    path: PathBuf,
    kept: Option<GPUNodeSpec>,
}

impl Desired {
    pub fn below(host_root: &Path) -> Self {
        Self { path: host_root.join(FILE), kept: None }
    }

    pub fn read(&self) -> Result<Option<GPUNodeSpec>, Error> {
        match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|source| Error::Damaged { path: self.path.clone(), source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path: self.path.clone(), source }),
        }
    }

    /// The last order of this process.
    pub fn kept(&self) -> Option<&GPUNodeSpec> {
        self.kept.as_ref()
    }

    /// Replaced whole, so that a crash leaves the old order or the new one.
    pub fn keep(&mut self, spec: &GPUNodeSpec) -> Result<(), Error> {
        if self.kept.as_ref() == Some(spec) {
            return Ok(());
        }
        self.replace(spec).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        self.kept = Some(spec.clone());
        Ok(())
    }

    /// For a host that is left for good.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn replace(&self, spec: &GPUNodeSpec) -> io::Result<()> {
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        let new = self.path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(spec)?)?;
        file.sync_all()?;
        fs::rename(new, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use crds::WorkloadMode;

    use super::*;

    #[test]
    fn the_order_outlives_the_process() {
        let dir = tempfile::tempdir().expect("tempdir");
        let spec = GPUNodeSpec { mode: Some(WorkloadMode::VmPassthrough), epoch: 3, ..GPUNodeSpec::default() };
        Desired::below(dir.path()).keep(&spec).expect("kept");
        assert_eq!(Desired::below(dir.path()).read().expect("read"), Some(spec));
    }

    #[test]
    fn a_host_that_is_left_has_no_order() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut desired = Desired::below(dir.path());
        desired.remove().expect("there is none");
        desired.keep(&GPUNodeSpec::default()).expect("kept");
        desired.remove().expect("removed");
        assert_eq!(desired.read().expect("read"), None);
    }

    #[test]
    fn a_host_without_an_order_has_none_and_a_damaged_one_is_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let desired = Desired::below(dir.path());
        assert_eq!(desired.read().expect("read"), None);
        fs::create_dir_all(dir.path().join("var/lib/gpuvirt")).expect("dir");
        fs::write(dir.path().join(FILE), "{").expect("write");
        let error = desired.read().expect_err("damaged");
        assert!(error.to_string().contains("desired.json"), "{error}");
    }
}
