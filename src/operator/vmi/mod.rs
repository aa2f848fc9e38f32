//! Virtual machine instances that ask for GPUs: why one of them does not run.
//!
//! ```text
//! VMI ───────────────────▶ instance ─┐
//! GPUNodes ──────────────▶ supply ───┼─▶ explain ─▶ event on the VMI · `kubectl gpuvirt explain vmi`
//! KubeVirt, launcher pod ▶ look ─────┘
//! ```
//!
//! KubeVirt itself tells of a GPU that is not permitted in a condition only, and nothing of who has the GPUs.

pub mod explain;
mod follow;
mod instance;
mod instances;
mod layouts;
pub mod look;
mod supply;
#[cfg(test)]
mod tests;
mod told;

pub use self::{follow::Explainer, instance::resource, instances::Instances};
