//! The plugins against a kubelet's side of the API, over real sockets and a real directory.

mod fake_kubelet;
mod serving;
mod sockets;

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use tempfile::TempDir;
use tokio::sync::watch;

use super::{Backoff, Config, Device, DevicePlugins, Health, Offer, PluginState, Recheck, ResourceName, States};
use fake_kubelet::{FakeKubelet, Held, Seen};

/// How long anything that should happen may take; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(20);

const T4: &str = "nvidia.com/TU104GL_TESLA_T4";
const A10: &str = "nvidia.com/GA102GL_A10";

/// A node: a kubelet's directory and the plugins that serve into it.
struct Node {
    dir: TempDir,
    plugins: DevicePlugins,
    shutdown: watch::Sender<bool>,
}

impl Node {
    fn start() -> Self {
        Self::with(|_| None)
    }

    /// `against`: what the host has against a device.
    fn with(against: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let recheck = move |devices: &[Device]| {
            devices.iter().filter_map(|device| Some((device.id.clone(), against(&device.id)?))).collect()
        };
        let (plugins, shutdown) = start_in(dir.path(), Arc::new(recheck));
        Self { dir, plugins, shutdown }
    }

    /// A node whose plugins try again only when something calls them.
    fn that_never_retries() -> Self {
        Self::that_retries(Backoff::new(Duration::from_secs(86_400), Duration::from_secs(86_400)))
    }

    fn that_retries(retry: Backoff) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let shutdown = watch::Sender::new(false);
        let config = Config {
            socket_dir: dir.path().to_owned(),
            iommufd: true,
            recheck: Arc::new(|_| BTreeMap::new()),
            noted: Arc::default(),
        };
        let plugins = DevicePlugins::start_with(config, retry, shutdown.subscribe());
        Self { dir, plugins, shutdown }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn kubelet(&self) -> FakeKubelet {
        FakeKubelet::start(self.path())
    }

    fn offer(&self, offer: &[(&str, &[u32])]) {
        self.plugins.offer(offer_of(offer));
    }

    /// The sockets in the directory that are ours.
    fn own_sockets(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("gpuvirt-")).collect()
    }

    async fn until_state(&self, resource: &str, what: &str, is: impl Fn(Option<&PluginState>) -> bool) {
        until_state(self.plugins.subscribe(), resource, what, is).await;
    }

    async fn until_registered(&self, resource: &str) {
        self.until_state(resource, "registered", |state| state.is_some_and(|state| state.registered)).await;
    }
}

fn start_in(dir: &Path, recheck: Recheck) -> (DevicePlugins, watch::Sender<bool>) {
    let shutdown = watch::Sender::new(false);
    let config = Config { socket_dir: dir.to_owned(), iommufd: true, recheck, noted: Arc::default() };
    (DevicePlugins::start(config, shutdown.subscribe()), shutdown)
}

async fn until_state(
    mut states: watch::Receiver<States>,
    resource: &str,
    what: &str,
    is: impl Fn(Option<&PluginState>) -> bool,
) {
    let resource = name(resource);
    let waiting = states.wait_for(|states| is(states.get(&resource)));
    let found = tokio::time::timeout(PATIENCE, waiting).await.is_ok();
    assert!(found, "{resource}: never saw {what}, but {:#?}", *states.borrow());
}

fn name(resource: &str) -> ResourceName {
    resource.parse().unwrap()
}

fn id(n: u32) -> String {
    format!("0000:{n:02x}:00.0")
}

fn gpu(n: u32) -> Device {
    Device {
        id: id(n),
        health: Health::Healthy,
        numa_node: Some(1),
        nodes: vec![format!("/dev/vfio/{n}").into(), format!("/dev/vfio/devices/vfio{n}").into()],
        others: vec![],
        path: vec![],
        egm: None,
        partition: None,
    }
}

fn offer_of(offer: &[(&str, &[u32])]) -> Offer {
    offer.iter().map(|(resource, gpus)| (name(resource), gpus.iter().map(|n| gpu(*n)).collect())).collect()
}
