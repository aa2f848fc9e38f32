//! vGPU layouts from the node's label to its agent, and into KubeVirt. The agent is played.

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUStatus, Holder, VgpuFramework},
};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    hyperconverged::{self, crd::Release},
    kubevirt::{nic, until_wired, with_kubevirt},
    support::{
        agents::{self, Agent, Host, Maker},
        cluster::{command, run, tools},
        kubelets::Kubelets,
        kubevirt, nodes, policies,
        turn::{Turn, turn},
        wait,
    },
};

const POLICY: &str = "cluster-policy";
const A10_4Q: &str = "nvidia.com/NVIDIA_A10-4Q";
const GPU: &str = "0000:18:00.0";
const CONFIG: &str = "my-vgpus";

const MDEV: Maker = Maker { framework: VgpuFramework::Mdev, types: &["A10-4Q", "A10-8Q", "A10-12Q"] };
const FUNCTIONS: Maker = Maker { framework: VgpuFramework::VendorVfio, types: &["L40S-12Q", "L40S-24Q"] };

fn gpu(id: &str) -> GPUStatus {
    GPUStatus { id: id.to_owned(), resource: None, ..agents::t4(GPU) }
}

/// `n1` has one GPU of this id, with a driver that makes vGPUs.
async fn node(t: &Turn, id: &str, maker: Maker, node_labels: &[(&str, &str)]) -> Agent {
    let mode = [(labels::WORKLOAD_CONFIG, "vm-vgpu")];
    nodes::create(t, "n1", &[&mode, node_labels].concat()).await;
    let gpus = vec![gpu(id)];
    let host = Host { gpus, obeys: true, registers: true, maker: Some(maker), driver: None, conditions: Vec::new() };
    Agent::start_with(t, "n1", host).await
}

/// Layouts of the user's own, and the policy that names them.
async fn policy(t: &Turn, text: &str) {
    write(t, text).await;
    let mut policy = policies::valid(POLICY);
    policy["spec"]["vgpuDeviceManager"] = json!({"config": {"name": CONFIG, "default": "small"}});
    policies::create(t, policy).await;
}

async fn write(t: &Turn, text: &str) {
    let map =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CONFIG}, "data": {"config.yaml": text}});
    let maps: Api<ConfigMap> = t.ours();
    let params = PatchParams::apply("user").force();
    maps.patch(CONFIG, &params, &Patch::Apply(&map)).await.expect("a ConfigMap should be accepted");
}

const LAYOUTS: &str = "version: v1
vgpu-configs:
  small: [{devices: all, vgpu-devices: {A10-4Q: 3}}]
  large: [{device-filter: '0x223610DE', devices: all, vgpu-devices: {A10-12Q: 2}}]
";

async fn until_state(t: &Turn, state: Option<&str>) {
    let promise = format!("{} is {state:?}", labels::VGPU_CONFIG_STATE);
    wait::until(&t.all(), "n1", &promise, |node: &Node| {
        node.metadata.labels.as_ref().and_then(|labels| labels.get(labels::VGPU_CONFIG_STATE)).map(String::as_str)
            == state
    })
    .await;
}

/// `A10-4Q×3` and so on, as it was asked of the agent.
fn asked(node: &GPUNode) -> Vec<String> {
    let gpus = node.spec.vgpu.iter().flat_map(|layout| &layout.gpus);
    gpus.flat_map(|gpu| &gpu.instances).map(|of| format!("{}×{}", of.kind, of.count)).collect()
}

fn says(node: &GPUNode, ready: &str, reason: &str, words: &[&str]) -> bool {
    agents::operator(node).is_some_and(|operator| {
        operator.ready == ready && operator.reason == reason && words.iter().all(|word| operator.message.contains(word))
    })
}

