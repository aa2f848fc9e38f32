//! Whether the kubelet offers GPUs: the node's allocatable resources say it.

use std::time::Duration;

use crds::labels::is_container_resource;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use tokio::time::timeout;

use super::{Check, Error, Validations};
use crate::shutdown::Shutdown;

pub struct Plugin {
    pub validations: Validations,
    pub node: String,
    pub patience: Duration,
}

/// A device plugin that has just started takes a moment.
const SOON: Duration = Duration::from_secs(10);

impl Plugin {
    pub async fn run(&self, client: Client, shutdown: &Shutdown) -> Result<(), Error> {
        let reason = format!(
            "node {} offers neither nvidia.com/gpu nor nvidia.com/mig-*: see kubectl logs ds/nvidia-device-plugin-daemonset for the pod of this node",
            self.node
        );
        let offered = self.offered(client);
        tokio::pin!(offered);
        // What is missing is told while it is still waited for.
        let mut asked = tokio::select! {
            asked = timeout(SOON.min(self.patience), &mut offered) => asked,
            () = shutdown.begun() => return Err(Error::Interrupted),
        };
        if asked.is_err() {
            self.validations.failed(Check::Plugin, &reason)?;
            tracing::warn!("not yet: {reason}");
            asked = tokio::select! {
                asked = timeout(self.patience.saturating_sub(SOON), offered) => asked,
                () = shutdown.begun() => return Err(Error::Interrupted),
            };
        }
        let resources = asked.map_err(|_| Error::Late { waited: self.patience, reason })?;
        self.validations.passed(Check::Plugin, "")?;
        tracing::info!(resources, "the kubelet offers GPUs");
        Ok(())
    }

    /// Until the node has one.
    async fn offered(&self, client: Client) -> String {
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.node));
        let nodes = watcher(Api::<Node>::all(client), config).default_backoff().applied_objects();
        futures::pin_mut!(nodes);
        loop {
            match nodes.try_next().await {
                Ok(Some(node)) => {
                    if let Some(resources) = resources(&node) {
                        return resources;
                    }
                }
                // A watch of kube does not end; were it to, the deadline around this would.
                Ok(None) => std::future::pending().await,
                Err(error) => tracing::warn!(%error, "watch interrupted, trying again"),
            }
        }
    }
}

fn resources(node: &Node) -> Option<String> {
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    let offered: Vec<String> = allocatable
        .iter()
        .filter(|(name, quantity)| is_container_resource(name) && quantity.0 != "0")
        .map(|(name, quantity)| format!("{name}={}", quantity.0))
        .collect();
    (!offered.is_empty()).then(|| offered.join(" "))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{api::core::v1::NodeStatus, apimachinery::pkg::api::resource::Quantity};

    use super::*;

    fn node(allocatable: &[(&str, &str)]) -> Node {
        let allocatable = allocatable.iter().map(|(k, v)| ((*k).to_owned(), Quantity((*v).to_owned()))).collect();
        Node { status: Some(NodeStatus { allocatable: Some(allocatable), ..NodeStatus::default() }), ..Node::default() }
    }

    #[test]
    fn whole_gpus_shared_ones_and_mig_devices_count_and_vms_do_not() {
        assert_eq!(resources(&node(&[("cpu", "8"), ("nvidia.com/gpu", "2")])).as_deref(), Some("nvidia.com/gpu=2"));
        assert!(resources(&node(&[("nvidia.com/mig-1g.10gb", "7")])).is_some());
        assert!(resources(&node(&[("nvidia.com/gpu.shared", "4")])).is_some());
        assert_eq!(resources(&node(&[("nvidia.com/gpu", "0"), ("nvidia.com/GA102GL_A10", "1")])), None);
    }
}
