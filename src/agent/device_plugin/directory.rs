//! The kubelet's device plugin directory: which sockets are in it, which of them are ours, and word of each change.
//!
//! A change is only a reason to look again. What counts is which file is there now ([`Identity`]), so that a missed or
//! doubled notification does no harm.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::StreamExt;
use inotify::{EventMask, EventOwned, Inotify, WatchMask};
use tokio::sync::{Notify, watch};

use super::{backoff::Backoff, names::ResourceName};

const KUBELET_SOCKET: &str = "kubelet.sock";
/// `checkpointmanager` of the kubelet writes a file beside it and renames that one.
const CHECKPOINT: &str = "kubelet_internal_checkpoint";
/// Never `kubevirt-`: virt-handler and NVIDIA's plugin remove each other's sockets of that name.
const OWN_PREFIX: &str = "gpuvirt-";
const OWN_SUFFIX: &str = ".sock";
/// Longest socket path in bytes: `sun_path` of `sockaddr_un` less its closing zero (`include/uapi/linux/un.h`).
pub(super) const MAX_PATH: usize = 107;

const FIRST_RETRY: Duration = Duration::from_millis(250);
const MOST_RETRY: Duration = Duration::from_secs(5);

/// The directory that `kubelet.sock` is in.
#[derive(Debug, Clone)]
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(super) fn kubelet_socket(&self) -> PathBuf {
        self.0.join(KUBELET_SOCKET)
    }

    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Removes the sockets that an earlier run left behind. Those of others stay.
    pub(super) fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.0) else { return };
        for entry in entries.flatten().filter(|entry| is_own(&entry.file_name())) {
            if let Err(error) = fs::remove_file(entry.path()) {
                tracing::warn!(path = %entry.path().display(), %error, "a socket of an earlier run stays: it could not be removed");
            }
        }
    }

    /// Reports every change of `kubelet.sock` and of our sockets, until it is dropped. A directory that is missing, or
    /// that is replaced, is looked for again and again.
    ///
    /// `noted`: notified when the kubelet replaces its checkpoint, as it does after each allocation.
    pub(super) async fn follow(self, changes: watch::Sender<u64>, noted: Arc<Notify>) {
        let notify = || changes.send_modify(|count| *count = count.wrapping_add(1));
        let mut backoff = Backoff::new(FIRST_RETRY, MOST_RETRY);
        let mut told = false;
        loop {
            match self.watch() {
                Ok(events) => {
                    told = false;
                    backoff.reset();
                    // What happened before the watch was set is seen by looking now.
                    notify();
                    let mut events = std::pin::pin!(events);
                    while let Some(Ok(event)) = events.next().await {
                        if concerns_us(&event) {
                            notify();
                        }
                        if event.name.as_deref().is_some_and(|name| name == CHECKPOINT) {
                            noted.notify_one();
                        }
                        if is_last(&event) {
                            break;
                        }
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(directory = %self.0.display(), %error, "cannot watch the kubelet's device plugin directory, trying again; is the kubelet running and its directory mounted?");
                    }
                    notify();
                }
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    fn watch(&self) -> io::Result<inotify::EventStream<[u8; 4096]>> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        inotify.watches().add(&self.0, mask)?;
        inotify.into_event_stream([0; 4096])
    }
}

/// Nameless events are about the directory itself, or say that some were lost.
fn concerns_us(event: &EventOwned) -> bool {
    event.name.as_deref().is_none_or(|name| name == KUBELET_SOCKET || is_own(name))
}

fn is_last(event: &EventOwned) -> bool {
    event.mask.intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT)
}

fn is_own(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(OWN_PREFIX) && name.ends_with(OWN_SUFFIX))
}

/// File name of a resource's socket. Short whatever the resource's name, and the same in every run.
pub(super) fn socket_name(resource: &ResourceName) -> String {
    // FNV-1a: the standard library's hashes may differ between its versions.
    let hash = resource
        .as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{OWN_PREFIX}{hash:016x}{OWN_SUFFIX}")
}

/// Tells a file from another that takes its path later. The time of birth is part of it because inode numbers come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl Identity {
    /// Who is at a path now; `None` where nobody is, or where that cannot be told.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino(), born: metadata.created().ok() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_names_are_short_stable_and_apart() {
        let t4 = socket_name(&"nvidia.com/TU104GL_TESLA_T4".parse().unwrap());
        let a10 = socket_name(&"nvidia.com/GA102GL_A10".parse().unwrap());
        assert_eq!(t4, "gpuvirt-52e2a4ad189c9c70.sock");
        assert_ne!(t4, a10);
        assert!(Path::new("/var/lib/kubelet/device-plugins").join(t4).as_os_str().len() <= MAX_PATH);
    }

    #[test]
    fn a_file_that_takes_a_path_over_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.sock");
        assert_eq!(Identity::of(&path), None);
        fs::write(&path, "").unwrap();
        let first = Identity::of(&path);
        assert_eq!(first, Identity::of(&path));
        let next = dir.path().join("next");
        fs::write(&next, "").unwrap();
        fs::rename(&next, &path).unwrap();
        assert!(first.is_some() && first != Identity::of(&path));
    }

    #[test]
    fn sweeping_removes_our_sockets_only() {
        let dir = tempfile::tempdir().unwrap();
        for name in
            ["gpuvirt-1.sock", "kubelet.sock", "kubevirt-kvm.sock", "kubelet_internal_checkpoint", "gpuvirt-notes"]
        {
            fs::write(dir.path().join(name), "").unwrap();
        }
        Directory::new(dir.path().to_owned()).sweep();
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["gpuvirt-notes", "kubelet.sock", "kubelet_internal_checkpoint", "kubevirt-kvm.sock"]);
    }
}
