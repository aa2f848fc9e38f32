//! KubeVirt's own controllers on this node, and its own host-device builder in launchers that have real vfio devices.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode, labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUStatus, GPUVirtConfig},
};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    mdev::WITH_FUNCTIONS,
    node::{GPU, H100, Lab, NODE, T4, lab},
    support::{
        NAMESPACE,
        kubevirt::{self, VMS},
        wait,
    },
};

const SECOND_T4: &str = "0000:44:00.0";
const RTX_4000: &str = "0000:01:00.0";
const ALIAS: &str = "nvidia.com/rtx-4000";

/// KubeVirt permits somebody's network card, and so nothing else.
pub async fn with_kubevirt(lab: &Lab) {
    kubevirt::install(lab.cluster, NODE);
    let nic = json!({"pciVendorSelector": "8086:1572", "resourceName": "intel.com/x710"});
    kubevirt::fresh(&lab.client, &json!({"pciHostDevices": [nic]})).await;
}

/// An instance that asks for these, once its launcher runs on the node.
pub async fn running(lab: &Lab, name: &str, resources: &[&str]) -> DynamicObject {
    kubevirt::start_vm(&lab.client, name, resources).await;
    let vm = kubevirt::until_phase(&lab.client, name, "Scheduled").await;
    assert_eq!(vm.data.pointer("/status/nodeName"), Some(&json!(NODE)));
    vm
}

pub async fn host_devices(lab: &Lab, vm: &DynamicObject) -> Vec<String> {
    kubevirt::host_devices(&lab.client, lab.cluster, vm).await
}

/// The launcher, as far as nothing may change while its VM runs.
pub async fn launcher(lab: &Lab, name: &str) -> (Option<String>, String, i32) {
    let pod: Pod = kubevirt::until_launcher(&lab.client, name).await;
    let restarts = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count).sum();
    (pod.uid(), pod.name_any(), restarts)
}

async fn alias(lab: &Lab, selector: &str, name: &str) {
    let config = json!({
        "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUVirtConfig", "metadata": {"name": "default"},
        "spec": {"resourceAliases": [{"selector": selector, "name": name}]},
    });
    let configs: Api<GPUVirtConfig> = Api::all(lab.client.clone());
    let params = PatchParams::apply("user").force();
    configs.patch("default", &params, &Patch::Apply(&config)).await.expect("a config should be accepted");
}

/// The note of an event about this very object.
pub async fn told(lab: &Lab, object: &DynamicObject, reason: &str) -> String {
    let events: Api<Event> = Api::all(lab.client.clone());
    let about = ListParams::default().fields(&format!("involvedObject.uid={}", object.uid().unwrap_or_default()));
    wait::eventually(&format!("an event {reason}"), async || {
        let found = events.list(&about).await.ok()?;
        found.items.into_iter().find(|event| event.reason.as_deref() == Some(reason))?.message
    })
    .await
}

/// Deploy labels that are on.
pub async fn deployed(lab: &Lab) -> BTreeSet<String> {
    let node = Api::<Node>::all(lab.client.clone()).get(NODE).await.expect("the node");
    let on = node.labels().iter().filter(|(key, value)| key.starts_with(labels::DEPLOY_PREFIX) && *value == "true");
    on.map(|(key, _)| key.clone()).collect()
}

#[test]
fn a_change_of_label_gives_vms_as_many_host_devices_as_gpus_and_never_an_audio_function() {
    lab(WorkloadMode::Container, async |lab, _| {
        with_kubevirt(lab).await;
        // KubeVirt keeps the hyphen in the variable's name.
        alias(lab, "10de:1eb1", ALIAS).await;
        kubevirt::start_vm(&lab.client, "rtx", &[ALIAS]).await;
        kubevirt::until_refused(&lab.client, "rtx", ALIAS).await;
        lab.switch(WorkloadMode::VmPassthrough).await;
        let rtx = kubevirt::until_phase(&lab.client, "rtx", "Scheduled").await;
        assert_eq!(host_devices(lab, &rtx).await, [RTX_4000], "its audio function takes no slot");

        let two = running(lab, "two", &[H100, H100]).await;
        assert_eq!(sorted(host_devices(lab, &two).await), ["0000:83:00.0", "0000:84:00.0"]);
        kubevirt::delete_all(&lab.client).await;

        let four = running(lab, "four", &[H100, T4, T4, H100]).await;
        let found = host_devices(lab, &four).await;
        assert_eq!(found.len(), 4, "{found:?}");
        let of = |places: [usize; 2]| sorted(places.map(|place| found[place].clone()).to_vec());
        assert_eq!(of([0, 3]), ["0000:83:00.0", "0000:84:00.0"], "the H100s in the order of the spec: {found:?}");
        assert_eq!(of([1, 2]), [GPU, SECOND_T4], "the T4s: {found:?}");
    });
}

