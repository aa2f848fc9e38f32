//! The node, one for all tests of this program, and what a test does with it.

use std::{collections::BTreeMap, env, path::PathBuf, sync::OnceLock, thread};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{CONFIG_NAME, GPUNode, GPUStatus, GPUVirtConfig},
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;

use crate::support::{
    NAMESPACE,
    alone::alone,
    cluster::{Cluster, script},
    kubevirt, wait,
};

pub const NODE: &str = "node-1";
pub const T4: &str = "nvidia.com/TU104GL_TESLA_T4";
pub const RTX: &str = "nvidia.com/TU104GL_QUADRO_RTX_4000";
pub const H100: &str = "nvidia.com/GH100_H100_SXM5_80GB";
/// The first T4 of the node.
pub const GPU: &str = "0000:43:00.0";

/// Of the cluster's tools; the launcher is for KubeVirt's instances.
const IMAGES: &str = "pause box virt-launcher";

static LAB: OnceLock<Result<Machine, String>> = OnceLock::new();

struct Machine {
    cluster: Cluster,
}

/// One test's time with the node.
pub struct Lab {
    pub cluster: &'static Cluster,
    pub client: Client,
}

/// Runs a test when no other one runs, on a node that nobody uses and that serves this mode: it stays in it from one test
/// to the next.
pub fn lab(mode: WorkloadMode, test: impl AsyncFnOnce(&Lab, GPUNode) + Send) {
    let run = async || {
        let machine = LAB.get_or_init(Machine::start).as_ref().unwrap_or_else(|error| panic!("no lab: {error}"));
        let lab = Lab { cluster: &machine.cluster, client: machine.cluster.client().await };
        let node = lab.clean(mode).await;
        test(&lab, node).await;
    };
    alone(run, || {
        if let Some(Ok(machine)) = LAB.get() {
            show(&machine.cluster);
        }
    });
}

#[expect(clippy::disallowed_methods, reason = "a test's equipment is named by the environment")]
pub fn equipment(variable: &str, below_home: &str) -> PathBuf {
    let home = || PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(below_home);
    env::var_os(variable).map_or_else(home, PathBuf::from)
}

impl Machine {
    fn start() -> Result<Self, String> {
        let out = equipment("GPUVIRT_LAB", ".cache/gpuvirt/lab");
        let target = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/images");
        let image = |variable, file| {
            let given = equipment(variable, "none");
            if given.exists() { given } else { target.join(file) }
        };
        let images = [
            image("GPUVIRT_IMAGE_TAR", "gpuvirt.tar"),
            image("GPUVIRT_DRIVER_TAR", "nvidia-driver.tar"),
            image("GPUVIRT_VGPU_MANAGER_TAR", "vgpu-manager.tar"),
        ];
        // The machine boots while the control plane does, and the chart is put in before the node is there.
        let state = Cluster::state_of_this_process();
        let boot = || {
            let mut args = vec![state.clone()];
            args.extend(images);
            script("tests/lab/up.sh", args, &[("OUT", out.as_os_str()), ("IMAGES", IMAGES.as_ref())])
        };
        let (cluster, booted) = thread::scope(|scope| {
            let booting = scope.spawn(boot);
            let cluster = Cluster::start().and_then(|cluster| install(&cluster).map(|()| cluster));
            (cluster, booting.join().expect("a script's run should not panic"))
        });
        booted?;
        let cluster = cluster?;
        // All of a first start: images, operator, agent. A test's patience is for what comes after.
        cluster.kubectl(&["wait", "--for=create", &format!("gpunode/{NODE}"), "--timeout=3m"])?;
        Ok(Self { cluster })
    }
}

fn install(cluster: &Cluster) -> Result<(), String> {
    let values = ["--values", "tests/lab/values.yaml", "--wait", "--timeout", "3m"];
    let release = ["install", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE, "--create-namespace"];
    cluster.helm(&[&release[..], &values[..]].concat()).map(drop)
}

