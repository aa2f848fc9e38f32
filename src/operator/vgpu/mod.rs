//! vGPU layouts: which types each GPU of a node is cut into.
//!
//! ```text
//! ConfigMap (the user's, or boards ─▶ defaults) ─▶ config ─┐
//! label nvidia.com/vgpu.config, policy's default ──────────┼─▶ resolve ─▶ GPUNode.spec.vgpu
//! GPUNode.status.agent.gpus ───────────────────────────────┘
//! ```
//!
//! Files are those of NVIDIA's vgpu-device-manager, version v1, read unchanged.

mod boards;
mod config;
#[cfg(test)]
mod config_tests;
mod defaults;
mod filter;
mod kind;
mod layouts;
mod resolve;
#[cfg(test)]
mod resolve_tests;
mod wish;

pub use self::{
    config::Config,
    defaults::{USUAL, makes, yaml as default_yaml},
    kind::VgpuType,
    layouts::{BadFile, File, KEY, LayoutSource, Layouts, OURS},
    resolve::resolve,
    wish::{Standing, Wish, label, standing, wish},
};
