//! The container toolkit, and the files of the container runtime that it sets up.

use crds::v1::ClusterPolicySpec;

use super::{Facts, Problem, Runtime, container, container::Container, given};

#[derive(Clone, Debug, PartialEq)]
pub struct Toolkit {
    pub container: Container,
    pub install_dir: String,
    pub runtime: Runtime,
    /// The runtime's main configuration file on the host.
    pub config: HostFile,
    /// A file beside it that the runtime reads too.
    pub drop_in: Option<HostFile>,
    pub socket: Option<HostFile>,
    pub nri_socket: HostFile,
}

/// A file of the host whose directory is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFile {
    pub directory: String,
    pub name: String,
}

impl HostFile {
    pub fn path(&self) -> String {
        format!("{}/{}", self.directory.trim_end_matches('/'), self.name)
    }
}

pub(super) fn install_dir(spec: &ClusterPolicySpec) -> String {
    given(Some(&spec.toolkit.install_dir)).unwrap_or("/usr/local/nvidia").to_owned()
}

/// `None` while no GPU node has said which runtime it has.
pub(super) fn toolkit(spec: &ClusterPolicySpec, facts: &Facts) -> Result<Option<Toolkit>, Problem> {
    let container = container::container("toolkit", &spec.toolkit.component.container, None, facts)?;
    let Some(runtime) = facts.runtime()? else { return Ok(None) };
    // The user's variables name files of the host; the container gets the places where they are mounted.
    let named = |names: &[&str], default: &str| {
        let given = names.iter().find_map(|name| container.env.iter().find(|entry| entry.name == *name));
        host_file(given.and_then(|entry| entry.value.as_deref()).unwrap_or(default))
    };
    let (config, drop_in, socket) = match runtime {
        Runtime::Containerd => (
            named(&["RUNTIME_CONFIG", "CONTAINERD_CONFIG"], "/etc/containerd/config.toml")?,
            Some(named(&["RUNTIME_DROP_IN_CONFIG"], "/etc/containerd/conf.d/99-nvidia.toml")?),
            Some(named(&["RUNTIME_SOCKET", "CONTAINERD_SOCKET"], "/run/containerd/containerd.sock")?),
        ),
        Runtime::CriO => (
            named(&["RUNTIME_CONFIG", "CRIO_CONFIG"], "/etc/crio/config.toml")?,
            Some(named(&["RUNTIME_DROP_IN_CONFIG"], "/etc/crio/conf.d/99-nvidia.toml")?),
            None,
        ),
        Runtime::Docker => (
            named(&["RUNTIME_CONFIG", "DOCKER_CONFIG"], "/etc/docker/daemon.json")?,
            None,
            Some(named(&["RUNTIME_SOCKET", "DOCKER_SOCKET"], "/var/run/docker.sock")?),
        ),
    };
    let nri_socket = named(&["NRI_SOCKET"], "/var/run/nri/nri.sock")?;
    let install_dir = install_dir(spec);
    Ok(Some(Toolkit { container, install_dir, runtime, config, drop_in, socket, nri_socket }))
}

fn host_file(path: &str) -> Result<HostFile, Problem> {
    let parts = path.rsplit_once('/').filter(|(_, name)| path.starts_with('/') && !name.is_empty());
    let (directory, name) = parts.ok_or_else(|| Problem {
        reason: "InvalidToolkitFile",
        message: format!("spec.toolkit.env: {path:?} is no file of the host: give an absolute path"),
    })?;
    Ok(HostFile { directory: if directory.is_empty() { "/" } else { directory }.to_owned(), name: name.to_owned() })
}