/// What a person would look at first.
fn show(cluster: &Cluster) {
    let kubectl = |args: &[&str]| {
        let said = cluster.kubectl(args).unwrap_or_else(|error| error);
        eprintln!("── kubectl {}\n{said}", args.join(" "));
    };
    kubectl(&["get", "clusterpolicy,gpunodes"]);
    kubectl(&["get", "gpunode", NODE, "-o", "yaml"]);
    kubectl(&["get", "pods", "-A"]);
    kubectl(&["get", "vmi", "-A", "-o", "yaml"]);
    kubectl(&["-n", NAMESPACE, "logs", "daemonset/gpuvirt-agent", "--tail=60"]);
    kubectl(&["-n", NAMESPACE, "logs", "deployment/gpuvirt-operator", "--tail=30"]);
}

impl Lab {
    /// What an earlier test has left is undone.
    async fn clean(&self, mode: WorkloadMode) -> GPUNode {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        let at_once = DeleteParams::default().grace_period(0);
        let _ = pods.delete_collection(&at_once, &kube::api::ListParams::default()).await;
        kubevirt::delete_all(&self.client).await;
        let configs: Api<GPUVirtConfig> = Api::all(self.client.clone());
        let _ = configs.delete(CONFIG_NAME, &DeleteParams::default()).await;
        self.guest("killall -9 hold hide 2>/dev/null; true");
        if !self.released() {
            self.install();
        }
        self.switch(mode).await
    }

    fn released(&self) -> bool {
        self.cluster.helm(&["status", "gpuvirt", "--namespace", NAMESPACE]).is_ok()
    }

    pub fn install(&self) {
        install(self.cluster).unwrap_or_else(|error| panic!("{error}"));
    }

    pub fn uninstall(&self) -> Result<String, String> {
        self.cluster.helm(&["uninstall", "gpuvirt", "--namespace", NAMESPACE, "--timeout", "90s"])
    }

    /// A root shell's output on the node; an error with the output if the command fails.
    pub fn try_guest(&self, shell: &str) -> Result<String, String> {
        let state = self.cluster.state().to_owned();
        script("tests/lab/guest.sh", [state.as_os_str(), shell.as_ref()], &[])
    }

    pub fn guest(&self, shell: &str) -> String {
        self.try_guest(shell).unwrap_or_else(|error| panic!("{error}"))
    }

    /// QEMU's monitor: what it says is an error, nothing is success.
    pub fn monitor(&self, command: &str) -> String {
        let state = self.cluster.state().to_owned();
        let said = script("tests/lab/monitor.py", [state.as_os_str(), command.as_ref()], &[]);
        said.unwrap_or_else(|error| panic!("{error}")).trim().to_owned()
    }

    pub fn gpu_nodes(&self) -> Api<GPUNode> {
        Api::all(self.client.clone())
    }

