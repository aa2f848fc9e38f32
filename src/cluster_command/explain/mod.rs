//! `kubectl gpuvirt explain …`: why something is as it is, in the words of the objects' statuses, and what to do.

mod gpu;
mod node;
mod policy;
pub mod vmi;

pub use self::{gpu::run as gpu, node::run as node, policy::run as policy, vmi::run as vmi};

#[cfg(test)]
pub use self::{
    gpu::{explained as gpu_of, text as gpu_text},
    node::{explained as node_of, text as node_text},
    policy::{explained as policy_of, text as policy_text},
};

use kube::ResourceExt;

use super::{ReadError, TargetError, fleet::Fleet};
use crate::answer;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(
        "node {wanted} has no GPUNode, so no agent has found a GPU there: kubectl get pods -A -l app=gpuvirt-agent -o wide{}",
        listed("; nodes with GPUs", have)
    )]
    NoNode { wanted: String, have: Vec<String> },
    #[error("no node has a GPU {wanted}: kubectl gpuvirt gpus lists them")]
    NoGpu { wanted: String },
    #[error("several nodes have a GPU {address}: name one, as in {}/{address}", nodes.join(", "))]
    ManyGpus { address: String, nodes: Vec<String> },
    #[error("there is no ClusterPolicy {wanted}{}", listed("; there is", have))]
    NoPolicy { wanted: String, have: Vec<String> },
    #[error("there is no ClusterPolicy: create one, or set clusterPolicy.deployCR in the chart's values")]
    NoPolicyAtAll,
    #[error(transparent)]
    Form(#[from] answer::Error),
}

fn listed(what: &str, names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{what}: {}", names.join(", ")) }
}

fn no_node(fleet: &Fleet, wanted: &str) -> Error {
    Error::NoNode { wanted: wanted.to_owned(), have: fleet.gpu_nodes.iter().map(ResourceExt::name_any).collect() }
}
