//! vGPUs of both frameworks, and KubeVirt's own making of mediated devices.

use crds::v1alpha1::{VgpuFramework, VgpuInstance, VgpuLayout, VgpuStatus, VgpuTypeStatus};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use super::{
    super::mediated::{Mediated, Switch},
    *,
};

const A10_4Q: &str = "nvidia.com/NVIDIA_A10-4Q";
const L40S_24Q: &str = "nvidia.com/NVIDIA_L40S-24Q";
const L40S_12Q: &str = "nvidia.com/NVIDIA_L40S-12Q";

/// A node whose GPU is cut into one vGPU of each of these resources.
fn cut(name: &str, id: &str, framework: VgpuFramework, resources: &[&str]) -> GPUNode {
    let mut node = node(name, id, T4);
    node.spec.vgpu = Some(VgpuLayout::default());
    let agent = node.status.as_mut().unwrap().agent.as_mut().unwrap();
    let instance = |(n, resource): (usize, &&str)| VgpuInstance {
        id: format!("vgpu-{n}"),
        kind: resource.rsplit('_').next().unwrap().to_owned(),
        resource: Some((*resource).to_owned()),
        ..VgpuInstance::default()
    };
    let instances: Vec<VgpuInstance> = resources.iter().enumerate().map(instance).collect();
    agent.resources = instances
        .iter()
        .map(|instance| ResourceStatus {
            name: instance.resource.clone().unwrap(),
            devices: vec![instance.id.clone()],
            registered: true,
        })
        .collect();
    let types = instances.iter().map(|i| VgpuTypeStatus { name: i.kind.clone(), available: 1 }).collect();
    agent.gpus[0].resource = None;
    agent.gpus[0].vgpu = Some(VgpuStatus { framework, types, instances, ..VgpuStatus::default() });
    node
}

fn mediated() -> World {
    World { nodes: vec![cut("n1", "10de:2236", VgpuFramework::Mdev, &[A10_4Q])], ..World::well() }
}

fn functions() -> World {
    World { nodes: vec![cut("n1", "10de:26b9", VgpuFramework::VendorVfio, &[L40S_24Q])], ..World::well() }
}

fn a10() -> Value {
    json!({"mdevNameSelector": "NVIDIA A10-4Q", "resourceName": A10_4Q, "externalResourceProvider": true})
}

fn l40s(resource: &str) -> Value {
    json!({"pciVendorSelector": "10DE:26B9", "resourceName": resource, "externalResourceProvider": true})
}

#[test]
fn a_mediated_device_is_permitted_by_the_name_of_its_type_and_leaves_the_other_list_alone() {
    let mut world = mediated().written();
    let both = json!({"pciHostDevices": [nic()], "mediatedDevices": [a10()]});
    assert_eq!(world.field(), Some(&both));
    assert_eq!(world.marks(), Some("NVIDIA A10-4Q=nvidia.com/NVIDIA_A10-4Q"));
    assert!(world.served().change.is_none(), "it is written once");
    world.apply(&withdraw(&world.read()));
    assert_eq!(world.field(), Some(&json!({"pciHostDevices": [nic()]})));
    assert_eq!(world.marks(), None);
}

#[test]
fn a_name_with_underscores_is_the_same_name() {
    let mut world = mediated();
    let user = json!({
        "mdevNameSelector": "NVIDIA_A10-4Q", "resourceName": A10_4Q, "externalResourceProvider": true,
    });
    world.permits(json!({"mediatedDevices": [user]}));
    let decision = world.served();
    assert_eq!((decision.change, decision.verdict.reason), (None, "Permitted"));
}

#[test]
fn a_mediated_device_without_external_provider_is_two_plugins_with_one_socket() {
    let mut world = mediated();
    world.permits(json!({"mediatedDevices": [{"mdevNameSelector": "NVIDIA A10-4Q", "resourceName": A10_4Q}]}));
    complains(&world, "MissingExternalResourceProvider", &[A10_4Q, "mediatedDevices"]);
}

#[test]
fn a_virtual_function_is_permitted_as_a_pci_device_and_all_types_of_one_id_are() {
    let mut world = functions();
    world.nodes.push(cut("n2", "10de:26b9", VgpuFramework::VendorVfio, &[L40S_12Q]));
    let world = world.written();
    assert_eq!(world.entries(), json!([nic(), l40s(L40S_12Q), l40s(L40S_24Q)]));
}

#[test]
fn hyperconverged_has_one_name_for_an_id_and_says_so() {
    let mut world = functions();
    world.nodes.push(cut("n2", "10de:26b9", VgpuFramework::VendorVfio, &[L40S_12Q]));
    world.hyper_converged(&json!([]));
    let verdict = world.served().verdict;
    assert_eq!(verdict.reason, "NotExpressible");
    assert!(verdict.message.contains(L40S_12Q) && verdict.message.contains(L40S_24Q), "{}", verdict.message);
}

#[test]
fn an_entry_stays_while_a_driver_lists_its_type_and_goes_after() {
    let mut world = mediated().written();
    let agent = world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap();
    agent.resources.clear();
    agent.gpus[0].vgpu.as_mut().unwrap().instances.clear();
    assert!(world.served().change.is_none(), "the layout may come back");
    let agent = world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap();
    agent.gpus[0].vgpu = None;
    assert_eq!(world.written().field(), Some(&json!({"pciHostDevices": [nic()]})));
}

