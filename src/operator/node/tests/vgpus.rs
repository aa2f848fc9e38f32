//! vGPU layouts of a node, from its label to its agent.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{Holder, NodePhase, VgpuInstance, VgpuStatus},
};

use super::lab::{Lab, layouts};
use crate::operator::vgpu;

/// A node whose GPU is cut as the policy's default says.
fn vgpu_node() -> Lab {
    let mut lab = Lab::container();
    lab.label("vm-vgpu");
    lab.settle();
    assert_eq!(lab.operator().ready, "True", "{}", lab.operator().message);
    lab
}

fn asked(lab: &Lab) -> Option<&str> {
    lab.gpu_node.spec.vgpu.as_ref().map(|layout| layout.name.as_str())
}

fn state(lab: &Lab) -> Option<&str> {
    lab.labels.get(labels::VGPU_CONFIG_STATE).map(String::as_str)
}

#[test]
fn a_label_brings_a_node_to_vgpus_and_back() {
    let mut lab = vgpu_node();
    assert!(lab.deploys("vgpu-manager") && !lab.deploys("driver"));
    assert_eq!((asked(&lab), state(&lab)), (Some("default"), Some("success")));
    let gpu = &lab.gpu_node.spec.vgpu.as_ref().expect("a layout").gpus[0];
    assert_eq!((gpu.instances[0].kind.as_str(), gpu.instances[0].count), ("A10-12Q", 2));

    lab.label("container");
    lab.settle();
    assert_eq!(lab.operator().ready, "True", "{}", lab.operator().message);
    assert!(lab.deploys("driver") && !lab.deploys("vgpu-manager"));
    assert_eq!((asked(&lab), state(&lab)), (None, None));
}

#[test]
fn passthrough_is_left_and_entered_like_any_other_mode() {
    let mut lab = Lab::container();
    for (mode, reached) in [
        ("vm-passthrough", WorkloadMode::VmPassthrough),
        ("vm-vgpu", WorkloadMode::VmVgpu),
        ("vm-passthrough", WorkloadMode::VmPassthrough),
    ] {
        lab.label(mode);
        lab.settle();
        let shown = lab.agent().gpus[0].mode;
        assert_eq!(shown, Some(reached), "{}", lab.operator().message);
        assert_eq!(lab.deploys("vgpu-manager"), reached == WorkloadMode::VmVgpu);
    }
}

#[test]
fn a_layout_is_pending_until_the_driver_that_makes_vgpus_is_there() {
    let mut lab = Lab::container();
    lab.label("vm-vgpu");
    lab.operate();
    while !lab.deploys("vgpu-manager") {
        assert_eq!(lab.deploys("driver"), !lab.pods.is_empty(), "one driver at a time");
        lab.run_agent();
        lab.operate();
        lab.run_pods();
    }
    // The kubelet takes its time.
    lab.pods.clear();
    lab.run_agent();
    lab.operate();
    assert_eq!((asked(&lab), state(&lab)), (Some("default"), Some("pending")));
    assert_eq!((lab.operator().ready.as_str(), lab.operator().reason.as_str()), ("False", "VGPULayoutPending"));
    lab.settle();
    assert_eq!(state(&lab), Some("success"));
}

#[test]
fn another_layout_is_asked_for_without_taking_anything_away_first() {
    let mut lab = vgpu_node();
    lab.history.clear();
    lab.labels.insert(labels::VGPU_CONFIG.to_owned(), "small".to_owned());
    lab.operate();
    assert_eq!((asked(&lab), state(&lab)), (Some("small"), Some("pending")));
    lab.settle();
    assert_eq!(state(&lab), Some("success"));
    for decision in &lab.history {
        let order = decision.order.as_ref().expect("an order");
        assert_eq!((order.phase, order.spec.advertise), (NodePhase::Steady, lab.gpu_node.spec.advertise));
    }
    assert!(lab.deploys("vgpu-manager"));
}

