//! Device nodes that come and go: a node that somebody removes by hand makes no uevent.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask, Watches};
use tokio::sync::Notify;

/// VFIO's directories of device nodes, of which neither need be there: they come with the first device.
pub struct DevNodes {
    watches: Watches,
    directories: [PathBuf; 2],
}

/// What the kernel says of them.
pub struct Changes(EventStream<[u8; 4096]>);

impl DevNodes {
    pub fn open(host_root: &Path) -> io::Result<(Self, Changes)> {
        let inotify = Inotify::init()?;
        let watches = inotify.watches();
        let directories = ["dev/vfio", "dev/vfio/devices"].map(|directory| host_root.join(directory));
        Ok((Self { watches, directories }, Changes(inotify.into_event_stream([0; 4096])?)))
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
