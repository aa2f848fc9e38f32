//! The vGPU host driver's pod is not taken away under a running VM: by the real API server's admission and eviction.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{VgpuInstance, VgpuStatus},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams},
};
use serde_json::json;

use crate::support::{
    NAMESPACE,
    agents::{Agent, qemu, t4},
    cluster,
    kubelets::Kubelets,
    nodes, policies,
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
const VF: &str = "0000:18:00.4";

/// A node in mode vm-vgpu, and the pod of its host driver.
async fn vgpu_node(t: &Turn) -> (Agent, Pod) {
    nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-vgpu")]).await;
    let mut gpu = t4("0000:18:00.0");
    gpu.mode = Some(WorkloadMode::VmVgpu);
    let instance = VgpuInstance { id: VF.to_owned(), parent: VF.to_owned(), ..VgpuInstance::default() };
    gpu.vgpu = Some(VgpuStatus { instances: vec![instance], ..VgpuStatus::default() });
    let agent = Agent::start(t, "n1", vec![gpu]).await;
    let mut policy = policies::valid(POLICY);
    policy["spec"]["vgpuManager"] =
        json!({"enabled": true, "repository": "localhost", "image": "vgpu-manager", "version": "1"});
    policies::create(t, policy).await;
    let pods: Api<Pod> = t.ours();
    let ours = ListParams::default().labels("app=nvidia-vgpu-manager-daemonset");
    let pod = wait::eventually("the host driver's pod runs", async || {
        let found = pods.list(&ours).await.expect("pods should be listable").items;
        found.into_iter().find(|pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running"))
    })
    .await;
    (agent, pod)
}

async fn until_marked(t: &Turn, pod: &Pod, marked: bool) {
    wait::until(&t.ours(), &pod.name_any(), &format!("marked: {marked}"), |pod: &Pod| {
        pod.labels().contains_key(labels::VGPUS_IN_USE) == marked
    })
    .await;
}

async fn refused(t: &Turn, pod: &Pod) {
    let pods: Api<Pod> = t.ours();
    let name = pod.name_any();
    let error = pods.delete(&name, &DeleteParams::default()).await.expect_err("a VM has a vGPU").to_string();
    for part in ["node n1", VF, "qemu-kvm (pid 42)", "gpuvirt.io/allow-delete=true"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let forced = pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
    assert!(forced.is_err(), "neither by force");
    let all = ListParams::default().labels("app=nvidia-vgpu-manager-daemonset");
    assert!(pods.delete_collection(&DeleteParams::default(), &all).await.is_err(), "nor with all others");
    let client = cluster::impatient_client(&t.cluster.kubeconfig()).await;
    let evicted = Api::<Pod>::namespaced(client, NAMESPACE)
        .evict(&name, &EvictParams::default())
        .await
        .expect_err("a VM has a vGPU");
    assert!(matches!(&evicted, kube::Error::Api(status) if status.code == 429), "{evicted}");
}

#[test]
fn a_host_driver_whose_vgpus_vms_have_is_neither_deleted_nor_evicted_until_they_end() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (agent, pod) = vgpu_node(t).await;
        until_marked(t, &pod, false).await;
        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders = vec![qemu(42)]);
        until_marked(t, &pod, true).await;
        refused(t, &pod).await;

        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders.clear());
        until_marked(t, &pod, false).await;
        let pods: Api<Pod> = t.ours();
        pods.evict(&pod.name_any(), &EvictParams::default()).await.expect("an idle one may go");
        wait::until_gone(&t.ours(), &pod, "it goes").await;
    });
}

#[test]
fn an_admins_word_lets_the_host_driver_go_under_a_vm_and_an_ended_pod_is_cleared_away() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let (agent, pod) = vgpu_node(t).await;
        agent.change(|host| host.gpus[0].vgpu.as_mut().expect("vGPUs").instances[0].holders = vec![qemu(42)]);
        until_marked(t, &pod, true).await;
        let pods: Api<Pod> = t.ours();
        let name = pod.name_any();
        // As the kubelet does it when memory runs out; then the DaemonSet's controller must be able to make a new one.
        let failed = json!({"status": {"phase": "Failed", "reason": "Evicted"}});
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&failed)).await.expect("patchable");
        wait::until_gone(&t.ours(), &pod, "what has ended goes").await;

        let ours = ListParams::default().labels("app=nvidia-vgpu-manager-daemonset");
        let next = wait::eventually("a new pod is marked", async || {
            let found = pods.list(&ours).await.expect("pods should be listable").items;
            found.into_iter().find(|pod| pod.labels().contains_key(labels::VGPUS_IN_USE))
        })
        .await;
        let word = json!({"metadata": {"annotations": {labels::ALLOW_DELETE: "true"}}});
        let name = next.name_any();
        pods.patch(&name, &PatchParams::default(), &Patch::Merge(&word)).await.expect("patchable");
        pods.delete(&name, &DeleteParams::default()).await.expect("the admin has said so");
    });
}
