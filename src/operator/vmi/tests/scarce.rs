//! The scheduler finds no node.

use crds::{
    WorkloadMode,
    v1alpha1::{Ailment, NodePhase, Refusal, Severity},
};

use super::{super::explain::Reason, A10, FIRST, Progress, SECOND, T4, cluster, node};

#[test]
fn gpus_that_are_free_are_not_the_reason() {
    let mut cluster = cluster();
    cluster.says(Reason::NotTheGPU, &["free on node", "does not count"]);
    cluster.instance.progress = Progress::Unschedulable("1 Insufficient memory".to_owned());
    cluster.says(Reason::NotTheGPU, &["so it is not the GPU", "Insufficient memory"]);
}

#[test]
fn all_in_use_names_the_vms_that_have_them() {
    let mut cluster = cluster();
    cluster.give(0, "vms/virt-launcher-b-x", Some("vms/b"));
    cluster.says(Reason::NotTheGPU, &["free on node"]);
    cluster.give(1, "ml/train", None);
    cluster.says(Reason::GPUInUse, &[FIRST, "VM vms/b", SECOND, "pod ml/train"]);
    let nodes = &cluster.explain().requests[0].nodes;
    assert_eq!((nodes[0].free, nodes[0].all), (0, 2));
}

#[test]
fn a_node_with_free_ones_beats_a_node_where_they_are_in_use() {
    let mut cluster = cluster();
    cluster.give(0, "vms/virt-launcher-b-x", Some("vms/b"));
    cluster.instance.asks = [(T4.to_owned(), 2)].into();
    cluster.says(Reason::GPUInUse, &["vms/b"]);
    cluster.nodes.push(node("other", T4, "10de:1eb8", &[FIRST, SECOND]));
    cluster.says(Reason::NotTheGPU, &["free on other"]);
}

#[test]
fn a_name_that_is_spelled_otherwise_is_shown_as_it_is() {
    let mut cluster = cluster();
    cluster.instance.asks = [("nvidia.com/TU104GL_Tesla_T4".to_owned(), 1)].into();
    cluster.says(Reason::GPUNameUnknown, &["did you mean nvidia.com/TU104GL_TESLA_T4?", "deviceName"]);
}

#[test]
fn a_model_that_no_node_has_is_told_with_those_that_there_are() {
    let mut cluster = cluster();
    cluster.instance.asks = [(A10.to_owned(), 1)].into();
    cluster.says(Reason::GPUNameUnknown, &["no GPU is called nvidia.com/GA102GL_A10", T4]);
    cluster.nodes.clear();
    cluster.says(Reason::GPUNameUnknown, &["no node has a GPU"]);
}

#[test]
fn a_node_in_another_mode_is_told_with_the_label_that_changes_it() {
    let mut cluster = cluster();
    cluster.operator().serving = Some(WorkloadMode::Container);
    cluster.says(
        Reason::NoNodeHasGPU,
        &["mode container", "kubectl label --overwrite node node nvidia.com/gpu.workload.config=vm-passthrough"],
    );
    cluster.operator().phase = NodePhase::Refused;
    cluster.operator().message = "GPU 0000:43:00.0 is held by python".to_owned();
    cluster.says(Reason::NoNodeHasGPU, &["held by python"]);
}

#[test]
fn a_node_that_changes_its_mode_is_waited_for() {
    let mut cluster = cluster();
    cluster.operator().phase = NodePhase::Switching;
    cluster.operator().message = "the agent is bringing 2 GPU(s) into vm-passthrough".to_owned();
    cluster.says(Reason::NodeInTransition, &["node is changing its mode", "bringing 2 GPU(s)"]);
}

#[test]
fn a_gpu_that_cannot_be_given_out_is_told_with_its_reason() {
    let mut cluster = cluster();
    cluster.instance.asks = [(T4.to_owned(), 2)].into();
    cluster.agent().gpus[1].withheld = Some("qemu (pid 7) has it".to_owned());
    cluster.says(Reason::GPUUnhealthy, &[SECOND, "qemu (pid 7) has it"]);
    cluster.agent().gpus[1].withheld = None;
    cluster.agent().gpus[1].refusal = Some(Refusal { reason: "X".to_owned(), message: "needs a reboot".to_owned() });
    cluster.says(Reason::GPUUnhealthy, &[SECOND, "needs a reboot"]);
    cluster.agent().gpus[1].refusal = None;
    cluster.agent().resources[0].devices.pop();
    cluster.says(Reason::GPUUnhealthy, &[SECOND, "not offered"]);
    cluster.agent().resources[0].devices.push(SECOND.to_owned());
    cluster.agent().resources[0].registered = false;
    cluster.says(Reason::GPUUnhealthy, &["has not accepted"]);
}

#[test]
fn an_unhealthy_gpu_is_told_with_what_is_wrong_and_a_degraded_one_serves() {
    let mut cluster = cluster();
    cluster.instance.asks = [(T4.to_owned(), 2)].into();
    let ailment = |severity| Ailment { reason: "X".to_owned(), severity, message: "it fell off the bus".to_owned() };
    cluster.agent().gpus[0].ailments = vec![ailment(Severity::Degraded)];
    cluster.says(Reason::NotTheGPU, &["free on node"]);
    cluster.agent().gpus[0].ailments = vec![ailment(Severity::Unhealthy)];
    cluster.says(Reason::GPUUnhealthy, &[FIRST, "fell off the bus"]);
}

#[test]
fn more_than_a_node_has_is_told_with_what_it_has() {
    let mut cluster = cluster();
    cluster.instance.asks = [(T4.to_owned(), 3)].into();
    cluster.says(Reason::NoNodeHasGPU, &["node has 2 of 3 nvidia.com/TU104GL_TESLA_T4"]);
}

#[test]
fn two_models_that_are_on_no_node_together_are_told_so() {
    let mut cluster = cluster();
    cluster.nodes.push(node("other", A10, "10de:2236", &[FIRST]));
    cluster.instance.asks = [(T4.to_owned(), 1), (A10.to_owned(), 1)].into();
    cluster.says(Reason::NoNodeHasGPU, &["together", T4, A10]);
}

#[test]
fn a_device_of_somebody_else_is_not_counted() {
    let mut cluster = cluster();
    cluster.instance.asks.insert("intel.com/x710".to_owned(), 1);
    cluster.instance.progress = Progress::Unschedulable("1 Insufficient intel.com/x710".to_owned());
    cluster.says(Reason::NotTheGPU, &["free on node", "Insufficient intel.com/x710"]);
}

#[test]
fn a_large_cluster_is_told_in_few_words() {
    let mut cluster = cluster();
    cluster.nodes = (0..500).map(|n| node(&format!("node-{n}"), T4, "10de:1eb8", &[FIRST])).collect();
    cluster.instance.asks = [(T4.to_owned(), 2)].into();
    let said = cluster.explain().message;
    assert!(said.contains("and 495 more nodes") && said.len() < 1024, "{said}");
}
