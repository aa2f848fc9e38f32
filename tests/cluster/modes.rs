//! The order of a mode change, seen in what is written.

use crds::{
    WorkloadMode, labels,
    v1::PolicyState,
    v1alpha1::{Advertise, GPUNode, NodePhase},
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::ListParams};

use crate::support::{
    agents::{self, Agent, T4, qemu, t4},
    kubelets::Kubelets,
    nodes::{self, deployed, label, until_deployed},
    policies,
    tape::{Tape, Written, version},
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
pub const CONTAINER: [&str; 9] = [
    "client",
    "container-toolkit",
    "dcgm",
    "dcgm-exporter",
    "device-plugin",
    "driver",
    "gpu-feature-discovery",
    "node-status-exporter",
    "operator-validator",
];
pub const PASSTHROUGH: [&str; 6] =
    ["cc-manager", "client", "kata-manager", "sandbox-device-plugin", "sandbox-validator", "vfio-manager"];

/// `n1` serves containers, with a driver pod.
async fn serving_containers(t: &Turn, agent: &Agent) -> Pod {
    policies::create(t, policies::valid(POLICY)).await;
    policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
    agent.until_reason(t, true, "Serving").await;
    let pods: Api<Pod> = t.ours();
    let driver = ListParams::default().labels("app=nvidia-driver-daemonset");
    let found = pods.list(&driver).await.expect("pods should be listable").items;
    found.into_iter().next().expect("a ready policy should have a driver pod")
}

fn is_gpunode(written: &Written<GPUNode>, is: impl Fn(&GPUNode) -> bool) -> bool {
    match written {
        Written::Is(node) => is(node),
        Written::Gone(_) => false,
    }
}

fn is_node(written: &Written<Node>, is: impl Fn(&Node) -> bool) -> bool {
    match written {
        Written::Is(node) => is(node),
        Written::Gone(_) => false,
    }
}

#[test]
fn a_mode_change_withdraws_waits_for_pods_switches_and_serves_only_then() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0"), t4("0000:19:00.0")]).await;
        let driver = serving_containers(t, &agent).await;
        until_deployed(t, "n1", &CONTAINER).await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        let labelled = Tape::<Node>::of(t.all(), "n1").await;
        let pods = Tape::<Pod>::start(t.ours()).await;

        kubelets.hold_endings();
        agent.change(|host| host.obeys = false);
        let flip = version(&label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await);
        let waits = agent.until_reason(t, false, "Withdrawing").await;
        let message = &agents::operator(&waits).expect("an operator's status").message;
        assert!(message.contains("vm-passthrough"), "{message}");
        agent
            .until(t, "it waits for the driver's pod by name", |node| {
                agents::operator(node).is_some_and(|o| o.message.contains(&driver.name_any()))
            })
            .await;
        let node = until_deployed(t, "n1", &[]).await;
        nodes::until_event(t, node.metadata.uid.clone(), "ModeChangeStarted").await;
        assert_eq!(waits.spec.mode, Some(WorkloadMode::Container), "the agent is not asked while the pod is there");
        policies::until(t, POLICY, PolicyState::NotReady, "GPUNodeNotReady", &["n1", "waiting for"]).await;

        kubelets.let_end();
        wait::until_gone(&t.ours(), &driver, "the driver's pod ends").await;
        let asked =
            agent.until(t, "the agent is asked", |node| node.spec.mode == Some(WorkloadMode::VmPassthrough)).await;
        assert_eq!(asked.spec.advertise, Advertise::Withdrawn);
        agent.until_reason(t, false, "Switching").await;

        agent.change(|host| host.obeys = true);
        let served = agent.until_reason(t, true, "Serving").await;
        assert_eq!(served.spec.advertise, Advertise::Offered);
        until_deployed(t, "n1", &PASSTHROUGH).await;
        nodes::until_event(t, node.metadata.uid, "ModeReached").await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;

        let labels_off = labelled.first(flip, "old labels off", |w| is_node(w, |n| deployed(n).is_empty())).await;
        let pod_gone = pods
            .first(
                flip,
                "driver pod gone",
                |w| matches!(w, Written::Gone(pod) if pod.metadata.uid == driver.metadata.uid),
            )
            .await;
        let order = written
            .first(flip, "spec.mode", |w| is_gpunode(w, |n| n.spec.mode == Some(WorkloadMode::VmPassthrough)))
            .await;
        let reached = written
            .first(flip, "mode reached", |w| {
                is_gpunode(w, |n| {
                    agents::agent(n).is_some_and(|a| a.gpus.iter().all(|g| g.mode == Some(WorkloadMode::VmPassthrough)))
                })
            })
            .await;
        let labels_on = labelled.first(labels_off, "new labels", |w| is_node(w, |n| !deployed(n).is_empty())).await;
        let offered =
            written.first(order, "offered", |w| is_gpunode(w, |n| n.spec.advertise == Advertise::Offered)).await;
        let steps = [flip, labels_off, pod_gone, order, reached, labels_on];
        assert!(steps.is_sorted_by(|a, b| a < b), "flip, labels off, pod gone, order, reached, labels on: {steps:?}");
        assert!(reached < offered, "reached {reached}, offered {offered}");
    });
}

