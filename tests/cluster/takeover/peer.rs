//! A cluster that NVIDIA's operator has set up: its recorded DaemonSets (tests/fixtures/peer-operands), with the owners,
//! accounts, labels and Deployment that it and its chart give them. Nobody runs it; pods are played.

use std::{collections::BTreeMap, time::Duration};

use crds::{labels, v1::ClusterPolicy};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        coordination::v1::Lease,
        core::v1::{Namespace, Pod, ServiceAccount},
        node::v1::RuntimeClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use tokio::time::sleep;

use crate::support::{
    NAMESPACE,
    cluster::source,
    nodes, policies,
    turn::{ML, Turn},
    wait,
};

pub const DEPLOYMENT: &str = "gpu-operator";
const NODE: [(&str, &str); 6] = [
    ("feature.node.kubernetes.io/pci-10de.present", "true"),
    ("feature.node.kubernetes.io/system-os_release.ID", "ubuntu"),
    ("feature.node.kubernetes.io/system-os_release.VERSION_ID", "24.04"),
    ("feature.node.kubernetes.io/kernel-version.full", "6.8.0-45-generic"),
    ("feature.node.kubernetes.io/cpu-hardware_multithreading", "true"),
    (labels::GPU_PRESENT, "true"),
];

/// A node for containers, `n1`, one for VMs, `n2`, and all that the peer makes for them; its pods run.
pub async fn set_up(t: &Turn) -> ClusterPolicy {
    node(t, "n1", "container", &crate::modes::CONTAINER).await;
    node(t, "n2", "vm-passthrough", &crate::modes::PASSTHROUGH).await;
    let policy = policies::create(t, policy()).await;
    let owner = policy.controller_owner_ref(&()).expect("a policy should own");
    let owner = serde_json::to_value(owner).expect("JSON");
    let operands: BTreeMap<String, Value> =
        serde_json::from_str(&source("tests/fixtures/peer-operands/base.json")).expect("a recording");
    for class in ["nvidia", "nvidia-cdi", "nvidia-legacy"] {
        make::<RuntimeClass>(
            &t.all(),
            json!({"metadata": {"name": class, "ownerReferences": [owner]}, "handler": class}),
        )
        .await;
    }
    for (name, operand) in &operands {
        let account = operand["serviceAccountName"].as_str().unwrap_or("default");
        make::<ServiceAccount>(&t.ours(), json!({"metadata": {"name": account, "ownerReferences": [owner]}})).await;
        make::<DaemonSet>(&t.ours(), set(name, operand, &owner)).await;
    }
    make::<Deployment>(&t.ours(), deployment()).await;
    make::<Lease>(&t.ours(), lease()).await;
    let pods: Api<Pod> = t.ours();
    wait::eventually("its pods run", async || {
        let all = pods.list(&ListParams::default()).await.expect("pods should be listable").items;
        let runs = |pod: &&Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        (all.iter().filter(runs).count() >= 9).then_some(())
    })
    .await;
    policy
}

async fn node(t: &Turn, name: &str, mode: &str, deploy: &[&str]) {
    let keys: Vec<String> = deploy.iter().map(|suffix| format!("{}{suffix}", labels::DEPLOY_PREFIX)).collect();
    let mut all: Vec<(&str, &str)> = NODE.to_vec();
    all.push((labels::WORKLOAD_CONFIG, mode));
    all.extend(keys.iter().map(|key| (key.as_str(), "true")));
    nodes::create(t, name, &all).await;
}

/// As recorded, without the vGPU host driver's values of an example.
fn policy() -> Value {
    let text = source("crds/tests/fixtures/peer-default.yaml");
    let mut policy: Value = serde_saphyr::from_str(&text).expect("the peer's default policy");
    policy["metadata"] = json!({"name": "cluster-policy"});
    policy["spec"]["daemonsets"]["labels"] = Value::Null;
    policy["spec"]["sandboxWorkloads"]["enabled"] = json!(true);
    policy["spec"]["vgpuManager"] = json!({"enabled": true, "repository": "registry.example.com/vgpu", "image": "vgpu-manager", "version": "580.95"});
    policy["spec"]["dcgmExporter"]["serviceMonitor"] = json!({"enabled": false});
    policy["spec"]["driver"]["upgradePolicy"]["autoUpgrade"] = json!(true);
    policy
}

/// Nobody runs its pod: no node has that label.
fn deployment() -> Value {
    let labels = json!({"app": "gpu-operator"});
    let container =
        json!({"name": "gpu-operator", "image": "nvcr.io/nvidia/gpu-operator:v26.7.0", "command": ["gpu-operator"]});
    let pod = json!({"containers": [container], "nodeSelector": {"nobody": "here"}});
    json!({
        "metadata": {"name": DEPLOYMENT, "labels": {"app.kubernetes.io/component": "gpu-operator"}},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
    })
}

fn lease() -> Value {
    let now = Timestamp::now().to_string();
    let spec =
        json!({"holderIdentity": "gpu-operator-0", "renewTime": now, "acquireTime": now, "leaseDurationSeconds": 15});
    json!({"metadata": {"name": "53822513.nvidia.com"}, "spec": spec})
}