#[test]
fn a_layout_that_the_agent_cannot_follow_is_told_with_its_words() {
    let mut lab = vgpu_node();
    lab.vgpu_failure = Some("vGPU A10-12Q is held by qemu (pid 7): stop that VM".to_owned());
    lab.labels.insert(labels::VGPU_CONFIG.to_owned(), "small".to_owned());
    lab.settle();
    assert_eq!(state(&lab), Some("failed"));
    assert_eq!((lab.operator().ready.as_str(), lab.operator().reason.as_str()), ("False", "VGPULayoutFailed"));
    assert!(lab.operator().message.contains("stop that VM"), "{}", lab.operator().message);
    assert!(lab.deploys("vgpu-manager"), "what the node offers goes on");
}

#[test]
fn a_name_that_no_layout_has_keeps_the_last_one_and_says_so() {
    let mut lab = vgpu_node();
    lab.labels.insert(labels::VGPU_CONFIG.to_owned(), "smalls".to_owned());
    lab.settle();
    assert_eq!((asked(&lab), state(&lab)), (Some("default"), Some("failed")));
    assert_eq!(lab.operator().reason, "VGPUConfigUnknown");
    assert!(lab.operator().message.contains("did you mean small?"), "{}", lab.operator().message);
    lab.labels.remove(labels::VGPU_CONFIG);
    lab.settle();
    assert_eq!((lab.operator().ready.as_str(), state(&lab)), ("True", Some("success")));
}

#[test]
fn a_file_that_breaks_keeps_the_last_layout_and_one_that_is_mended_is_followed() {
    let mut lab = vgpu_node();
    let fault = vgpu::Config::parse("version: v2").expect_err("a fault");
    lab.layouts = Some(Err(vgpu::BadFile::Fault { name: "mine".to_owned(), fault }));
    lab.settle();
    assert_eq!((asked(&lab), state(&lab)), (Some("default"), Some("failed")));
    assert!(lab.operator().message.contains("line 1, column 10"), "{}", lab.operator().message);
    let mended = layouts("version: v1\nvgpu-configs: {default: [{devices: all, vgpu-devices: {A10-24Q: 1}}]}\n");
    lab.layouts = Some(Ok(mended));
    lab.settle();
    assert_eq!(lab.gpu_node.spec.vgpu.as_ref().expect("a layout").gpus[0].instances[0].kind, "A10-24Q");
    assert_eq!(state(&lab), Some("success"), "{}", lab.operator().message);
}

#[test]
fn an_operator_that_has_not_read_the_file_yet_changes_nothing() {
    let mut lab = vgpu_node();
    let before = (lab.gpu_node.spec.clone(), lab.labels.clone());
    lab.layouts = None;
    lab.settle();
    assert_eq!((lab.gpu_node.spec.clone(), lab.labels.clone()), before);
    assert_eq!(lab.operator().ready, "True");
}

#[test]
fn where_the_admin_makes_the_vgpus_none_is_asked_for() {
    let mut lab = Lab::container();
    lab.labels.insert(labels::DEPLOY_VGPU_DEVICE_MANAGER.to_owned(), "false".to_owned());
    lab.label("vm-vgpu");
    lab.settle();
    assert_eq!((lab.operator().ready.as_str(), asked(&lab), state(&lab)), ("True", None, None));
}

#[test]
fn a_vm_with_a_vgpu_keeps_the_node_in_its_mode() {
    let mut lab = vgpu_node();
    let holder = Holder {
        pid: 7,
        command: "qemu".to_owned(),
        path: "/dev/vfio/9".to_owned(),
        pod: Some("vm".to_owned()),
        vm: None,
    };
    let instance = VgpuInstance { id: "uuid".to_owned(), holders: vec![holder], ..VgpuInstance::default() };
    lab.agent().gpus[0].vgpu = Some(VgpuStatus { instances: vec![instance], ..VgpuStatus::default() });
    lab.label("container");
    lab.settle();
    assert_eq!((lab.operator().phase, lab.operator().reason.as_str()), (NodePhase::Refused, "GPUInUse"));
    assert_eq!((asked(&lab), state(&lab)), (Some("default"), Some("success")), "what runs goes on");
    assert!(lab.deploys("vgpu-manager"));
}