    pub async fn label(&self, mode: WorkloadMode) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = json!({"metadata": {"labels": {labels::WORKLOAD_CONFIG: mode}}});
        nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a node should be patchable");
    }

    /// The operator says that the node serves the mode, and is ready.
    pub async fn until_serving(&self, mode: WorkloadMode) -> GPUNode {
        let serves = |node: &GPUNode| {
            let operator = node.status.as_ref().and_then(|s| s.operator.as_ref());
            operator.is_some_and(|o| o.serving == Some(mode) && o.desired == Some(mode) && o.ready == "True")
        };
        wait::until(&self.gpu_nodes(), NODE, &format!("the node serves {mode}"), serves).await
    }

    pub async fn until_refused(&self, words: &[&str]) -> GPUNode {
        let refused = |node: &GPUNode| {
            let operator = node.status.as_ref().and_then(|s| s.operator.as_ref());
            operator.is_some_and(|o| o.ready == "False" && words.iter().all(|word| o.message.contains(word)))
        };
        wait::until(&self.gpu_nodes(), NODE, &format!("a refusal that names {words:?}"), refused).await
    }

    /// Label, and wait until it is so.
    pub async fn switch(&self, mode: WorkloadMode) -> GPUNode {
        self.label(mode).await;
        self.until_serving(mode).await
    }

    pub async fn until_gpu(&self, address: &str, promise: &str, holds: impl Fn(&GPUStatus) -> bool) -> GPUNode {
        let is_so = |node: &GPUNode| gpu(node, address).is_some_and(&holds);
        wait::until(&self.gpu_nodes(), NODE, promise, is_so).await
    }

    /// The agent has seen the holder. Nothing tells it of a process that opens a device without having asked the kubelet,
    /// so a uevent makes it look.
    pub async fn until_holder(&self, pid: &str) {
        self.guest(&format!("echo change >/sys/bus/pci/devices/{GPU}/uevent"));
        let names = |gpu: &GPUStatus| gpu.holders.iter().any(|holder| holder.pid.to_string() == pid);
        self.until_gpu(GPU, &format!("the agent names process {pid}"), names).await;
    }

    /// What the scheduler may give out of a resource of the node.
    pub async fn until_allocatable(&self, resource: &str, count: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let offers = |node: &Node| {
            let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
            allocatable.and_then(|a| a.get(resource)).map_or("0", |q| q.0.as_str()) == count
        };
        wait::until(&nodes, NODE, &format!("{resource} allocatable: {count}"), offers).await;
    }

    /// Drivers of all NVIDIA functions, as the kernel shows them, read past the product.
    pub fn drivers(&self) -> BTreeMap<String, String> {
        let said = self.guest(
            "for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) != 0x10de ] || echo ${d##*/} $(basename $(readlink $d/driver || echo none)); done",
        );
        said.lines().filter_map(|line| line.split_once(' ')).map(|(a, d)| (a.to_owned(), d.to_owned())).collect()
    }

    /// Opens a device node and keeps it: "a VM is running". Returns the pid on the node.
    pub fn hold(&self, command: &str) -> String {
        let pid = self.guest(&format!("setsid {command} </dev/null >/tmp/hold.log 2>&1 & echo $!"));
        pid.trim().to_owned()
    }

    pub fn lives(&self, pid: &str) -> bool {
        self.try_guest(&format!("kill -0 {pid}")).is_ok()
    }

    pub fn end(&self, pid: &str) {
        self.guest(&format!("kill -9 {pid}"));
    }

    pub async fn pod(&self, name: &str, resource: &str, count: u32) -> Pod {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        // As the container was given it: a shell drops variables whose names it could not have, as of types with a hyphen.
        let script =
            "tr '\\0' '\\n' </proc/1/environ | grep PCI_RESOURCE; ls -R /dev/vfio; ls /dev/iommu; exec sleep 1000000";
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{
                    "name": "vm", "image": "localhost/box:test", "command": ["sh", "-c", script],
                    "resources": {"limits": {resource: count.to_string()}},
                }],
            },
        });
        let pod: Pod = serde_json::from_value(pod).expect("a Pod");
        pods.create(&kube::api::PostParams::default(), &pod).await.expect("a pod should be creatable");
        self.until_ready("default", name).await
    }

    pub async fn until_ready(&self, namespace: &str, pod: &str) -> Pod {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let ready = |pod: &Pod| {
            let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
            conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
        };
        wait::until(&pods, pod, "the pod is ready", ready).await
    }

    pub async fn log(&self, pod: &str) -> String {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        wait::eventually("the pod has said all", async || {
            let log = pods.logs(pod, &kube::api::LogParams::default()).await.ok()?;
            log.contains("/dev/vfio").then_some(log)
        })
        .await
    }

    pub async fn delete_pod(&self, namespace: &str, name: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let pod = pods.get(name).await.expect("the pod should be there");
        pods.delete(name, &DeleteParams::default().grace_period(0)).await.expect("a pod should be deletable");
        wait::until_gone(&pods, &pod, "the pod has gone").await;
    }

    /// The agent's pod on the node.
    pub async fn agent_pod(&self) -> String {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        let ours = kube::api::ListParams::default().labels("app=gpuvirt-agent");
        wait::eventually("the agent's pod", async || {
            let found = pods.list_metadata(&ours).await.ok()?;
            found.items.first().map(ResourceExt::name_any)
        })
        .await
    }
}

pub fn gpu<'a>(node: &'a GPUNode, address: &str) -> Option<&'a GPUStatus> {
    node.status.as_ref()?.agent.as_ref()?.gpus.iter().find(|gpu| gpu.address == address)
}
