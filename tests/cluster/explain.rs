//! Why a virtual machine does not run: as an event on it, and for a person who asks. With KubeVirt's own controllers.

use std::time::{Duration, Instant};

use crds::{labels, v1alpha1::Holder};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    kubevirt::{nic, offering, until_permitted, with_kubevirt},
    support::{
        agents::{Agent, T4, t4},
        cluster::{command, run},
        kubelets::Kubelets,
        kubevirt::{self, VMS},
        nodes, policies,
        turn::{Turn, turn},
    },
};

/// A person has the reason within this, from the moment that KubeVirt took the instance.
const SOON: Duration = Duration::from_secs(5);

/// The event of this reason about an instance.
async fn told(t: &Turn, vm: &DynamicObject, reason: &str, words: &[&str]) -> Event {
    let event = nodes::until_event(t, vm.uid(), reason).await;
    let note = event.message.clone().unwrap_or_default();
    assert!(words.iter().all(|word| note.contains(word)), "{words:?} in {note}");
    event
}

/// All about an instance, whoever tells them.
async fn events(t: &Turn, vm: &DynamicObject) -> Vec<Event> {
    let events: Api<Event> = t.all();
    let about = ListParams::default().fields(&format!("involvedObject.uid={}", vm.uid().unwrap_or_default()));
    events.list(&about).await.expect("events should be listable").items
}

async fn count(t: &Turn, vm: &DynamicObject, reason: &str) -> i32 {
    let events = events(t, vm).await;
    let of = events.iter().filter(|event| event.reason.as_deref() == Some(reason));
    of.map(|event| event.series.as_ref().and_then(|series| series.count).unwrap_or(1)).sum()
}

/// What a person is told who asks for it. The exit status says whether a GPU is the reason.
fn asked(t: &Turn, args: &[&str]) -> Result<String, String> {
    let args = ["explain", "vmi"].iter().chain(args);
    run(command(env!("CARGO_BIN_EXE_gpuvirt"), args).env("KUBECONFIG", t.cluster.kubeconfig()))
}

#[test]
fn a_vm_that_is_not_permitted_is_told_why_within_five_seconds_and_so_is_who_asks() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        nodes::create(t, "n1", &[]).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid("cluster-policy")).await;
        agent.until_reason(t, true, "Serving").await;

        let began = Instant::now();
        let vm = kubevirt::start_vm(&t.client, "vm-1", &[T4]).await;
        let event = told(t, &vm, "GPUNotPermitted", &[T4, "n1", "gpu.workload.config=vm-passthrough"]).await;
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        let said = asked(t, &["vms/vm-1", "-o", "json"]).expect_err("exit status 2: a GPU is the reason");
        assert!(said.contains(&format!("{:?}", event.message.unwrap_or_default())), "{said}");
        let said = asked(t, &["--namespace", VMS, "vm-1"]).expect_err("as text");
        assert!(said.contains("vms/vm-1 does not run (GPUNotPermitted)") && said.contains("container"), "{said}");

        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        kubevirt::until_pod(&t.client, "vm-1", T4).await;
        assert_eq!(count(t, &vm, "GPUNotPermitted").await, 1, "said once, however often KubeVirt tried");
    });
}

#[test]
fn a_name_that_no_gpu_has_is_told_with_the_one_that_was_meant() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let vm = kubevirt::start_vm(&t.client, "vm-1", &["nvidia.com/TU104GL_Tesla_T4"]).await;
        told(t, &vm, "GPUNameUnknown", &["did you mean nvidia.com/TU104GL_TESLA_T4?"]).await;
        let other = kubevirt::start_vm(&t.client, "vm-2", &["intel.com/x710"]).await;
        kubevirt::until_launcher(&t.client, "vm-2").await;
        let said = asked(t, &["vms/vm-2"]).expect("exit status 0: no GPU is the reason");
        assert!(said.contains("no GPU of gpuvirt"), "{said}");
        let mut ours = events(t, &other).await;
        ours.retain(|event| event.action.as_deref() == Some("ExplainGPU"));
        assert_eq!(ours, [], "others' devices are others' to explain");
        let said = asked(t, &["vms/vm-3"]).expect_err("there is none");
        assert!(said.contains("no VirtualMachineInstance vms/vm-3"), "{said}");
    });
}

pub fn held_by(pod: &str) -> Vec<Holder> {
    vec![Holder {
        command: "kubelet".to_owned(),
        path: "pod-resources".to_owned(),
        pod: Some(pod.to_owned()),
        ..Holder::default()
    }]
}

#[test]
fn the_vm_that_has_the_gpu_is_named_to_the_one_that_waits_and_to_the_mode_change() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = offering(t).await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        kubevirt::start_vm(&t.client, "vm-1", &[T4]).await;
        let first = kubevirt::until_launcher(&t.client, "vm-1").await.name_any();
        agent.change(|host| host.gpus[0].holders = held_by(&format!("{VMS}/{first}")));
        let users = |node: &crds::v1alpha1::GPUNode| {
            let operator = node.status.as_ref().and_then(|s| s.operator.as_ref());
            operator.is_some_and(|o| o.users.iter().any(|user| user.vmi.as_deref() == Some("vms/vm-1")))
        };
        agent.until(t, "the GPUNode names the VM", users).await;

        let second = kubevirt::start_vm(&t.client, "vm-2", &[T4]).await;
        told(t, &second, "GPUInUse", &["0000:18:00.0 by VM vms/vm-1"]).await;
        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await;
        let node = agent.until_reason(t, false, "GPUInUse").await;
        let message = &node.status.and_then(|s| s.operator).expect("the operator's part").message;
        assert!(message.contains("in use by VM vms/vm-1") && message.contains(&first), "{message}");

        // The first one ends, and the node may leave: another reason, told at once, and the old one was told once.
        agent.change(|host| host.gpus[0].holders.clear());
        agent.until_reason(t, true, "Serving").await;
        told(t, &second, "NoNodeHasGPU", &["mode container"]).await;
        assert_eq!(count(t, &second, "GPUInUse").await, 1);
    });
}

#[test]
fn a_pod_that_the_node_refuses_is_told_with_the_nodes_words() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        until_permitted(t, &["intel.com/x710", T4]).await;
        let vm = kubevirt::start_vm(&t.client, "vm-1", &[T4]).await;
        let pod = kubevirt::until_launcher(&t.client, "vm-1").await.name_any();
        // The scheduler and the kubelet, played.
        let pods: Api<Pod> = Api::namespaced(t.client.clone(), VMS);
        let bind = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
        });
        let bound: Result<Value, _> = pods.create_subresource("binding", &pod, &PostParams::default(), &bind).await;
        bound.expect("a pod should be bindable");
        let why = "Allocate failed due to rpc error: device 0000:18:00.0 is unhealthy, which is unexpected";
        let failed = json!({"status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": why}});
        pods.patch_status(&pod, &PatchParams::default(), &Patch::Merge(&failed)).await.expect("patchable");
        kubevirt::until_phase(&t.client, "vm-1", "Failed").await;
        told(t, &vm, "RefusedByNode", &["node n1 refused", &pod, "0000:18:00.0 is unhealthy"]).await;
    });
}
