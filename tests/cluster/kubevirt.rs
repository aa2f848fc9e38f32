//! KubeVirt's own controllers, and `permittedHostDevices` as gpuvirt keeps it.

use crds::{
    labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{GPUNode, GPUVirtConfig},
};
use k8s_openapi::{
    api::core::v1::Node, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::support::{
    agents::{Agent, T4, t4},
    kubelets::Kubelets,
    kubevirt::{self, permitted, resources},
    nodes, policies,
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
const WIRED: &str = "KubeVirtWired";
pub const HYPER_CONVERGED: &str = "hyperconvergeds.hco.kubevirt.io";

pub fn nic() -> Value {
    json!({"pciVendorSelector": "8086:1572", "resourceName": "intel.com/x710"})
}

fn entry() -> Value {
    json!({"pciVendorSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true})
}

/// `n1` offers a T4.
pub async fn offering(t: &Turn) -> Agent {
    nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
    let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
    policies::create(t, policies::valid(POLICY)).await;
    agent.until_reason(t, true, "Serving").await;
    agent
}

fn wired(conditions: &[Condition]) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.type_ == WIRED)
}

fn of_policy(policy: &ClusterPolicy) -> Option<&Condition> {
    wired(&policy.status.as_ref()?.conditions)
}

pub async fn until_wired(t: &Turn, status: &str, reason: &str, words: &[&str]) {
    let promise = format!("{WIRED} is {status}, reason {reason}, message with {words:?}");
    wait::until(&t.all(), POLICY, &promise, |policy: &ClusterPolicy| {
        of_policy(policy).is_some_and(|c| {
            c.status == status && c.reason == reason && words.iter().all(|word| c.message.contains(word))
        })
    })
    .await;
}

pub async fn until_permitted(t: &Turn, expected: &[&str]) -> DynamicObject {
    let promise = format!("KubeVirt permits {expected:?}");
    kubevirt::until(&kubevirt::api(&t.client), kubevirt::NAME, &promise, |object| resources(object) == expected).await
}

async fn uninstall(t: &Turn) {
    let policies: Api<ClusterPolicy> = t.all();
    let policy = policies.get(POLICY).await.expect("the policy should be there");
    policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
    wait::until_gone(&policies, &policy, "the policy goes").await;
}

/// KubeVirt is there. Whichever test comes first sees how it comes: later than gpuvirt.
pub async fn with_kubevirt(t: &Turn, field: Value) {
    if !kubevirt::is_installed() {
        let _kubelets = Kubelets::start(t);
        let operator = t.operator("op-0").await;
        let _agent = offering(t).await;
        let policy = policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        assert_eq!(of_policy(&policy), None, "nothing is said while there is no KubeVirt");
        let log = operator.log();
        // A watch on a kind that is not served is refused; one that a new API server lets expire is begun anew.
        let in_vain = |line: &&str| line.contains("interrupted") && !line.contains("Expired");
        assert_eq!(log.lines().find(in_vain), None, "nothing is watched in vain");
        kubevirt::install(t.cluster, "");
        let object = until_permitted(t, &[T4]).await;
        nodes::until_event(t, object.uid(), "HostDevicesPermitted").await;
        until_wired(t, "True", "Permitted", &[T4, "KubeVirt kubevirt/kubevirt"]).await;
        kubevirt::namespace(&t.client).await;
        let vm = kubevirt::start_vm(&t.client, "vm-1", &["nvidia.com/T4"]).await;
        nodes::until_event(t, vm.uid(), "GPUNameUnknown").await;
        kubevirt::delete(&t.client, "vm-1").await;
        uninstall(t).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(permitted(&object), None, "unset, as it was before");
        assert!(!object.annotations().keys().any(|key| key.starts_with("gpuvirt.io/")));
        operator.stop().await;
        t.all::<GPUNode>()
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await
            .expect("deletable");
        t.all::<Node>().delete("n1", &DeleteParams::default()).await.expect("deletable");
    }
    // A failed test may have left it.
    let crds: Api<CustomResourceDefinition> = t.all();
    if let Ok(Some(left)) = crds.get_opt(HYPER_CONVERGED).await {
        crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&crds, &left, "HyperConverged goes").await;
    }
    kubevirt::fresh(&t.client, &field).await;
}

#[test]
fn kubevirt_that_is_installed_later_is_found_and_left_as_it_was() {
    turn(async |t| with_kubevirt(t, Value::Null).await);
}

#[test]
fn a_vm_is_refused_before_its_gpu_is_permitted_and_gets_its_pod_after() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        kubevirt::start_vm(&t.client, "vm-1", &[T4]).await;
        kubevirt::until_refused(&t.client, "vm-1", T4).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let object = until_permitted(t, &["intel.com/x710", T4]).await;
        assert_eq!(
            permitted(&object),
            Some(&json!({"pciHostDevices": [nic(), entry()]})),
            "the user's entry as it was"
        );
        kubevirt::until_pod(&t.client, "vm-1", T4).await;
        kubevirt::delete(&t.client, "vm-1").await;
        uninstall(t).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(permitted(&object), Some(&json!({"pciHostDevices": [nic()]})), "ours goes and the user's stays");
    });
}

