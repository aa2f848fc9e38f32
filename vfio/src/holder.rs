//! One who has a GPU open, and what makes it let go.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Something that has a device of a GPU open.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Holder {
    /// As the host counts; 0 where no process but the kernel itself holds it (a mount).
    pub pid: i32,
    /// The process's name (at most 15 bytes, `/proc/PID/comm`), or what the kernel does with the device.
    pub command: String,
    /// The device node; `/proc/PID/fd` where a process does not let its files be seen.
    pub path: PathBuf,
    /// Uid of the pod that the process runs in.
    pub pod: Option<String>,
    /// The VM that the process is: as libvirt names it, `namespace/name` in a pod of `KubeVirt`.
    pub vm: Option<String>,
}

/// Who it is that must let go. All of them block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum HolderKind {
    /// A pod, a VM, or a process of a person: what GPUs are there for.
    Workload,
    /// A pod that serves the GPUs of a node in its mode, and goes when the node leaves that mode.
    Operand,
    /// A service of the host.
    HostDaemon,
    /// The kernel itself, as with a mounted disk.
    Kernel,
    /// A process that cannot be looked into.
    Unseen,
}

/// Names of processes (15 bytes, as the kernel cuts them) of the container stack's pods: device plugin, DCGM and its
/// exporter, GPU feature discovery, MIG manager, validator, MPS, and the services that a driver pod runs.
const OPERANDS: [&str; 9] = [
    "nvidia-device-p",
    "nv-hostengine",
    "dcgm-exporter",
    "gpu-feature-dis",
    "nvidia-mig-mana",
    "nvidia-validato",
    "nvidia-cuda-mps",
    "nvidia-persiste",
    "nv-fabricmanage",
];

/// Services of a host, and what stops them.
const DAEMONS: [(&str, &str); 11] = [
    ("nvidia-persiste", "systemctl stop nvidia-persistenced"),
    ("nv-fabricmanage", "systemctl stop nvidia-fabricmanager"),
    ("nv-hostengine", "systemctl stop nvidia-dcgm"),
    ("nvidia-powerd", "systemctl stop nvidia-powerd"),
    ("nvidia-cuda-mps", "echo quit | nvidia-cuda-mps-control"),
    ("Xorg", "systemctl stop display-manager"),
    ("Xwayland", "systemctl stop display-manager"),
    ("gdm", "systemctl stop display-manager"),
    ("gnome-shell", "systemctl stop display-manager"),
    ("sddm", "systemctl stop display-manager"),
    ("pulseaudio", "pulseaudio --kill"),
];

impl Holder {
    /// A VM that the driver's library tells of, whose process was not seen. `vm`: its UUID.
    pub fn told(vm: &str) -> Self {
        Self { pid: 0, command: "nvml".to_owned(), path: "nvml".into(), pod: None, vm: Some(vm.to_owned()) }
    }

    /// Told by the pod, the name of the process and the path.
    pub fn kind(&self) -> HolderKind {
        let command = self.command.as_str();
        match &self.pod {
            _ if self.path.starts_with("/proc") => HolderKind::Unseen,
            Some(_) if OPERANDS.contains(&command) => HolderKind::Operand,
            None if self.pid == 0 && self.vm.is_none() => HolderKind::Kernel,
            None if self.daemon().is_some() => HolderKind::HostDaemon,
            Some(_) | None => HolderKind::Workload,
        }
    }

    /// How the holder is brought to let go.
    pub fn next_step(&self) -> String {
        let Self { pid, command, pod, vm, .. } = self;
        if let Some(vm) = vm {
            return format!("stop VM {vm}");
        }
        match (self.kind(), pod) {
            (HolderKind::Unseen, _) => {
                "look again with the right to read every process's files (CAP_SYS_PTRACE)".to_owned()
            }
            (HolderKind::Operand, Some(pod)) => {
                format!("change the node's mode by its label, which ends {command}, or end pod {pod}")
            }
            (HolderKind::Workload, Some(pod)) => format!("end pod {pod}"),
            (HolderKind::Kernel, _) => format!("undo: {command}"),
            (HolderKind::HostDaemon, _) => self.daemon().unwrap_or("stop it").to_owned(),
            (HolderKind::Workload | HolderKind::Operand, None) => format!("end process {pid}"),
        }
    }

    fn daemon(&self) -> Option<&'static str> {
        DAEMONS.iter().find(|(name, _)| *name == self.command).map(|(_, stop)| *stop)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, command, path, pod, vm } = self;
        let path = path.display();
        match vm {
            Some(vm) if *pid == 0 => return write!(f, "VM {vm}, as the driver's library says"),
            Some(vm) => write!(f, "VM {vm}, ")?,
            None => {}
        }
        match (self.kind(), pod) {
            (HolderKind::Unseen, _) => write!(f, "pid {pid} ({command}), whose open files cannot be read"),
            (HolderKind::Kernel, _) => write!(f, "{path} ({command})"),
            (HolderKind::Workload | HolderKind::Operand | HolderKind::HostDaemon, None) => {
                write!(f, "pid {pid} ({command}) with {path}")
            }
            (HolderKind::Workload | HolderKind::Operand | HolderKind::HostDaemon, Some(pod)) => {
                write!(f, "pid {pid} ({command}) of pod {pod} with {path}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(pid: i32, command: &str, pod: Option<&str>) -> Holder {
        let (command, pod) = (command.to_owned(), pod.map(str::to_owned));
        Holder { pid, command, path: "/dev/nvidia0".into(), pod, vm: None }
    }

    #[test]
    fn a_holder_says_how_it_is_ended() {
        assert_eq!(holder(7, "nvidia-persiste", None).next_step(), "systemctl stop nvidia-persistenced");
        assert_eq!(holder(7, "python", None).next_step(), "end process 7");
        assert_eq!(holder(7, "python", Some("u-1")).next_step(), "end pod u-1");
        assert_eq!(holder(7, "python", Some("u-1")).to_string(), "pid 7 (python) of pod u-1 with /dev/nvidia0");
    }

    #[test]
    fn a_vm_is_named_before_its_process_and_pod() {
        let vm = Holder { vm: Some("vms/training".to_owned()), ..holder(7, "qemu-kvm", Some("u-1")) };
        assert_eq!(vm.to_string(), "VM vms/training, pid 7 (qemu-kvm) of pod u-1 with /dev/nvidia0");
        assert_eq!((vm.kind(), vm.next_step()), (HolderKind::Workload, "stop VM vms/training".to_owned()));
        let told = Holder::told("0f0e0d0c");
        assert_eq!(
            (told.kind(), told.to_string().as_str()),
            (HolderKind::Workload, "VM 0f0e0d0c, as the driver's library says")
        );
    }

    #[test]
    fn workloads_operands_and_daemons_are_told_apart() {
        assert_eq!(holder(7, "python", None).kind(), HolderKind::Workload);
        assert_eq!(holder(7, "qemu-system-x86", Some("u-1")).kind(), HolderKind::Workload);
        assert_eq!(holder(7, "nv-hostengine", None).kind(), HolderKind::HostDaemon);
        assert_eq!(holder(7, "nv-hostengine", Some("u-1")).kind(), HolderKind::Operand);
        assert_eq!(holder(0, "mounted at /mnt", None).kind(), HolderKind::Kernel);
        assert_eq!(Holder { path: "/proc/7/fd".into(), ..holder(7, "x", None) }.kind(), HolderKind::Unseen);
    }

    #[test]
    fn names_are_as_the_kernel_cuts_them() {
        assert!(DAEMONS.iter().map(|(name, _)| name).chain(&OPERANDS).all(|name| name.len() <= 15));
    }
}