#[test]
fn a_running_vm_outlives_the_agent_and_keeps_the_mode_that_it_runs_in() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        with_kubevirt(lab).await;
        // Not the VM's own, but what KubeVirt gives to a VM that has none.
        kubevirt::evict_by_default(&lab.client, Some("LiveMigrate")).await;
        kubevirt::start_vm(&lab.client, "vm", &[T4]).await;
        kubevirt::evict_by_default(&lab.client, None).await;
        let vm = kubevirt::until_phase(&lab.client, "vm", "Scheduled").await;
        let before = launcher(lab, "vm").await;
        let devices = host_devices(lab, &vm).await;
        let labels = deployed(lab).await;

        let agent = lab.agent_pod().await;
        lab.delete_pod(NAMESPACE, &agent).await;
        let pod = format!("{VMS}/{}", before.1);
        let held = |gpu: &GPUStatus| gpu.holders.iter().any(|h| h.pod.as_deref() == Some(pod.as_str()));
        lab.until_gpu(&devices[0], "the next agent knows whose it is", held).await;
        lab.until_allocatable(T4, "2").await;

        lab.label(WorkloadMode::Container).await;
        lab.until_refused(&["in use by VM vms/vm", &pod, &devices[0]]).await;
        let waits = |node: &GPUNode| {
            let operator = node.status.as_ref().and_then(|status| status.operator.as_ref());
            let conditions = operator.map(|operator| operator.conditions.as_slice()).unwrap_or_default();
            let drain = conditions.iter().find(|condition| condition.type_ == "VMsDrainable");
            drain.is_some_and(|drain| drain.status == "False" && drain.message.contains("vms/vm"))
        };
        wait::until(&lab.gpu_nodes(), NODE, "a drain would wait for the VM", waits).await;
        assert_eq!(deployed(lab).await, labels, "the old mode's labels are there");
        assert!(lab.drivers().values().all(|driver| driver == "vfio-pci"));
        assert_eq!(launcher(lab, "vm").await, before, "nothing has happened to the VM");
        assert_eq!(host_devices(lab, &vm).await, devices);

        kubevirt::delete(&lab.client, "vm").await;
        lab.until_serving(WorkloadMode::Container).await;
    });
}

#[test]
fn a_gpu_that_is_not_healthy_is_given_to_no_vm() {
    lab(WorkloadMode::VmPassthrough, async |lab, node| {
        with_kubevirt(lab).await;
        let group = crate::node::gpu(&node, GPU).and_then(|gpu| gpu.iommu_group).expect("a group");
        // Somebody whom the kubelet knows nothing of.
        let holder = lab.hold(&format!("hold {group} {GPU} 1000"));
        lab.until_holder(&holder).await;
        lab.until_allocatable(T4, "1").await;
        kubevirt::start_vm(&lab.client, "two", &[T4, T4]).await;
        let waits = |vm: &DynamicObject| {
            let conditions = vm.data.pointer("/status/conditions").and_then(serde_json::Value::as_array);
            let short = format!("Insufficient {T4}");
            conditions.into_iter().flatten().any(|c| c["message"].as_str().is_some_and(|text| text.contains(&short)))
        };
        let two = wait::until(&kubevirt::instances(&lab.client), "two", "one T4 is too few", waits).await;
        let said = told(lab, &two, "GPUUnhealthy").await;
        assert!(said.contains(GPU) && said.contains(&holder), "it is told which one, and who has it: {said}");
        let one = running(lab, "one", &[T4]).await;
        assert_eq!(host_devices(lab, &one).await, [SECOND_T4]);
        lab.end(&holder);
        kubevirt::delete(&lab.client, "one").await;
        let two = kubevirt::until_phase(&lab.client, "two", "Scheduled").await;
        assert_eq!(sorted(host_devices(lab, &two).await), [GPU, SECOND_T4]);
        kubevirt::delete_all(&lab.client).await;
    });
}

