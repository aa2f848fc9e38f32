//! Host-side PCI, IOMMU and VFIO as a pipeline of values:
//! [`observe`] → [`plan()`] → [`execute()`] → [`deviations`].
//!
//! | module | does |
//! |---|---|
//! | [`address`] | the address of a PCI function |
//! | [`host`] | reading a host below a root directory: the only door for reads |
//! | [`facts`], [`function`], [`inventory`] | what the kernel says of the host, its PCI functions and its GPUs |
//! | [`iommu`], [`driver`], [`bar`], [`console`] | groups and ports, VFIO drivers, memory, screens |
//! | [`pcie`], [`vgpu`], [`mod@egm`] | link, errors and presence on the bus; what makes vGPUs; memory that GPUs share |
//! | [`mod@holders`], [`holder`] | who has a GPU open, and what makes it let go |
//! | [`journal`] | what was changed since boot, so that it can be undone |
//! | [`mod@plan`], [`refusal`] | pure: the steps to a binding, or why not |
//! | [`kernel`], [`module`] | bounded writes and module loads in a child: the only door for writes |
//! | [`mod@execute`] | does a plan, journal first |
//! | [`verify`] | pure: what still differs |
//! | [`described`], [`tree`] | machines that are described instead of had |
//!
//! Facts that shape the code (measured on Linux 6.1 and 6.12): `unbind` of a device in use does not return and cannot be
//! killed; `driver_override` survives an unbind, reads `(null)` when empty and is cleared by writing a newline; `new_id`
//! grabs every device of an id; a group with a member on a host driver cannot be opened, one with an unbound member can.

#![warn(missing_docs)]

pub mod address;
pub mod bar;
pub mod console;
pub mod described;
pub mod driver;
pub mod egm;
pub mod execute;
pub mod facts;
pub mod function;
pub mod holder;
pub mod holders;
pub mod host;
pub mod inventory;
pub mod iommu;
pub mod journal;
pub mod kernel;
mod late;
pub mod module;
mod names;
pub mod pcie;
pub mod plan;
mod reader;
pub mod refusal;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tree;
pub mod verify;
pub mod vgpu;

#[cfg(test)]
mod tests;

pub use address::PciAddress;
pub use described::{Description, DescriptionError};
pub use egm::egm;
pub use execute::{ExecuteError, execute};
pub use holder::{Holder, HolderKind};
pub use holders::holders;
pub use host::{Host, Root};
pub use inventory::{Function, Gpu, HostFacts, Inventory, ObserveError, observe, observe_except};
pub use journal::Journal;
pub use kernel::{Kernel, KernelError, LinuxKernel};
pub use pcie::{Aer, Link, LinkState, Presence};
pub use plan::{Binding, Disruption, Plan, Step, World, plan};
pub use refusal::Refusal;
pub use tree::Tree;
pub use verify::{Deviation, deviations};
pub use vgpu::VgpuParent;