/// One write of a user who replaces the list, good only for what was read. Every other one takes our entry out.
async fn user_writes(api: &Api<DynamicObject>, number: usize) {
    let mut added = nic();
    added["resourceName"] = json!(format!("intel.com/x{number}"));
    added["pciVendorSelector"] = json!(format!("8086:{number:04}"));
    loop {
        let mut object = api.get(kubevirt::NAME).await.expect("KubeVirt should be there");
        let list = object.data.pointer_mut("/spec/configuration/permittedHostDevices/pciHostDevices");
        let list = list.and_then(Value::as_array_mut).expect("a list");
        list.retain(|entry| number.is_multiple_of(2) || entry["resourceName"] != T4);
        list.push(added.clone());
        match api.replace(kubevirt::NAME, &PostParams::default(), &object).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn somebody_who_writes_at_the_same_moment_loses_nothing_and_neither_do_we() {
    const WRITES: usize = 40;
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        let api = kubevirt::api(&t.client);
        for number in 0..WRITES {
            user_writes(&api, number).await;
        }
        let promise = "ours and every entry of the user, once";
        kubevirt::until(&api, kubevirt::NAME, promise, |object| {
            let found = resources(object);
            let count = |name: &str| found.iter().filter(|found| **found == name).count();
            count(T4) == 1 && (0..WRITES).all(|number| count(&format!("intel.com/x{number}")) == 1)
        })
        .await;
    });
}

#[test]
fn the_first_entry_waits_for_a_vm_that_would_lose_its_device() {
    turn(async |t| {
        with_kubevirt(t, Value::Null).await;
        kubevirt::start_vm(&t.client, "vm-1", &["example.com/other"]).await;
        kubevirt::until_pod(&t.client, "vm-1", "example.com/other").await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let words = ["VirtualMachineInstance vms/vm-1", "example.com/other", "by hand"];
        until_wired(t, "False", "PermittingWouldBreakVMs", &words).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(permitted(&object), None);
        kubevirt::delete(&t.client, "vm-1").await;
        until_permitted(t, &[T4]).await;
        until_wired(t, "True", "Permitted", &[T4]).await;
    });
}

async fn set_mode(t: &Turn, mode: &str) {
    let patch = json!({
        "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUVirtConfig", "metadata": {"name": "default"},
        "spec": {"kubevirt": {"mode": mode}},
    });
    let configs: Api<GPUVirtConfig> = t.all();
    let params = PatchParams::apply("user").force();
    configs.patch("default", &params, &Patch::Apply(&patch)).await.expect("a config should be accepted");
}

#[test]
fn report_shows_the_entry_and_manage_writes_it_and_off_is_silent() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        set_mode(t, "Report").await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        until_wired(t, "False", "NotPermitted", &["10DE:1EB8", T4, "spec.configuration.permittedHostDevices"]).await;
        let configs: Api<GPUVirtConfig> = t.all();
        wait::until(&configs, "default", "the config says it too", |config: &GPUVirtConfig| {
            let conditions = config.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
            wired(conditions).is_some_and(|c| c.reason == "NotPermitted")
        })
        .await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(resources(&object), ["intel.com/x710"]);
        nodes::until_event(t, object.uid(), "NotPermitted").await;

        set_mode(t, "Manage").await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        until_wired(t, "True", "Permitted", &[]).await;

        set_mode(t, "Off").await;
        let silent = |policy: &ClusterPolicy| of_policy(policy).is_none();
        wait::until(&t.all(), POLICY, "nothing is said of KubeVirt", silent).await;
    });
}

#[test]
fn a_conflict_is_shown_until_the_user_has_solved_it() {
    turn(async |t| {
        let mut old = entry();
        old["resourceName"] = json!("nvidia.com/TU104GL_Tesla_T4");
        with_kubevirt(t, json!({"pciHostDevices": [old]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let words = ["nvidia.com/TU104GL_Tesla_T4", T4, "resourceAliases"];
        until_wired(t, "False", "SelectorHasAnotherName", &words).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(permitted(&object), Some(&json!({"pciHostDevices": [old]})), "the user's entry as it was");
        kubevirt::permit(&t.client, &json!({"pciHostDevices": [entry()]})).await;
        until_wired(t, "True", "Permitted", &[]).await;
        uninstall(t).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(resources(&object), [T4], "an entry that the user made is not ours to remove");
    });
}

#[test]
fn an_entry_goes_with_the_last_node_that_has_the_gpu() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = offering(t).await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        // Back to containers: the GPU may be offered again, so the entry stays.
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await;
        agent.until(t, "withdrawn", |node| node.spec.mode == Some(crds::WorkloadMode::Container)).await;
        agent.until_reason(t, true, "Serving").await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        drop(agent);
        let all: Api<Node> = t.all();
        all.delete("n1", &DeleteParams::default()).await.expect("deletable");
        let object = until_permitted(t, &["intel.com/x710"]).await;
        nodes::until_event(t, object.uid(), "HostDevicesWithdrawn").await;
    });
}
