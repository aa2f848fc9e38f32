//! The DaemonSet controller's part of a DaemonSet's status, without its pods: each node that the selector takes has a pod
//! that is ready.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};

use crate::{fleet::Seen, support::NAMESPACE};

/// A real controller takes as long for its pods.
const PACE: Duration = Duration::from_millis(250);

pub async fn play(client: Client, seen: Arc<Mutex<Seen>>) {
    let api: Api<DaemonSet> = Api::namespaced(client, NAMESPACE);
    let mut sets = watcher(api.clone(), watcher::Config::default()).default_backoff().applied_objects().boxed();
    let mut known: HashMap<String, DaemonSet> = HashMap::new();
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(Ok(set)) = sets.next() => {
                known.insert(set.name_any(), set);
            }
            _ = pace.tick() => {
                for set in known.values() {
                    write(&api, set, &seen).await;
                }
            }
        }
    }
}

async fn write(api: &Api<DaemonSet>, set: &DaemonSet, seen: &Mutex<Seen>) {
    let template = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let selector = template.and_then(|pod| pod.node_selector.clone()).unwrap_or_default();
    let pods = {
        let seen = seen.lock().expect("no task should have panicked");
        let takes = |labels: &&_| {
            selector.iter().all(|(key, value)| std::collections::BTreeMap::get(labels, key) == Some(value))
        };
        i32::try_from(seen.labels.values().filter(takes).count()).unwrap_or(i32::MAX)
    };
    let generation = set.metadata.generation;
    let is = |status: &k8s_openapi::api::apps::v1::DaemonSetStatus| {
        status.observed_generation == generation && status.desired_number_scheduled == pods
    };
    if set.status.as_ref().is_some_and(is) {
        return;
    }
    let status = json!({"status": {
        "observedGeneration": generation, "desiredNumberScheduled": pods, "currentNumberScheduled": pods,
        "updatedNumberScheduled": pods, "numberReady": pods, "numberAvailable": pods, "numberMisscheduled": 0,
    }});
    // One that has gone meanwhile is the next event's matter.
    let _ = api.patch_status(&set.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
}