async fn make<K>(api: &Api<K>, mut object: Value)
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + std::fmt::Debug,
{
    object["apiVersion"] = json!(K::api_version(&()));
    object["kind"] = json!(K::kind(&()));
    let object: K = serde_json::from_value(object).unwrap_or_else(|error| panic!("{}: {error}", K::kind(&())));
    let params = PostParams { dry_run: false, field_manager: Some("gpu-operator".to_owned()) };
    loop {
        match api.create(&params, &object).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("{}: {error}", object.name_any()),
        }
        // What an earlier test's policy owned is on its way to the garbage; what the chart made stays.
        let there = api.get_metadata_opt(&object.name_any()).await.expect("readable");
        match there {
            Some(there) if there.owner_references().is_empty() => return,
            Some(there) => drop(api.delete(&there.name_any(), &DeleteParams::default()).await),
            None => {}
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// A recorded operand as the API server had it.
fn set(name: &str, operand: &Value, owner: &Value) -> Value {
    let list = |key: &str| operand[key].as_array().into_iter().flatten().map(container).collect::<Vec<_>>();
    let volumes: Vec<Value> = operand["volumes"].as_array().into_iter().flatten().map(volume).collect();
    let mut pod =
        json!({"initContainers": list("initContainers"), "containers": list("containers"), "volumes": volumes});
    for key in [
        "nodeSelector",
        "tolerations",
        "priorityClassName",
        "serviceAccountName",
        "runtimeClassName",
        "affinity",
        "hostPID",
        "hostIPC",
        "terminationGracePeriodSeconds",
    ] {
        pod[key] = operand[key].clone();
    }
    json!({
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": operand["labels"],
            "annotations": {"nvidia.com/last-applied-hash": "1234567890"},
            "ownerReferences": [owner],
        },
        "spec": {
            "selector": {"matchLabels": operand["selector"]},
            "updateStrategy": operand["updateStrategy"],
            "template": {"metadata": {"labels": operand["podLabels"], "annotations": operand["podAnnotations"]}, "spec": pod},
        },
    })
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn container(recorded: &Value) -> Value {
    let mut container = recorded.clone();
    let fields: &mut Map<String, Value> = container.as_object_mut().expect("a container");
    fields.remove("mounts");
    let env: Vec<Value> = texts(&recorded["env"]).map(variable).collect();
    let mounts: Vec<Value> = texts(&recorded["mounts"]).map(mount).collect();
    let port = |text: &str| {
        let (name, number) = text.split_once(':').expect("a port");
        json!({"name": name, "containerPort": number.parse::<i32>().expect("a number")})
    };
    let ports: Vec<Value> = texts(&recorded["ports"]).map(port).collect();
    fields.insert("env".to_owned(), json!(env));
    fields.insert("volumeMounts".to_owned(), json!(mounts));
    fields.insert("ports".to_owned(), json!(ports));
    for at in ["/startupProbe/exec", "/lifecycle/preStop/exec"] {
        if let Some(exec) = container.pointer_mut(at).filter(|exec| exec.is_array()) {
            *exec = json!({"command": exec.clone()});
        }
    }
    container
}

fn variable(text: &str) -> Value {
    match (text.split_once("<-field:"), text.split_once('=')) {
        (Some((name, path)), _) => json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}),
        (None, Some((name, value))) => json!({"name": name, "value": value}),
        (None, None) => json!({"name": text}),
    }
}

fn mount(text: &str) -> Value {
    let (name, rest) = text.split_once("->").expect("a mount");
    let mut words = rest.split(' ');
    let (path, sub_path) = words.next().map(|p| p.split_once(':').unwrap_or((p, ""))).expect("a path");
    let words: Vec<&str> = words.collect();
    let propagation = words.iter().find(|word| **word != "ro");
    json!({
        "name": name, "mountPath": path, "readOnly": words.contains(&"ro").then_some(true),
        "subPath": (!sub_path.is_empty()).then_some(sub_path), "mountPropagation": propagation,
    })
}

fn volume(recorded: &Value) -> Value {
    let (name, source) = recorded.as_str().and_then(|text| text.split_once('=')).expect("a volume");
    let (kind, rest) = source.split_once(':').unwrap_or((source, ""));
    let words: Vec<&str> = rest.split(' ').collect();
    match kind {
        "hostPath" => json!({"name": name, "hostPath": {"path": words[0], "type": words.get(1)}}),
        "configMap" => {
            let mode = words.iter().find_map(|word| word.strip_prefix("mode=")?.parse::<i32>().ok());
            let items = rest.split_once("items=[('").map(|(_, items)| {
                let (key, path) = items.trim_end_matches("')]").split_once("', '").expect("an item");
                json!([{"key": key, "path": path}])
            });
            json!({"name": name, "configMap": {"name": words[0], "defaultMode": mode, "items": items}})
        }
        _ => json!({"name": name, "emptyDir": {}}),
    }
}

/// Its Deployment alone, as of an install that has just begun.
pub async fn start(t: &Turn) {
    make::<Deployment>(&t.ours(), deployment()).await;
}

/// A launcher pod with a GPU on a node.
pub async fn virtual_machine(t: &Turn, node: &str) {
    let namespace = json!({"metadata": {"name": ML}});
    make::<Namespace>(&t.all(), namespace).await;
    make::<ServiceAccount>(&Api::namespaced(t.client.clone(), ML), json!({"metadata": {"name": "default"}})).await;
    let gpu = json!({"nvidia.com/TU104GL_TESLA_T4": "1"});
    let owner =
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "training", "uid": "u"});
    let container = json!({"name": "compute", "image": "i", "resources": {"limits": gpu, "requests": gpu}});
    // Where KubeVirt's types are, garbage collection would take it: there is no such instance.
    let kept = ["example.com/kept"];
    let pod = json!({
        "metadata": {
            "name": "virt-launcher-training", "labels": {"kubevirt.io": "virt-launcher"}, "ownerReferences": [owner],
            "finalizers": kept,
        },
        "spec": {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0},
    });
    make::<Pod>(&Api::namespaced(t.client.clone(), ML), pod).await;
}
