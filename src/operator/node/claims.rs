//! Pods that a node's GPUs are promised to, and that need not have opened one yet: by a `ResourceClaim` (NVIDIA's driver for
//! dynamic resource allocation tells no device plugin), and by what they request of NVIDIA's own device plugin.
//!
//! Listed only while a node is to change, and not watched: whoever waits for one looks again.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crds::labels;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use serde_json::Value;

use crate::operator::pod::gpus_asked;

/// NVIDIA's driver for whole GPUs and parts of them; its pools have the names of nodes.
const DRIVER: &str = "gpu.nvidia.com";
/// Looks that follow each other share a list: of one node its pods, of all nodes the claims.
const FRESH: Duration = Duration::from_secs(1);

/// A pod that has GPUs by a promise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claimant {
    /// `namespace/name`.
    pub pod: String,
    pub uid: String,
    /// `namespace/name` of the virtual machine instance that it runs.
    pub vmi: Option<String>,
    /// As in `device gpu-0 of ResourceClaim ml/one-gpu`, or `1 nvidia.com/gpu`.
    pub what: String,
}

#[derive(Default)]
pub struct Claims {
    nodes: Mutex<HashMap<String, (Instant, Vec<Claimant>)>>,
    /// The cluster's.
    listed: tokio::sync::Mutex<Option<(Instant, Arc<[DynamicObject]>)>>,
}

impl Claims {
    /// Who has GPUs of `node`. A cluster without claims (`resource.k8s.io/v1`, from Kubernetes 1.34) has nobody.
    pub async fn of(&self, client: &Client, node: &str) -> Result<Vec<Claimant>, kube::Error> {
        let known = self.nodes.lock().expect("claims lock should not be poisoned").get(node).cloned();
        if let Some((at, claimants)) = known
            && at.elapsed() < FRESH
        {
            return Ok(claimants);
        }
        let mut claimants: Vec<Claimant> =
            self.listed(client).await?.iter().flat_map(|claim| of(claim, node)).collect();
        let pods: Api<Pod> = Api::all(client.clone());
        let there = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let pods = pods.list(&ListParams::default().fields(&there)).await?;
        claimants.extend(pods.iter().filter_map(requesting));
        let mut all = self.nodes.lock().expect("claims lock should not be poisoned");
        all.insert(node.to_owned(), (Instant::now(), claimants.clone()));
        Ok(claimants)
    }

    /// Thousands of nodes may change at once.
    async fn listed(&self, client: &Client) -> Result<Arc<[DynamicObject]>, kube::Error> {
        let mut listed = self.listed.lock().await;
        if let Some((at, claims)) = &*listed
            && at.elapsed() < FRESH
        {
            return Ok(claims.clone());
        }
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"));
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
        let claims: Arc<[DynamicObject]> = match api.list(&ListParams::default()).await {
            Ok(found) => found.items.into(),
            Err(kube::Error::Api(status)) if status.code == 404 => Arc::default(),
            Err(error) => return Err(error),
        };
        *listed = Some((Instant::now(), claims.clone()));
        Ok(claims)
    }

    pub fn forget(&self, node: &str) {
        let mut nodes = self.nodes.lock().expect("claims lock should not be poisoned");
        // Nobody changes any more.
        if nodes.remove(node).is_some()
            && nodes.is_empty()
            && let Ok(mut listed) = self.listed.try_lock()
        {
            *listed = None;
        }
    }
}

/// Of one claim.
fn of(claim: &DynamicObject, node: &str) -> Vec<Claimant> {
    let list = |path: &str| claim.data.pointer(path).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let results = list("/status/allocation/devices/results").iter();
    let here = results.filter(|result| result["driver"] == DRIVER && result["pool"] == node);
    let devices: Vec<String> = here.filter_map(|result| Some(result["device"].as_str()?.to_owned())).collect();
    if devices.is_empty() {
        return Vec::new();
    }
    let namespace = claim.namespace().unwrap_or_default();
    let pods = list("/status/reservedFor").iter().filter(|user| user["resource"] == "pods");
    let what = format!("device {} of ResourceClaim {namespace}/{}", devices.join(", "), claim.name_any());
    let claimant = |user: &Value| {
        Some(Claimant {
            pod: format!("{namespace}/{}", user["name"].as_str()?),
            uid: user["uid"].as_str()?.to_owned(),
            vmi: None,
            what: what.clone(),
        })
    };
    pods.filter_map(claimant).collect()
}

/// A pod that asks for GPUs. Operands of ours are nobody's users.
fn requesting(pod: &Pod) -> Option<Claimant> {
    if pod.labels().contains_key(labels::POLICY) {
        return None;
    }
    Some(Claimant {
        pod: format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
        uid: pod.uid()?,
        vmi: None,
        what: gpus_asked(pod)?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(driver: &str, pool: &str) -> DynamicObject {
        serde_json::from_value(json!({
            "metadata": {"namespace": "ml", "name": "one-gpu"},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": driver, "pool": pool, "device": "gpu-0"},
                    {"request": "nic", "driver": "nic.example.com", "pool": pool, "device": "nic-0"},
                ]}},
                "reservedFor": [
                    {"resource": "pods", "name": "train", "uid": "u-1"},
                    {"apiGroup": "example.com", "resource": "others", "name": "x", "uid": "u-2"},
                ],
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_claim_of_nvidias_driver_on_this_node_has_the_pods_that_it_is_reserved_for() {
        let expected = Claimant {
            pod: "ml/train".to_owned(),
            uid: "u-1".to_owned(),
            vmi: None,
            what: "device gpu-0 of ResourceClaim ml/one-gpu".to_owned(),
        };
        assert_eq!(of(&claim(DRIVER, "n1"), "n1"), [expected]);
    }

    #[test]
    fn a_pod_that_requests_a_gpu_has_one_whether_it_has_opened_it_or_not() {
        let pod = |labels: Value| {
            let container = json!({"name": "c", "resources": {"limits": {"nvidia.com/gpu": "2"}}});
            let metadata = json!({"namespace": "ml", "name": "notebook", "uid": "u-3", "labels": labels});
            let pod = json!({"metadata": metadata, "spec": {"containers": [container]}});
            requesting(&serde_json::from_value(pod).unwrap()).map(|claimant| claimant.what)
        };
        assert_eq!(pod(json!({})).as_deref(), Some("2 nvidia.com/gpu"));
        assert_eq!(pod(json!({labels::POLICY: "p"})), None);
    }

    #[test]
    fn another_node_another_driver_and_a_claim_that_nobody_has_are_nobodys() {
        assert_eq!(of(&claim(DRIVER, "n2"), "n1"), []);
        assert_eq!(of(&claim("gpu.example.com", "n1"), "n1"), []);
        let mut free = claim(DRIVER, "n1");
        free.data["status"]["reservedFor"] = json!([]);
        assert_eq!(of(&free, "n1"), []);
        free.data["status"] = json!({});
        assert_eq!(of(&free, "n1"), [], "it is not allocated");
    }
}
