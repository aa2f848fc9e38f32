//! KubeVirt's own API types, virt-api and virt-controller (tests/cluster/kubevirt.sh), put into the ring's cluster once.

use std::sync::OnceLock;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{cluster::script, turn::Turn, wait};

const VMS: &str = "vms";
/// The one object, and its namespace.
pub const NAME: &str = "kubevirt";

static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();

pub fn is_installed() -> bool {
    INSTALLED.get().is_some()
}

/// About sixteen seconds, the first time. No node of the cluster is told about it: instances get as far as a pod.
pub fn install(t: &Turn) {
    let installed = INSTALLED
        .get_or_init(|| script("tests/cluster/kubevirt.sh", [t.cluster.state()], &[("NODE", "".as_ref())]).map(drop));
    installed.as_ref().unwrap_or_else(|error| panic!("{error}"));
}

pub fn kind(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

pub fn api(t: &Turn) -> Api<DynamicObject> {
    Api::namespaced_with(t.client.clone(), NAME, &kind("kubevirt.io", "v1", "KubeVirt"))
}

fn instances(t: &Turn) -> Api<DynamicObject> {
    Api::namespaced_with(t.client.clone(), VMS, &kind("kubevirt.io", "v1", "VirtualMachineInstance"))
}

/// As it was after the installation, with this for `permittedHostDevices`.
pub async fn fresh(t: &Turn, permitted: &Value) {
    let namespaces: Api<Namespace> = t.all();
    let mut vms = Namespace::default();
    vms.metadata.name = Some(VMS.to_owned());
    let _exists = namespaces.create(&PostParams::default(), &vms).await;
    for instance in instances(t).list(&ListParams::default()).await.expect("instances should be listable") {
        delete(t, &instance.name_any()).await;
    }
    let annotations = json!({
        crds::labels::PERMITTED_HOST_DEVICES: null, crds::labels::PERMITTED_WAS_UNSET: null,
    });
    // A merge patch keeps what it does not name: the field has to go before it comes.
    permit(t, &Value::Null).await;
    let clean = json!({"metadata": {"annotations": annotations}});
    api(t).patch(NAME, &PatchParams::default(), &Patch::Merge(&clean)).await.expect("KubeVirt should be patchable");
    permit(t, permitted).await;
}

/// As a user does, by merge patch.
pub async fn permit(t: &Turn, permitted: &Value) {
    let patch = json!({"spec": {"configuration": {"permittedHostDevices": permitted}}});
    api(t).patch(NAME, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("KubeVirt should be patchable");
}

pub fn permitted(object: &DynamicObject) -> Option<&Value> {
    object.data.pointer("/spec/configuration/permittedHostDevices")
}

/// Resource names of `pciHostDevices`, in order.
pub fn resources(object: &DynamicObject) -> Vec<&str> {
    let list = permitted(object).and_then(|field| field.get("pciHostDevices")).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|entry| entry["resourceName"].as_str()).collect()
}

/// The object, once `holds` is true of it.
pub async fn until(
    api: &Api<DynamicObject>,
    name: &str,
    promise: &str,
    holds: impl Fn(&DynamicObject) -> bool,
) -> DynamicObject {
    wait::until(api, name, promise, holds).await
}

/// An instance that asks for one GPU of this resource.
pub async fn start_vm(t: &Turn, name: &str, resource: &str) -> DynamicObject {
    let mut vm = DynamicObject::new(name, &kind("kubevirt.io", "v1", "VirtualMachineInstance"));
    vm.data = json!({"spec": {
        "terminationGracePeriodSeconds": 0,
        "domain": {
            "resources": {"requests": {"memory": "64Mi"}},
            "devices": {"autoattachPodInterface": false, "gpus": [{"name": "gpu1", "deviceName": resource}]},
        },
    }});
    // The webhook's endpoint is served a moment after it was registered.
    wait::eventually("KubeVirt takes an instance", async || instances(t).create(&PostParams::default(), &vm).await.ok())
        .await
}

pub async fn delete(t: &Turn, name: &str) {
    let vm = instances(t).get(name).await.expect("the instance should be there");
    instances(t).delete(name, &DeleteParams::default()).await.expect("an instance should be deletable");
    wait::until_gone(&instances(t), &vm, "the instance goes").await;
}

/// What KubeVirt says when it refuses to make the pod.
pub async fn until_refused(t: &Turn, name: &str, resource: &str) {
    let says = format!("GPU {resource} is not permitted in permittedHostDevices configuration");
    let refused = |vm: &DynamicObject| {
        let conditions = vm.data.pointer("/status/conditions").and_then(Value::as_array);
        conditions.into_iter().flatten().any(|c| c["message"].as_str().is_some_and(|text| text.contains(&says)))
    };
    wait::until(&instances(t), name, &says, refused).await;
}

/// The pod that KubeVirt makes of it, and that it asks for one device of this resource.
pub async fn until_pod(t: &Turn, name: &str, resource: &str) {
    let pods: Api<Pod> = Api::namespaced(t.client.clone(), VMS);
    let of_vm = ListParams::default().labels(&format!("vm.kubevirt.io/name={name}"));
    let pod = wait::eventually(&format!("a pod for {name}"), async || {
        pods.list(&of_vm).await.expect("pods should be listable").items.into_iter().next()
    })
    .await;
    let limits = pod.spec.into_iter().flat_map(|spec| spec.containers).filter_map(|c| c.resources?.limits);
    let asked: Vec<String> = limits.filter_map(|limits| limits.get(resource).map(|count| count.0.clone())).collect();
    assert_eq!(asked, ["1"], "the pod asks for the GPU");
}
