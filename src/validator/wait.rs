//! Waits for the file of a check, by word of the kernel and not by looking again and again.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use tokio::time::timeout;

use super::{Check, Error, Validations};
use crate::shutdown::Shutdown;

/// How often it says what it still waits for.
const REMINDER: Duration = Duration::from_secs(60);

/// Until the check has passed on this node. There is no deadline: an init container that ends is tried again later and
/// later, and what it waits for may come the next second.
pub async fn wait(validations: &Validations, check: Check, shutdown: &Shutdown) -> Result<(), Error> {
    let file = validations.path(check.file());
    let begun = Instant::now();
    loop {
        // Watched first, then looked: what comes in between is seen.
        let directory = nearest(validations.directory());
        let mut changes = watch(&directory).map_err(|source| Error::Watch { directory: directory.clone(), source })?;
        if file.exists() {
            tracing::info!(file = %file.display(), "passed");
            return Ok(());
        }
        tracing::info!(
            "waiting for {} for {} s: it is written by container {} of nvidia-operator-validator on this node; see kubectl logs ds/nvidia-operator-validator -c {}",
            file.display(),
            begun.elapsed().as_secs(),
            check.container(),
            check.container(),
        );
        tokio::select! {
            // Silence for so long is a reason to say it again, and to look whether the directory is another one now.
            _ = timeout(REMINDER, changes.next()) => {}
            () = shutdown.begun() => return Err(Error::Interrupted),
        }
    }
}

/// The directory itself, or what there is of the way to it.
fn nearest(directory: &Path) -> PathBuf {
    directory.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn watch(directory: &Path) -> io::Result<inotify::EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    inotify.watches().add(
        directory,
        WatchMask::CREATE | WatchMask::MOVED_TO | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR,
    )?;
    inotify.into_event_stream(vec![0; 4096])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits in a directory that comes later, for a file that comes later still.
    #[tokio::test]
    async fn a_check_that_passes_later_ends_the_wait_also_when_its_directory_comes_later() {
        let dir = tempfile::tempdir().expect("tempdir");
        let validations = Validations::new(dir.path().join("nvidia/validations"));
        let (_stop, shutdown) = Shutdown::manual();
        let waits = wait(&validations, Check::Toolkit, &shutdown);
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        validations.write("driver-ready", "").expect("writable");
        assert!(futures::poll!(&mut waits).is_pending(), "another check's file");
        validations.write("toolkit-ready", "").expect("writable");
        timeout(Duration::from_secs(20), waits).await.expect("in time").expect("passed");
    }

    #[tokio::test]
    async fn a_wait_that_is_told_to_stop_stops() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (stop, shutdown) = Shutdown::manual();
        stop.send(true).expect("somebody listens");
        let waits = wait(&Validations::new(dir.path()), Check::Driver, &shutdown).await;
        assert!(matches!(waits, Err(Error::Interrupted)), "{waits:?}");
    }
}
