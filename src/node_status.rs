//! `gpuvirt node-status`: what a container node's checks have found, as metrics under the names of gpu-operator 26.7.
//!
//! Files and PCI devices are read when Prometheus asks. The node's resources come by a watch on the one Node. Only the
//! driver is asked now and then, in a child process: it tells nobody when it stops working.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::AtomicU64,
    time::Duration,
};

use crds::labels::is_container_resource;
use futures::TryStreamExt;
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, metrics::gauge::Gauge, registry::Registry};
use tokio::time::{MissedTickBehavior, interval};
use vfio::Root;

use crate::{
    nvml,
    shutdown::Shutdown,
    telemetry::{Described, Telemetry, Unit},
    validator::{Check, Found, Validations},
};

const NODE: &[&str] = &["node"];
pub const BEGAN: Described =
    Described::gauge("gpu_operator_node_metrics_ready_ts_seconds", NODE, Unit::Time, "When this exporter began");
const DRIVER: Described =
    Described::gauge("gpu_operator_node_driver_validation", NODE, Unit::Flag, "Whether the driver answers");
const DRIVER_SUCCESS: Described = Described::gauge(
    "gpu_operator_node_driver_validation_last_success_ts_seconds",
    NODE,
    Unit::Time,
    "When the driver answered last, 0 for never",
);
const DEVICES: Described = Described::gauge(
    "gpu_operator_node_device_plugin_devices_total",
    NODE,
    Unit::Count,
    "GPUs and parts of GPUs that the node offers to containers",
);
const DEVICES_SUCCESS: Described = Described::gauge(
    "gpu_operator_node_device_plugin_validation_last_success_ts_seconds",
    NODE,
    Unit::Time,
    "When the node offered GPUs last, 0 for never",
);
const READY: Described =
    Described::gauge("gpu_operator_node_driver_ready", NODE, Unit::Flag, "Whether the check of the driver has passed");
const TOOLKIT: Described = Described::gauge(
    "gpu_operator_node_toolkit_ready",
    NODE,
    Unit::Flag,
    "Whether the check of the toolkit has passed",
);
const CUDA: Described =
    Described::gauge("gpu_operator_node_cuda_ready", NODE, Unit::Flag, "Whether the check of CUDA has passed");
const PLUGIN: Described = Described::gauge(
    "gpu_operator_node_plugin_ready",
    NODE,
    Unit::Flag,
    "Whether the check of the device plugin has passed",
);
pub const PCI: Described = Described::gauge(
    "gpu_operator_nvidia_pci_devices_total",
    NODE,
    Unit::Count,
    "PCI functions of NVIDIA, whatever their driver",
);

/// For the reference.
#[cfg(test)]
pub(crate) const METRICS: &[Described] =
    &[BEGAN, DRIVER, DRIVER_SUCCESS, DEVICES, DEVICES_SUCCESS, READY, TOOLKIT, CUDA, PLUGIN, PCI];

/// How often the driver is asked, as the peer does it.
const DRIVER_PERIOD: Duration = Duration::from_secs(60);
const NVML_PATIENCE: Duration = Duration::from_secs(50);

#[derive(Clone, Debug)]
pub struct Config {
    pub node: String,
    pub listen: SocketAddr,
    pub host_root: PathBuf,
    pub validations: Validations,
    /// Where a driver pod's root is.
    pub driver_root: PathBuf,
    /// This program, to be run as a child.
    pub helper: OsString,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("metrics cannot be served on {listen}: is another exporter on this port?")]
    Serve { listen: SocketAddr, source: std::io::Error },
    #[error("no connection to the API server can be configured")]
    Client(#[source] kube::Error),
    #[error("host root {root} cannot be opened: mount the host's file system there or set --host-root")]
    Root { root: PathBuf, source: std::io::Error },
}

#[derive(Clone, Default)]
struct Metrics {
    driver: Gauge,
    driver_success: Gauge<f64, AtomicU64>,
    devices: Gauge,
    devices_success: Gauge<f64, AtomicU64>,
}

impl Metrics {
    fn register(registry: &mut Registry, node: &str, files: Files) -> Self {
        let registry = registry.sub_registry_with_label(("node".into(), node.to_owned().into()));
        let metrics = Self::default();
        let ready: Gauge<f64, AtomicU64> = Gauge::default();
        ready.set(now());
        for (metric, gauge) in
            [(BEGAN, &ready), (DRIVER_SUCCESS, &metrics.driver_success), (DEVICES_SUCCESS, &metrics.devices_success)]
        {
            metric.register(registry, gauge);
        }
        DRIVER.register(registry, &metrics.driver);
        DEVICES.register(registry, &metrics.devices);
        registry.register_collector(Box::new(files));
        metrics
    }
}

/// What is read at the moment of the question.
#[derive(Debug)]
struct Files {
    validations: Validations,
    host: PathBuf,
}

impl Collector for Files {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (check, metric) in
            [(Check::Driver, READY), (Check::Toolkit, TOOLKIT), (Check::Cuda, CUDA), (Check::Plugin, PLUGIN)]
        {
            let passed = self.validations.found(check) == Found::Passed;
            metric.encode(&mut encoder, i64::from(passed))?;
        }
        let count = Root::new(&self.host).map_or(0, |root| {
            let inventory = vfio::observe(&root);
            let devices = inventory.functions.values().filter(|f| f.vendor == vfio::function::NVIDIA);
            devices.count()
        });
        PCI.encode(&mut encoder, i64::try_from(count).unwrap_or(i64::MAX))
    }
}

