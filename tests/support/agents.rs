//! An agent without a machine: it reports GPUs as the real one would, and does what its `GPUNode` asks.

mod vgpus;

use std::sync::{Arc, Mutex};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{
        Advertise, AgentStatus, GPUNode, GPUNodeSpec, GPUStatus, Holder, HostFacts, NvidiaDriver, Refusal,
        ResourceStatus, Summary,
    },
};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use serde_json::json;
use tokio::sync::Notify;

pub use self::vgpus::Maker;
use super::{Background, turn::Turn, wait};

pub const T4: &str = "nvidia.com/TU104GL_TESLA_T4";

/// What the agent has before it.
#[derive(Clone, Debug)]
pub struct Host {
    pub gpus: Vec<GPUStatus>,
    /// Whether it changes drivers when asked. It looks, reports and withdraws either way.
    pub obeys: bool,
    /// Whether the kubelet takes what it offers.
    pub registers: bool,
    /// The NVIDIA driver of the host.
    pub driver: Option<NvidiaDriver>,
    /// What it says of the node as a whole.
    pub conditions: Vec<Condition>,
    /// The host's driver, where it makes vGPUs.
    pub maker: Option<Maker>,
}

pub struct Agent {
    pub node: String,
    host: Arc<Mutex<Host>>,
    changed: Arc<Notify>,
    _task: Background,
}

/// A Tesla T4 as it is after boot with the driver loaded.
pub fn t4(address: &str) -> GPUStatus {
    GPUStatus {
        address: address.to_owned(),
        id: "10de:1eb8".to_owned(),
        class: "0x030200".to_owned(),
        product: "TU104GL [Tesla T4]".to_owned(),
        mode: Some(WorkloadMode::Container),
        driver: Some("nvidia".to_owned()),
        iommu_group: Some(20),
        resource: Some(T4.to_owned()),
        ..GPUStatus::default()
    }
}

/// A VM that has a GPU.
pub fn qemu(pid: i32) -> Holder {
    Holder {
        pid,
        command: "qemu-kvm".to_owned(),
        path: "/dev/vfio/20".to_owned(),
        pod: Some("vm-pod".to_owned()),
        vm: None,
    }
}

impl Host {
    /// With these GPUs, and nothing in the way.
    pub fn of(gpus: Vec<GPUStatus>) -> Self {
        Self { gpus, obeys: true, registers: true, driver: None, conditions: Vec::new(), maker: None }
    }
}

impl Agent {
    /// Sees these GPUs: makes its `GPUNode`, and follows it from then on.
    pub async fn start(turn: &Turn, node: &str, gpus: Vec<GPUStatus>) -> Self {
        Self::start_with(turn, node, Host::of(gpus)).await
    }

    pub async fn start_with(turn: &Turn, node: &str, host: Host) -> Self {
        let api: Api<GPUNode> = turn.all();
        let object = GPUNode::new(node, GPUNodeSpec::default());
        api.create(&PostParams::default(), &object).await.expect("a GPUNode should be creatable");
        let host = Arc::new(Mutex::new(host));
        let changed = Arc::new(Notify::new());
        let task = follow(turn.client.clone(), node.to_owned(), host.clone(), changed.clone());
        Self { node: node.to_owned(), host, changed, _task: Background(tokio::spawn(task)) }
    }

    /// Something happens on the host, and the agent sees it.
    pub fn change(&self, change: impl FnOnce(&mut Host)) {
        change(&mut self.host.lock().expect("the host's lock should not be poisoned"));
        self.changed.notify_one();
    }

    /// Waits for the operator's part of the report.
    pub async fn until(&self, turn: &Turn, promise: &str, holds: impl Fn(&GPUNode) -> bool) -> GPUNode {
        wait::until(&turn.all(), &self.node, promise, holds).await
    }

    pub async fn until_reason(&self, turn: &Turn, ready: bool, reason: &str) -> GPUNode {
        let status = if ready { "True" } else { "False" };
        self.until(turn, &format!("ready is {status}, reason {reason}"), |node| {
            operator(node).is_some_and(|o| o.ready == status && o.reason == reason)
        })
        .await
    }
}

pub fn operator(node: &GPUNode) -> Option<&crds::v1alpha1::OperatorStatus> {
    node.status.as_ref()?.operator.as_ref()
}

