//! An instance that asks for a vGPU.

use crds::v1alpha1::{
    GPUVgpus, VgpuCount, VgpuFramework, VgpuInstance, VgpuLayout, VgpuProgress, VgpuState, VgpuStatus, VgpuTypeStatus,
};

use super::{super::explain::Reason, *};

const A10_4Q: &str = "nvidia.com/NVIDIA_A10-4Q";
const A10_8Q: &str = "nvidia.com/NVIDIA_A10-8Q";

/// `node` gives out two A10-4Q of one A10; `vms/a` asks for one, and the scheduler has not found it.
fn cut() -> Cluster {
    let mut cluster = cluster();
    cluster.nodes = vec![node("node", A10, "10de:2236", &[FIRST])];
    let node = &mut cluster.nodes[0];
    node.spec.mode = Some(WorkloadMode::VmVgpu);
    let instances = vec![VgpuCount { kind: "A10-4Q".to_owned(), count: 2 }];
    let gpus = vec![GPUVgpus { address: FIRST.to_owned(), instances }];
    node.spec.vgpu = Some(VgpuLayout { name: "small".to_owned(), gpus });
    cluster.operator().serving = Some(WorkloadMode::VmVgpu);
    let agent = cluster.agent();
    agent.vgpu = Some(VgpuState { config: "small".to_owned(), state: VgpuProgress::Success, message: String::new() });
    let ids = ["uuid-1", "uuid-2"].map(str::to_owned);
    let instance = |id: &String| VgpuInstance {
        id: id.clone(),
        kind: "A10-4Q".to_owned(),
        resource: Some(A10_4Q.to_owned()),
        ..VgpuInstance::default()
    };
    let kind = |name: &str| VgpuTypeStatus { name: name.to_owned(), available: 1 };
    agent.gpus[0].mode = Some(WorkloadMode::VmVgpu);
    agent.gpus[0].vgpu = Some(VgpuStatus {
        framework: VgpuFramework::Mdev,
        types: vec![kind("A10-4Q"), kind("A10-8Q")],
        instances: ids.iter().map(instance).collect(),
        ..VgpuStatus::default()
    });
    agent.resources = vec![ResourceStatus { name: A10_4Q.to_owned(), devices: ids.to_vec(), registered: true }];
    cluster.asks(A10_4Q, 1);
    cluster
}

impl Cluster {
    fn asks(&mut self, resource: &str, count: usize) {
        self.instance.asks = [(resource.to_owned(), count)].into();
        self.instance.progress = Progress::Unschedulable(format!("1 Insufficient {resource}"));
    }

    fn part(&mut self, number: usize) -> &mut VgpuInstance {
        &mut self.agent().gpus[0].vgpu.as_mut().unwrap().instances[number]
    }

    fn give_part(&mut self, number: usize, pod: &str, vmi: Option<&str>) {
        self.part(number).holders = vec![Holder { pod: Some(pod.to_owned()), ..Holder::default() }];
        let user = GPUUser { pod: pod.to_owned(), vmi: vmi.map(str::to_owned), gpus: vec![FIRST.to_owned()] };
        self.operator().users.push(user);
    }
}

#[test]
fn free_vgpus_are_not_the_reason() {
    cut().says(Reason::NotTheGPU, &["free on node"]);
}

#[test]
fn each_vgpu_in_use_is_told_with_its_own_vm() {
    let mut cluster = cut();
    cluster.give_part(0, "vms/virt-launcher-b-x", Some("vms/b"));
    cluster.says(Reason::NotTheGPU, &["free on node"]);
    let nodes = &cluster.explain().requests[0].nodes;
    assert_eq!((nodes[0].free, nodes[0].all, nodes[0].mode.as_str()), (1, 2, "vm-vgpu"));
    cluster.give_part(1, "vms/virt-launcher-c-x", Some("vms/c"));
    cluster.says(Reason::GPUInUse, &["uuid-1 by VM vms/b", "uuid-2 by VM vms/c"]);
}

#[test]
fn a_type_that_no_layout_has_is_told_with_the_gpu_that_could() {
    let mut cluster = cut();
    cluster.asks(A10_8Q, 1);
    cluster.says(Reason::NoNodeHasGPU, &["vGPU layout small", FIRST, "nvidia.com/vgpu.config=LAYOUT", "A10-8Q"]);
    cluster.instance.progress =
        Progress::Refused(format!("GPU {A10_8Q} is not permitted in permittedHostDevices configuration"));
    cluster.permitted = Some(json!({"pciHostDevices": []}));
    cluster.says(Reason::GPUNotPermitted, &["once a node offers it", "vGPU layout small"]);
}

#[test]
fn a_layout_that_failed_is_told_with_the_agents_words() {
    let mut cluster = cut();
    cluster.agent().gpus[0].vgpu.as_mut().unwrap().instances.clear();
    cluster.agent().resources.clear();
    let state = cluster.agent().vgpu.as_mut().unwrap();
    (state.state, state.message) = (VgpuProgress::Failed, "the host's driver makes no vGPUs".to_owned());
    cluster.says(Reason::VGPULayoutFailed, &["node: vGPU layout small failed", "makes no vGPUs"]);
    cluster.agent().vgpu.as_mut().unwrap().state = VgpuProgress::Pending;
    cluster.says(Reason::NodeInTransition, &["node is making vGPU layout small"]);
}

#[test]
fn a_gpu_in_another_mode_is_told_with_the_labels_that_cut_it() {
    let mut cluster = cluster();
    cluster.nodes = vec![node("node", A10, "10de:2236", &[FIRST])];
    cluster.asks(A10_4Q, 1);
    let labels = "nvidia.com/gpu.workload.config=vm-vgpu nvidia.com/vgpu.config=A10-4Q";
    cluster.says(Reason::NoNodeHasGPU, &["mode vm-passthrough", labels]);
    cluster.asks("nvidia.com/NVIDIA_L40S-4Q", 1);
    cluster.says(Reason::GPUNameUnknown, &["no GPU is called nvidia.com/NVIDIA_L40S-4Q"]);
}

#[test]
fn a_whole_gpu_of_a_vgpu_node_is_told_with_the_mode_that_gives_it() {
    let mut cluster = cut();
    cluster.asks(A10, 1);
    cluster.says(Reason::NoNodeHasGPU, &["mode vm-vgpu", "nvidia.com/gpu.workload.config=vm-passthrough"]);
}

#[test]
fn vgpus_that_cannot_be_given_out_are_told_and_a_refused_layout_leaves_those_that_there_are() {
    let mut cluster = cut();
    cluster.asks(A10_4Q, 2);
    let refusal = crds::v1alpha1::Refusal { reason: "X".to_owned(), message: "in use".to_owned() };
    cluster.agent().gpus[0].refusal = Some(refusal);
    cluster.says(Reason::NotTheGPU, &["free on node"]);
    cluster.agent().resources[0].devices.pop();
    cluster.says(Reason::GPUUnhealthy, &["vGPU uuid-2", FIRST, "not offered"]);
}

#[test]
fn a_vgpu_that_is_not_permitted_is_told_with_the_entry_of_its_own_list() {
    let mut cluster = cut();
    cluster.instance.progress =
        Progress::Refused(format!("GPU {A10_4Q} is not permitted in permittedHostDevices configuration"));
    cluster.permitted = Some(json!({"pciHostDevices": []}));
    cluster.says(Reason::GPUNotPermitted, &["mdevNameSelector", "NVIDIA A10-4Q", "mediatedDevices"]);
}
