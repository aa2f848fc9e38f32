//! Files that come and go: a device node that somebody removes by hand makes no uevent, and the verdicts of a container
//! node's checks are files.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio::sync::Notify;

use crate::validator::DIRECTORY;

/// VFIO's directories of device nodes, of which neither need be there: they come with the first device.
pub struct DevNodes {
    watches: Watches,
    directories: [PathBuf; 2],
    /// Of the checks' verdicts.
    verdicts: PathBuf,
    /// The nearest to it that there is.
    nearest: Option<(PathBuf, WatchDescriptor)>,
}

/// What the kernel says of them.
pub struct Changes(EventStream<[u8; 4096]>);

impl DevNodes {
    pub fn open(host_root: &Path) -> io::Result<(Self, Changes)> {
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        let directories = ["dev/vfio", "dev/vfio/devices"].map(|directory| host_root.join(directory));
        let verdicts = super::below(host_root, Path::new(DIRECTORY));
        Ok((Self { watches, directories, verdicts, nearest: None }, Changes(inotify.into_event_stream([0; 4096])?)))
    }

    /// To be called before each look: watches what is there by now. Watching again what is watched changes nothing.
    pub fn follow(&mut self) {
        let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR;
        for directory in &self.directories {
            match self.watches.add(directory, mask) {
                Ok(_) => {}
                // Its coming makes a uevent of the device that it comes for.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(directory = %directory.display(), %error, "not watched; the next resync sees what becomes of it");
                }
            }
        }
        self.follow_verdicts(mask);
    }

    /// No uevent tells of this directory's coming: until then the next one above it is watched.
    fn follow_verdicts(&mut self, mask: WatchMask) {
        let there = self.verdicts.ancestors().find(|ancestor| ancestor.is_dir());
        let Some(there) = there.map(Path::to_owned) else { return };
        match self.watches.add(&there, mask) {
            Ok(descriptor) => {
                let before = self.nearest.replace((there.clone(), descriptor)).filter(|(before, _)| *before != there);
                if let Some((_, before)) = before {
                    // It may have gone by itself.
                    let _ = self.watches.remove(before);
                }
            }
            Err(error) => {
                tracing::warn!(directory = %there.display(), %error, "not watched; the next resync sees what the checks say");
            }
        }
    }
}

impl Changes {
    /// Notifies for every change; returns only on an error.
    pub async fn notify(mut self, due: Arc<Notify>) -> io::Result<()> {
        while let Some(event) = self.0.next().await {
            event?;
            due.notify_one();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn a_node_that_goes_and_comes_back_is_a_reason_to_look_each_time() {
        let host = tempfile::tempdir().unwrap();
        let node = host.path().join("dev/vfio/35");
        fs::create_dir_all(node.parent().unwrap()).unwrap();
        fs::write(&node, "").unwrap();
        let due = Arc::new(Notify::new());
        let (mut nodes, changes) = DevNodes::open(host.path()).unwrap();
        let _changes = tokio::spawn(changes.notify(due.clone()));
        nodes.follow();
        fs::remove_file(&node).unwrap();
        due.notified().await;
        fs::write(&node, "").unwrap();
        due.notified().await;
    }

    #[tokio::test]
    async fn a_verdict_is_a_reason_to_look_also_where_its_directory_comes_later() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("run")).unwrap();
        let due = Arc::new(Notify::new());
        let (mut nodes, changes) = DevNodes::open(host.path()).unwrap();
        let _changes = tokio::spawn(changes.notify(due.clone()));
        let verdicts = host.path().join("run/nvidia/validations");
        nodes.follow();
        fs::create_dir_all(&verdicts).unwrap();
        due.notified().await;
        nodes.follow();
        fs::write(verdicts.join("driver-failed"), "no").unwrap();
        due.notified().await;
        fs::remove_file(verdicts.join("driver-failed")).unwrap();
        due.notified().await;
    }

    #[tokio::test]
    async fn a_directory_that_comes_later_is_followed_from_the_next_look_on() {
        let host = tempfile::tempdir().unwrap();
        let due = Arc::new(Notify::new());
        let (mut nodes, changes) = DevNodes::open(host.path()).unwrap();
        let _changes = tokio::spawn(changes.notify(due.clone()));
        nodes.follow();
        let devices = host.path().join("dev/vfio/devices");
        fs::create_dir_all(&devices).unwrap();
        nodes.follow();
        fs::write(devices.join("vfio0"), "").unwrap();
        due.notified().await;
    }
}