#[test]
fn on_the_way_back_devices_are_withdrawn_before_the_driver_is_asked_for() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        let served = agent.until_reason(t, true, "Serving").await;
        assert_eq!(agents::agent(&served).expect("a report").resources[0].name, T4);
        let written = Tape::<GPUNode>::start(t.all()).await;
        let flip = version(&label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await);
        agent.until_reason(t, true, "Serving").await;
        agent
            .until(t, "containers are served", |n| {
                agents::operator(n).is_some_and(|o| o.serving == Some(WorkloadMode::Container))
            })
            .await;
        until_deployed(t, "n1", &CONTAINER).await;
        let withdrawn =
            written.first(flip, "withdrawn", |w| is_gpunode(w, |n| n.spec.advertise == Advertise::Withdrawn)).await;
        let unregistered = written
            .first(flip, "unregistered", |w| {
                is_gpunode(w, |n| agents::agent(n).is_some_and(|a| a.resources.is_empty()))
            })
            .await;
        let order =
            written.first(flip, "spec.mode", |w| is_gpunode(w, |n| n.spec.mode == Some(WorkloadMode::Container))).await;
        assert!(withdrawn < unregistered && unregistered < order, "{withdrawn} {unregistered} {order}");
    });
}

#[test]
fn a_vm_keeps_its_mode_and_the_change_happens_when_the_vm_ends() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        agent.until_reason(t, true, "Serving").await;
        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        agent.until(t, "the VM is seen", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 1)).await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        let node = label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await;

        let held = agent.until_reason(t, false, "GPUInUse").await;
        let operator = agents::operator(&held).expect("an operator's status");
        assert_eq!(operator.phase, NodePhase::Refused);
        for part in ["0000:18:00.0", "qemu-kvm", "4711", "/dev/vfio/20"] {
            assert!(operator.message.contains(part), "{}", operator.message);
        }
        nodes::until_event(t, node.metadata.uid.clone(), "ModeChangeRefused").await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
        let touched = written.ever(version(&node), |w| {
            is_gpunode(w, |n| {
                n.spec.advertise == Advertise::Withdrawn || n.spec.mode != Some(WorkloadMode::VmPassthrough)
            })
        });
        assert!(!touched, "nothing is withdrawn under a running VM");

        agent.change(|host| host.gpus[0].holders.clear());
        until_deployed(t, "n1", &CONTAINER).await;
        agent
            .until(t, "containers are served", |n| {
                agents::operator(n).is_some_and(|o| o.serving == Some(WorkloadMode::Container))
            })
            .await;
    });
}

#[test]
fn a_refusal_by_the_agent_brings_the_old_mode_back() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        serving_containers(t, &agent).await;
        agent.change(|host| host.obeys = false);
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        agent.until(t, "the agent is asked", |n| n.spec.mode == Some(WorkloadMode::VmPassthrough)).await;
        until_deployed(t, "n1", &[]).await;

        // Someone was faster: the agent finds the GPU open when it is asked.
        agent.change(|host| {
            host.gpus[0].holders = vec![qemu(4711)];
            host.obeys = true;
        });
        let refused = agent.until_reason(t, false, "GPUInUse").await;
        assert_eq!(agents::operator(&refused).expect("an operator's status").phase, NodePhase::Refused);
        until_deployed(t, "n1", &CONTAINER).await;
        agent.until(t, "the order is taken back", |n| n.spec.mode == Some(WorkloadMode::Container)).await;

        agent.change(|host| host.gpus[0].holders.clear());
        until_deployed(t, "n1", &PASSTHROUGH).await;
        agent.until_reason(t, true, "Serving").await;
    });
}

#[test]
fn an_operator_that_dies_in_the_middle_of_a_change_is_followed_by_one_that_goes_on() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let driver = serving_containers(t, &agent).await;
        // Dies while it waits for pods …
        kubelets.hold_endings();
        agent.change(|host| host.obeys = false);
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        agent.until_reason(t, false, "Withdrawing").await;
        until_deployed(t, "n1", &[]).await;
        operator.kill().await;
        kubelets.let_end();
        wait::until_gone(&t.ours(), &driver, "the driver's pod ends").await;
        // … and the next one, of the same name as in a container that was restarted, while the agent is at it.
        let operator = t.operator("op-1").await;
        agent.until(t, "the agent is asked", |n| n.spec.mode == Some(WorkloadMode::VmPassthrough)).await;
        operator.kill().await;
        agent.change(|host| host.obeys = true);
        agent
            .until(t, "the agent has done it", |n| {
                agents::agent(n).is_some_and(|a| a.gpus[0].mode == Some(WorkloadMode::VmPassthrough))
            })
            .await;
        let _operator = t.operator("op-1").await;
        agent.until_reason(t, true, "Serving").await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
    });
}
