//! The container stack on a real API server: what is made of a policy, in every variant, and that it leaves with it.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode, labels,
    v1::{ClusterPolicy, PolicyState},
};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Node, Service},
    node::v1::RuntimeClass,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::support::{
    NAMESPACE,
    agents::{Agent, t4},
    cluster::source,
    identity,
    kubelets::Kubelets,
    nodes, policies,
    program::Program,
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";

/// The peer's defaults, with sandbox workloads on.
fn peers_default() -> Value {
    let text = source("crds/tests/fixtures/peer-default.yaml");
    let mut policy: Value = serde_saphyr::from_str(&text).expect("the fixture should be YAML");
    policy["spec"]["sandboxWorkloads"]["enabled"] = json!(true);
    policy
}

/// A container node whose driver works.
async fn container_node(t: &Turn) -> Agent {
    nodes::create(t, "n1", &[]).await;
    let mut gpu = t4("0000:18:00.0");
    (gpu.mode, gpu.driver) = (Some(WorkloadMode::Container), Some("nvidia".to_owned()));
    Agent::start(t, "n1", vec![gpu]).await
}

async fn config_map(t: &Turn, name: &str, key: &str) {
    let map = json!({"metadata": {"name": name, "namespace": NAMESPACE}, "data": {key: "{}"}});
    let map: ConfigMap = serde_json::from_value(map).expect("a ConfigMap");
    let _ = t.ours::<ConfigMap>().delete(name, &DeleteParams::default()).await;
    t.ours::<ConfigMap>().create(&PostParams::default(), &map).await.expect("creatable");
}

/// Names of the objects that the operator has made.
async fn ours<K>(api: Api<K>) -> BTreeSet<String>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let made = api.list_metadata(&ListParams::default().labels(labels::POLICY)).await.expect("listable");
    made.items.iter().filter(|o| o.metadata.deletion_timestamp.is_none()).map(ResourceExt::name_any).collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The operator has applied this policy as it is now, whole.
async fn until_applied(t: &Turn) -> ClusterPolicy {
    wait::until(&t.all(), POLICY, "the policy is applied", |policy: &ClusterPolicy| {
        policies::ready(policy).is_some_and(|ready| ready.observed_generation == policy.metadata.generation)
    })
    .await
}

#[test]
fn the_peers_default_policy_brings_its_stack_and_takes_it_away() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _agent = container_node(t).await;
        let _operator = t.operator("op-1").await;
        let policy = policies::create(t, peers_default()).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &["1 GPU node(s)"]).await;
        let sets = [
            "gpu-feature-discovery",
            "gpuvirt-agent",
            "nvidia-container-toolkit-daemonset",
            "nvidia-dcgm-exporter",
            "nvidia-device-plugin-daemonset",
            "nvidia-device-plugin-mps-control-daemon",
            "nvidia-driver-daemonset",
            "nvidia-mig-manager",
            "nvidia-operator-validator",
        ];
        assert_eq!(ours::<DaemonSet>(t.ours()).await, names(&sets));
        assert_eq!(ours::<Service>(t.ours()).await, names(&["nvidia-dcgm-exporter"]));
        assert_eq!(ours::<RuntimeClass>(t.all()).await, names(&["nvidia", "nvidia-cdi", "nvidia-legacy"]));

        let off = json!({"spec": {"devicePlugin": {"enabled": false}, "dcgmExporter": {"enabled": false}}});
        policies::patch(t, POLICY, &off).await;
        wait::eventually("what is not wanted goes", async || {
            let gone =
                ["nvidia-device-plugin-daemonset", "nvidia-device-plugin-mps-control-daemon", "nvidia-dcgm-exporter"];
            let left: BTreeSet<String> = names(&sets).difference(&names(&gone)).cloned().collect();
            let no_service = ours::<Service>(t.ours()).await.is_empty();
            (ours::<DaemonSet>(t.ours()).await == left && no_service).then_some(())
        })
        .await;
        let policies: Api<ClusterPolicy> = t.all();
        policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&t.all(), &policy, "the policy goes").await;
        assert_eq!(ours::<RuntimeClass>(t.all()).await, BTreeSet::new());
        assert_eq!(ours::<ConfigMap>(t.ours()).await, BTreeSet::new());
    });
}