#[test]
fn a_label_chooses_a_layout_and_the_state_is_shown_on_the_node() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = node(t, "10de:2236", MDEV, &[]).await;
        policies::create(t, policies::valid(POLICY)).await;
        let first = agent.until_reason(t, true, "Serving").await;
        assert_eq!(asked(&first), ["A10-12Q×2"], "the usual one of the board");
        until_state(t, Some("success")).await;
        let maps: Api<ConfigMap> = t.ours();
        let ours = maps.get("default-vgpu-devices-config").await.expect("our layouts should be there to read");
        assert!(ours.data.unwrap_or_default()["config.yaml"].contains("  A10-4Q:"));

        nodes::label(t, "n1", &[(labels::VGPU_CONFIG, Some("A10-4Q"))]).await;
        agent
            .until(t, "the other layout", |node| asked(node) == ["A10-4Q×6"] && says(node, "True", "Serving", &[]))
            .await;
        let node = nodes::label(t, "n1", &[(labels::VGPU_CONFIG, Some("a10-4q"))]).await;
        let promise = "the last one stays, with the name that was meant";
        let kept = |node: &GPUNode| {
            asked(node) == ["A10-4Q×6"] && says(node, "False", "VGPUConfigUnknown", &["a10-4q", "did you mean A10-4Q?"])
        };
        agent.until(t, promise, kept).await;
        until_state(t, Some("failed")).await;
        nodes::until_event(t, node.metadata.uid, "VGPUConfigUnknown").await;

        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, None), (labels::VGPU_CONFIG, None)]).await;
        agent.until(t, "nothing is asked for", |node| node.spec.vgpu.is_none()).await;
        until_state(t, None).await;
    });
}

#[test]
fn a_file_of_the_users_is_followed_at_each_change_and_a_broken_one_keeps_the_last() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = node(t, "10de:2236", MDEV, &[]).await;
        policy(t, LAYOUTS).await;
        let promise = "the policy's default of the user's file";
        agent.until(t, promise, |node| asked(node) == ["A10-4Q×3"] && says(node, "True", "Serving", &[])).await;

        write(t, &LAYOUTS.replace("A10-4Q: 3", "A10-4Q: 3, A10-8Q: 1")).await;
        agent.until(t, "the file as it is now", |node| asked(node) == ["A10-4Q×3", "A10-8Q×1"]).await;
        write(t, &LAYOUTS.replace("devices: all", "device: all")).await;
        let words =
            [CONFIG, "config.yaml, line 3, column", "unknown field", "what was asked for last (layout small) stays"];
        agent.until(t, "the fault with its place", |node| says(node, "False", "VGPUConfigInvalid", &words)).await;
        until_state(t, Some("failed")).await;
        let maps: Api<ConfigMap> = t.ours();
        maps.delete(CONFIG, &DeleteParams::default()).await.expect("deletable");
        let node =
            agent.until(t, "it is missing", |node| says(node, "False", "VGPUConfigMapNotFound", &[CONFIG])).await;
        assert_eq!(asked(&node), ["A10-4Q×3", "A10-8Q×1"], "nothing is taken away");
        write(t, LAYOUTS).await;
        agent.until(t, "it is mended", |node| asked(node) == ["A10-4Q×3"] && says(node, "True", "Serving", &[])).await;
        until_state(t, Some("success")).await;
    });
}

#[test]
fn a_vm_keeps_its_vgpu_through_another_layout_and_nothing_is_withdrawn() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = node(t, "10de:2236", MDEV, &[]).await;
        policy(t, LAYOUTS).await;
        agent.until_reason(t, true, "Serving").await;
        let holder =
            Holder { pid: 7, command: "qemu-kvm".to_owned(), path: "/dev/vfio/9".to_owned(), pod: None, vm: None };
        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders = vec![holder]);
        nodes::label(t, "n1", &[(labels::VGPU_CONFIG, Some("large"))]).await;
        let words = ["vGPU layout large", "in use by pid 7", "stop that VM"];
        let node = agent.until(t, "the agent's refusal", |node| says(node, "False", "VGPULayoutFailed", &words)).await;
        assert_eq!(node.spec.advertise, crds::v1alpha1::Advertise::Offered);
        nodes::until_deployed(
            t,
            "n1",
            &[
                "cc-manager",
                "client",
                "sandbox-device-plugin",
                "sandbox-validator",
                "vgpu-device-manager",
                "vgpu-manager",
            ],
        )
        .await;
        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders.clear());
        agent.until_reason(t, true, "Serving").await;
        until_state(t, Some("success")).await;
    });
}

