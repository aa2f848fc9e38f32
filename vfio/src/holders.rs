//! Who has a GPU open.
//!
//! Looked for by device number in `/proc/*/fd`, since a container may give a node any path: the group's and the device's
//! VFIO nodes, those of its virtual functions and mediated devices, `/dev/nvidiaN` (told apart by
//! `/proc/driver/nvidia/gpus/*/information`), `/dev/dri/*` and `/dev/snd/*` of a GPU and its companions. A block device behind a companion (USB) is held while it is mounted or part of another block
//! device. `/dev/nvidiactl` and `/dev/nvidia-uvm` belong to no single GPU: they stand in the way of a module's unload only.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::address::PciAddress;
pub use crate::holder::{Holder, HolderKind};
use crate::host::{self, DeviceNumber, FileKind, Host};
use crate::inventory::{Inventory, device_path};
use crate::vgpu;

/// Holders of each GPU that is held, keyed by its primary function. A group's holder holds all GPUs of that group.
///
/// A process whose files may not be read could hold any GPU and is named for all of them (one such process suffices).
pub fn holders(host: &impl Host, inventory: &Inventory) -> BTreeMap<PciAddress, Vec<Holder>> {
    let mut held: BTreeMap<PciAddress, BTreeSet<Holder>> = BTreeMap::new();
    let nodes = nodes(host, inventory);
    if !nodes.is_empty() {
        scan_processes(host, inventory, &nodes, &mut held);
    }
    scan_block_devices(host, inventory, &mut held);
    held.into_iter().map(|(gpu, holders)| (gpu, holders.into_iter().collect())).collect()
}

struct Node {
    path: PathBuf,
    gpus: Vec<PciAddress>,
}

/// Device nodes by number, each with the GPUs that are held through it.
fn nodes(host: &impl Host, inventory: &Inventory) -> BTreeMap<DeviceNumber, Node> {
    let mut nodes: BTreeMap<DeviceNumber, Node> = BTreeMap::new();
    let mut add = |path: PathBuf, gpu: PciAddress| {
        // A node that is not there cannot be open.
        if let Ok(FileKind::CharDevice(number)) = host.stat(&path).map(|stat| stat.kind) {
            nodes.entry(number).or_insert_with(|| Node { path, gpus: Vec::new() }).gpus.push(gpu);
        }
    };
    let minors = nvidia_minors(host, inventory);
    let unclaimed = unclaimed_minors(host, &minors);
    for gpu in inventory.gpus() {
        let address = gpu.primary.address;
        // A companion may have a group of its own.
        let companions = gpu.companions.iter().filter_map(|function| function.iommu_group);
        let groups: BTreeSet<u32> = gpu.group.into_iter().chain(companions).collect();
        for group in groups {
            add(PathBuf::from(format!("/dev/vfio/{group}")), address);
        }
        // What a VM may have instead of the GPU: its virtual functions and mediated devices.
        for path in vgpu::nodes(inventory, address).into_iter().flat_map(|(_, paths)| paths) {
            add(path, address);
        }
        match minors.get(&address) {
            Some(Some(minor)) => add(nvidia_node(*minor), address),
            // It could be any that is no other GPU's.
            Some(None) => unclaimed.iter().for_each(|minor| add(nvidia_node(*minor), address)),
            None => {}
        }
        for function in std::iter::once(gpu.primary).chain(gpu.companions) {
            if let Some(name) = &function.vfio_dev {
                add(Path::new("/dev/vfio/devices").join(name), address);
            }
            for name in host.list(&device_path(function.address).join("drm")).unwrap_or_default() {
                add(Path::new("/dev/dri").join(name), address);
            }
            for node in sound_nodes(host, function.address) {
                add(node, address);
            }
        }
    }
    nodes
}

fn nvidia_node(minor: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nvidia{minor}"))
}

/// `Device Minor` of each GPU that the NVIDIA driver has; `None` where it does not say, as when it waits for a GPU that is
/// gone.
fn nvidia_minors(host: &impl Host, inventory: &Inventory) -> BTreeMap<PciAddress, Option<u32>> {
    let gpus = inventory.gpus().into_iter().map(|gpu| gpu.primary);
    let gpus: Vec<_> = gpus.filter(|gpu| gpu.driver.as_deref() == Some("nvidia")).map(|gpu| gpu.address).collect();
    let path = |gpu: &PciAddress| PathBuf::from(format!("/proc/driver/nvidia/gpus/{gpu}/information"));
    let subjects = gpus.iter().map(path).map(|path| (path.clone(), path)).collect();
    let texts = host.each(subjects, |host, path| host::text(host, path));
    let minor = |text: String| text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse().ok();
    gpus.into_iter().zip(texts).map(|(gpu, text)| (gpu, text.flatten().ok().and_then(minor))).collect()
}