#[test]
fn a_runtime_class_of_an_admin_is_left_alone() {
    turn(async |t| {
        let class = json!({"metadata": {"name": "nvidia"}, "handler": "own"});
        let class: RuntimeClass = serde_json::from_value(class).expect("a RuntimeClass");
        let classes: Api<RuntimeClass> = t.all();
        let own = classes.create(&PostParams::default(), &class).await.expect("creatable");
        let _operator = t.operator("op-1").await;
        policies::create(t, peers_default()).await;
        until_applied(t).await;
        let live = classes.get("nvidia").await.expect("still there");
        classes.delete("nvidia", &DeleteParams::default()).await.expect("deletable");
        assert_eq!((live.handler, live.metadata.resource_version), ("own".to_owned(), own.metadata.resource_version));
    });
}

/// Patches over the policy before, one after the other.
fn variants() -> Vec<(&'static str, Value)> {
    vec![
        ("host driver", json!({"driver": {"enabled": false}})),
        ("host driver and toolkit", json!({"toolkit": {"enabled": false}})),
        ("dcgm", json!({"driver": {"enabled": true}, "toolkit": {"enabled": true}, "dcgm": {"enabled": true}})),
        ("configurations", json!({"devicePlugin": {"config": {"name": "time.slicing", "default": "any"}}})),
        ("without CDI", json!({"cdi": {"enabled": false}})),
        ("NRI", json!({"cdi": {"enabled": true, "nriPluginEnabled": true}})),
        (
            "RDMA, GDS, GDRCopy",
            json!({
                "driver": {"rdma": {"enabled": true, "useHostMofed": true}}, "gds": {"enabled": true}, "gdrcopy": {"enabled": true},
            }),
        ),
        (
            "files",
            json!({"driver": {
                "licensingConfig": {"secretName": "licence"}, "virtualTopology": {"config": "topology"},
                "kernelModuleConfig": {"name": "modules"}, "repoConfig": {"configMapName": "repos"}, "secretEnv": "more",
            }}),
        ),
        (
            "exporter",
            json!({"dcgmExporter": {
                "config": {"name": "metrics"}, "hpcJobMapping": {"enabled": true}, "enablePodLabels": true, "hostPID": true,
                "hostNetwork": true, "service": {"type": "NodePort", "internalTrafficPolicy": "Local"},
            }}),
        ),
        ("MIG", json!({"mig": {"strategy": "mixed"}, "migManager": {"config": {"name": "layouts"}}})),
        (
            "vGPU host driver",
            json!({"vgpuManager": {
                "enabled": true, "repository": "registry.example", "image": "vgpu-manager", "version": "1",
                "kernelModuleConfig": {"name": "modules"},
            }}),
        ),
        (
            "kata",
            json!({
                "sandboxWorkloads": {"mode": "kata"},
                "kataSandboxDevicePlugin": {"enabled": true, "image": "registry.example/plugin:1"},
                "ccManager": {"enabled": true, "image": "registry.example/cc-manager:1", "defaultMode": "off"},
            }),
        ),
        (
            "passthrough by default",
            json!({"sandboxWorkloads": {"mode": "kubevirt", "defaultWorkload": "vm-passthrough"}}),
        ),
        ("precompiled", json!({"driver": {"usePrecompiled": true, "version": "595"}})),
        ("service monitor", json!({"dcgmExporter": {"serviceMonitor": {"enabled": true}}})),
        ("sandbox off", json!({"sandboxWorkloads": {"enabled": false}})),
        ("on delete", json!({"daemonsets": {"updateStrategy": "OnDelete"}})),
    ]
}

/// Applied for real: what the API server refuses would keep the generation from being observed.
#[test]
fn the_api_server_takes_every_object_of_every_variant() {
    turn(async |t| {
        for (name, key) in [
            ("time.slicing", "any"),
            ("modules", "nvidia.conf"),
            ("repos", "custom.list"),
            ("topology", "nvidia-topologyd.conf"),
            ("metrics", "dcgm-metrics.csv"),
            ("layouts", "config.yaml"),
        ] {
            config_map(t, name, key).await;
        }
        let _agent = container_node(t).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, peers_default()).await;
        until_applied(t).await;
        for (name, patch) in variants() {
            policies::patch(t, POLICY, &json!({"spec": patch})).await;
            let policy = until_applied(t).await;
            let ready = policies::ready(&policy).expect("a condition");
            let waits = ["OperandNotReady", "GPUNodeNotReady", "Reconciled"];
            assert!(waits.contains(&ready.reason.as_str()), "{name}: {}: {}", ready.reason, ready.message);
        }
    });
}

