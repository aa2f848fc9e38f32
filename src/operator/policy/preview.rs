//! What a policy would be built into, for whoever asks before there is an agent: nodes are known by their labels alone.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUVirtConfigSpec, NVIDIADriver},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Node};
use kube::ResourceExt;

use super::{
    build::{Installation, build},
    validate::{Facts, GPUNodeFacts, Host, NVIDIADrivers, OSTREE_VERSION, validate},
};

/// What is there to go by.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Those that have a GPU.
    pub nodes: Vec<Node>,
    /// Of the operator's namespace, with their keys.
    pub config_maps: BTreeMap<String, BTreeSet<String>>,
    pub drivers: Vec<NVIDIADriver>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Intended {
    pub sets: Vec<DaemonSet>,
    /// Settings that cannot be followed, in words.
    pub problems: Vec<String>,
    /// `driver.upgradePolicy.autoUpgrade`.
    pub renews_drivers: bool,
}

pub fn intended(
    policy: &ClusterPolicy,
    config: &GPUVirtConfigSpec,
    seen: &Seen,
    installation: &Installation,
) -> Intended {
    let nodes: Vec<GPUNodeFacts> = seen.nodes.iter().filter_map(facts_of).collect();
    let runtime = |node: &Node| Some(node.status.as_ref()?.node_info.as_ref()?.container_runtime_version.clone());
    let facts = Facts {
        hosts: nodes.iter().map(|node| node.host.clone()).collect(),
        nodes,
        nvidia_drivers: Some(NVIDIADrivers { all: seen.drivers.clone(), undecodable: Vec::new() }),
        runtimes: seen.nodes.iter().filter_map(runtime).filter(|runtime| !runtime.is_empty()).collect(),
        config_maps: seen.config_maps.clone(),
        ..Facts::default()
    };
    let validated = validate(policy, config, &facts);
    let operands = build(&validated.settings, installation);
    Intended {
        sets: operands.daemon_sets,
        problems: validated.problems.into_iter().map(|problem| problem.message).collect(),
        renews_drivers: policy.spec.driver.upgrade_policy.auto_upgrade,
    }
}

fn facts_of(node: &Node) -> Option<GPUNodeFacts> {
    Some(GPUNodeFacts { name: node.name_any(), host: host_of(node)?, labels: node.labels().clone() })
}

/// As Node Feature Discovery says it, and as the node's agent will.
pub fn host_of(node: &Node) -> Option<Host> {
    let label = |key: &str| node.labels().get(key).filter(|value| !value.is_empty());
    let release = "feature.node.kubernetes.io/system-os_release";
    let (id, version) = (label(&format!("{release}.ID"))?, label(&format!("{release}.VERSION_ID"))?);
    let kernel = label("feature.node.kubernetes.io/kernel-version.full")?;
    Some(Host { os: format!("{id}{version}"), kernel: kernel.clone(), rhcos: label(OSTREE_VERSION).cloned() })
}

impl Host {
    /// The labels by which driver sets select this host's nodes.
    pub fn labels(&self) -> [(&'static str, String); 2] {
        let kernel = crate::operator::host::label_value(&self.kernel);
        [(labels::OS, crate::operator::host::label_value(&self.tag())), (labels::KERNEL, kernel)]
    }
}
