//! Whose pods have a node's GPUs, and which virtual machines these pods run.
//!
//! The agent knows pods that the kubelet gave something of ours by name. A launcher's owner is its instance, so each pod's
//! metadata is read once; pods are not watched for this. A container with a GPU of NVIDIA's own device plugin has only its
//! pod's UID there, which is looked up among the node's pods when the node is to change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Mutex,
};

use crds::{
    labels,
    v1alpha1::{AgentStatus, GPUStatus, GPUUser},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt, api::ListParams, core::PartialObjectMeta};

use super::claims::{Claimant, Claims};
use crate::operator::pod::instance;

/// Of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    pub list: Vec<GPUUser>,
    /// Names (`namespace/name`) of their pods, by UID.
    pub names: BTreeMap<String, String>,
    /// Of virtual machines that a drain would wait for without end, a sentence each.
    pub blockers: Vec<String>,
    /// Pods that GPUs are promised to; only of a node that is to change.
    pub claims: Vec<Claimant>,
    /// These could not be listed: there may be others.
    pub unread: bool,
}

impl Users {
    /// The virtual machine that has a GPU.
    pub fn vm(&self, gpu: &str) -> Option<&str> {
        self.list.iter().find(|user| user.gpus.iter().any(|has| has == gpu)).and_then(|user| user.vmi.as_deref())
    }

    /// `namespace/name` of a pod that is known by that, or by its UID.
    pub fn name<'a>(&'a self, pod: &'a str) -> Option<&'a str> {
        if pod.contains('/') { Some(pod) } else { self.names.get(pod).map(String::as_str) }
    }
}

/// By the pod's `namespace/name`.
type Launchers = BTreeMap<String, Launcher>;

/// A pod that has a GPU; one that is gone has no UID any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Launcher {
    uid: Option<String>,
    /// The instance that it runs, as `namespace/name`.
    instance: Option<String>,
}

pub struct UserNames {
    client: Client,
    /// By node.
    known: Mutex<HashMap<String, Launchers>>,
    /// By node: names of pods by UID; `None` for one that is no pod of the API server's.
    strangers: Mutex<HashMap<String, BTreeMap<String, Option<String>>>>,
    claims: Claims,
}

impl UserNames {
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default(), strangers: Mutex::default(), claims: Claims::default() }
    }

    /// And whether every pod could be asked about. `all`: also of pods that the agent knows by their UID only.
    pub async fn of(&self, node: &str, agent: &AgentStatus, all: bool) -> (Users, bool) {
        let pods = pods(agent);
        let mut known = self.known.lock().expect("names lock should not be poisoned").remove(node).unwrap_or_default();
        known.retain(|pod, _| pods.contains_key(pod));
        let mut complete = true;
        for pod in pods.keys() {
            if known.contains_key(pod) {
                continue;
            }
            match self.launcher(pod).await {
                Ok(launcher) => drop(known.insert(pod.clone(), launcher)),
                Err(error) => {
                    tracing::warn!(pod, %error, "pod with a GPU cannot be read: its VM stays unnamed");
                    complete = false;
                }
            }
        }
        let mut users = users(pods, &known);
        let uids = if all { strangers(agent, &users) } else { BTreeSet::new() };
        match self.lookup(node, uids).await {
            Ok(names) => {
                users.list.extend(found(agent, &names));
                users.names.extend(names);
            }
            Err(error) => {
                tracing::warn!(node, %error, "pods cannot be listed: those with a GPU stay unnamed");
                complete = false;
            }
        }
        if all {
            match self.claimants(node).await {
                Ok(claims) => {
                    let named: BTreeSet<String> = users.list.iter().map(|user| user.pod.clone()).collect();
                    let new = claims.iter().filter(|claimant| !named.contains(&claimant.pod));
                    users.list.extend(new.map(|claimant| GPUUser {
                        pod: claimant.pod.clone(),
                        vmi: claimant.vmi.clone(),
                        gpus: Vec::new(),
                    }));
                    users.claims = claims;
                }
                Err(error) => {
                    tracing::warn!(node, %error, "ResourceClaims and pods cannot be listed: pods that GPUs are promised to stay unknown");
                    complete = false;
                    users.unread = true;
                }
            }
        } else {
            self.claims.forget(node);
        }
        if !known.is_empty() {
            self.known.lock().expect("names lock should not be poisoned").insert(node.to_owned(), known);
        }
        (users, complete)
    }

    async fn claimants(&self, node: &str) -> Result<Vec<Claimant>, kube::Error> {
        let mut claims = self.claims.of(&self.client, node).await?;
        for claimant in &mut claims {
            claimant.vmi = self.launcher(&claimant.pod).await?.instance;
        }
        Ok(claims)
    }

    /// One list for all that are new. Operands of ours are nobody's.
    async fn lookup(&self, node: &str, uids: BTreeSet<String>) -> Result<BTreeMap<String, String>, kube::Error> {
        let lock = || self.strangers.lock().expect("strangers lock should not be poisoned");
        let mut known = lock().remove(node).unwrap_or_default();
        known.retain(|uid, _| uids.contains(uid));
        if uids.iter().any(|uid| !known.contains_key(uid)) {
            let pods: Api<Pod> = Api::all(self.client.clone());
            let there = ListParams::default().fields(&format!("spec.nodeName={node}"));
            let listed = pods.list_metadata(&there).await?;
            let users = listed.iter().filter(|pod| !pod.labels().contains_key(labels::POLICY));
            let names: HashMap<String, String> = users.filter_map(|pod| Some((pod.uid()?, named(pod)))).collect();
            known = uids.into_iter().map(|uid| (uid.clone(), names.get(&uid).cloned())).collect();
        }
        let names = known.iter().filter_map(|(uid, name)| Some((uid.clone(), name.clone()?))).collect();
        if !known.is_empty() {
            lock().insert(node.to_owned(), known);
        }
        Ok(names)
    }

    async fn launcher(&self, pod: &str) -> Result<Launcher, kube::Error> {
        let Some((namespace, name)) = pod.split_once('/') else { return Ok(Launcher::default()) };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = pods.get_metadata_opt(name).await?;
        let launcher = |pod: PartialObjectMeta<Pod>| Launcher { uid: pod.uid(), instance: instance(&pod) };
        Ok(found.map(launcher).unwrap_or_default())
    }
}

