//! The kubelets of nodes without a machine: pods that the scheduler puts there run at once, and end when they are told to.

use std::collections::BTreeMap;

use crds::labels;
use futures::StreamExt;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::json;
use tokio::sync::watch;

use super::{Background, machine, turn::Turn};

pub struct Kubelets {
    hold: watch::Sender<bool>,
    _task: Background,
}

impl Kubelets {
    /// Of all operand pods.
    pub fn start(turn: &Turn) -> Self {
        let (hold, ends) = watch::channel(false);
        Self { hold, _task: Background(tokio::spawn(run(turn.ours(), ends))) }
    }

    /// From now on pods that are deleted take their time.
    pub fn hold_endings(&self) {
        self.hold.send_replace(true);
    }

    /// They end.
    pub fn let_end(&self) {
        self.hold.send_replace(false);
    }
}

async fn run(pods: Api<Pod>, mut held: watch::Receiver<bool>) {
    let operands = watcher::Config::default().labels(labels::POLICY);
    let mut events = watcher(pods.clone(), operands).default_backoff().boxed();
    let mut ending: BTreeMap<String, Pod> = BTreeMap::new();
    loop {
        tokio::select! {
            Some(event) = events.next() => match event {
                Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                    if pod.metadata.deletion_timestamp.is_some() {
                        ending.insert(pod.name_any(), pod);
                    } else if placed(&pod) && !runs(&pod) {
                        start(&pods, &pod).await;
                    }
                }
                Ok(Event::Delete(pod)) => drop(ending.remove(&pod.name_any())),
                Ok(Event::Init | Event::InitDone) | Err(_) => {}
            },
            Ok(()) = held.changed() => {}
        }
        if !*held.borrow() {
            for (name, pod) in std::mem::take(&mut ending) {
                if placed(&pod) {
                    let _ = pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
                }
            }
        }
    }
}

/// On a node that this plays the kubelet of.
fn placed(pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    node.is_some_and(|node| node != machine::NODE)
}

fn runs(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

async fn start(pods: &Api<Pod>, pod: &Pod) {
    let now = Time(Timestamp::now());
    let yes = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now});
    let status = json!({"status": {
        "phase": "Running",
        "startTime": now,
        "conditions": [yes("PodScheduled"), yes("Initialized"), yes("ContainersReady"), yes("Ready")],
    }});
    let _ = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
}
