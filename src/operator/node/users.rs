//! Whose pods have a node's GPUs, and which virtual machines these pods run.
//!
//! The agent knows pods by name, from the kubelet. A launcher's owner is its instance, so each pod's metadata is read
//! once; pods are not watched for this.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Mutex,
};

use crds::v1alpha1::{AgentStatus, GPUUser};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt, core::PartialObjectMeta};

/// Of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    pub list: Vec<GPUUser>,
    /// Of virtual machines that a drain would wait for without end, a sentence each.
    pub blockers: Vec<String>,
}

impl Users {
    /// The virtual machine that has a GPU.
    pub fn vm(&self, gpu: &str) -> Option<&str> {
        self.list.iter().find(|user| user.gpus.iter().any(|has| has == gpu)).and_then(|user| user.vmi.as_deref())
    }
}

/// Instances by the pods (`namespace/name`) that they run in; `None` for a pod that runs none.
type Launchers = BTreeMap<String, Option<String>>;

pub struct UserNames {
    client: Client,
    /// By node.
    known: Mutex<HashMap<String, Launchers>>,
}

impl UserNames {
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default() }
    }

    /// And whether every pod could be asked about.
    pub async fn of(&self, node: &str, agent: &AgentStatus) -> (Vec<GPUUser>, bool) {
        let pods = pods(agent);
        let mut known = self.known.lock().expect("names lock should not be poisoned").remove(node).unwrap_or_default();
        known.retain(|pod, _| pods.contains_key(pod));
        let mut complete = true;
        for pod in pods.keys() {
            if known.contains_key(pod) {
                continue;
            }
            match self.instance(pod).await {
                Ok(instance) => drop(known.insert(pod.clone(), instance)),
                Err(error) => {
                    tracing::warn!(pod, %error, "pod with a GPU cannot be read: its VM stays unnamed");
                    complete = false;
                }
            }
        }
        let users = users(pods, &known);
        if !known.is_empty() {
            self.known.lock().expect("names lock should not be poisoned").insert(node.to_owned(), known);
        }
        (users, complete)
    }

    async fn instance(&self, pod: &str) -> Result<Option<String>, kube::Error> {
        let Some((namespace, name)) = pod.split_once('/') else { return Ok(None) };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        Ok(pods.get_metadata_opt(name).await?.as_ref().and_then(owner))
    }
}

/// KubeVirt 1.6-1.9: the instance is the controlling owner of its launcher.
fn owner(pod: &PartialObjectMeta<Pod>) -> Option<String> {
    let owner = pod.owner_references().iter().find(|owner| owner.kind == "VirtualMachineInstance")?;
    Some(format!("{}/{}", pod.namespace().unwrap_or_default(), owner.name))
}

/// GPUs by the pods that the kubelet has given them to. Holders that were found by their open files have a UID there.
fn pods(agent: &AgentStatus) -> BTreeMap<String, Vec<String>> {
    let mut pods: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for gpu in &agent.gpus {
        for pod in gpu.all_holders().filter_map(|holder| holder.pod.as_ref()).filter(|pod| pod.contains('/')) {
            let gpus = pods.entry(pod.clone()).or_default();
            if !gpus.contains(&gpu.address) {
                gpus.push(gpu.address.clone());
            }
        }
    }
    pods
}

fn users(pods: BTreeMap<String, Vec<String>>, known: &Launchers) -> Vec<GPUUser> {
    let user = |(pod, gpus): (String, Vec<String>)| {
        let vmi = known.get(&pod).cloned().flatten();
        GPUUser { pod, vmi, gpus }
    };
    pods.into_iter().map(user).collect()
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUStatus, Holder};
    use serde_json::json;

    use super::*;

    fn holder(pod: &str) -> Holder {
        Holder { pod: Some(pod.to_owned()), ..Holder::default() }
    }

    #[test]
    fn a_pod_has_all_its_gpus_once_however_many_ways_it_was_seen() {
        let gpu = |address: &str| GPUStatus {
            address: address.to_owned(),
            holders: vec![holder("vms/launcher"), holder("5f0e-uid"), holder("vms/launcher")],
            ..GPUStatus::default()
        };
        let agent = AgentStatus { gpus: vec![gpu("0000:01:00.0"), gpu("0000:02:00.0")], ..AgentStatus::default() };
        let known = [("vms/launcher".to_owned(), Some("vms/a".to_owned()))].into();
        let list = users(pods(&agent), &known);
        let both = vec!["0000:01:00.0".to_owned(), "0000:02:00.0".to_owned()];
        let expected = GPUUser { pod: "vms/launcher".to_owned(), vmi: Some("vms/a".to_owned()), gpus: both };
        assert_eq!(list, [expected]);
        assert_eq!(Users { list, blockers: Vec::new() }.vm("0000:02:00.0"), Some("vms/a"));
    }

    #[test]
    fn only_an_instance_as_owner_makes_a_pod_a_vm() {
        let owned_by = |kind: &str| {
            let owner = json!({"apiVersion": "v1", "kind": kind, "name": "a", "uid": "1"});
            let pod = json!({"metadata": {"namespace": "vms", "name": "p", "ownerReferences": [owner]}});
            owner_of(pod)
        };
        assert_eq!(owned_by("VirtualMachineInstance").as_deref(), Some("vms/a"));
        assert_eq!(owned_by("StatefulSet"), None);
    }

    fn owner_of(pod: serde_json::Value) -> Option<String> {
        owner(&serde_json::from_value(pod).expect("metadata of a pod"))
    }
}