#[test]
fn another_layout_brings_its_own_entry_and_takes_the_old_one() {
    let mut world = functions().written();
    world.nodes = vec![cut("n1", "10de:26b9", VgpuFramework::VendorVfio, &[L40S_12Q])];
    assert_eq!(world.written().entries(), json!([nic(), l40s(L40S_12Q)]));
}

#[test]
fn vgpus_on_one_node_do_not_take_the_entry_of_whole_gpus_on_another() {
    const WHOLE: &str = "nvidia.com/AD102GL_L40S";
    let mut world = World { nodes: vec![node("n1", "10de:26b9", WHOLE)], ..World::well() }.written();
    world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap().resources.clear();
    world.nodes.push(cut("n2", "10de:26b9", VgpuFramework::VendorVfio, &[L40S_24Q]));
    assert_eq!(world.written().entries(), json!([nic(), l40s(WHOLE), l40s(L40S_24Q)]));
}

fn crd(properties: &Value) -> CustomResourceDefinition {
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    let schema = object(json!({"spec": object(json!({"configuration": object(properties.clone())}))}));
    serde_json::from_value(json!({
        "metadata": {"name": "kubevirts.kubevirt.io"},
        "spec": {
            "group": "kubevirt.io", "scope": "Namespaced", "names": {"kind": "KubeVirt", "plural": "kubevirts"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    }))
    .unwrap()
}

fn gates() -> Value {
    json!({"developerConfiguration": {"type": "object", "properties": {"featureGates": {"type": "array"}}}})
}

fn enabled() -> Value {
    let mut both = gates();
    both["mediatedDevicesConfiguration"] = json!({"type": "object", "properties": {"enabled": {"type": "boolean"}}});
    both
}

impl World {
    /// With what is decided of mediated devices.
    fn served_with(&self, crd: &CustomResourceDefinition) -> Decision {
        let switch = Switch::of(self.dialect, crd);
        let mediated = Mediated::read(self.dialect, switch.as_ref(), &self.object);
        mediated.serve(self.served(), &offers(&self.nodes, self.all_read), self.mode)
    }

    fn configuration(&self, path: &str) -> Option<&Value> {
        self.object.data.pointer(&format!("/spec/configuration{path}"))
    }
}

#[test]
fn kubevirt_is_told_to_make_no_mediated_devices_and_it_is_undone_at_the_end() {
    for (crd, path, off) in [
        (crd(&enabled()), "/mediatedDevicesConfiguration/enabled", json!(false)),
        (crd(&gates()), "/developerConfiguration/featureGates", json!(["DisableMDEVConfiguration"])),
    ] {
        let mut world = mediated();
        world.apply(&world.served_with(&crd));
        assert_eq!(world.configuration(path), Some(&off));
        assert_eq!(world.configuration("/permittedHostDevices/mediatedDevices/0"), Some(&a10()), "in the same write");
        assert!(world.served_with(&crd).change.is_none());
        let switch = Switch::of(world.dialect, &crd);
        let mediated = Mediated::read(world.dialect, switch.as_ref(), &world.object);
        world.apply(&mediated.withdraw(withdraw(&world.read())));
        assert_eq!(world.configuration(path), None);
        assert!(world.object.metadata.annotations.unwrap_or_default().is_empty());
    }
}

#[test]
fn other_gates_stay() {
    let mut world = mediated();
    let crd = crd(&gates());
    world.object.data["spec"]["configuration"]["developerConfiguration"] = json!({"featureGates": ["HostDevices"]});
    world.apply(&world.served_with(&crd));
    let path = "/developerConfiguration/featureGates";
    assert_eq!(world.configuration(path), Some(&json!(["HostDevices", "DisableMDEVConfiguration"])));
    world.nodes.clear();
    world.apply(&world.served_with(&crd));
    assert_eq!(world.configuration(path), Some(&json!(["HostDevices"])), "nobody makes any");
}

#[test]
fn what_the_user_has_switched_off_stays_off() {
    let mut world = mediated();
    let crd = crd(&enabled());
    world.object.data["spec"]["configuration"]["mediatedDevicesConfiguration"] = json!({"enabled": false});
    world.apply(&world.served_with(&crd));
    world.nodes.clear();
    world.apply(&world.served_with(&crd));
    assert_eq!(world.configuration("/mediatedDevicesConfiguration/enabled"), Some(&json!(false)));
}

#[test]
fn virtual_functions_are_no_mediated_devices() {
    let decision = functions().served_with(&crd(&enabled()));
    let patch = decision.change.expect("an entry").patch;
    assert_eq!(patch.pointer("/spec/configuration/mediatedDevicesConfiguration"), None);
}

#[test]
fn a_user_who_has_kubevirt_make_them_is_told_and_not_overruled() {
    let types = json!({"mediatedDeviceTypes": ["nvidia-222"]});
    for (configuration, words) in [(types, "mediatedDeviceTypes"), (json!({"enabled": true}), "enabled")] {
        let mut world = mediated();
        world.object.data["spec"]["configuration"]["mediatedDevicesConfiguration"] = configuration.clone();
        let decision = world.served_with(&crd(&enabled()));
        assert_eq!(decision.verdict.reason, "KubeVirtMakesMediatedDevices");
        assert!(decision.verdict.message.contains(words), "{}", decision.verdict.message);
        world.apply(&decision);
        assert_eq!(world.configuration("/mediatedDevicesConfiguration"), Some(&configuration));
    }
    let mut world = mediated();
    world.mode = KubeVirtMode::Report;
    let decision = world.served_with(&crd(&enabled()));
    assert!(decision.change.is_none() && decision.verdict.message.contains("mediatedDevicesConfiguration.enabled"));
}
