//! Whole mode changes, step by step.

mod lab;
mod vgpus;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{Advertise, AgentFunction, GPUMode, NodePhase, NvidiaDriver, Obstacle, Refusal},
};

use self::lab::{GPU, Lab, VM_RESOURCE};
use super::{
    decide::{Observed, decide},
    gates::SandboxMode,
    mode::Sandbox,
    readiness::TORN_DOWN,
    users::Users,
};
use crate::operator::transition::Leave;

fn in_use() -> Refusal {
    Refusal { reason: "InUse".to_owned(), message: "in use".to_owned() }
}

#[test]
fn a_label_brings_a_node_to_passthrough_and_back() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    assert_eq!(lab.operator().ready, "True", "{}", lab.operator().message);
    assert!(lab.deploys("vfio-manager") && !lab.deploys("driver"));
    assert_eq!(lab.agent().resources[0].name, VM_RESOURCE);

    lab.label("container");
    lab.settle();
    assert_eq!(lab.operator().ready, "True", "{}", lab.operator().message);
    assert!(lab.deploys("driver") && !lab.deploys("vfio-manager"));
    assert_eq!(lab.agent().gpus[0].driver.as_deref(), Some("nvidia"));
}

#[test]
fn the_agent_is_asked_only_when_the_old_modes_pods_are_gone() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.operate();
    assert!(lab.deploys("driver"), "nothing is taken away before the agent has answered");
    lab.run_agent();
    lab.operate();
    assert!(!lab.deploys("driver"), "then the gate goes");
    // The kubelet takes its time: the pod stays.
    for _ in 0..3 {
        lab.run_agent();
        lab.operate();
        assert_eq!(lab.operator().phase, NodePhase::Withdrawing);
        assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::Container));
    }
    assert!(lab.operator().message.contains("driver-x"), "{}", lab.operator().message);
    lab.run_pods();
    lab.operate();
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::VmPassthrough));
}

#[test]
fn the_agent_is_asked_only_when_the_kubelet_has_lost_the_old_devices() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.label("container");
    lab.operate();
    lab.run_pods();
    for _ in 0..3 {
        lab.operate();
        assert_eq!(lab.gpu_node.spec.advertise, Advertise::Withdrawn);
        assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::VmPassthrough));
        assert!(lab.deploys("vfio-manager"), "an agent that does not answer costs the node nothing");
        assert!(lab.operator().message.contains("gpuvirt-agent"), "{}", lab.operator().message);
    }
    lab.run_agent();
    lab.operate();
    lab.operate();
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::Container));
}

#[test]
fn nothing_is_offered_or_deployed_before_the_agent_shows_the_new_mode() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    while lab.gpu_node.spec.mode != Some(WorkloadMode::VmPassthrough) {
        lab.operate();
        lab.run_pods();
        if lab.gpu_node.spec.mode != Some(WorkloadMode::VmPassthrough) {
            lab.run_agent();
        }
    }
    for _ in 0..3 {
        lab.operate();
        assert_eq!((lab.operator().phase, lab.gpu_node.spec.advertise), (NodePhase::Switching, Advertise::Withdrawn));
        assert!(!lab.deploys("vfio-manager"));
    }
    lab.run_agent();
    lab.operate();
    assert_eq!(lab.gpu_node.spec.advertise, Advertise::Offered);
    assert!(lab.deploys("vfio-manager"));
}

#[test]
fn a_node_whose_gpu_a_vm_holds_is_left_as_it_is_and_goes_on_once_it_ends() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.hold(Some("launcher"));
    lab.label("container");
    lab.settle();
    assert_eq!(lab.operator().phase, NodePhase::Refused);
    assert!(lab.operator().message.contains("qemu-system-x86 (pid 4711, pod launcher)"), "{}", lab.operator().message);
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::VmPassthrough));
    assert!(lab.deploys("vfio-manager"));
    assert_eq!(lab.agent().resources.len(), 1, "what the node offers goes on");

    lab.agent().gpus[0].holders.clear();
    lab.settle();
    assert_eq!(lab.operator().ready, "True");
    assert_eq!(lab.agent().gpus[0].mode, Some(WorkloadMode::Container));
}

#[test]
fn a_holder_that_is_our_own_operand_does_not_block() {
    let mut lab = Lab::container();
    lab.hold(Some("driver"));
    lab.label("vm-passthrough");
    lab.operate();
    assert!(lab.deploys("driver"), "nothing is touched before it is known whose pod it is");
    lab.operate();
    assert_eq!(lab.operator().phase, NodePhase::Withdrawing);
}

