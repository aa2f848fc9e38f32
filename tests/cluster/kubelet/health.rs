//! What the kubelet is told of GPUs that are not well, or that somebody still has.

use std::{
    fs,
    process::{Child, Stdio},
};

use crds::v1alpha1::{AgentStatus, Severity};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use super::{NODE, T4, allocatable, eight_t4, offering, real_node, until_report};
use crate::support::{
    cluster::command,
    turn::{Turn, turn},
    wait,
};

/// Group node and address of two of the eight.
const FIRST: (&str, &str) = ("/dev/vfio/20", "0000:18:00.0");
const SECOND: (&str, &str) = ("/dev/vfio/21", "0000:19:00.0");

fn ails(agent: &AgentStatus, address: &str, reason: &str) -> bool {
    let gpu = agent.gpus.iter().find(|gpu| gpu.address == address);
    gpu.is_some_and(|gpu| {
        gpu.withheld.is_some() && gpu.ailments.iter().any(|a| a.reason == reason && a.severity == Severity::Unhealthy)
    })
}

async fn event(t: &Turn, reason: &str, text: &str) {
    let events: Api<Event> = t.all();
    wait::eventually(&format!("an event {reason} that says {text}"), async || {
        let list = events.list(&ListParams::default().fields(&format!("reason={reason}"))).await.ok()?;
        list.items.iter().any(|event| event.message.as_ref().is_some_and(|m| m.contains(text))).then_some(())
    })
    .await;
}

#[test]
fn a_gpu_that_is_not_well_is_withdrawn_with_its_reason_and_comes_back_by_itself() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let mut agent = offering(t, host.path(), 8).await;
        // Nothing tells of the second; it is seen when the first one's node goes.
        host.write(&format!("/sys/bus/pci/devices/{}/config", SECOND.1), [0xff; 64]);
        host.remove(FIRST.0);
        allocatable(t, "6").await;
        until_report(t, "both are named", |a| ails(a, FIRST.1, "NoGroupNode") && ails(a, SECOND.1, "FellOff")).await;
        event(t, "GPUUnhealthy", FIRST.0).await;
        let mut config = vec![0xde, 0x10, 0xb8, 0x1e];
        config.resize(64, 0);
        host.write(&format!("/sys/bus/pci/devices/{}/config", SECOND.1), config);
        host.write(FIRST.0, "char 240:20");
        allocatable(t, "8").await;
        until_report(t, "and well again", |a| {
            a.conditions.iter().any(|c| c.type_ == "GPUsHealthy" && c.status == "True")
        })
        .await;
        event(t, "GPURecovered", FIRST.1).await;
        assert!(agent.lives(), "without a restart");
    });
}

/// A pod of the node that asks for GPUs.
pub(super) async fn pod(t: &Turn, name: &str, gpus: u32) -> Api<Pod> {
    let pods: Api<Pod> = t.ours();
    let _ = pods.delete(name, &DeleteParams::default().grace_period(0)).await;
    let limits = json!({T4: gpus.to_string()});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeName": NODE, "hostNetwork": true, "restartPolicy": "Never", "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "c", "image": "localhost/pause:test", "imagePullPolicy": "Never", "resources": {"limits": limits},
            }],
        },
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).expect("a Pod")).await.expect("a pod");
    pods
}

/// A process that ends with the test, however that ends: whoever reads the test's output waits for it, too.
struct Old(Child);

impl Drop for Old {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_gpu_that_an_old_vm_still_has_is_given_to_nobody_until_it_is_free() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        // Open devices are known by their number.
        let node = host.path().join(FIRST.0.trim_start_matches('/'));
        fs::remove_file(&node).expect("a file in place of the node");
        command("mknod", [node.as_os_str(), "c".as_ref(), "240".as_ref(), "20".as_ref()]).status().expect("a node");
        let _agent = offering(t, host.path(), 8).await;
        // As after a deletion by force: the kubelet counts it as free, and no event tells of the process.
        let old =
            Old(command("sleep", ["600"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a process"));
        let pid = i32::try_from(old.0.id()).expect("a pid");
        host.open_device(pid, "qemu-kvm", FIRST.0, None);
        let pods = pod(t, "eager", 8).await;
        let refused = wait::until(&pods, "eager", "it is refused", |pod: &Pod| {
            pod.status.as_ref().is_some_and(|status| status.reason.as_deref() == Some("UnexpectedAdmissionError"))
        });
        let message = refused.await.status.and_then(|status| status.message).unwrap_or_default();
        // By the agent when it is asked; or, if one of the looks after a registration saw it before, by what the agent has
        // just told the kubelet, or by the kubelet once it knows.
        let asked = message.contains(&format!("pid {pid} (qemu-kvm)")) && message.contains(FIRST.1);
        let told = message.contains(&format!("device {} is unhealthy", FIRST.1));
        assert!(asked || told || message.contains("Requested: 8, Available: 7"), "{message}");
        allocatable(t, "7").await;
        // The seven others are given, although the kubelet could choose the eighth.
        let pods = pod(t, "patient", 7).await;
        until_report(t, "seven are in use by a pod", |a| {
            a.gpus.iter().filter(|gpu| gpu.holders.iter().any(|h| h.pod.as_deref() == Some("gpuvirt/patient"))).count()
                == 7
        })
        .await;
        let _ = pods.delete("patient", &DeleteParams::default().grace_period(0)).await;
        let _ = pods.delete("eager", &DeleteParams::default().grace_period(0)).await;
        host.remove(&format!("/proc/{pid}"));
        drop(old);
        allocatable(t, "8").await;
    });
}