fn configuration(object: &DynamicObject, path: &str) -> Option<Value> {
    object.data.pointer(&format!("/spec/configuration{path}")).cloned()
}

async fn until_configured(t: &Turn, promise: &str, path: &str, expected: Option<Value>) {
    let api = kubevirt::api(&t.client);
    kubevirt::until(&api, kubevirt::NAME, promise, |object| configuration(object, path) == expected).await;
}

#[test]
fn kubevirt_gets_the_types_entry_and_makes_no_mediated_devices_itself_until_we_leave() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = node(t, "10de:2236", MDEV, &[]).await;
        policy(t, LAYOUTS).await;
        agent.until_reason(t, true, "Serving").await;
        let entry =
            json!({"mdevNameSelector": "NVIDIA A10-4Q", "resourceName": A10_4Q, "externalResourceProvider": true});
        let list = "/permittedHostDevices/mediatedDevices";
        until_configured(t, "the type is permitted", list, Some(json!([entry]))).await;
        let switch = "/mediatedDevicesConfiguration/enabled";
        until_configured(t, "KubeVirt leaves them alone", switch, Some(json!(false))).await;
        until_wired(t, "True", "Permitted", &[A10_4Q]).await;
        kubevirt::start_vm(&t.client, "vm-1", &[A10_4Q]).await;
        kubevirt::until_pod(&t.client, "vm-1", A10_4Q).await;

        kubevirt::delete(&t.client, "vm-1").await;
        let policies: Api<ClusterPolicy> = t.all();
        let policy = policies.get(POLICY).await.expect("the policy should be there");
        policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&policies, &policy, "the policy goes").await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(configuration(&object, list), None);
        assert_eq!(configuration(&object, switch), None);
        assert_eq!(kubevirt::resources(&object), ["intel.com/x710"], "the user's stays");
        assert!(!object.metadata.annotations.unwrap_or_default().keys().any(|key| key.starts_with("gpuvirt.io/")));
    });
}

/// The type goes into `HyperConverged`, and what keeps `KubeVirt` from making mediated devices itself: in the version that is
/// stored, by the words that this version has. Both are taken back.
async fn hyper_converged_is_told(t: &Turn, release: Release, switch: &str, off: Value) {
    with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
    let (_, api) = hyperconverged::hyper_converged(t, release).await;
    let _kubelets = Kubelets::start(t);
    let _operator = t.operator("op-1").await;
    let agent = node(t, "10de:2236", MDEV, &[]).await;
    policy(t, LAYOUTS).await;
    agent.until_reason(t, true, "Serving").await;
    let list = format!("/{}/mediatedDevices", release.stored().1.join("/"));
    let entry = json!({"mdevNameSelector": "NVIDIA A10-4Q", "resourceName": A10_4Q, "externalResourceProvider": true});
    let told = |object: &DynamicObject| {
        let at = |path: &str| object.data.pointer(path).cloned();
        at(&list) == Some(json!([entry])) && at(switch) == Some(off.clone())
    };
    kubevirt::until(&api, hyperconverged::NAME, "the type is permitted, and none is made", told).await;
    until_wired(t, "True", "Permitted", &[A10_4Q]).await;
    let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
    assert_eq!(configuration(&object, "/mediatedDevicesConfiguration"), None, "HyperConverged's operator writes it");

    let policies: Api<ClusterPolicy> = t.all();
    let policy = policies.get(POLICY).await.expect("the policy should be there");
    policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
    wait::until_gone(&policies, &policy, "the policy goes").await;
    let left = api.get(hyperconverged::NAME).await.expect("HyperConverged should be there");
    assert_eq!(left.data.pointer(&list), None);
    assert_ne!(left.data.pointer(switch), Some(&off), "it is as it was: the gate has a default");
}