#[test]
fn an_obstacle_is_a_refusal_before_anything_is_touched() {
    let mut lab = Lab::container();
    let mode = WorkloadMode::VmPassthrough;
    lab.agent().gpus[0].obstacles =
        vec![Obstacle { mode, reason: "IommuOff".to_owned(), message: "intel_iommu=on".to_owned() }];
    lab.label("vm-passthrough");
    lab.settle();
    assert_eq!((lab.operator().phase, lab.operator().reason.as_str()), (NodePhase::Refused, "IommuOff"));
    assert!(lab.deploys("driver"));
    assert_eq!(lab.modes_asked(), ["container"].into());
}

#[test]
fn a_workload_that_comes_during_the_change_brings_the_old_mode_back() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.operate();
    lab.run_agent();
    lab.operate();
    lab.run_pods();
    lab.refusal = Some(in_use());
    lab.hold(None);
    lab.settle();
    assert_eq!(lab.operator().phase, NodePhase::Refused);
    assert!(lab.deploys("driver"), "the old mode's labels come back");
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::Container));
}

#[test]
fn a_node_that_serves_already_is_taken_over_without_a_ripple() {
    let mut lab = Lab::new();
    for suffix in ["driver", "device-plugin", "operator-validator"] {
        lab.labels.insert(format!("{}{suffix}", labels::DEPLOY_PREFIX), "true".to_owned());
    }
    lab.operate();
    assert!(lab.deploys("driver") && lab.deploys("device-plugin"));
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::Container));
}

#[test]
fn a_node_that_somebody_else_ran_keeps_what_it_has_if_its_new_mode_is_impossible() {
    let mut lab = Lab::new();
    lab.labels.insert(format!("{}driver", labels::DEPLOY_PREFIX), "true".to_owned());
    let mode = WorkloadMode::VmPassthrough;
    lab.agent().gpus[0].obstacles =
        vec![Obstacle { mode, reason: "IommuOff".to_owned(), message: "intel_iommu=on".to_owned() }];
    lab.label("vm-passthrough");
    lab.settle();
    assert!(lab.deploys("driver"), "{:?}", lab.operator());
    assert_eq!(lab.operator().reason, "IommuOff");
}

#[test]
fn a_report_of_an_older_order_makes_no_node_ready() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.gpu_node.metadata.generation = lab.gpu_node.metadata.generation.map(|g| g + 1);
    lab.operate();
    assert_eq!((lab.operator().ready.as_str(), lab.operator().reason.as_str()), ("False", "AgentBehind"));
}

#[test]
fn what_somebody_writes_into_the_spec_is_taken_back() {
    let mut lab = Lab::container();
    lab.gpu_node.spec.gpus = vec![GPUMode { address: GPU.to_owned(), mode: WorkloadMode::VmPassthrough }];
    lab.operate();
    assert_eq!(lab.gpu_node.spec.gpus, []);
}

#[test]
fn a_gpu_that_falls_out_of_its_mode_keeps_the_nodes_operands() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.agent().gpus[0].mode = None;
    lab.operate();
    assert!(lab.deploys("vfio-manager"));
    assert_eq!((lab.operator().ready.as_str(), lab.operator().reason.as_str()), ("False", "GPUNotInMode"));
}

#[test]
fn kata_nodes_are_bound_and_not_advertised_by_us() {
    let mut lab = Lab::container();
    lab.policy.sandbox = Sandbox::On { default: WorkloadMode::Container, mode: SandboxMode::Kata };
    lab.label("vm-passthrough");
    lab.settle();
    assert_eq!(lab.operator().ready, "True");
    assert_eq!(lab.agent().resources, []);
    assert!(lab.deploys("kata-sandbox-device-plugin"));
}

#[test]
fn operands_false_takes_the_gates_away_and_leaves_the_gpu() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.labels.insert(labels::DEPLOY_OPERANDS.to_owned(), "false".to_owned());
    lab.settle();
    assert!(!lab.deploys("vfio-manager"));
    assert_eq!(lab.gpu_node.spec.mode, Some(WorkloadMode::VmPassthrough));
    assert_eq!(lab.labels[labels::DEPLOY_OPERANDS], "false", "the admin's own label stays");
}

#[test]
fn a_vanished_hint_tears_nothing_down() {
    let mut lab = Lab::container();
    lab.labels.insert(labels::NFD_HINTS[0].to_owned(), "true".to_owned());
    lab.settle();
    lab.labels.remove(labels::NFD_HINTS[0]);
    lab.settle();
    assert!(lab.deploys("driver"));
    assert_eq!(lab.labels[labels::GPU_PRESENT], "true");
}

