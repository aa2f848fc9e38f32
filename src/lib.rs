//! gpuvirt: NVIDIA GPUs for containers and for KubeVirt virtual machines, in one cluster.
//!
//! | room | may reach |
//! |---|---|
//! | [`operator`] | the API server; never a host |
//! | [`agent`] | its own `GPUNode`, the kubelet, and the host through the crate `vfio` |
//! | [`host_command`] | a host or a described one through `vfio`, reading only |
//! | [`cluster_command`] | the API server, reading only, with the rights of whoever runs it |
//! | [`takeover`] | the API server, with the rights of an admin who hands NVIDIA's operator's work over |
//! | [`validator`] | what a container of the stack sees, and the host through `vfio`, reading only; its own Node |
//! | [`host_driver`] | whose NVIDIA driver a host runs, through `vfio`, reading only |
//! | [`node_status`] | as [`validator`], for Prometheus |
//! | [`nvml`], [`cuda`] | NVIDIA's libraries, in a child process |
//! | [`cluster`] | kube: apply, events, lease |
//! | [`cli`], [`kubectl`] | arguments and environment of the two programs; nothing else reads them |
//!
//! `gpuvirt` runs on Linux. `kubectl-gpuvirt` has what a person asks of a cluster, and builds for macOS and Windows too: what
//! touches a host is not part of it there.
//!
//! The contract with users is the crate `crds`.

#[cfg(target_os = "linux")]
pub mod agent;
pub mod answer;
#[cfg(target_os = "linux")]
pub mod cli;
pub mod cluster;
pub mod cluster_command;
#[cfg(target_os = "linux")]
pub mod cuda;
#[cfg(target_os = "linux")]
pub mod host_command;
#[cfg(target_os = "linux")]
pub mod host_driver;
pub mod kubectl;
#[cfg(target_os = "linux")]
pub mod node_status;
#[cfg(target_os = "linux")]
pub mod nvml;
pub mod operator;
#[cfg(target_os = "linux")]
pub mod prepare_driver;
pub mod shutdown;
pub mod takeover;
pub mod telemetry;
pub mod terminal;
#[cfg(target_os = "linux")]
pub mod validator;

/// An error and all its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some errors tell their source themselves.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
