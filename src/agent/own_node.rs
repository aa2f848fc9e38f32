//! The order: this node's own `GPUNode`.

use crds::v1alpha1::GPUNode;
use futures::StreamExt;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher::watch_object},
};
use tokio::sync::watch;

/// What is known of our own object: nothing yet, or that there is none, or the object.
pub(super) type Known = Option<Option<GPUNode>>;

pub(super) async fn follow(client: Client, node: &str, known: watch::Sender<Known>) {
    let api: Api<GPUNode> = Api::all(client);
    let mut objects = watch_object(api, node).default_backoff().boxed();
    while let Some(next) = objects.next().await {
        match next {
            Ok(object) => {
                known.send_replace(Some(object));
            }
            Err(error) => tracing::warn!(%error, "own GPUNode cannot be watched, trying again; GPUs stay as they are"),
        }
    }
}
