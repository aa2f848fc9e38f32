//! ClusterPolicies, and the `GPUVirtConfig`.

use crds::{
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{CONFIG_NAME, GPUVirtConfig},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{turn::Turn, wait};

/// One with which nothing is wrong: the driver, and sandbox workloads on.
pub fn valid(name: &str) -> Value {
    let off = json!({"enabled": false});
    json!({
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": name},
        "spec": {
            "operator": {"runtimeClass": "nvidia"},
            "daemonsets": {"updateStrategy": "RollingUpdate"},
            "driver": {"enabled": true, "repository": "localhost", "image": "nvidia-driver", "version": "test"},
            "toolkit": off, "devicePlugin": off, "dcgm": off, "dcgmExporter": off, "gfd": off, "migManager": off,
            "nodeStatusExporter": off,
            "sandboxWorkloads": {"enabled": true},
        },
    })
}

pub async fn create(turn: &Turn, policy: Value) -> ClusterPolicy {
    let policy: ClusterPolicy = serde_json::from_value(policy).expect("a ClusterPolicy");
    let policies: Api<ClusterPolicy> = turn.all();
    policies.create(&PostParams::default(), &policy).await.expect("a ClusterPolicy should be accepted")
}

pub async fn patch(turn: &Turn, name: &str, patch: &Value) {
    let policies: Api<ClusterPolicy> = turn.all();
    let done = policies.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
    done.expect("a ClusterPolicy should be patchable");
}

/// Waits for a state with a reason, and for a message that has all these parts.
pub async fn until(turn: &Turn, name: &str, state: PolicyState, reason: &str, parts: &[&str]) -> ClusterPolicy {
    let promise = format!("state {state:?}, reason {reason}, message with {parts:?}");
    wait::until(&turn.all(), name, &promise, |policy: &ClusterPolicy| {
        let is = policy.status.as_ref().is_some_and(|status| status.state == Some(state));
        is && ready(policy).is_some_and(|c| c.reason == reason && parts.iter().all(|part| c.message.contains(part)))
    })
    .await
}

/// Waits for a condition with a reason, and a message that has this part.
pub async fn until_condition(turn: &Turn, name: &str, type_: &str, reason: &str, part: &str) -> ClusterPolicy {
    let promise = format!("condition {type_}, reason {reason}, message with {part:?}");
    wait::until(&turn.all(), name, &promise, |policy: &ClusterPolicy| {
        let conditions = policy.status.iter().flat_map(|status| &status.conditions);
        let is = |c: &Condition| c.type_ == type_ && c.reason == reason && c.message.contains(part);
        conditions.into_iter().any(is)
    })
    .await
}

pub fn ready(policy: &ClusterPolicy) -> Option<&Condition> {
    policy.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == "Ready")
}

/// The `GPUVirtConfig` that counts has this.
pub async fn config(turn: &Turn, spec: Value) {
    let object = json!({
        "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUVirtConfig", "metadata": {"name": CONFIG_NAME}, "spec": spec,
    });
    let configs: Api<GPUVirtConfig> = turn.all();
    let params = PatchParams::apply("a-test").force();
    configs.patch(CONFIG_NAME, &params, &Patch::Apply(&object)).await.expect("a GPUVirtConfig should be accepted");
}
