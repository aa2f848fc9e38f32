//! Who has GPUs, and the end of a process that holds one, as an event: nothing in sysfs tells of it.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc};

use crds::labels;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::{sync::Notify, task::AbortHandle};
use vfio::{Holder, Inventory, PciAddress, Root, holders};

use super::{pod_resources::Allocations, readable::readable, translate};

pub(super) type Held = BTreeMap<PciAddress, Vec<Holder>>;

/// Who has each GPU, by any of its nodes or by what the kubelet has given out.
pub(super) fn held_by(root: &Root, allocations: &Allocations, inventory: &Inventory) -> Held {
    let mut held = holders(root, inventory);
    for gpu in inventory.gpus() {
        let address = gpu.primary.address;
        let parts = vfio::vgpu::part_ids(inventory, address);
        let ids = std::iter::once(address.to_string()).chain(parts);
        let mut pods: Vec<_> = ids.filter_map(|id| allocations.get(&id)).flatten().collect();
        if !gpu.primary.on_vfio() {
            // The container stack names its devices by UUID, and only NVML could tell which GPU that is: a pod that
            // has one could have any.
            let all = allocations.values().flatten();
            pods.extend(all.filter(|allocation| labels::is_container_resource(&allocation.resource)));
        }
        held.entry(address).or_default().extend(pods.into_iter().map(translate::allocation));
    }
    held.retain(|_, holders| !holders.is_empty());
    held
}

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
