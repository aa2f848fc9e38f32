//! The chain of a container node on a real kubelet: driver → toolkit → cuda → plugin, as the init containers that the
//! operator renders, from this tree's image. The host is a folder with NVIDIA's libraries played by tests/chain's; what
//! its container toolkit would do is done by tests/cluster/nvidia-container-runtime.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crds::{labels::DEPLOY_OPERANDS, v1::PolicyState, v1alpha1::GPUNode};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vfio::testing;

use super::real_node;
use crate::support::{
    NAMESPACE,
    agents::operator,
    cluster::{command, run},
    machine::{Machine, NODE},
    nodes::{label, until_deployed},
    policies,
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
const VALIDATOR: &str = "app=nvidia-operator-validator";
const GPUVIRT: &str = env!("CARGO_BIN_EXE_gpuvirt");

/// A host with a driver and a container toolkit of its own, in the cluster's folder.
struct Host {
    state: PathBuf,
    _described: testing::Machine,
}

impl Host {
    fn new(state: &Path) -> Self {
        let described = testing::Machine::described("v100");
        described.write("/usr/bin/nvidia-smi", "");
        described.write("/sys/module/nvidia/refcnt", "0\n");
        described.write("/sys/module/nvidia/version", "595.91.07\n");
        let host = state.join("host");
        for folder in ["host", "nvidia/lib", "host/run/nvidia", "host/usr/lib64"] {
            fs::create_dir_all(state.join(folder)).expect("a folder");
        }
        fs::create_dir_all("/run/nvidia/validations").expect("the folder of verdicts");
        shell("cp -a \"$0\"/. \"$1\" && mount --bind /run/nvidia \"$1/run/nvidia\"", &[described.path(), &host]);
        Self { state: state.to_owned(), _described: described }
    }

    fn root(&self) -> PathBuf {
        self.state.join("host")
    }

    /// Puts a stand-in for a library of NVIDIA's at a place below the cluster's folder.
    fn library(&self, source: &str, macros: &[&str], to: &str) {
        let source = format!("{}/tests/chain/{source}.c", env!("CARGO_MANIFEST_DIR"));
        let to = self.state.join(to);
        let made = to.with_extension("made");
        let mut cc = command("cc", ["-shared", "-fPIC", &source, "-o"]);
        run(cc.arg(&made).args(macros)).expect("cc should be installed");
        // Processes that have the old one open keep it.
        fs::rename(made, to).expect("a library should be replaceable");
    }

    fn host_library(&self, macros: &[&str]) {
        self.library("nvml", macros, "host/usr/lib64/libnvidia-ml.so.1");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = run(&mut command("umount", ["-l".as_ref(), self.root().join("run/nvidia").as_os_str()]));
        let _ = fs::remove_dir_all("/run/nvidia");
    }
}

fn shell(script: &str, arguments: &[&Path]) {
    let all = [Path::new("-c"), Path::new(script)].into_iter().chain(arguments.iter().copied());
    run(&mut command("sh", all)).expect("a host should be made");
}

/// The product's image, and a stand-in for the device plugin's, in the node's containerd.
fn images(t: &Turn, machine: &Machine<'_>) {
    let dir = t.dir.path();
    let plugin = dir.join("plugin/usr/bin");
    fs::create_dir_all(&plugin).expect("a folder");
    fs::write(plugin.join("nvidia-device-plugin"), "#!/bin/sh\necho plugin\nexec sleep 2147483647\n")
        .expect("a script");
    let script = "set -e; strip -o \"$0/gpuvirt\" \"$1\"; chmod +x \"$0/plugin/usr/bin/nvidia-device-plugin\"
        images/gpuvirt.sh \"$0/gpuvirt.tar\" localhost/gpuvirt:test \"$0/gpuvirt\"
        images/box.sh \"$0/plugin.tar\" localhost/k8s-device-plugin:test sh \"$0/plugin\"";
    shell(script, &[dir, Path::new(GPUVIRT)]);
    for image in ["gpuvirt.tar", "plugin.tar"] {
        machine.import(&dir.join(image)).expect("an image should be importable");
    }
}

/// The host has driver and toolkit, and the device plugin is NVIDIA's.
fn policy(host: &Host) -> Value {
    let mut policy = policies::valid(POLICY);
    policy["spec"]["driver"] = json!({"enabled": false});
    policy["spec"]["hostPaths"] = json!({"rootFS": host.root()});
    policy["spec"]["devicePlugin"] =
        json!({"enabled": true, "repository": "localhost", "image": "k8s-device-plugin", "version": "test"});
    policy
}

/// A device plugin's work, as far as the node shows it.
async fn offer_gpus(t: &Turn, count: Value) {
    let nodes: Api<Node> = t.all();
    let patch = json!({"status": {"capacity": {"nvidia.com/gpu": count}, "allocatable": {"nvidia.com/gpu": count}}});
    nodes.patch_status(NODE, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a Node should be patchable");
}

/// The next try at once: the kubelet's own waits from 10 s on.
async fn try_again(t: &Turn) {
    let pods: Api<Pod> = t.ours();
    let validators = ListParams::default().labels(VALIDATOR);
    pods.delete_collection(&DeleteParams::default(), &validators).await.expect("pods should be deletable");
}

/// The link that is broken, as people see it: columns, conditions, what the kubelet says of the pod, the log.
async fn broken(t: &Turn, link: &str, reason: &str, message: &str) {
    wait::until(&t.all(), NODE, &format!("{reason}: {message}"), |node: &GPUNode| {
        operator(node).is_some_and(|o| o.ready == "False" && o.reason == reason && o.message.contains(message))
    })
    .await;
    let shown = t.cluster.kubectl(&["get", "gpunodes"]).expect("kubectl");
    assert!(shown.lines().any(|line| line.starts_with(NODE) && line.contains(reason)), "{shown}");
    let shown = t.cluster.kubectl(&["describe", "gpunode", NODE]).expect("kubectl");
    assert!(shown.contains(message), "{shown}");
    let container = format!("{link}-validation");
    let told = wait::eventually("the log says it too", async || {
        let log = t.cluster.kubectl(&["logs", "-n", NAMESPACE, "ds/nvidia-operator-validator", "-c", &container]);
        log.ok().filter(|log| log.contains(message))
    });
    told.await;
    policies::until(
        t,
        POLICY,
        PolicyState::NotReady,
        "OperandNotReady",
        &["nvidia-operator-validator", NODE, &container],
    )
    .await;
}

#[test]
fn the_chain_of_a_container_node_stops_at_the_link_that_is_broken_and_says_why() {
    turn(async |t| {
        let machine = real_node(t).await;
        let host = Host::new(t.cluster.state());
        images(t, machine);
        host.host_library(&["-DINIT=18"]);
        let _operator = t.operator("op-1").await;
        policies::create(t, policy(&host)).await;
        label(t, NODE, &[(DEPLOY_OPERANDS, None)]).await;

        broken(t, "driver", "DriverNotValidated", "mismatch").await;
        host.host_library(&[]);
        try_again(t).await;
        broken(t, "toolkit", "ToolkitNotValidated", "this container has been given no GPU").await;

        host.library("nvml", &[], "nvidia/lib/libnvidia-ml.so.1");
        host.library("cuda", &["-DFAULT=1"], "nvidia/lib/libcuda.so.1");
        try_again(t).await;
        broken(t, "cuda", "CudaNotValidated", "the GPU computes wrongly").await;

        host.library("cuda", &[], "nvidia/lib/libcuda.so.1");
        try_again(t).await;
        broken(t, "plugin", "PluginNotValidated", "node-1 offers neither nvidia.com/gpu nor nvidia.com/mig-*").await;

        offer_gpus(t, json!("2")).await;
        wait::until(&t.all(), NODE, "the node serves containers", |node: &GPUNode| {
            operator(node).is_some_and(|o| o.ready == "True" && o.reason == "Serving")
        })
        .await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        let commands: [(&[&str], &str); 3] = [
            (&["get", "clusterpolicy", POLICY, "-o", "jsonpath={.status.state}"], "ready"),
            (&["get", "nodes", "-L", "nvidia.com/gpu.present"], "true"),
            (&["logs", "-n", NAMESPACE, "ds/nvidia-device-plugin-daemonset"], "plugin"),
        ];
        for (arguments, answer) in commands {
            let shown = t.cluster.kubectl(arguments).expect("kubectl");
            assert!(shown.contains(answer), "{arguments:?}: {shown}");
        }
        let log =
            t.cluster.kubectl(&["logs", "-n", NAMESPACE, "ds/nvidia-operator-validator", "-c", "cuda-validation"]);
        assert!(log.as_ref().is_ok_and(|log| log.contains("1 GPU(s) computed rightly")), "{log:?}");

        offer_gpus(t, Value::Null).await;
        label(t, NODE, &[(DEPLOY_OPERANDS, Some("false"))]).await;
        until_deployed(t, NODE, &[]).await;
    });
}
