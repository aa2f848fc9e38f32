//! KubeVirt's own API types, virt-api and virt-controller (tests/cluster/kubevirt.sh), put into the ring's cluster once.

use std::sync::OnceLock;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{Cluster, script},
    wait,
};

/// Namespace of the instances.
pub const VMS: &str = "vms";
/// The one object, and its namespace.
pub const NAME: &str = "kubevirt";

static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();

pub fn is_installed() -> bool {
    INSTALLED.get().is_some()
}

/// About sixteen seconds, the first time. `node` is told what virt-handler would tell it, so that instances' pods go
/// there; without one (`""`) instances get as far as a pod.
pub fn install(cluster: &Cluster, node: &str) {
    let installed = INSTALLED
        .get_or_init(|| script("tests/cluster/kubevirt.sh", [cluster.state()], &[("NODE", node.as_ref())]).map(drop));
    installed.as_ref().unwrap_or_else(|error| panic!("{error}"));
}

pub fn kind(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

pub fn api(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), NAME, &kind("kubevirt.io", "v1", "KubeVirt"))
}

pub fn instances(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), VMS, &kind("kubevirt.io", "v1", "VirtualMachineInstance"))
}

/// Where the instances go.
pub async fn namespace(client: &Client) {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut vms = Namespace::default();
    vms.metadata.name = Some(VMS.to_owned());
    let _exists = namespaces.create(&PostParams::default(), &vms).await;
}

/// As it was after the installation, with this for `permittedHostDevices`.
pub async fn fresh(client: &Client, permitted: &Value) {
    namespace(client).await;
    delete_all(client).await;
    let annotations = json!({
        crds::labels::PERMITTED_HOST_DEVICES: null, crds::labels::PERMITTED_WAS_UNSET: null,
        crds::labels::MEDIATED_DEVICES_OFF: null,
    });
    // A merge patch keeps what it does not name: the field has to go before it comes.
    permit(client, &Value::Null).await;
    let unset = json!({"configuration": {"mediatedDevicesConfiguration": null}});
    let clean = json!({"metadata": {"annotations": annotations}, "spec": unset});
    api(client)
        .patch(NAME, &PatchParams::default(), &Patch::Merge(&clean))
        .await
        .expect("KubeVirt should be patchable");
    permit(client, permitted).await;
}