/// Numbers of nodes that no GPU is known to have; looked for only where there is a GPU that does not tell.
fn unclaimed_minors(host: &impl Host, minors: &BTreeMap<PciAddress, Option<u32>>) -> Vec<u32> {
    if minors.values().all(Option::is_some) {
        return Vec::new();
    }
    let names = host.list(Path::new("/dev")).unwrap_or_default();
    let numbers = names.iter().filter_map(|name| name.to_str()?.strip_prefix("nvidia")?.parse().ok());
    numbers.filter(|number| !minors.values().flatten().any(|claimed| claimed == number)).collect()
}

/// `sound/card0/{controlC0,pcmC0D3p,…}` are `/dev/snd/…`.
fn sound_nodes(host: &impl Host, address: PciAddress) -> Vec<PathBuf> {
    let sound = device_path(address).join("sound");
    let cards = host.list(&sound).unwrap_or_default();
    let nodes = cards.iter().flat_map(|card| host.list(&sound.join(card)).unwrap_or_default());
    let is_node =
        |name: &OsStr| ["controlC", "pcmC", "hwC"].iter().any(|start| name.as_bytes().starts_with(start.as_bytes()));
    nodes.filter(|name| is_node(name)).map(|name| Path::new("/dev/snd").join(name)).collect()
}

fn scan_processes(
    host: &impl Host,
    inventory: &Inventory,
    nodes: &BTreeMap<DeviceNumber, Node>,
    held: &mut BTreeMap<PciAddress, BTreeSet<Holder>>,
) {
    let names = host.list(Path::new("/proc"));
    let mut unseen = names.is_err().then_some(0);
    let pids: Vec<i32> = names.unwrap_or_default().iter().filter_map(|name| name.to_str()?.parse().ok()).collect();
    for (pid, found) in look_at(host, &pids, nodes) {
        match found {
            Look::Holds(numbers) => {
                for node in numbers.iter().filter_map(|number| nodes.get(number)) {
                    let holder = holder(host, pid, node.path.clone());
                    for gpu in &node.gpus {
                        held.entry(*gpu).or_default().insert(holder.clone());
                    }
                }
            }
            Look::Forbidden => {
                unseen.get_or_insert(pid);
            }
        }
    }
    if let Some(pid) = unseen {
        for gpu in inventory.gpus() {
            let holder = holder(host, pid, PathBuf::from(format!("/proc/{pid}/fd")));
            held.entry(gpu.primary.address).or_default().insert(holder);
        }
    }
}

/// What matters of a process.
enum Look {
    Holds(BTreeSet<DeviceNumber>),
    Forbidden,
}

/// Looks at the descriptors of all processes, on a few processors at once: there may be 100,000 of them.
fn look_at(host: &impl Host, pids: &[i32], nodes: &BTreeMap<DeviceNumber, Node>) -> Vec<(i32, Look)> {
    /// A thread for fewer processes costs more than it saves.
    const SHARE: usize = 64;
    const MOST: usize = 8;
    let look = |pid: i32| match host.open_devices(Path::new(&format!("/proc/{pid}/fd"))) {
        Ok(numbers) => {
            let numbers: BTreeSet<_> = numbers.into_iter().filter(|number| nodes.contains_key(number)).collect();
            (!numbers.is_empty()).then_some((pid, Look::Holds(numbers)))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some((pid, Look::Forbidden)),
        // It ended meanwhile.
        Err(_) => None,
    };
    let next = AtomicUsize::new(0);
    let work = || std::iter::from_fn(|| pids.get(next.fetch_add(1, Ordering::Relaxed))).filter_map(|pid| look(*pid));
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let helpers = processors.min(MOST).min(pids.len() / SHARE).saturating_sub(1);
    let mut found: Vec<_> = thread::scope(|scope| {
        let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(|| work().collect::<Vec<_>>())).collect();
        let own: Vec<_> = work().collect();
        let others =
            helpers.into_iter().flat_map(|helper| helper.join().expect("looking at a process should not panic"));
        own.into_iter().chain(others).collect()
    });
    found.sort_by_key(|(pid, _)| *pid);
    found
}

fn holder(host: &impl Host, pid: i32, path: PathBuf) -> Holder {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let command = host::text(host, &proc.join("comm")).unwrap_or_else(|_| "unknown".to_owned());
    let pod = host::text(host, &proc.join("cgroup")).ok().and_then(|text| pod_uid(&text));
    let line = command.starts_with("qemu").then(|| host.read(&proc.join("cmdline")).ok()).flatten();
    let vm = line.and_then(|line| vm(&String::from_utf8_lossy(&line), pod.is_some()));
    Holder { pid, command, path, pod, vm }
}