/// As its init container: with the rights that the chart gives it.
async fn plugin_check(t: &Turn, name: &str, patience: &str) -> Program {
    let kubeconfig = identity::service_account(t, "nvidia-operator-validator", None).await;
    let validations = t.dir.path().join("validations");
    let arguments = ["validate", "plugin", "--node=n1", "--timeout", patience, "--validations"];
    let arguments = [&arguments[..], &[validations.to_str().expect("UTF-8")]].concat();
    Program::start(t, name, &arguments, &[("KUBECONFIG", kubeconfig.as_os_str())])
}

#[test]
fn the_plugin_check_passes_when_the_node_offers_gpus_and_says_what_is_missing_until_then() {
    turn(async |t| {
        nodes::create(t, "n1", &[]).await;
        let passed = t.dir.path().join("validations/plugin-ready");
        let mut late = plugin_check(t, "late", "1s").await;
        assert!(!late.ended().await.success());
        late.says("node n1 offers neither nvidia.com/gpu nor nvidia.com/mig-*").await;
        late.says("kubectl logs ds/nvidia-device-plugin-daemonset").await;
        assert!(!passed.exists());

        let mut waits = plugin_check(t, "waits", "40s").await;
        let offer = json!({"status": {"capacity": {"nvidia.com/gpu": "2"}, "allocatable": {"nvidia.com/gpu": "2"}}});
        let nodes: Api<Node> = t.all();
        let done = nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&offer)).await;
        done.expect("a node's status should be patchable");
        assert!(waits.ended().await.success());
        assert!(passed.exists());
    });
}

#[test]
fn a_missing_config_map_is_named_and_its_coming_is_noticed() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _agent = container_node(t).await;
        let _operator = t.operator("op-1").await;
        let mut policy = peers_default();
        policy["spec"]["devicePlugin"]["config"] = json!({"name": "slices", "default": "any"});
        let _ = t.ours::<ConfigMap>().delete("slices", &DeleteParams::default()).await;
        policies::create(t, policy).await;
        let named = ["spec.devicePlugin.config.name", "no ConfigMap slices"];
        policies::until(t, POLICY, PolicyState::NotReady, "ConfigMapNotFound", &named).await;
        config_map(t, "slices", "other").await;
        policies::until(t, POLICY, PolicyState::NotReady, "ConfigMapKeyMissing", &["no key any", "other"]).await;
        config_map(t, "slices", "any").await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
    });
}

#[test]
fn a_service_monitor_without_the_prometheus_operator_is_a_condition_and_no_reason_to_be_not_ready() {
    turn(async |t| {
        let _operator = t.operator("op-1").await;
        let mut policy = policies::valid(POLICY);
        let exporter =
            json!({"enabled": true, "image": "registry.example/exporter:1", "serviceMonitor": {"enabled": true}});
        policy["spec"]["dcgmExporter"] = exporter;
        policies::create(t, policy).await;
        let condition = |policy: &ClusterPolicy| {
            let conditions = policy.status.iter().flat_map(|status| &status.conditions);
            conditions.clone().find(|c| c.type_ == "ServiceMonitorApplied").map(|c| c.message.clone())
        };
        let said =
            wait::until(&t.all(), POLICY, "it is said", |policy: &ClusterPolicy| condition(policy).is_some()).await;
        assert!(condition(&said).expect("a condition").contains("servicemonitors.monitoring.coreos.com"));
        let _kubelets = Kubelets::start(t);
        policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &[]).await;
        policies::patch(t, POLICY, &json!({"spec": {"dcgmExporter": {"serviceMonitor": {"enabled": false}}}})).await;
        wait::until(&t.all(), POLICY, "it goes", |policy: &ClusterPolicy| condition(policy).is_none()).await;
    });
}
