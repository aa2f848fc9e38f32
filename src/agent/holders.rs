//! The end of a process that holds a GPU, as an event: nothing in sysfs tells of it.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::{sync::Notify, task::AbortHandle};

use super::readable::readable;

/// One task for each holder that lives.
#[derive(Default)]
pub struct HolderEnds {
    followed: BTreeMap<i32, AbortHandle>,
}

impl HolderEnds {
    /// Follows exactly these pids (as the host counts, so the agent must be in the host's pid namespace).
    pub fn follow(&mut self, pids: impl IntoIterator<Item = i32>, due: &Arc<Notify>) {
        let pids: Vec<i32> = pids.into_iter().collect();
        self.followed.retain(|pid, task| {
            let keep = pids.contains(pid) && !task.is_finished();
            if !keep {
                task.abort();
            }
            keep
        });
        for pid in pids {
            if self.followed.contains_key(&pid) {
                continue;
            }
            let Some(raw) = Pid::from_raw(pid) else { continue };
            match pidfd_open(raw, PidfdFlags::NONBLOCK) {
                Ok(fd) => {
                    let task = tokio::spawn(ended(fd, due.clone())).abort_handle();
                    self.followed.insert(pid, task);
                }
                // It has ended between the look and now.
                Err(rustix::io::Errno::SRCH) => due.notify_one(),
                Err(error) => {
                    tracing::debug!(pid, %error, "holder cannot be followed; the next resync will see its end");
                }
            }
        }
    }
}

/// A pidfd becomes readable when its process ends.
async fn ended(fd: OwnedFd, due: Arc<Notify>) {
    let Ok(fd) = readable(fd) else { return };
    if fd.readable().await.is_ok() {
        due.notify_one();
    }
}
