//! NVIDIA's GPU Operator in the same cluster: while it manages, this one touches nothing.
//!
//! Two operators that write the same `ClusterPolicy`, DaemonSets and node labels undo each other, and two device plugins
//! would give a GPU away twice. So its Deployment, its Lease and its operands are watched: the operator begins when none of
//! them is left, and stops when one comes. `gpuvirt takeover` makes them ours.

use std::{sync::Arc, time::Duration};

use crds::{
    conditions::{Verdict, merge},
    labels,
    v1::{ClusterPolicy, PolicyState},
};
use futures::future::BoxFuture;
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        coordination::v1::Lease,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ListParams, Patch},
    core::PartialObjectMeta,
    runtime::{reflector::Store, watcher},
};
use serde_json::json;
use tokio::{sync::Notify, time::sleep};

use super::{
    policy::reference_of,
    world::{Guarded, follow},
};
use crate::cluster::{
    events::{Events, Notice},
    gone, lease, merges,
};

/// Its leader election (gpu-operator 26.7).
pub const LEASE: &str = "53822513.nvidia.com";
/// By its chart and by its bundle (gpu-operator 26.7).
pub const DEPLOYMENT: &str = "gpu-operator";
/// Condition of a `ClusterPolicy`: nobody else manages it. Told only while it is not so.
pub const SOLE: &str = "SoleManager";

/// A lease falls silent without an event.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

type Set = PartialObjectMeta<DaemonSet>;

/// What is watched of it, in all namespaces.
pub struct Sight {
    deployments: Store<Deployment>,
    leases: Store<Lease>,
    sets: Store<Set>,
    moved: Arc<Notify>,
}

impl Sight {
    /// And the work that keeps it.
    pub fn new(client: &Client) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let moved = Arc::new(Notify::new());
        let touched = || {
            let moved = moved.clone();
            move || moved.notify_one()
        };
        let named = |name: &str| watcher::Config::default().fields(&format!("metadata.name={name}"));
        let (deployments, follow_deployments) = {
            let touched = touched();
            follow(Api::all(client.clone()), named(DEPLOYMENT), move |_| touched())
        };
        let (leases, follow_leases) = {
            let touched = touched();
            follow(Api::all(client.clone()), named(LEASE), move |_| touched())
        };
        let (sets, follow_sets) = {
            let touched = touched();
            follow(Api::all(client.clone()), watcher::Config::default().labels(&not_ours()), move |_| touched())
        };
        (Self { deployments, leases, sets, moved }, vec![follow_deployments, follow_leases, follow_sets])
    }

    async fn found(&self) -> Vec<String> {
        // A writer that is dropped ends the operator anyway.
        let _ = self.deployments.wait_until_ready().await;
        let _ = self.leases.wait_until_ready().await;
        let _ = self.sets.wait_until_ready().await;
        signs(&self.deployments.state(), &self.leases.state(), &self.sets.state())
    }

    async fn moved(&self) {
        tokio::select! {
            () = self.moved.notified() => {}
            () = sleep(LOOK_AGAIN) => {}
        }
    }

    /// Tells on the ClusterPolicies, while it waits, what there is to be taken over.
    pub async fn until_absent(&self, client: &Client, events: &Events) {
        let mut said = String::new();
        loop {
            let found = self.found().await;
            if found.is_empty() {
                return;
            }
            let message = format!(
                "{}: nothing is touched while NVIDIA's GPU Operator manages this cluster; to take it over: gpuvirt takeover --plan",
                found.join("; ")
            );
            if said != message {
                tracing::warn!("{message}");
            }
            if let Err(error) = tell(client, events, &message).await {
                tracing::warn!(%error, "condition {SOLE} not written");
            }
            said = message;
            self.moved().await;
        }
    }

    pub async fn until_present(&self) -> Vec<String> {
        loop {
            self.moved.notified().await;
            let found = self.found().await;
            if !found.is_empty() {
                return found;
            }
        }
    }
}

/// The same, asked once.
pub async fn look(client: &Client) -> Result<Vec<String>, kube::Error> {
    let named = |name: &str| ListParams::default().fields(&format!("metadata.name={name}"));
    let deployments = Api::<Deployment>::all(client.clone()).list(&named(DEPLOYMENT)).await?.items;
    let leases = Api::<Lease>::all(client.clone()).list(&named(LEASE)).await?.items;
    let others = ListParams::default().labels(&not_ours());
    let sets = Api::<DaemonSet>::all(client.clone()).list_metadata(&others).await?.items;
    Ok(signs(&shared(deployments), &shared(leases), &shared(sets)))
}

fn shared<K>(objects: Vec<K>) -> Vec<Arc<K>> {
    objects.into_iter().map(Arc::new).collect()
}

/// Of its DaemonSets those that have been taken over carry our label.
fn not_ours() -> String {
    format!("!{}", labels::POLICY)
}

/// What shows that it manages, in words. Pure but for the clock.
fn signs(deployments: &[Arc<Deployment>], leases: &[Arc<Lease>], sets: &[Arc<Set>]) -> Vec<String> {
    let deployments: Vec<&Arc<Deployment>> = deployments.iter().filter(|d| is_operator(d)).collect();
    let running = deployments
        .iter()
        .filter(|deployment| replicas(deployment) > 0)
        .map(|deployment| format!("Deployment {} has {} replica(s)", place(&***deployment), replicas(deployment)));
    // Where its Deployment is, that says whether anybody renews the lease; the clock is needed only without one.
    let unexplained = leases.iter().filter(|lease| {
        deployments.iter().all(|deployment| deployment.namespace() != lease.namespace())
            && lease::silence(LEASE, Some(lease)).is_none()
    });
    let held = unexplained.map(|lease| format!("Lease {} is renewed by {}", place(&**lease), holder(lease)));
    let mut owned: Vec<String> =
        sets.iter().filter(|set| owner(set.as_ref()).is_some()).map(|set| place(&**set)).collect();
    // In one order, so that the same is told once.
    owned.sort();
    let operands = (!owned.is_empty()).then(|| format!("its operands are there (DaemonSets {})", owned.join(", ")));
    running.chain(held).chain(operands).collect()
}