#[test]
fn hyperconverged_of_v1_has_a_switch_for_mediated_devices() {
    let switch = "/spec/virtualization/mediatedDevicesConfiguration/enabled";
    turn(async |t| hyper_converged_is_told(t, Release::V1_20, switch, json!(false)).await);
}

#[test]
fn hyperconverged_of_v1beta1_has_a_gate_in_its_place() {
    let gate = "/spec/featureGates/disableMDevConfiguration";
    turn(async |t| hyper_converged_is_told(t, Release::V1_17, gate, json!(true)).await);
}

#[test]
fn a_virtual_function_is_permitted_as_a_pci_device_and_a_vm_gets_as_far_as_its_pod() {
    const L40S_24Q: &str = "nvidia.com/NVIDIA_L40S-24Q";
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = node(t, "10de:26b9", FUNCTIONS, &[(labels::VGPU_CONFIG, "L40S-24Q")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        agent.until_reason(t, true, "Serving").await;
        let entry =
            json!({"pciVendorSelector": "10DE:26B9", "resourceName": L40S_24Q, "externalResourceProvider": true});
        let list = "/permittedHostDevices/pciHostDevices";
        until_configured(t, "the function is permitted", list, Some(json!([nic(), entry]))).await;
        let object = kubevirt::api(&t.client).get(kubevirt::NAME).await.expect("KubeVirt should be there");
        assert_eq!(configuration(&object, "/mediatedDevicesConfiguration/enabled"), None, "there are none");
        kubevirt::start_vm(&t.client, "vm-1", &[L40S_24Q]).await;
        kubevirt::until_pod(&t.client, "vm-1", L40S_24Q).await;
        let other = kubevirt::start_vm(&t.client, "vm-2", &["nvidia.com/NVIDIA_L40S-12Q"]).await;
        nodes::until_event(t, other.metadata.uid.clone(), "GPUNotPermitted").await;
        kubevirt::delete_all(&t.client).await;
    });
}

/// What KubeVirt's own code, as it is in a launcher, makes of one variable.
fn built(resource: &str, variable: &str, value: &str) -> Result<String, String> {
    let gpus = json!([{"name": "gpu1", "deviceName": resource}]).to_string();
    let launcher = tools()?.join("launcher");
    run(command(launcher, ["gpus", &gpus]).env(variable, value))
}

/// The variables are those of `agent/device_plugin/allocate.rs`.
#[test]
fn kubevirts_builder_makes_a_pci_device_of_a_virtual_function_and_a_mediated_one_of_a_uuid() {
    const UUID: &str = "c728e022-f16f-434b-ad2c-9665ee634d3d";
    let made = built("nvidia.com/NVIDIA_L40S-24Q", "PCI_RESOURCE_NVIDIA_COM_NVIDIA_L40S-24Q", "0000:26:00.4");
    let made = made.expect("a host device");
    assert_eq!(kubevirt::addresses(&made), ["0000:26:00.4"], "{made}");
    assert!(made.contains("type=\"pci\"") && made.contains("managed=\"no\""), "{made}");
    let made = built(A10_4Q, "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-4Q", UUID).expect("a host device");
    assert_eq!(kubevirt::addresses(&made), [UUID], "{made}");
    assert!(made.contains("type=\"mdev\"") && made.contains("model=\"vfio-pci\""), "{made}");
    let error = built(A10_4Q, "MDEV_PCI_RESOURCE_NVIDIA_COM_OTHER", UUID).expect_err("another name is none of it");
    assert!(error.contains("do not match"), "{error}");
}
