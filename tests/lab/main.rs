//! The ring on a real kernel: a node with IOMMU groups and vfio-pci in QEMU, the chart as a user installs it, the release
//! image in its pods. Devices say that they are GPUs; the product does not know that they are none.
//!
//! Tests run in the order of their names, and a node changes its mode only for one that wants another: `uninstall` is last.
//! `cargo test --test lab`; needs root, the tools of tests/{cluster,lab}/build.sh, and the images (`make image`).

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod kubevirt;
mod mdev;
mod modes;
mod node;
mod plain;
mod pods;
mod transitions;
mod uninstall;
