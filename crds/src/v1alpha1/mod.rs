//! `gpuvirt.io/v1alpha1`: our own settings and reports.

mod gpu_node;
mod gpu_transition;
mod gpuvirt_config;
mod vgpu;

pub use gpu_node::*;
pub use gpu_transition::*;
pub use gpuvirt_config::*;
pub use vgpu::*;
