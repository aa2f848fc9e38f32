//! `gpuvirt.io/v1alpha1`: our own settings and reports; and `NVIDIADriver` of nvidia.com/v1alpha1, which is the peer's.

mod gpu_node;
mod gpu_transition;
mod gpuvirt_config;
mod nvidia_driver;
mod vgpu;

pub use gpu_node::*;
pub use gpu_transition::*;
pub use gpuvirt_config::*;
pub use nvidia_driver::*;
pub use vgpu::*;