/// As a user does, by merge patch.
pub async fn permit(client: &Client, permitted: &Value) {
    let patch = json!({"spec": {"configuration": {"permittedHostDevices": permitted}}});
    api(client)
        .patch(NAME, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .expect("KubeVirt should be patchable");
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

/// What a drain does with instances that come from now on and do not say it themselves.
pub async fn evict_by_default(client: &Client, strategy: Option<&str>) {
    let patch = json!({"spec": {"configuration": {"evictionStrategy": strategy}}});
    api(client)
        .patch(NAME, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .expect("KubeVirt should be patchable");
    let expected = strategy.unwrap_or("None");
    let mut probe = instance("probe", &[]);
    probe.metadata.namespace = Some(VMS.to_owned());
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    wait::eventually("virt-api knows of it", async || {
        let made = instances(client).create(&dry, &probe).await.ok()?;
        (made.data.pointer("/spec/evictionStrategy")?.as_str()? == expected).then_some(())
    })
    .await;
}

/// An instance that asks for these GPUs, named `gpu1` and on, in this order.
pub async fn start_vm(client: &Client, name: &str, resources: &[&str]) -> DynamicObject {
    let vm = instance(name, resources);
    // The webhook's endpoint is served a moment after it was registered.
    wait::eventually("KubeVirt takes an instance", async || {
        instances(client).create(&PostParams::default(), &vm).await.ok()
    })
    .await
}

pub fn machines(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), VMS, &kind("kubevirt.io", "v1", "VirtualMachine"))
}

/// A `VirtualMachine` that is to run always, with such an instance.
pub async fn start_machine(client: &Client, name: &str, resources: &[&str]) -> DynamicObject {
    let mut machine = DynamicObject::new(name, &kind("kubevirt.io", "v1", "VirtualMachine"));
    let template = json!({"metadata": {}, "spec": instance(name, resources).data["spec"]});
    machine.data = json!({"spec": {"runStrategy": "Always", "template": template}});
    wait::eventually("KubeVirt takes a machine", async || {
        machines(client).create(&PostParams::default(), &machine).await.ok()
    })
    .await
}

fn instance(name: &str, resources: &[&str]) -> DynamicObject {
    let gpus: Vec<Value> = resources
        .iter()
        .enumerate()
        .map(|(n, resource)| json!({"name": format!("gpu{}", n + 1), "deviceName": resource}))
        .collect();
    let mut vm = DynamicObject::new(name, &kind("kubevirt.io", "v1", "VirtualMachineInstance"));
    vm.data = json!({"spec": {
        "terminationGracePeriodSeconds": 0,
        "domain": {
            "resources": {"requests": {"memory": "64Mi"}},
            "devices": {"autoattachPodInterface": false, "gpus": gpus},
        },
    }});
    vm
}

pub async fn delete(client: &Client, name: &str) {
    let vm = instances(client).get(name).await.expect("the instance should be there");
    instances(client).delete(name, &DeleteParams::default()).await.expect("an instance should be deletable");
    wait::until_gone(&instances(client), &vm, "the instance goes").await;
}

/// Of every machine and instance, if KubeVirt is there.
pub async fn delete_all(client: &Client) {
    for machine in machines(client).list(&ListParams::default()).await.into_iter().flatten() {
        let name = machine.name_any();
        machines(client).delete(&name, &DeleteParams::default()).await.expect("a machine should be deletable");
        wait::until_gone(&machines(client), &machine, "the machine goes").await;
    }
    let Ok(found) = instances(client).list(&ListParams::default()).await else { return };
    for instance in found {
        delete(client, &instance.name_any()).await;
    }
}

/// What KubeVirt says when it refuses to make the pod.
pub async fn until_refused(client: &Client, name: &str, resource: &str) {
    let says = format!("GPU {resource} is not permitted in permittedHostDevices configuration");
    let refused = |vm: &DynamicObject| {
        let conditions = vm.data.pointer("/status/conditions").and_then(Value::as_array);
        conditions.into_iter().flatten().any(|c| c["message"].as_str().is_some_and(|text| text.contains(&says)))
    };
    wait::until(&instances(client), name, &says, refused).await;
}

/// The pod that KubeVirt makes of it.
pub async fn until_launcher(client: &Client, name: &str) -> Pod {
    let pods: Api<Pod> = Api::namespaced(client.clone(), VMS);
    let of_vm = ListParams::default().labels(&format!("vm.kubevirt.io/name={name}"));
    wait::eventually(&format!("a pod for {name}"), async || {
        pods.list(&of_vm).await.expect("pods should be listable").items.into_iter().next()
    })
    .await
}

/// It asks for one device of this resource.
pub async fn until_pod(client: &Client, name: &str, resource: &str) {
    let pod = until_launcher(client, name).await;
    let limits = pod.spec.into_iter().flat_map(|spec| spec.containers).filter_map(|c| c.resources?.limits);
    let asked: Vec<String> = limits.filter_map(|limits| limits.get(resource).map(|count| count.0.clone())).collect();
    assert_eq!(asked, ["1"], "the pod asks for the GPU");
}

/// As far as virt-controller takes it: the launcher runs.
pub async fn until_phase(client: &Client, name: &str, phase: &str) -> DynamicObject {
    let is = |vm: &DynamicObject| vm.data.pointer("/status/phase").and_then(Value::as_str) == Some(phase);
    wait::until(&instances(client), name, &format!("phase {phase}"), is).await
}

/// PCI addresses, or UUIDs of mediated devices, of the host devices that KubeVirt's own code, in the instance's launcher,
/// makes of what the kubelet gave.
pub async fn host_devices(client: &Client, cluster: &Cluster, vm: &DynamicObject) -> Vec<String> {
    let pod = until_launcher(client, &vm.name_any()).await.name_any();
    let gpus = vm.data.pointer("/spec/domain/devices/gpus").expect("the instance should ask for GPUs").to_string();
    let made = cluster.kubectl(&["-n", VMS, "exec", &pod, "--", "virt-launcher-monitor", "gpus", &gpus]);
    let xml = made.unwrap_or_else(|error| panic!("{error}"));
    addresses(&xml)
}

/// Of all host devices in libvirt's words.
pub fn addresses(xml: &str) -> Vec<String> {
    xml.lines().filter(|line| line.contains("<address ")).map(address).collect()
}

/// Of libvirt's `<address type="pci" domain="0x0000" bus="0x43" slot="0x00" function="0x0"…>` or `<address uuid="…">`.
fn address(line: &str) -> String {
    if let Some((_, uuid)) = line.split_once("uuid=\"") {
        return uuid.split('"').next().unwrap_or_default().to_owned();
    }
    let part = |key: &str| {
        let value = line.split(&format!("{key}=\"0x")).nth(1).and_then(|rest| rest.split('"').next());
        value.unwrap_or_else(|| panic!("{key} in {line}"))
    };
    format!("{}:{}:{}.{}", part("domain"), part("bus"), part("slot"), part("function"))
}