fn place(object: &impl ResourceExt) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

fn holder(lease: &Lease) -> String {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default()
}

/// How many are wanted, or still there.
pub fn replicas(deployment: &Deployment) -> i32 {
    let wanted = deployment.spec.as_ref().map_or(0, |spec| spec.replicas.unwrap_or(1));
    let there = deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0);
    wanted.max(there)
}

/// Another program may have a Deployment of this name.
pub fn is_operator(deployment: &Deployment) -> bool {
    let pod = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let mut containers = pod.into_iter().flat_map(|pod| &pod.containers);
    containers.any(|container| {
        let image = container.image.as_deref().unwrap_or_default();
        let command = container.command.iter().flatten().any(|word| word.ends_with("gpu-operator"));
        command || image.contains("gpu-operator")
    })
}

/// The `ClusterPolicy` or `NVIDIADriver` that owns an object: ours have no owner.
pub fn owner(object: &impl Resource) -> Option<String> {
    let owners = object.meta().owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.api_version.starts_with("nvidia.com/"));
    owners.next().map(|owner| format!("{} {}", owner.kind, owner.name))
}

/// The one thing that is written beside it: a condition with the next step, and an event when it is new.
async fn tell(client: &Client, events: &Events, message: &str) -> Result<(), kube::Error> {
    let api: Api<Guarded<ClusterPolicy>> = Api::all(client.clone());
    for policy in api.list(&ListParams::default()).await? {
        let Ok(policy) = policy.0 else { continue };
        let old = policy.status.clone().unwrap_or_default();
        if old.conditions.iter().any(|condition| condition.type_ == SOLE && condition.message == message) {
            continue;
        }
        let new = old.conditions.iter().all(|condition| condition.type_ != SOLE);
        let verdict = Verdict::no(SOLE, "PeerManages", message);
        let conditions = merge(&old.conditions, &[verdict], policy.metadata.generation, &Time(Timestamp::now()));
        let patch = json!({
            "metadata": {"uid": policy.uid(), "resourceVersion": policy.resource_version()},
            "status": {"state": old.state.unwrap_or(PolicyState::NotReady), "conditions": conditions},
        });
        match api.patch_status(&policy.name_any(), &merges(), &Patch::Merge(&patch)).await {
            Ok(_) if new => {
                events.publish(&Notice::warning("PeerManages", "Manage", message), &reference_of(&policy)).await;
            }
            Ok(_) => {}
            Err(error) if gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(object: Value) -> Vec<Arc<K>> {
        vec![Arc::new(serde_json::from_value(object).expect("an object"))]
    }

    fn deployment(replicas: i32, image: &str) -> Vec<Arc<Deployment>> {
        let template = json!({"spec": {"containers": [{"name": "c", "image": image}]}});
        let spec = json!({"replicas": replicas, "selector": {}, "template": template});
        object(json!({"metadata": {"name": DEPLOYMENT, "namespace": "peer"}, "spec": spec}))
    }

    fn held() -> Vec<Arc<Lease>> {
        let spec =
            json!({"holderIdentity": "h", "renewTime": Timestamp::now().to_string(), "leaseDurationSeconds": 15});
        object(json!({"metadata": {"name": LEASE, "namespace": "peer"}, "spec": spec}))
    }

    fn set(kind: &str, version: &str) -> Vec<Arc<Set>> {
        let owner = json!({"apiVersion": version, "kind": kind, "name": "p", "uid": "u"});
        let metadata = json!({"name": "s", "namespace": "peer", "ownerReferences": [owner]});
        object(json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata}))
    }

    const IMAGE: &str = "nvcr.io/nvidia/gpu-operator:v26.7.0";

    #[test]
    fn each_sign_is_named_and_without_any_there_is_nothing_to_wait_for() {
        assert_eq!(signs(&deployment(1, IMAGE), &[], &[]), ["Deployment peer/gpu-operator has 1 replica(s)"]);
        assert_eq!(signs(&[], &held(), &[]), ["Lease peer/53822513.nvidia.com is renewed by h"]);
        let operands = signs(&[], &[], &set("ClusterPolicy", "nvidia.com/v1"));
        assert_eq!(operands, ["its operands are there (DaemonSets peer/s)"]);
        assert_eq!(signs(&[], &[], &set("NVIDIADriver", "nvidia.com/v1alpha1")).len(), 1);
        assert_eq!(signs(&[], &[], &[]), Vec::<String>::new());
    }

    #[test]
    fn an_operator_that_is_scaled_to_nothing_does_not_renew_a_lease_however_young_it_is() {
        assert_eq!(signs(&deployment(0, IMAGE), &held(), &[]), Vec::<String>::new());
    }

    #[test]
    fn objects_of_others_with_such_names_and_owners_do_not_count() {
        assert_eq!(signs(&deployment(1, "example/other:1"), &[], &[]), Vec::<String>::new());
        assert_eq!(signs(&[], &[], &set("ClusterPolicy", "example.com/v1")), Vec::<String>::new());
    }
}
