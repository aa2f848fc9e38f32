//! `nvidia.com/v1`: the peer's `ClusterPolicy`.

mod cluster_policy;

pub use cluster_policy::*;