/// Until shutdown, or until it cannot serve.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let client = Client::try_default().await.map_err(Error::Client)?;
    let telemetry = Telemetry::default();
    let files = Files { validations: config.validations.clone(), host: config.host_root.clone() };
    let metrics = telemetry.register(|registry| Metrics::register(registry, &config.node, files));
    telemetry.set_ready();
    let root = Root::new(&config.host_root).map_err(|source| Error::Root { root: config.host_root.clone(), source })?;
    tokio::select! {
        source = telemetry.serve_plain(config.listen) => Err(Error::Serve { listen: config.listen, source }),
        () = follow_node(client, &config.node, &metrics) => Ok(()),
        () = ask_driver(&config, &root, &metrics) => Ok(()),
        () = shutdown.begun() => Ok(()),
    }
}

/// Does not end: an interrupted watch is begun anew.
async fn follow_node(client: Client, name: &str, metrics: &Metrics) {
    let which = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let nodes = watcher(Api::<Node>::all(client), which).default_backoff().applied_objects();
    futures::pin_mut!(nodes);
    loop {
        match nodes.try_next().await {
            Ok(Some(node)) => {
                let count = offered(&node);
                metrics.devices.set(count);
                if count > 0 {
                    metrics.devices_success.set(now());
                }
            }
            Ok(None) => std::future::pending().await,
            Err(error) => tracing::warn!(%error, "watch interrupted, trying again"),
        }
    }
}

fn offered(node: &Node) -> i64 {
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let ours = allocatable.into_iter().flatten().filter(|(name, _)| is_container_resource(name));
    ours.filter_map(|(_, quantity)| quantity.0.parse::<i64>().ok()).sum()
}

async fn ask_driver(config: &Config, host: &Root, metrics: &Metrics) {
    let mut period = interval(DRIVER_PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said = String::new();
    loop {
        period.tick().await;
        let answer = match vfio::Host::exists(host, Path::new("/sys/module/nvidia/refcnt")) {
            false => Err("the kernel module nvidia is not loaded".to_owned()),
            true => nvml::ask(&config.helper, &driver_root(config), false, NVML_PATIENCE)
                .await
                .map_err(|error| crate::chain(&error)),
        };
        metrics.driver.set(answer.is_ok().into());
        match answer {
            Ok(_) => {
                metrics.driver_success.set(now());
                said.clear();
            }
            Err(reason) if reason != said => {
                tracing::warn!("the driver does not answer: {reason}");
                said = reason;
            }
            Err(_) => {}
        }
    }
}

/// The driver check has written whose driver it is.
fn driver_root(config: &Config) -> PathBuf {
    let told = std::fs::read_to_string(config.validations.path(Check::Driver.file())).unwrap_or_default();
    match told.lines().any(|line| line.trim() == "IS_HOST_DRIVER=false") {
        true => config.driver_root.clone(),
        false => config.host_root.clone(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "seconds since 1970 fit")]
fn now() -> f64 {
    Timestamp::now().as_second() as f64
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{api::core::v1::NodeStatus, apimachinery::pkg::api::resource::Quantity};
    use prometheus_client::encoding::text::encode;
    use vfio::testing::Machine;

    use super::*;

    #[test]
    fn every_metric_of_the_peer_is_there_with_the_nodes_name_and_what_the_files_say_now() {
        let machine = Machine::described("v100");
        let validations = Validations::new(machine.path().join("run/nvidia/validations"));
        let mut registry = Registry::default();
        let files = Files { validations: validations.clone(), host: machine.path().to_owned() };
        let metrics = Metrics::register(&mut registry, "n1", files);
        let shown = || {
            let mut text = String::new();
            encode(&mut text, &registry).expect("encodable");
            text
        };
        for name in [
            "node_metrics_ready_ts_seconds",
            "node_driver_ready",
            "node_toolkit_ready",
            "node_cuda_ready",
            "node_plugin_ready",
            "node_driver_validation",
            "node_driver_validation_last_success_ts_seconds",
            "node_device_plugin_devices_total",
            "node_device_plugin_validation_last_success_ts_seconds",
            "nvidia_pci_devices_total",
        ] {
            assert!(shown().contains(&format!("gpu_operator_{name}{{node=\"n1\"}}")), "{name}: {}", shown());
        }
        assert!(shown().contains("gpu_operator_nvidia_pci_devices_total{node=\"n1\"} 2"), "{}", shown());
        assert!(shown().contains("gpu_operator_node_toolkit_ready{node=\"n1\"} 0"));
        validations.passed(Check::Toolkit, "").expect("writable");
        assert!(shown().contains("gpu_operator_node_toolkit_ready{node=\"n1\"} 1"));
        crate::telemetry::check_described(&shown(), METRICS);
        metrics.driver.set(1);
        assert!(shown().contains("gpu_operator_node_driver_validation{node=\"n1\"} 1"));
    }

    #[test]
    fn gpus_and_their_parts_are_counted_and_those_of_vms_are_not() {
        let resources = [("nvidia.com/gpu", "2"), ("nvidia.com/mig-1g.10gb", "7"), ("nvidia.com/GA102GL_A10", "1")];
        let allocatable = resources.map(|(name, count)| (name.to_owned(), Quantity(count.to_owned()))).into();
        let status = NodeStatus { allocatable: Some(allocatable), ..NodeStatus::default() };
        assert_eq!(offered(&Node { status: Some(status), ..Node::default() }), 9);
    }
}