#[test]
fn a_vm_with_a_vgpu_gets_its_uuid_as_a_mediated_device_and_kubevirt_makes_none_itself() {
    const Q4: &str = "nvidia.com/GRID_T4-4Q";
    lab(WorkloadMode::Container, async |lab, _| {
        with_kubevirt(lab).await;
        lab.label_vgpus("T4-4Q").await;
        lab.until_serving(WorkloadMode::VmVgpu).await;
        let vm = running(lab, "vgpu", &[Q4]).await;
        let object = kubevirt::api(&lab.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        let configured = |path: &str| object.data.pointer(&format!("/spec/configuration{path}")).cloned();
        let entry = json!({"mdevNameSelector": "GRID T4-4Q", "resourceName": Q4, "externalResourceProvider": true});
        assert_eq!(configured("/permittedHostDevices/mediatedDevices"), Some(json!([entry])));
        assert_eq!(configured("/mediatedDevicesConfiguration/enabled"), Some(json!(false)));

        let devices = host_devices(lab, &vm).await;
        let [uuid] = devices.as_slice() else { panic!("one host device: {devices:?}") };
        let made = [lab.mdevs(GPU), lab.mdevs(SECOND_T4)].concat();
        assert!(made.contains(uuid), "{uuid} is one of {made:?}");
        let node = lab.gpu_nodes().get(NODE).await.expect("the GPUNode");
        let parts = [GPU, SECOND_T4].map(|address| crate::node::gpu(&node, address).and_then(|gpu| gpu.vgpu.clone()));
        let own = parts.iter().flatten().flat_map(|vgpu| &vgpu.instances).find(|vgpu| vgpu.id == *uuid);
        assert_eq!(own.and_then(|own| own.resource.as_deref()), Some(Q4));
        kubevirt::delete(&lab.client, "vgpu").await;
    });
}

#[test]
fn a_vm_with_a_virtual_function_gets_it_as_a_pci_device_and_the_condition_says_what_kubevirt_is_too_old_for() {
    const Q24: &str = "nvidia.com/NVIDIA_L40S-24Q";
    lab(WorkloadMode::Container, async |lab, _| {
        with_kubevirt(lab).await;
        // As its operator writes it, which is not here.
        let version = json!({"status": {"observedKubeVirtVersion": "v1.8.0"}});
        let api = kubevirt::api(&lab.client);
        let merge = Patch::Merge(&version);
        api.patch_status(kubevirt::NAME, &PatchParams::default(), &merge).await.expect("a status should be writable");
        lab.board_with_functions(true);
        lab.until_gpu(WITH_FUNCTIONS, "the L40S is seen", |gpu| gpu.driver.as_deref() == Some("nvidia")).await;
        lab.label_vgpus("L40S-24Q").await;
        lab.until_allocatable(Q24, "2").await;
        let vm = running(lab, "vf", &[Q24]).await;
        let devices = host_devices(lab, &vm).await;
        let [function] = devices.as_slice() else { panic!("one host device: {devices:?}") };
        let node = lab.gpu_nodes().get(NODE).await.expect("the GPUNode");
        let board = crate::node::gpu(&node, WITH_FUNCTIONS).and_then(|gpu| gpu.vgpu.clone()).expect("its vGPUs");
        let own = board.instances.iter().find(|vgpu| vgpu.id == *function).expect("the VM's is one of them");
        assert_eq!((own.kind.as_str(), own.resource.as_deref()), ("L40S-24Q", Some(Q24)));

        let object = kubevirt::api(&lab.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        let list = object.data.pointer("/spec/configuration/permittedHostDevices/pciHostDevices").cloned();
        let entry = json!({"pciVendorSelector": "10DE:26B9", "resourceName": Q24, "externalResourceProvider": true});
        assert!(list.is_some_and(|list| list.as_array().is_some_and(|all| all.contains(&entry))));
        let policies: Api<ClusterPolicy> = Api::all(lab.client.clone());
        let told = |policy: &ClusterPolicy| {
            let conditions = policy.status.iter().flat_map(|status| status.conditions.iter());
            conditions
                .into_iter()
                .any(|c| c.type_ == "KubeVirtWired" && c.reason == "KubeVirtTooOld" && c.message.contains(Q24))
        };
        wait::until(&policies, "cluster-policy", "KubeVirt 1.8 was not made for virtual functions", told).await;

        // Another layout leaves the VM's alone, and says whose it is.
        lab.label_vgpus("L40S-16Q").await;
        lab.until_refused(&[function, "vms/virt-launcher-vf"]).await;
        assert_eq!(host_devices(lab, &vm).await, devices);
        kubevirt::delete(&lab.client, "vf").await;
        lab.switch(WorkloadMode::Container).await;
        lab.board_with_functions(false);
    });
}

fn sorted(mut addresses: Vec<String>) -> Vec<String> {
    addresses.sort_unstable();
    addresses
}