fn named(pod: &PartialObjectMeta<Pod>) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// UIDs of pods whose names the agent does not know.
fn strangers(agent: &AgentStatus, users: &Users) -> BTreeSet<String> {
    let pods = agent.gpus.iter().flat_map(GPUStatus::all_holders).filter_map(|holder| holder.pod.as_ref());
    pods.filter(|pod| users.name(pod).is_none()).cloned().collect()
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

/// The same of pods that were looked up by their UIDs.
fn found(agent: &AgentStatus, names: &BTreeMap<String, String>) -> Vec<GPUUser> {
    let mut found: BTreeMap<&String, Vec<String>> = BTreeMap::new();
    for gpu in &agent.gpus {
        for name in gpu.all_holders().filter_map(|holder| names.get(holder.pod.as_ref()?)) {
            let gpus = found.entry(name).or_default();
            if !gpus.contains(&gpu.address) {
                gpus.push(gpu.address.clone());
            }
        }
    }
    found.into_iter().map(|(pod, gpus)| GPUUser { pod: pod.clone(), vmi: None, gpus }).collect()
}

fn users(pods: BTreeMap<String, Vec<String>>, known: &Launchers) -> Users {
    let named = |(pod, launcher): (&String, &Launcher)| Some((launcher.uid.clone()?, pod.clone()));
    let user = |(pod, gpus): (String, Vec<String>)| {
        let vmi = known.get(&pod).and_then(|launcher| launcher.instance.clone());
        GPUUser { pod, vmi, gpus }
    };
    Users {
        names: known.iter().filter_map(named).collect(),
        list: pods.into_iter().map(user).collect(),
        blockers: Vec::new(),
        claims: Vec::new(),
        unread: false,
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::Holder;
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
        let launcher = Launcher { uid: Some("5f0e-uid".to_owned()), instance: Some("vms/a".to_owned()) };
        let known = [("vms/launcher".to_owned(), launcher)].into();
        let users = users(pods(&agent), &known);
        let both = vec!["0000:01:00.0".to_owned(), "0000:02:00.0".to_owned()];
        let expected = GPUUser { pod: "vms/launcher".to_owned(), vmi: Some("vms/a".to_owned()), gpus: both };
        assert_eq!(users.list, [expected]);
        assert_eq!(users.vm("0000:02:00.0"), Some("vms/a"));
        assert_eq!([users.name("5f0e-uid"), users.name("other-uid")], [Some("vms/launcher"), None]);
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
        instance(&serde_json::from_value::<PartialObjectMeta<Pod>>(pod).expect("metadata of a pod"))
    }
}