/// What `-name guest=…` or `-name …` of QEMU says, else its `-uuid`. `KubeVirt` names a domain `namespace_name`, and a
/// namespace has no `_`.
fn vm(command_line: &str, in_pod: bool) -> Option<String> {
    let after = |option: &str| command_line.split('\0').skip_while(move |word| *word != option).nth(1);
    let Some(name) = after("-name") else { return after("-uuid").map(str::to_owned) };
    let mut parts = name.split(',');
    let guest = parts.clone().find_map(|part| part.strip_prefix("guest="));
    let guest = guest.or_else(|| parts.next())?;
    Some(match guest.split_once('_').filter(|_| in_pod) {
        Some((namespace, name)) => format!("{namespace}/{name}"),
        None => guest.to_owned(),
    })
}

/// The pod's uid in a path of `/proc/PID/cgroup`: `…/pod<uid>/…` with the cgroupfs driver,
/// `…-pod<uid with underscores>.slice/…` with systemd's.
fn pod_uid(cgroup: &str) -> Option<String> {
    let parts = cgroup.lines().filter(|line| line.contains("kubepods")).flat_map(|line| line.split('/'));
    parts.into_iter().find_map(|part| {
        let part = part.strip_suffix(".slice").unwrap_or(part);
        let (_, uid) = part.rsplit_once("pod").filter(|(before, _)| before.is_empty() || before.ends_with('-'))?;
        let plain = uid.len() >= 32 && uid.bytes().all(|b| b.is_ascii_hexdigit() || matches!(b, b'-' | b'_'));
        plain.then(|| uid.replace('_', "-"))
    })
}

/// A disk behind a companion's USB port, in use by the kernel.
fn scan_block_devices(host: &impl Host, inventory: &Inventory, held: &mut BTreeMap<PciAddress, BTreeSet<Holder>>) {
    let class = Path::new("/sys/class/block");
    let names = host.list(class).unwrap_or_default();
    let mut mounts = None;
    for gpu in inventory.gpus() {
        for function in &gpu.companions {
            let address = function.address.to_string();
            for name in &names {
                let Ok(target) = host.link(&class.join(name)) else { continue };
                if !target.iter().any(|part| part.to_str() == Some(address.as_str())) {
                    continue;
                }
                let mounts = mounts.get_or_insert_with(|| mounted(host));
                for command in uses(host, &class.join(name), mounts) {
                    let holder = Holder { pid: 0, command, path: Path::new("/dev").join(name), pod: None, vm: None };
                    held.entry(gpu.primary.address).or_default().insert(holder);
                }
            }
        }
    }
}

fn uses(host: &impl Host, block: &Path, mounts: &BTreeMap<String, String>) -> Vec<String> {
    let number = host::text(host, &block.join("dev")).unwrap_or_default();
    let mount = mounts.get(&number).map(|at| format!("mounted at {at}"));
    let parts = host.list(&block.join("holders")).unwrap_or_default();
    mount.into_iter().chain(parts.iter().map(|part| format!("part of {}", part.to_string_lossy()))).collect()
}

/// `major:minor` → mount point, from the third and fifth field of mountinfo (proc(5)), as process 1 sees them.
fn mounted(host: &impl Host) -> BTreeMap<String, String> {
    let text = host::text(host, Path::new("/proc/1/mountinfo")).unwrap_or_default();
    let mount = |line: &str| {
        let mut fields = line.split(' ').skip(2);
        Some((fields.next()?.to_owned(), fields.nth(1)?.to_owned()))
    };
    text.lines().filter_map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_known_by_both_cgroup_drivers() {
        let uid = "7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22";
        let systemd = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7b5c2f0e_8a4d_4a6e_9a57_0d9f3a7c1b22.slice/cri-containerd-1f.scope\n";
        let cgroupfs = format!("12:devices:/kubepods/besteffort/pod{uid}/9f\n0::/\n");
        let guaranteed = format!("0::/kubepods/pod{uid}/9f");
        for text in [systemd, &cgroupfs, &guaranteed] {
            assert_eq!(pod_uid(text).as_deref(), Some(uid), "{text}");
        }
    }

    #[test]
    fn a_vm_is_known_by_its_command_line() {
        let line = |words: &[&str]| words.join("\0");
        let libvirts = line(&["/usr/libexec/qemu-kvm", "-name", "guest=vms_training,debug-threads=on", "-S"]);
        assert_eq!(vm(&libvirts, true).as_deref(), Some("vms/training"));
        assert_eq!(vm(&libvirts, false).as_deref(), Some("vms_training"), "no VM of KubeVirt's");
        assert_eq!(vm(&line(&["qemu", "-name", "mine"]), false).as_deref(), Some("mine"));
        assert_eq!(vm(&line(&["qemu", "-uuid", "0f0e0d0c"]), true).as_deref(), Some("0f0e0d0c"));
        assert_eq!(vm(&line(&["qemu", "-m", "2048"]), true), None);
    }

    #[test]
    fn a_process_outside_pods_has_none() {
        for text in ["0::/system.slice/podman.service", "0::/user.slice/user-0.slice", "", "0::/kubepods.slice"] {
            assert_eq!(pod_uid(text), None, "{text}");
        }
    }
}
