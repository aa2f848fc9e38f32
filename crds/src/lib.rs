//! The contract with users: custom resources, labels, conditions.
//!
//! [`v1::ClusterPolicy`] is NVIDIA's, field by field, with none of ours in it; our own settings and reports live in
//! [`v1alpha1`]. The YAML under `generated/` is made from these types by `gpuvirt crds` and tested for staleness.

pub mod conditions;
mod generate;
mod json;
pub mod labels;
mod mode;
mod schema;
pub mod v1;
pub mod v1alpha1;

pub use generate::{Error, generated, to_yaml, write_generated};
pub use mode::{UnknownMode, WorkloadMode};
