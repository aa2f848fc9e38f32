//! The device plugins of this node: what the agent offers becomes the node's allocatable resources, one plugin per
//! resource name, over the kubelet's device plugin API v1beta1.
//!
//! ```text
//! offer() ─► mod.rs ─► registration.rs (one task per resource) ─► server.rs ─► allocate.rs, preferred.rs (pure)
//!                            ▲ directory.rs (inotify)                 ▲ recheck (the caller looks at the host)
//! ```

mod allocate;
mod backoff;
mod device;
mod directory;
pub mod names;
mod preferred;
mod registration;
mod server;
#[cfg(test)]
mod tests;

/// Messages and services of the API, from `proto/api.proto` by `proto/generate.sh`.
#[allow(
    clippy::pedantic,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    dead_code,
    unreachable_pub,
    unused_qualifications,
    reason = "generated, and both halves of each service: the product serves one and calls the other, tests the reverse"
)]
mod proto {
    include!("proto/v1beta1.rs");
}

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use tokio::{
    sync::{Notify, watch},
    task::{JoinHandle, JoinSet},
};

pub use device::{Device, Egm, Health, Offer, Partition};
pub use names::ResourceName;
pub use preferred::prefer;

use backoff::Backoff;
use directory::Directory;
use registration::{Plugin, RETRY};
use server::{Listing, Service};

/// A fresh look at the host right before devices are given to a pod as they were offered: what speaks against it, by id.
/// The text is shown in the pod's status: it should say what was found and what to do.
/// May block; it is called off the async threads, with a deadline.
pub type Recheck = Arc<dyn Fn(&[Device]) -> BTreeMap<String, String> + Send + Sync>;

/// The plugins' states by resource. A resource is in it from its first offer until the kubelet was told that it is gone.
pub type States = BTreeMap<ResourceName, PluginState>;

/// How one resource stands with the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginState {
    /// Devices in the list, healthy or not: the node's capacity once registered.
    pub devices: usize,
    /// Healthy devices in the list: the node's allocatable once registered.
    pub healthy: usize,
    /// The kubelet registered this resource and is reading its list.
    pub registered: bool,
    /// One sentence; when not registered, what is waited for or what failed, and what happens next.
    pub message: String,
}

/// What the plugins need to know about the host.
#[derive(Clone)]
pub struct Config {
    /// The directory of `kubelet.sock`, e.g. `/var/lib/kubelet/device-plugins`. It may appear later.
    pub socket_dir: PathBuf,
    /// The host has `/dev/iommu`: VFIO's character devices are handed over as well.
    pub iommufd: bool,
    pub recheck: Recheck,
    /// Notified when the kubelet has written down which pod has which devices (of any plugin).
    pub noted: Arc<Notify>,
}

/// All device plugins of this node. Nothing is registered before the first [`DevicePlugins::offer`].
/// Dropping it ends the plugins, like a shutdown.
pub struct DevicePlugins {
    offers: watch::Sender<Offer>,
    states: watch::Receiver<States>,
    task: JoinHandle<()>,
}

impl DevicePlugins {
    /// Starts the plugins' task; needs a tokio runtime. When `shutdown` turns true (or its sender is dropped) the lists
    /// end and the sockets are removed, without telling the kubelet empty lists: a restarted agent finds its resources as
    /// they were, and pods that run are not affected.
    pub fn start(config: Config, shutdown: watch::Receiver<bool>) -> Self {
        Self::start_with(config, RETRY, shutdown)
    }

    fn start_with(config: Config, retry: Backoff, shutdown: watch::Receiver<bool>) -> Self {
        let offers = watch::Sender::new(Offer::new());
        let states = Arc::new(watch::Sender::new(States::new()));
        let subscription = states.subscribe();
        let task = tokio::spawn(run(config, retry, offers.subscribe(), states, shutdown));
        Self { offers, states: subscription, task }
    }

    /// Replaces the whole offer. A resource that is new gets a plugin; the kubelet of one that is gone is told an empty
    /// list at once, and then its server stops. The withdrawal is done when the resource is no longer in the states.
    pub fn offer(&self, offer: Offer) {
        self.offers.send_replace(offer);
    }

    /// Follows the states.
    pub fn subscribe(&self) -> watch::Receiver<States> {
        self.states.clone()
    }

    /// Ends the plugins and waits until their sockets are gone, at most about five seconds.
    pub async fn stop(self) {
        drop(self.offers);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the device plugins ended badly");
        }
    }
}

async fn run(
    config: Config,
    retry: Backoff,
    mut offers: watch::Receiver<Offer>,
    states: Arc<watch::Sender<States>>,
    mut shutdown: watch::Receiver<bool>,
) {
    let directory = Directory::new(config.socket_dir.clone());
    directory.sweep();
    let changes = watch::Sender::new(0);
    let noted = Arc::clone(&config.noted);
    let mut plugins = Plugins {
        config,
        directory: directory.clone(),
        changes: changes.subscribe(),
        states,
        retry,
        listings: BTreeMap::new(),
        tasks: JoinSet::new(),
    };
    let following = tokio::spawn(directory.follow(changes, noted));
    let stop = async {
        // An error means that the agent is on its way out as well.
        let _ = shutdown.wait_for(|shutdown| *shutdown).await;
    };
    let serving = async {
        loop {
            let offer = offers.borrow_and_update().clone();
            plugins.apply(offer);
            if offers.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = stop => {}
        () = serving => {}
    }
    plugins.close().await;
    following.abort();
}

struct Plugins {
    config: Config,
    directory: Directory,
    changes: watch::Receiver<u64>,
    states: Arc<watch::Sender<States>>,
    retry: Backoff,
    /// One for each resource that was ever offered; few, as they are the names of GPU models.
    listings: BTreeMap<ResourceName, watch::Sender<Listing>>,
    tasks: JoinSet<()>,
}

impl Plugins {
    fn apply(&mut self, mut offer: Offer) {
        for (resource, listing) in &self.listings {
            let next = offer.remove(resource).map_or(Listing::Withdrawn, Listing::Offered);
            listing.send_if_modified(|now| {
                let news = *now != next;
                *now = next;
                news
            });
        }
        for (resource, devices) in offer {
            self.add(resource, devices);
        }
    }

    fn add(&mut self, resource: ResourceName, devices: Vec<Device>) {
        let listing = watch::Sender::new(Listing::Offered(devices));
        let plugin = Plugin {
            service: Service {
                resource: resource.clone(),
                listing: listing.subscribe(),
                iommufd: self.config.iommufd,
                recheck: Arc::clone(&self.config.recheck),
            },
            directory: self.directory.clone(),
            changes: self.changes.clone(),
            states: Arc::clone(&self.states),
            retry: self.retry.clone(),
        };
        self.tasks.spawn(plugin.run());
        self.listings.insert(resource, listing);
    }

    async fn close(mut self) {
        self.listings.clear();
        while self.tasks.join_next().await.is_some() {}
    }
}
