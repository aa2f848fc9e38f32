//! Links `/dev/char/MAJOR:MINOR` to NVIDIA's device nodes.
//!
//! systemd, as a container's cgroup driver, takes devices away that have no such link when a unit is reloaded (runc
//! issue 3708); the kernel makes none for NVIDIA's, since they are no devices of its driver model.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt, symlink},
    path::{Path, PathBuf},
};

use nix::sys::stat::{major, minor};

use super::Error;

/// `here`: a root that has the nodes below `/dev`; `on_host`: that root as the host calls it.
pub(super) fn link(here: &Path, on_host: &str, dev_char: &Path) -> Result<(), Error> {
    let failed = |path: &Path, source| Error::Write { path: path.to_owned(), source };
    for node in nodes(&here.join("dev")) {
        let Ok(meta) = fs::symlink_metadata(&node) else { continue };
        let below = node.strip_prefix(here).expect("a node should be below its root");
        let target = Path::new(on_host).join(below);
        let link = dev_char.join(format!("{}:{}", major(meta.rdev()), minor(meta.rdev())));
        if fs::read_link(&link).is_ok_and(|there| there == target) {
            continue;
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&link, error)),
            Ok(()) | Err(_) => {}
        }
        symlink(&target, &link).map_err(|error| failed(&link, error))?;
    }
    Ok(())
}

fn nodes(dev: &Path) -> Vec<PathBuf> {
    let of = |directory: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("nvidia"))
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_char_device()))
            .map(|entry| entry.path())
            .collect()
    };
    let mut nodes = of(dev);
    nodes.extend(of(&dev.join("nvidia-caps")));
    nodes.sort();
    nodes
}
