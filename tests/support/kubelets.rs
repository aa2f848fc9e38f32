//! The kubelets of nodes without a machine: pods that the scheduler puts there run at once, and end when they are told to.

use std::collections::{BTreeMap, BTreeSet};

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
    hold: watch::Sender<Ways>,
    _task: Background,
}

/// How they behave.
#[derive(Clone, Debug, Default)]
struct Ways {
    holds_endings: bool,
    /// Nodes where containers that start now crash again and again.
    breaks: BTreeSet<String>,
}

impl Kubelets {
    /// Of all operand pods.
    pub fn start(turn: &Turn) -> Self {
        Self::of(turn, watcher::Config::default().labels(labels::POLICY))
    }

    /// Of all pods in the operator's namespace, whoever made them.
    pub fn of_all(turn: &Turn) -> Self {
        Self::of(turn, watcher::Config::default())
    }

    fn of(turn: &Turn, which: watcher::Config) -> Self {
        let (hold, ends) = watch::channel(Ways::default());
        Self { hold, _task: Background(tokio::spawn(run(turn.ours(), which, ends))) }
    }

    /// From now on pods that are deleted take their time.
    pub fn hold_endings(&self) {
        self.hold.send_modify(|ways| ways.holds_endings = true);
    }

    /// From now on containers that start on these nodes crash again and again.
    pub fn break_starts(&self, nodes: &[&str]) {
        self.hold.send_modify(|ways| ways.breaks.extend(nodes.iter().map(|node| (*node).to_owned())));
    }

    /// All start, and those that crashed run.
    pub fn let_start(&self) {
        self.hold.send_modify(|ways| ways.breaks.clear());
    }

    /// They end.
    pub fn let_end(&self) {
        self.hold.send_modify(|ways| ways.holds_endings = false);
    }
}

async fn run(pods: Api<Pod>, which: watcher::Config, mut held: watch::Receiver<Ways>) {
    let mut events = watcher(pods.clone(), which).default_backoff().boxed();
    let mut ending: BTreeMap<String, Pod> = BTreeMap::new();
    let mut crashing: BTreeMap<String, Pod> = BTreeMap::new();
    loop {
        tokio::select! {
            Some(event) = events.next() => match event {
                Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                    if pod.metadata.deletion_timestamp.is_some() {
                        ending.insert(pod.name_any(), pod);
                    } else if placed(&pod) && is_new(&pod) {
                        let breaks = held.borrow().breaks.contains(node(&pod));
                        if breaks && crashing.insert(pod.name_any(), pod.clone()).is_none() {
                            crash(&pods, &pod).await;
                        } else if !breaks {
                            start(&pods, &pod).await;
                        }
                    }
                }
                Ok(Event::Delete(pod)) => drop(ending.remove(&pod.name_any())),
                Ok(Event::Init | Event::InitDone) | Err(_) => {}
            },
            Ok(()) = held.changed() => {}
        }
        let ways = held.borrow().clone();
        let starts: Vec<String> =
            crashing.iter().filter(|(_, pod)| !ways.breaks.contains(node(pod))).map(|(name, _)| name.clone()).collect();
        for name in starts {
            if let Some(pod) = crashing.remove(&name) {
                start(&pods, &pod).await;
            }
        }
        if !ways.holds_endings {
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
    !matches!(node(pod), "" | machine::NODE)
}

fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// What has ended is never started again.
fn is_new(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|status| status.phase.as_deref()), None | Some("Pending"))
}

/// As the kubelet tells of a loop of crashes that has lasted a while.
async fn crash(pods: &Api<Pod>, pod: &Pod) {
    let container =
        pod.spec.as_ref().and_then(|spec| spec.containers.first()).map(|c| (c.name.clone(), c.image.clone()));
    let (name, image) = container.unwrap_or_default();
    let state = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}});
    let status = json!({"status": {"phase": "Pending", "containerStatuses": [{
        "name": name, "image": image, "imageID": "", "ready": false, "restartCount": 11, "state": state,
    }]}});
    let _ = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
}

async fn start(pods: &Api<Pod>, pod: &Pod) {
    let now = Time(Timestamp::now());
    let yes = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now});
    let status = json!({"status": {
        "phase": "Running",
        "startTime": now,
        "containerStatuses": null,
        "conditions": [yes("PodScheduled"), yes("Initialized"), yes("ContainersReady"), yes("Ready")],
    }});
    let _ = pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
}
