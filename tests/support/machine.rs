//! This host as a real node of the cluster: containerd, kubelet and kube-proxy, by tests/cluster/node.sh.

use std::{
    ffi::OsString,
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal, kill_process};

use super::cluster::{Cluster, command, run, script};

/// Its name in the cluster; that of the lab's machine too.
pub const NODE: &str = "node-1";
const KUBELET_DIR: &str = "/var/lib/kubelet";
/// No other node is here, neither on the host nor of the lab.
const FREE: &str = "! findmnt /var/lib/kubelet >/dev/null && ! ip link show dev vmnode0 >/dev/null 2>&1";
/// Seconds that another ring may still be at its node.
const PATIENCE: &str = "120";

/// Lives as long as the cluster.
pub struct Machine<'a> {
    cluster: &'a Cluster,
    kubelet: Vec<OsString>,
}

impl<'a> Machine<'a> {
    /// Makes this host the node. There can be one on a machine: waits until another ring's has gone.
    pub fn start(cluster: &'a Cluster) -> Result<Self, String> {
        let free = format!("until {FREE}; do sleep 0.5; done");
        if run(&mut command("timeout", [PATIENCE, "sh", "-c", &free])).is_err() {
            return Err(format!(
                "another node is on this machine ({KUBELET_DIR} is mounted, or the lab's link vmnode0 is there), and there can be one: wait for its end, or end it with tests/cluster/down.sh or tests/lab/down.sh"
            ));
        }
        script("tests/cluster/node.sh", [cluster.state()], &[])?;
        let kubelet = arguments(&pid(cluster, "kubelet")?)?;
        let machine = Self { cluster, kubelet };
        // What a device plugin offers shows in the node's status after this time, instead of 10 s.
        let config = cluster.state().join("kubelet.yaml");
        let text = fs::read_to_string(&config).map_err(|error| error.to_string())?;
        fs::write(&config, text + "nodeStatusUpdateFrequency: 1s\n").map_err(|error| error.to_string())?;
        machine.stop_kubelet()?;
        machine.start_kubelet()?;
        Ok(machine)
    }

    pub fn stop_kubelet(&self) -> Result<(), String> {
        self.common("stop kubelet", &[])
    }

    pub fn start_kubelet(&self) -> Result<(), String> {
        self.common("cd \"$STATE\"; start kubelet \"$@\"", &self.kubelet)
    }

    /// Gives the node an image.
    pub fn import(&self, archive: &Path) -> Result<(), String> {
        self.common("ctr images import \"$@\" >/dev/null", &[archive.as_os_str().to_owned()])
    }

    /// Signals a program of the control plane.
    pub fn signal(&self, program: &str, signal: Signal) -> Result<(), String> {
        let pid = pid(self.cluster, program)?;
        let pid = pid.parse().ok().and_then(Pid::from_raw).ok_or_else(|| format!("{pid:?} is no pid"))?;
        kill_process(pid, signal).map_err(|error| format!("{program}: {error}"))
    }

    /// A command with the functions of `common.sh`.
    fn common(&self, text: &str, arguments: &[OsString]) -> Result<(), String> {
        let text = format!(". tests/cluster/common.sh \"$0\"; {text}");
        let state: PathBuf = self.cluster.state().to_owned();
        let all = [OsString::from("-c"), text.into(), state.into()].into_iter().chain(arguments.iter().cloned());
        run(&mut command("bash", all)).map(drop)
    }
}

fn pid(cluster: &Cluster, program: &str) -> Result<String, String> {
    let path = cluster.state().join("pids").join(program);
    let record = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    record.split_whitespace().next().map(str::to_owned).ok_or_else(|| format!("{} is empty", path.display()))
}

fn arguments(pid: &str) -> Result<Vec<OsString>, String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(|error| error.to_string())?;
    let parts = line.split(|byte| *byte == 0).filter(|part| !part.is_empty());
    Ok(parts.map(|part| OsString::from_vec(part.to_vec())).collect())
}
