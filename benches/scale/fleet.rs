//! Thousands of nodes, and an agent for each of them, played by one task: as [`agents`](crate::support::agents) plays one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUNode, GPUNodeSpec, GPUStatus},
};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::{
    api::core::v1::Node,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
    core::PartialObjectMeta,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tokio::{sync::Notify, task::JoinHandle, time::sleep};

use crate::support::{
    agents::{self, Host, t4},
    nodes,
};

/// Requests in flight, of the agents as of whoever labels the nodes.
const PARALLEL: usize = 64;

/// What the nodes say, as the API server tells it to anyone.
#[derive(Default)]
pub struct Seen {
    pub labels: HashMap<String, BTreeMap<String, String>>,
    modes: HashMap<String, Standing>,
}

/// A node's desired mode, the one it serves, and whether it is ready.
type Standing = (Option<WorkloadMode>, Option<WorkloadMode>, bool);

pub struct Fleet {
    client: Client,
    pub names: Vec<String>,
    pub seen: Arc<Mutex<Seen>>,
    changed: Arc<Notify>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Fleet {
    /// Makes the nodes and their `GPUNode`s; the agents follow them from then on.
    pub async fn start(client: Client, nodes: usize, gpus: u8) -> Self {
        let names: Vec<String> = (0..nodes).map(|number| format!("n{number:05}")).collect();
        let api: Api<Node> = Api::all(client.clone());
        let objects: Api<GPUNode> = Api::all(client.clone());
        stream::iter(&names)
            .map(Ok::<_, kube::Error>)
            .try_for_each_concurrent(PARALLEL, async |name| {
                api.create(&PostParams::default(), &node(name)).await?;
                objects.create(&PostParams::default(), &GPUNode::new(name, GPUNodeSpec::default())).await.map(drop)
            })
            .await
            .expect("nodes should be creatable");
        let (seen, changed) = <(Arc<Mutex<Seen>>, Arc<Notify>)>::default();
        let tasks = vec![
            tokio::spawn(follow_nodes(Api::all(client.clone()), seen.clone(), changed.clone())),
            tokio::spawn(play_agents(objects, gpus, seen.clone(), changed.clone())),
        ];
        Self { client, names, seen, changed, tasks }
    }

    pub fn api(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Gives these nodes a label, as `kubectl label` in a loop would, but many at a time.
    pub async fn label(&self, names: &[String], key: &str, value: &str) {
        let api = self.api();
        let patch = Patch::Merge(json!({"metadata": {"labels": {key: value}}}));
        let params = PatchParams::default();
        let patches = stream::iter(names).map(Ok::<_, kube::Error>);
        let done = patches
            .try_for_each_concurrent(PARALLEL, async |name| api.patch_metadata(name, &params, &patch).await.map(drop));
        done.await.expect("nodes should be patchable");
    }

    pub async fn switch(&self, names: &[String], mode: WorkloadMode) {
        self.label(names, labels::WORKLOAD_CONFIG, &mode.to_string()).await;
    }

    /// Waits until all of these serve the mode and are ready.
    pub async fn until_serving(&self, names: &[String], mode: WorkloadMode) {
        self.until(&format!("{} nodes serve {mode}", names.len()), |seen| {
            names.iter().all(|name| seen.modes.get(name) == Some(&(Some(mode), Some(mode), true)))
        })
        .await;
    }

    /// Waits until all have the label.
    pub async fn until_labelled(&self, key: &str) {
        self.until(&format!("all nodes have {key}"), |seen| {
            self.names.iter().all(|name| seen.labels.get(name).is_some_and(|labels| labels.contains_key(key)))
        })
        .await;
    }

    async fn until(&self, promise: &str, holds: impl Fn(&Seen) -> bool) {
        let patience = Duration::from_secs(600);
        let wait = async {
            loop {
                let notified = self.changed.notified();
                if holds(&self.seen.lock().expect("no task should have panicked")) {
                    return;
                }
                notified.await;
                // Not for each of thousands of events.
                sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(patience, wait).await.is_err() {
            let mut standings: BTreeMap<String, usize> = BTreeMap::new();
            for standing in self.seen.lock().expect("no task should have panicked").modes.values() {
                *standings.entry(format!("{standing:?}")).or_default() += 1;
            }
            panic!("not within {patience:?}: {promise}; they are {standings:?}");
        }
    }
}

/// With NFD's labels, and the images that take most of a real node's object.
fn node(name: &str) -> Node {
    let flags = ["ADX", "AESNI", "AVX", "AVX2", "AVX512F", "FMA3", "SHA", "VMX", "VNNI", "XSAVE"];
    let flags = flags.map(|flag| format!("feature.node.kubernetes.io/cpu-cpuid.{flag}"));
    let mut labels: Vec<(&str, &str)> = flags.iter().map(|flag| (flag.as_str(), "true")).collect();
    labels.extend([
        ("kubernetes.io/arch", "amd64"),
        ("feature.node.kubernetes.io/pci-10de.present", "true"),
        ("feature.node.kubernetes.io/kernel-version.full", "6.8.0-45-generic"),
        ("feature.node.kubernetes.io/system-os_release.ID", "ubuntu"),
        ("feature.node.kubernetes.io/system-os_release.VERSION_ID", "24.04"),
    ]);
    let mut node = nodes::object(name, &labels);
    let images = (0..30).map(
        |n| json!({"names": [format!("registry.example/some/image-{n}@sha256:{n:064x}")], "sizeBytes": 100_000_000}),
    );
    node["status"]["images"] = images.collect();
    serde_json::from_value(node).expect("a Node")
}

/// As much as a real agent says of its host when all is well.
fn conditions() -> Vec<Condition> {
    let all = [
        ("FabricReady", "NoNVSwitch", "the GPUs are joined by no NVSwitch"),
        ("GPUsHealthy", "Healthy", "every GPU answers, with its full link"),
        ("GroupsSeparate", "Separate", "no two GPUs share an IOMMU group"),
        ("IommuEnabled", "Enabled", "devices have IOMMU groups"),
        ("ModesReached", "Reached", "every GPU is in the mode asked for, or none is asked for"),
        ("Observed", "Complete", "every PCI function could be read"),
        ("ResourcesRegistered", "Registered", "the kubelet knows every resource that is offered"),
    ];
    let condition = |(type_, reason, message): (&str, &str, &str)| Condition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: None,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    };
    all.into_iter().map(condition).collect()
}

fn host(gpus: u8) -> Host {
    let gpu = |number: u8| GPUStatus {
        iommu_group: Some(20 + i32::from(number)),
        numa_node: Some(i32::from(number / 4)),
        subsystem: Some("10de:12a2".to_owned()),
        ..t4(&format!("0000:{:02x}:00.0", 0x17 + number))
    };
    Host { conditions: conditions(), ..Host::of((0..gpus).map(gpu).collect()) }
}

async fn follow_nodes(api: Api<PartialObjectMeta<Node>>, seen: Arc<Mutex<Seen>>, changed: Arc<Notify>) {
    let mut nodes = watcher(api, watcher::Config::default()).default_backoff().applied_objects().boxed();
    while let Some(next) = nodes.next().await {
        let Ok(node) = next else { continue };
        let name = node.name_any();
        seen.lock()
            .expect("no task should have panicked")
            .labels
            .insert(name, node.metadata.labels.unwrap_or_default());
        changed.notify_waiters();
    }
}

async fn play_agents(api: Api<GPUNode>, gpus: u8, seen: Arc<Mutex<Seen>>, changed: Arc<Notify>) {
    let hosts: Mutex<HashMap<String, Host>> = Mutex::default();
    let objects = watcher(api.clone(), watcher::Config::default()).default_backoff().applied_objects();
    let replies = objects.filter_map(async |next| {
        let object = next.ok()?;
        let name = object.name_any();
        let status = object.status.as_ref();
        let standing = status.and_then(|status| status.operator.as_ref());
        let standing = standing.map(|o| (o.desired, o.serving, o.ready == "True")).unwrap_or_default();
        seen.lock().expect("no task should have panicked").modes.insert(name.clone(), standing);
        changed.notify_waiters();
        let said = {
            let mut hosts = hosts.lock().expect("no task should have panicked");
            let host = hosts.entry(name).or_insert_with(|| host(gpus));
            agents::act(host, &object);
            agents::report(host, &object)
        };
        (status.and_then(|status| status.agent.as_ref()) != Some(&said)).then_some((object, said))
    });
    replies.for_each_concurrent(PARALLEL, async |(object, said)| agents::say(&api, &object, &said).await).await;
}
