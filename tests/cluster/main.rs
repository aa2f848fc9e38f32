//! The ring on a real API server: real controllers and scheduler, the chart's RBAC and admission policy, the product as
//! processes. Agents and kubelets are played, except in `kubelet`, where this host is a real node.
//!
//! `cargo test --test cluster`; needs the tools of tests/cluster/build.sh, and root for the node.

#[path = "../support/mod.rs"]
mod support;

mod access;
mod chart;
mod cli;
mod drivers;
mod events;
mod explain;
mod faults;
mod guard;
mod helm;
mod hyperconverged;
mod identities;
mod kubelet;
mod kubevirt;
mod labels;
mod leadership;
mod logging;
mod metrics;
mod modes;
mod openshift;
mod planning;
mod policy;
mod rolling;
mod schema;
mod stack;
mod takeover;
mod teardown;
mod transitions;
mod uninstall;
mod upgrades;
mod vgpu;