pub fn agent(node: &GPUNode) -> Option<&AgentStatus> {
    node.status.as_ref()?.agent.as_ref()
}

async fn follow(client: Client, node: String, host: Arc<Mutex<Host>>, changed: Arc<Notify>) {
    let api: Api<GPUNode> = Api::all(client);
    let mut objects = watch_object(api.clone(), &node).default_backoff().boxed();
    let mut known: Option<GPUNode> = None;
    loop {
        tokio::select! {
            Some(next) = objects.next() => match next {
                Ok(object) => known = object,
                Err(_interrupted) => continue,
            },
            () = changed.notified() => {}
        }
        let Some(object) = &known else { continue };
        let status = {
            let mut host = host.lock().expect("the host's lock should not be poisoned");
            act(&mut host, object);
            report(&host, object)
        };
        if object.status.as_ref().and_then(|s| s.agent.as_ref()) != Some(&status) {
            say(&api, object, &status).await;
        }
    }
}

/// Does what the object asks.
pub fn act(host: &mut Host, object: &GPUNode) {
    let obeys = host.obeys;
    for gpu in &mut host.gpus {
        gpu.refusal = None;
        let Some(mode) = object.spec.mode.filter(|mode| obeys && gpu.mode != Some(*mode)) else { continue };
        if let Some(holder) = gpu.holders.first() {
            let message = format!("GPU {} is held by {} (pid {})", gpu.address, holder.command, holder.pid);
            gpu.refusal = Some(Refusal { reason: "InUse".to_owned(), message });
            continue;
        }
        gpu.mode = Some(mode);
        let driver = if mode == WorkloadMode::VmPassthrough { "vfio-pci" } else { "nvidia" };
        gpu.driver = Some(driver.to_owned());
    }
    if obeys {
        vgpus::act(host, object);
    }
}

/// What it says then.
pub fn report(host: &Host, object: &GPUNode) -> AgentStatus {
    let offered = object.spec.advertise == Advertise::Offered && object.spec.mode == Some(WorkloadMode::VmPassthrough);
    let bound = host.gpus.iter().filter(|gpu| gpu.mode == Some(WorkloadMode::VmPassthrough));
    let devices: Vec<String> = bound.filter(|_| offered).map(|gpu| gpu.address.clone()).collect();
    let resource = ResourceStatus { name: T4.to_owned(), devices, registered: host.registers };
    AgentStatus {
        observed_generation: object.metadata.generation.unwrap_or_default(),
        version: "0.0.0-test".to_owned(),
        summary: Summary {
            gpus: i32::try_from(host.gpus.len()).unwrap_or_default(),
            in_use: i32::try_from(host.gpus.iter().filter(|gpu| !gpu.holders.is_empty()).count()).unwrap_or_default(),
            driver: host.gpus.first().and_then(|gpu| gpu.driver.clone()).unwrap_or_else(|| "none".to_owned()),
        },
        host: HostFacts {
            kernel: "6.8.0-45-generic".to_owned(),
            architecture: "x86_64".to_owned(),
            os: "ubuntu24.04".to_owned(),
            iommu: true,
            iommufd: true,
            driver: host.driver.clone(),
        },
        conditions: host.conditions.clone(),
        gpus: host.gpus.clone(),
        resources: if resource.devices.is_empty() { vgpus::resources(host, object) } else { vec![resource] },
        vgpu: vgpus::state(host, object),
        ..AgentStatus::default()
    }
}

/// An apply of its own part, as the agent does it. A conflict means that the object has gone.
pub async fn say(api: &Api<GPUNode>, object: &GPUNode, status: &AgentStatus) {
    let patch = json!({
        "apiVersion": GPUNode::api_version(&()),
        "kind": GPUNode::kind(&()),
        "metadata": {"name": object.metadata.name, "uid": object.metadata.uid},
        "status": {"agent": status},
    });
    let params = PatchParams::apply(labels::AGENT_MANAGER).force();
    let name = object.metadata.name.as_deref().unwrap_or_default();
    match api.patch_status(name, &params, &Patch::Apply(&patch)).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
        Err(error) => panic!("the played agent of {name} cannot report: {error}"),
    }
}
