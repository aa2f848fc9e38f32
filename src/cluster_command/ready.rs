//! `gpuvirt ready`: whether an installation does its work, as `helm test` asks. It reads, and changes nothing.

use std::time::Duration;

use crds::{
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::GPUNode,
};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client, ResourceExt, api::ListParams, core::DeserializeGuard};
use tokio::time::{Instant, sleep};

use crate::{
    cluster::lease,
    operator::LEASE,
    terminal::{GOOD, paint, print},
};

/// A test's pod has the right to list, and asks so few times that a watch on three kinds would be more work.
const ASK_AGAIN: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the cluster cannot be reached, or refuses")]
    Api(#[from] kube::Error),
    #[error("not ready after {} s:\n  {}", waited.as_secs(), troubles.join("\n  "))]
    NotReady { waited: Duration, troubles: Vec<String> },
    #[error("the answer cannot be written")]
    Output(#[from] std::io::Error),
}

type Guarded<K> = DeserializeGuard<K>;

pub async fn run(client: &Client, namespace: &str, patience: Duration) -> Result<(), Error> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let policies: Api<Guarded<ClusterPolicy>> = Api::all(client.clone());
    let gpu_nodes: Api<Guarded<GPUNode>> = Api::all(client.clone());
    let began = Instant::now();
    loop {
        let lease = leases.get_opt(LEASE).await?;
        let policies = policies.list(&ListParams::default()).await?.items;
        let gpu_nodes = gpu_nodes.list(&ListParams::default()).await?.items;
        let troubles = troubles(lease.as_ref(), &policies, &gpu_nodes);
        if troubles.is_empty() {
            let text = format!("{} GPU node(s), {} ClusterPolicy", gpu_nodes.len(), policies.len());
            return Ok(print(&format!("{}: {text}\n", paint(GOOD, "ready")))?);
        }
        if began.elapsed() + ASK_AGAIN > patience {
            return Err(Error::NotReady { waited: patience, troubles });
        }
        sleep(ASK_AGAIN).await;
    }
}

/// One line a trouble.
fn troubles(lease: Option<&Lease>, policies: &[Guarded<ClusterPolicy>], gpu_nodes: &[Guarded<GPUNode>]) -> Vec<String> {
    let mut troubles: Vec<String> =
        lease::silence(LEASE, lease).map(|why| format!("the operator is not running: {why}")).into_iter().collect();
    let counts = |policy: &&Guarded<ClusterPolicy>| {
        let status = policy.0.as_ref().ok().and_then(|policy| policy.status.as_ref());
        status.is_none_or(|status| status.state != Some(PolicyState::Ignored))
    };
    let counting: Vec<_> = policies.iter().filter(counts).collect();
    if counting.is_empty() {
        troubles.push("no ClusterPolicy counts: create one, or set clusterPolicy.deployCR".to_owned());
    }
    for policy in counting {
        let why = match &policy.0 {
            Ok(policy) => unready(policy),
            Err(invalid) => Some(format!("does not decode: {}", invalid.error)),
        };
        troubles.extend(why.map(|why| format!("ClusterPolicy {}: {why}", policy.name_any())));
    }
    for gpu_node in gpu_nodes {
        let why = match &gpu_node.0 {
            Ok(gpu_node) => silent(gpu_node),
            Err(invalid) => Some(format!("its GPUNode does not decode: {}", invalid.error)),
        };
        troubles.extend(why.map(|why| format!("node {}: {why}", gpu_node.name_any())));
    }
    troubles
}

fn unready(policy: &ClusterPolicy) -> Option<String> {
    let status = policy.status.clone().unwrap_or_default();
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
    match status.state {
        Some(PolicyState::Ready | PolicyState::Ignored) => None,
        Some(PolicyState::NotReady) | None => Some(ready.map_or_else(
            || "the operator has not looked at it".to_owned(),
            |ready| format!("{}: {}", ready.reason, ready.message),
        )),
    }
}

/// Why its agent counts as not reporting.
fn silent(gpu_node: &GPUNode) -> Option<String> {
    let agent = gpu_node.status.as_ref().and_then(|status| status.agent.as_ref());
    match agent {
        None => Some("its agent has not reported (kubectl get pods -l app=gpuvirt-agent -o wide)".to_owned()),
        Some(agent) if Some(agent.observed_generation) < gpu_node.metadata.generation => {
            Some("its agent has not answered its last order".to_owned())
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use crds::{v1::ClusterPolicySpec, v1alpha1::GPUNodeSpec};
    use serde_json::json;

    use super::*;

    fn lease() -> Lease {
        let now = jiff::Timestamp::now().to_string();
        serde_json::from_value(json!({"spec": {"holderIdentity": "op-1", "renewTime": now}})).expect("a Lease")
    }

    fn policy(state: &str) -> Guarded<ClusterPolicy> {
        let mut policy = ClusterPolicy::new("cluster-policy", ClusterPolicySpec::default());
        let ready = json!({"type": "Ready", "status": "False", "reason": "OperandNotReady", "message": "driver: 1 of 2",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        policy.status = Some(serde_json::from_value(json!({"state": state, "conditions": [ready]})).expect("a status"));
        DeserializeGuard(Ok(policy))
    }

    fn node(answered: Option<i64>) -> Guarded<GPUNode> {
        let mut node = GPUNode::new("n1", GPUNodeSpec::default());
        node.metadata.generation = Some(2);
        let agent = answered.map(|answered| json!({"agent": {"observedGeneration": answered}}));
        node.status = agent.map(|agent| serde_json::from_value(agent).expect("a status"));
        DeserializeGuard(Ok(node))
    }

    #[test]
    fn an_installation_that_works_has_no_trouble() {
        let found = troubles(Some(&lease()), &[policy("ready"), policy("ignored")], &[node(Some(2))]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn each_trouble_is_named() {
        let found = troubles(None, &[policy("notReady")], &[node(Some(1)), node(None)]);
        let parts = [
            "lease gpuvirt-operator does not exist",
            "driver: 1 of 2",
            "n1: its agent has not answered",
            "n1: its agent has not reported",
        ];
        assert_eq!(found.len(), parts.len(), "{found:?}");
        for (line, part) in found.iter().zip(parts) {
            assert!(line.contains(part), "{line}");
        }
        assert!(troubles(Some(&lease()), &[policy("ignored")], &[])[0].contains("no ClusterPolicy counts"));
    }
}
