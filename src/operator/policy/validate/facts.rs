//! What nodes and other objects say about a policy: read before it is judged.

use std::collections::{BTreeMap, BTreeSet};

use crds::v1alpha1::NVIDIADriver;

use super::{Problem, pools::LiveSet};
use crate::operator::{host::os_tag, owner::Claim};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// What the nodes with GPUs run, as agents report it.
    pub hosts: BTreeSet<Host>,
    /// The same node by node, with their labels.
    pub nodes: Vec<GPUNodeFacts>,
    pub platform: Platform,
    /// Unset while they have not been listed.
    pub nvidia_drivers: Option<NVIDIADrivers>,
    /// DaemonSets of ours that bring a driver, by name.
    pub live: BTreeMap<String, LiveSet>,
    /// Container runtimes of the nodes with GPUs, as their kubelets say it: `containerd://2.1.0`.
    pub runtimes: BTreeSet<String>,
    /// ConfigMaps of the operator's namespace, with their keys.
    pub config_maps: BTreeMap<String, BTreeSet<String>>,
    /// Images of the operator's environment by section, for policies that name none.
    pub images: BTreeMap<String, String>,
    /// Whether the cluster has the Prometheus operator's type.
    pub service_monitors: bool,
}

/// NFD's label with the version of Red Hat CoreOS.
pub const OSTREE_VERSION: &str = "feature.node.kubernetes.io/system-os_release.OSTREE_VERSION";

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Platform {
    #[default]
    Kubernetes,
    OpenShift(OpenShift),
    /// Its objects have not been listed.
    NotYet,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenShift {
    /// As in `4.16`.
    pub version: String,
    pub proxy: Proxy,
    /// The proxy has certificates of its own.
    pub trusted_ca: bool,
    /// The driver toolkit's `ImageStream` is there.
    pub stream: bool,
    /// Images that can build kernel modules, by version of Red Hat CoreOS.
    pub toolkits: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxy {
    pub http: Option<String>,
    pub https: Option<String>,
    pub none: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct GPUNodeFacts {
    pub name: String,
    pub host: Host,
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct NVIDIADrivers {
    pub all: Vec<NVIDIADriver>,
    /// Names of those that do not decode.
    pub undecodable: Vec<String>,
}

impl NVIDIADrivers {
    pub fn claims(&self) -> Vec<Claim> {
        self.all.iter().filter_map(Claim::of).collect()
    }
}

/// One kind of node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    /// As in `ubuntu24.04`.
    pub os: String,
    /// `uname -r`.
    pub kernel: String,
    /// Version of Red Hat CoreOS, as in `416.94.202405291527-0`; where NFD says it.
    pub rhcos: Option<String>,
}

impl Host {
    pub fn tag(&self) -> String {
        os_tag(&self.os)
    }
}

/// How a node runs containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Runtime {
    Containerd,
    CriO,
    Docker,
}

impl Runtime {
    fn parse(version: &str) -> Option<Self> {
        match version.split("://").next() {
            Some("containerd") => Some(Self::Containerd),
            Some("cri-o") => Some(Self::CriO),
            Some("docker") => Some(Self::Docker),
            _ => None,
        }
    }
}

impl Facts {
    pub fn openshift(&self) -> Option<&OpenShift> {
        match &self.platform {
            Platform::OpenShift(openshift) => Some(openshift),
            Platform::Kubernetes | Platform::NotYet => None,
        }
    }

    /// Keys of a ConfigMap that `field` names.
    pub fn keys(&self, field: &str, name: &str) -> Result<Vec<String>, Problem> {
        match self.config_maps.get(name) {
            Some(keys) => Ok(keys.iter().cloned().collect()),
            None => Err(Problem {
                reason: "ConfigMapNotFound",
                message: format!(
                    "spec.{field}: there is no ConfigMap {name} in the operator's namespace: create it, or leave the field empty"
                ),
            }),
        }
    }

    /// The one runtime of all GPU nodes; `None` while no node has said its own.
    pub fn runtime(&self) -> Result<Option<Runtime>, Problem> {
        let known: BTreeSet<Option<Runtime>> = self.runtimes.iter().map(|version| Runtime::parse(version)).collect();
        match known.iter().collect::<Vec<_>>()[..] {
            [] => Ok(None),
            [Some(one)] => Ok(Some(*one)),
            _ => {
                let versions: Vec<&str> = self.runtimes.iter().map(String::as_str).collect();
                Err(Problem {
                    reason: "ContainerRuntimeNotSupported",
                    message: format!(
                        "GPU nodes run {}: the container stack can be set up for one of containerd, CRI-O and Docker; install the toolkit on the hosts and set spec.toolkit.enabled to false",
                        versions.join(" and ")
                    ),
                })
            }
        }
    }
}
