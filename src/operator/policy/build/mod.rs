//! Operands from validated settings: pure, and they cannot fail. One file an operand.

mod agent;
mod config_manager;
mod dcgm;
mod device_plugin;
mod driver;
#[cfg(test)]
mod drivers;
#[cfg(test)]
mod fields;
mod gfd;
mod kata;
mod mig;
mod monitor;
mod node_status;
mod openshift;
#[cfg(test)]
mod parity;
mod pod;
mod runtime_classes;
mod stack;
#[cfg(test)]
mod tests;
mod toolkit;
mod validator;
mod vgpu_layouts;
mod vgpu_manager;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Service},
    node::v1::RuntimeClass,
};

pub use self::{
    device_plugin::{MPS, NAME as DEVICE_PLUGIN},
    monitor::{NAMES as MONITORS, ServiceMonitor},
    toolkit::NAME as TOOLKIT,
};
use super::validate::{Settings, Wish};
use crate::{operator::vgpu, telemetry::LogFormat};

/// How this operator runs: what its operands take over from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    pub namespace: String,
    /// The operator's own image, which the agent runs too.
    pub image: String,
    pub pull_policy: String,
    pub log_level: String,
    pub log_format: LogFormat,
    /// How agents show their metrics.
    pub metrics: AgentMetrics,
    /// By section of a ClusterPolicy (`driver`, `toolkit`), for a policy that names no image: what bundles of the
    /// Operator Lifecycle Manager set.
    pub images: BTreeMap<String, String>,
}

/// How agents show their metrics: as the operator does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AgentMetrics {
    #[default]
    Off,
    Plain,
    /// With the certificate of a Secret, or with one that the agent makes.
    Tls {
        secret: Option<String>,
    },
}

/// Everything that a policy asks for: in the operator's namespace, and the runtime classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Operands {
    pub config_maps: Vec<ConfigMap>,
    pub daemon_sets: Vec<DaemonSet>,
    pub services: Vec<Service>,
    pub runtime_classes: Vec<RuntimeClass>,
    pub monitors: Vec<ServiceMonitor>,
    /// Names of objects that are not asked for, and not to be taken away either.
    pub kept: Vec<String>,
    /// Names of DaemonSets that are taken away without their pods.
    pub orphaned: Vec<String>,
}

/// `app.kubernetes.io/component` of the pods that bring a vGPU host driver.
pub const VGPU_HOST_DRIVERS: [&str; 2] = [vgpu_manager::COMPONENT, driver::HOST_MANAGER];
/// Components whose pods load a kernel driver: a node gets a new one only by a change of its own.
pub const DRIVERS: [&str; 3] = [driver::COMPONENT, vgpu_manager::COMPONENT, driver::HOST_MANAGER];

/// The ConfigMap of our own MIG layouts, and their names.
pub fn mig_layouts() -> (String, BTreeSet<String>) {
    (mig::LAYOUTS.to_owned(), mig::names())
}

pub const AGENT: &str = "gpuvirt-agent";

