//! Commands for a person who has a kubeconfig. They change nothing but what a person says: an approval.

pub mod approve;
pub mod doctor;
pub mod explain;
mod fleet;
pub mod gather;
pub mod gpus;
mod live;
pub mod nodes;
pub mod plan;
pub mod ready;
mod report;
pub mod status;
mod target;
#[cfg(test)]
pub mod tests;

pub use self::target::{ReadError, Target, TargetError};
