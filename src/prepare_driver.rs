//! `gpuvirt prepare-driver`: the init container of driver pods.
//!
//! An earlier driver pod may have left its modules loaded. They are unloaded in their order of dependence if nobody uses
//! them; a module in use ends the init container with the holders' names, and the kubelet tries again. GPUs on vfio-pci
//! are not the driver's and are not looked at.

use std::path::{Path, PathBuf};

use nix::kmod::{DeleteModuleFlags, delete_module};

/// Users before what they use.
const MODULES: [&str; 8] = [
    "nvidia_vgpu_vfio",
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nvidia_fs",
    "gdrdrv",
    "nvidia",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "module {module} is in use by {users}: end what uses the GPUs of this node, the driver pod tries again by itself"
    )]
    InUse { module: &'static str, users: String },
    #[error("module {module} cannot be unloaded")]
    Unload { module: &'static str, source: nix::errno::Errno },
    #[error("{path} cannot be read")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("host root {root} cannot be opened: mount the host's file system there or set --host-root")]
    Root { root: PathBuf, source: std::io::Error },
}

pub fn run(host_root: &Path) -> Result<(), Error> {
    for module in MODULES {
        if !loaded(host_root, module) {
            continue;
        }
        if references(host_root, module)? > 0 {
            return Err(Error::InUse { module, users: users(host_root, module)? });
        }
        let name = std::ffi::CString::new(module).expect("a module's name should have no NUL");
        delete_module(&name, DeleteModuleFlags::O_NONBLOCK).map_err(|source| Error::Unload { module, source })?;
        tracing::info!(module, "unloaded");
    }
    Ok(())
}

/// A module that is built in has no `refcnt` and cannot be unloaded.
fn loaded(host_root: &Path, module: &str) -> bool {
    refcnt(host_root, module).exists()
}

fn refcnt(host_root: &Path, module: &str) -> PathBuf {
    host_root.join("sys/module").join(module).join("refcnt")
}

fn references(host_root: &Path, module: &str) -> Result<u64, Error> {
    let path = refcnt(host_root, module);
    let text = std::fs::read_to_string(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    text.trim().parse().map_err(|_| Error::Read { path, source: std::io::ErrorKind::InvalidData.into() })
}

/// Other modules, and processes that have a GPU open.
fn users(host_root: &Path, module: &str) -> Result<String, Error> {
    let root = vfio::Root::new(host_root).map_err(|source| Error::Root { root: host_root.to_owned(), source })?;
    let inventory = vfio::observe(&root);
    let mut users: Vec<String> = vfio::holders(&root, &inventory).values().flatten().map(ToString::to_string).collect();
    let holders = host_root.join("sys/module").join(module).join("holders");
    if let Ok(entries) = std::fs::read_dir(holders) {
        users.extend(entries.flatten().map(|entry| format!("module {}", entry.file_name().to_string_lossy())));
    }
    if users.is_empty() {
        users.push("a process that cannot be named (nvidiactl or nvidia-uvm may be open)".to_owned());
    }
    Ok(users.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(module: &str, references: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = refcnt(dir.path(), module);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("dir");
        std::fs::write(path, references).expect("refcnt");
        dir
    }

    #[test]
    fn a_host_without_a_driver_is_ready() {
        run(tempfile::tempdir().expect("tempdir").path()).expect("nothing to unload");
    }

    #[test]
    fn a_driver_in_use_is_named_and_left() {
        let host = host("nvidia_uvm", "2\n");
        let error = run(host.path()).expect_err("in use");
        assert!(matches!(error, Error::InUse { module: "nvidia_uvm", .. }), "{error}");
    }

    #[test]
    fn an_unreadable_count_is_an_error_that_names_the_file() {
        let host = host("nvidia", "many");
        assert!(matches!(run(host.path()), Err(Error::Read { path, .. }) if path.ends_with("nvidia/refcnt")));
    }
}