#[test]
fn a_node_without_gpus_loses_its_gates() {
    let mut lab = Lab::container();
    lab.agent().gpus.clear();
    lab.operate();
    assert!(!lab.deploys("driver"));
    assert_eq!(lab.labels[labels::GPU_PRESENT], "false");
}

#[test]
fn teardown_releases_an_idle_node_and_leaves_no_gate() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.policy.teardown = true;
    lab.settle();
    assert_eq!(lab.operator().reason, TORN_DOWN, "{}", lab.operator().message);
    assert_eq!(lab.agent().gpus[0].mode, Some(WorkloadMode::Container));
    assert!(!lab.deploys("driver") && !lab.deploys("vfio-manager"));
}

#[test]
fn teardown_waits_for_a_vm() {
    let mut lab = Lab::container();
    lab.label("vm-passthrough");
    lab.settle();
    lab.hold(Some("launcher"));
    lab.policy.teardown = true;
    lab.settle();
    assert_eq!(lab.operator().phase, NodePhase::Refused);
    assert_eq!(lab.agent().gpus[0].mode, Some(WorkloadMode::VmPassthrough));
}

#[test]
fn a_hint_without_a_report_is_worth_one_label() {
    let lab = Lab::new();
    let labels = [(labels::NFD_HINTS[1].to_owned(), "true".to_owned())].into();
    let observed = Observed {
        name: "n1",
        labels: &labels,
        gpu_node: None,
        policy: &lab.policy,
        pods: None,
        users: &Users::default(),
        layouts: None,
        leave: &Leave::Free,
        upgrade: None,
        epoch: 1,
    };
    let decision = decide(&observed);
    assert_eq!(decision.labels, [(labels::GPU_PRESENT.to_owned(), Some("true".to_owned()))].into());
    assert_eq!(decision.order, None);
}

#[test]
fn a_function_that_the_policy_switches_off_is_off_on_every_node_and_comes_back() {
    let mut lab = Lab::container();
    lab.policy.disabled = vec![AgentFunction::SandboxDevicePlugin];
    lab.label("vm-passthrough");
    lab.settle();
    assert_eq!(lab.gpu_node.spec.disabled, [AgentFunction::SandboxDevicePlugin]);
    assert_eq!((lab.operator().ready.as_str(), lab.operator().reason.as_str()), ("True", "Bound"));
    lab.policy.disabled.clear();
    lab.settle();
    assert_eq!((lab.gpu_node.spec.disabled.len(), lab.operator().reason.as_str()), (0, "Serving"));
}

#[test]
fn a_node_gets_the_policys_mig_layout_once_it_serves_containers() {
    let mut lab = Lab::new();
    lab.labels.insert(labels::MIG_CAPABLE.to_owned(), "true".to_owned());
    lab.policy.mig_default = Some("all-disabled");
    lab.settle();
    assert_eq!(lab.labels[labels::MIG_CONFIG], "all-disabled");
    lab.labels.insert(labels::MIG_CONFIG.to_owned(), "all-1g.10gb".to_owned());
    lab.settle();
    assert_eq!(lab.labels[labels::MIG_CONFIG], "all-1g.10gb");
}

#[test]
fn a_check_that_has_failed_is_the_nodes_reason_while_checks_are_asked_for() {
    let mut lab = Lab::container();
    lab.policy.checks = true;
    let failed = crds::conditions::Verdict::no(crds::conditions::CUDA_VALIDATED, "Failed", "GPU 0 computes wrongly");
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::now());
    lab.agent().conditions = crds::conditions::merge(&[], &[failed], Some(1), &now);
    lab.settle();
    let operator = lab.operator();
    assert_eq!(
        (operator.ready.as_str(), operator.reason.as_str(), operator.message.as_str()),
        ("False", "CudaNotValidated", "GPU 0 computes wrongly")
    );
    // The file of a check outlives its validator: without one it says nothing.
    lab.policy.checks = false;
    lab.settle();
    assert_eq!(lab.operator().ready, "True");
}

#[test]
fn a_host_with_a_driver_of_its_own_keeps_it_and_has_no_driver_pod() {
    let mut lab = Lab::container();
    lab.policy.driver = true;
    lab.agent().host.driver =
        Some(NvidiaDriver { version: "570.1".to_owned(), origin: crds::v1alpha1::DriverOrigin::Host });
    lab.operate();
    assert_eq!(lab.labels["nvidia.com/gpu.deploy.driver"], "pre-installed");
    lab.run_pods();
    assert!(lab.pods.is_empty());
    lab.label("vm-passthrough");
    lab.settle();
    assert_eq!(lab.agent().gpus[0].mode, Some(WorkloadMode::VmPassthrough));
    assert!(!lab.labels.contains_key("nvidia.com/gpu.deploy.driver"));
}
