//! The end of a process that holds a GPU, as an event: nothing in sysfs tells of it.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::{sync::Notify, task::AbortHandle};

use super::readable::readable;

/// One task for each holder that lives.
#[derive(Default)]
pub struct HolderEnds {
    /// `None`: there was no such process when it was looked for.
    followed: BTreeMap<i32, Option<AbortHandle>>,
}

impl HolderEnds {
    /// Follows exactly these pids (as the host counts, so the agent must be in the host's pid namespace).
    pub fn follow(&mut self, pids: impl IntoIterator<Item = i32>, due: &Arc<Notify>) {
        let pids: Vec<i32> = pids.into_iter().collect();
        self.followed.retain(|pid, task| {
            let keep = pids.contains(pid) && task.as_ref().is_none_or(|task| !task.is_finished());
            if let Some(task) = task.as_ref().filter(|_| !keep) {
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
                    self.followed.insert(pid, Some(task));
                }
                // It has ended between the look and now. Said once: a process that is seen and not found is of another
                // pid namespace, and will not be found the next time either.
                Err(rustix::io::Errno::SRCH) => {
                    self.followed.insert(pid, None);
                    due.notify_one();
                }
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
