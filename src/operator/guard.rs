//! Pods of the vGPU host driver are marked while VMs have vGPUs of their node: at its end that pod disables all virtual
//! functions, those of running VMs too.
//!
//! An admission policy cannot look another object up, and an eviction carries no labels: so the mark is on the pod, where
//! the chart's policy `gpuvirt-vgpus-in-use` refuses the deletion of what has it, and its `PodDisruptionBudget` the eviction.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{AgentStatus, GPUNode, GPUStatus},
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::{reflector::Store, watcher},
};
use serde_json::{Value, json};
use tokio::{sync::Notify, time::sleep};

use super::{
    policy::VGPU_HOST_DRIVERS,
    world::{Wake, World, follow},
};
use crate::cluster::gone;

const RETRY: Duration = Duration::from_secs(5);

pub struct Guard {
    client: Client,
    namespace: String,
    world: World,
    pods: Store<Pod>,
    due: Arc<Notify>,
}

impl Guard {
    /// And the work that keeps its list of pods.
    pub fn new(client: &Client, namespace: &str, world: &World, wake: &Wake) -> (Self, BoxFuture<'static, ()>) {
        let drivers = format!("{} in ({})", labels::APP_COMPONENT, VGPU_HOST_DRIVERS.join(","));
        let due = wake.guard.clone();
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let (pods, work) = follow(api, watcher::Config::default().labels(&drivers), move |_| due.notify_one());
        let guard = Self {
            client: client.clone(),
            namespace: namespace.to_owned(),
            world: world.clone(),
            pods,
            due: wake.guard.clone(),
        };
        (guard, work)
    }

    /// Runs for as long as the process does.
    pub async fn run(self) {
        loop {
            self.due.notified().await;
            for pod in self.pods.state() {
                while let Err(error) = self.mark(&pod).await {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    tracing::warn!(pod = pod.name_any(), error = crate::chain(error), "pod not marked, trying again");
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn mark(&self, pod: &Pod) -> Result<(), kube::Error> {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        let guarded = self.world.gpu_node(node);
        let Some(Ok(gpu_node)) = guarded.as_deref().map(|guarded| &guarded.0) else { return Ok(()) };
        let Some(changes) = changes(pod, gpu_node) else { return Ok(()) };
        let pods: Api<PartialObjectMeta<Pod>> = Api::namespaced(self.client.clone(), &self.namespace);
        let patch = json!({"metadata": changes});
        match pods.patch_metadata(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => Ok(()),
            Err(error) if gone(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// What of the pod's metadata is to change. `None`: nothing, or what the VMs have is not known.
fn changes(pod: &Pod, gpu_node: &GPUNode) -> Option<Value> {
    let agent = gpu_node.status.as_ref()?.agent.as_ref()?;
    let allowed = pod.annotations().get(labels::ALLOW_DELETE).is_some_and(|value| value == "true");
    let users = users(agent).filter(|_| !allowed);
    let marked = pod.labels().contains_key(labels::VGPUS_IN_USE);
    if marked == users.is_some() && pod.annotations().get(labels::VGPU_USERS) == users.as_ref() {
        return None;
    }
    let label = BTreeMap::from([(labels::VGPUS_IN_USE, users.is_some().then_some("true"))]);
    let annotation = BTreeMap::from([(labels::VGPU_USERS, users)]);
    Some(json!({"uid": pod.uid(), "labels": label, "annotations": annotation}))
}

/// Who has a vGPU, in words.
fn users(agent: &AgentStatus) -> Option<String> {
    let gpus = agent.gpus.iter().filter(|gpu| gpu.mode == Some(WorkloadMode::VmVgpu) || gpu.vgpu.is_some());
    let users: Vec<String> = gpus.flat_map(users_of).collect();
    (!users.is_empty()).then(|| users.join(", "))
}

fn users_of(gpu: &GPUStatus) -> Vec<String> {
    let instances = gpu.vgpu.iter().flat_map(|vgpu| &vgpu.instances);
    let of_instances = instances.flat_map(|instance| instance.holders.iter().map(|holder| (&instance.id, holder)));
    let of_gpu = gpu.holders.iter().map(|holder| (&gpu.address, holder));
    let mut users: Vec<String> = of_instances
        .chain(of_gpu)
        .map(|(id, holder)| format!("{id}: {} (pid {})", holder.command, holder.pid))
        .collect();
    users.sort();
    users.dedup();
    users
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUNodeSpec, GPUNodeStatus, Holder, VgpuInstance, VgpuStatus};

    use super::*;

    fn node(holders: Vec<Holder>) -> GPUNode {
        let instance = VgpuInstance { id: "0000:41:00.4".to_owned(), holders, ..VgpuInstance::default() };
        let vgpu = VgpuStatus { instances: vec![instance], ..VgpuStatus::default() };
        let gpu = GPUStatus { mode: Some(WorkloadMode::VmVgpu), vgpu: Some(vgpu), ..GPUStatus::default() };
        let agent = AgentStatus { gpus: vec![gpu], ..AgentStatus::default() };
        let mut node = GPUNode::new("n1", GPUNodeSpec::default());
        node.status = Some(GPUNodeStatus { agent: Some(agent), operator: None });
        node
    }

    fn vm() -> Vec<Holder> {
        vec![Holder { pid: 7, command: "qemu-kvm".to_owned(), ..Holder::default() }]
    }

    fn pod(metadata: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": metadata})).expect("a Pod")
    }

    #[test]
    fn a_pod_is_marked_with_who_has_a_vgpu_and_once() {
        let set = changes(&pod(&json!({"name": "p"})), &node(vm())).expect("a change");
        let users = "0000:41:00.4: qemu-kvm (pid 7)";
        assert_eq!(set["labels"][labels::VGPUS_IN_USE], "true");
        assert_eq!(set["annotations"][labels::VGPU_USERS], users);
        let marked = json!({"labels": {labels::VGPUS_IN_USE: "true"}, "annotations": {labels::VGPU_USERS: users}});
        assert_eq!(changes(&pod(&marked), &node(vm())), None);
    }

    #[test]
    fn the_mark_goes_with_the_vm_and_by_an_admins_word() {
        let users = "0000:41:00.4: qemu-kvm (pid 7)";
        let mut metadata =
            json!({"labels": {labels::VGPUS_IN_USE: "true"}, "annotations": {labels::VGPU_USERS: users}});
        let gone = changes(&pod(&metadata), &node(Vec::new())).expect("a change");
        assert_eq!(gone["labels"][labels::VGPUS_IN_USE], Value::Null);
        metadata["annotations"][labels::ALLOW_DELETE] = json!("true");
        assert!(changes(&pod(&metadata), &node(vm())).is_some_and(|c| c["labels"][labels::VGPUS_IN_USE].is_null()));
    }

    #[test]
    fn a_node_that_has_not_reported_changes_no_mark() {
        let marked = pod(&json!({"labels": {labels::VGPUS_IN_USE: "true"}}));
        assert_eq!(changes(&marked, &GPUNode::new("n1", GPUNodeSpec::default())), None);
    }
}