pub fn build(settings: &Settings, installation: &Installation) -> Operands {
    let mut operands = Operands { daemon_sets: vec![agent::daemon_set(settings, installation)], ..Operands::default() };
    let stacked = &settings.stacked;
    operands.add(&settings.drivers.wish, &[driver::PROBE_SCRIPT, openshift::TRUSTED_CA], |operands, drivers| {
        operands.config_maps.push(driver::startup_probe_script(settings, installation));
        let sets = drivers.iter().map(|driver| driver::daemon_set(settings, driver, installation));
        operands.daemon_sets.extend(sets);
    });
    if settings.openshift.as_ref().is_some_and(|openshift| openshift.trusted_ca) {
        operands.config_maps.push(openshift::trusted_ca(settings, installation));
    }
    operands.kept.extend(settings.drivers.kept.clone());
    operands.orphaned.clone_from(&settings.orphaned);
    if stacked.any {
        operands.runtime_classes = runtime_classes::runtime_classes(settings);
        operands.daemon_sets.push(validator::daemon_set(settings, installation));
    }
    operands.add(&stacked.toolkit, &[toolkit::NAME, toolkit::ENTRYPOINT], |operands, toolkit| {
        operands.config_maps.push(toolkit::script(settings, installation));
        operands.daemon_sets.push(toolkit::daemon_set(settings, toolkit, installation));
    });
    let plugin = [DEVICE_PLUGIN, device_plugin::ENTRYPOINT, MPS];
    operands.add(&stacked.device_plugin, &plugin, |operands, plugin| {
        operands.config_maps.push(device_plugin::script(settings, installation));
        operands.daemon_sets.push(device_plugin::daemon_set(settings, plugin, installation));
        operands.daemon_sets.push(device_plugin::mps(settings, plugin, installation));
    });
    operands.add(&stacked.gfd, &[gfd::NAME], |operands, gfd| {
        operands.daemon_sets.push(gfd::daemon_set(settings, gfd, installation));
    });
    operands.add(&stacked.dcgm, &[dcgm::NAME], |operands, dcgm| {
        operands.daemon_sets.push(dcgm::daemon_set(settings, dcgm, installation));
        operands.services.push(dcgm::service(settings, installation));
    });
    operands.add(&stacked.dcgm_exporter, &[dcgm::EXPORTER], |operands, exporter| {
        operands.daemon_sets.push(dcgm::exporter(settings, exporter, installation));
        operands.services.push(dcgm::exporter_service(settings, exporter, installation));
        let monitor = exporter.monitor.as_ref();
        operands.monitors.extend(monitor.map(|monitor| monitor::of_exporter(settings, monitor, installation)));
    });
    operands.add(
        &stacked.mig_manager,
        &[mig::NAME, mig::ENTRYPOINT, mig::LAYOUTS, mig::CLIENTS],
        |operands, manager| {
            operands.config_maps.extend(mig::config_maps(settings, manager, installation));
            operands.daemon_sets.push(mig::daemon_set(settings, manager, installation));
        },
    );
    if let Some(exporter) = &stacked.node_status {
        operands.daemon_sets.push(node_status::daemon_set(settings, exporter, installation));
        operands.services.push(node_status::service(settings, installation));
        operands.monitors.extend(exporter.monitored.then(|| monitor::of_node_status(settings, installation)));
    }
    let sandboxed = &settings.sandboxed;
    operands.add(&sandboxed.vgpu_managers.wish, &[openshift::TRUSTED_CA], |operands, managers| {
        let sets = managers.iter().map(|manager| vgpu_manager::daemon_set(settings, manager, installation));
        operands.daemon_sets.extend(sets);
    });
    operands.kept.extend(sandboxed.vgpu_managers.kept.clone());
    operands.add(&sandboxed.kata_plugin, &[kata::PLUGIN], |operands, plugin| {
        operands.daemon_sets.push(kata::plugin(settings, plugin, installation));
    });
    operands.add(&sandboxed.cc_manager, &[kata::CC_MANAGER], |operands, manager| {
        operands.daemon_sets.push(kata::cc_manager(settings, manager, installation));
    });
    operands.add(&settings.vgpu_layouts, &[vgpu::OURS], |operands, source| {
        if source.config_map.is_none() {
            operands.config_maps.push(vgpu_layouts::config_map(settings, installation));
        }
    });
    operands
}

impl Operands {
    /// `names` of everything that `build` makes.
    fn add<T>(&mut self, wish: &Wish<T>, names: &[&'static str], build: impl FnOnce(&mut Self, &T)) {
        match wish {
            Wish::Wanted(wanted) => build(self, wanted),
            Wish::NotWanted => {}
            Wish::Unknown => self.kept.extend(names.iter().map(|name| (*name).to_owned())),
        }
    }
}
