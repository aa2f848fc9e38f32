//! The contract as a real API server takes it.

use std::fmt::Debug;

use crds::{
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{GPUNode, GPUTransition, GPUVirtConfig},
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, CustomResourceExt, Resource,
    api::{Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::support::{
    cluster::source,
    policies,
    turn::{Turn, turn},
    wait,
};

#[test]
fn a_real_api_server_serves_every_crd() {
    turn(async |t| {
        for name in
            [ClusterPolicy::crd_name(), GPUNode::crd_name(), GPUVirtConfig::crd_name(), GPUTransition::crd_name()]
        {
            let crds: Api<CustomResourceDefinition> = t.all();
            let crd = wait::until(&crds, name, "the CRD is established", |crd: &CustomResourceDefinition| {
                condition(crd, "Established") == Some("True")
            })
            .await;
            assert_eq!(condition(&crd, "NonStructuralSchema").unwrap_or("False"), "False", "{name}");
        }
    });
}

fn condition<'a>(crd: &'a CustomResourceDefinition, type_: &str) -> Option<&'a str> {
    let conditions = crd.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == type_).map(|condition| condition.status.as_str())
}

async fn create<K>(t: &Turn, object: Value) -> Result<K, String>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
{
    let object: K = serde_json::from_value(object).expect("an object of this kind");
    t.all().create(&PostParams::default(), &object).await.map_err(|error| error.to_string())
}

async fn patch<K>(t: &Turn, name: &str, patch: Value) -> Result<K, String>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let done = t.all().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.map_err(|error| error.to_string())
}

fn refused<K: Debug>(result: Result<K, String>, why: &str) {
    let error = result.expect_err("should have been refused");
    assert!(error.contains(why), "{error}");
}

#[test]
fn there_is_one_gpuvirtconfig_and_its_name_is_default() {
    turn(async |t| {
        let named = |name: &str| json!({"apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUVirtConfig", "metadata": {"name": name}, "spec": {}});
        refused(create::<GPUVirtConfig>(t, named("other")).await, "its name is default: rename this object");
        let own = create::<GPUVirtConfig>(t, named("default")).await.expect("accepted");
        assert_eq!(own.spec.resync_seconds, 300, "defaults are filled in");
    });
}

#[test]
fn a_transition_stays_with_its_node_and_is_approved_for_its_own_plan_only() {
    turn(async |t| {
        let plan = "0123456789abcdef";
        let transition = json!({
            "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUTransition", "metadata": {"name": "n1"},
            "spec": {"node": "n1", "from": "container", "to": "vm-passthrough", "planHash": plan},
        });
        create::<GPUTransition>(t, transition).await.expect("accepted");
        for (field, value) in [("node", "n2"), ("from", "vm-vgpu"), ("to", "vm-vgpu")] {
            refused(patch::<GPUTransition>(t, "n1", json!({"spec": {field: value}})).await, field);
        }
        let approve = |hash: &str| json!({"spec": {"approved": hash}});
        refused(
            patch::<GPUTransition>(t, "n1", approve("fedcba9876543210")).await,
            "approved must equal planHash: read status.plan again",
        );
        let approved = patch::<GPUTransition>(t, "n1", approve(plan)).await.expect("accepted");
        assert!(approved.spec.is_approved());
        refused(
            patch::<GPUTransition>(t, "n1", json!({"spec": {"planHash": "aaaaaaaaaaaaaaaa"}})).await,
            "approved must equal planHash",
        );
    });
}

#[test]
fn an_alias_is_a_resource_name_of_63_characters_at_most_and_one_for_each_id() {
    turn(async |t| {
        let with = |aliases: Value| {
            json!({
                "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUVirtConfig", "metadata": {"name": "default"},
                "spec": {"resourceAliases": aliases},
            })
        };
        let alias = |name: &str| json!({"selector": "10de:1eb8", "name": name});
        let long = format!("nvidia.com/{}", "x".repeat(64));
        for wrong in ["nvidia.com/T4!", "T4", "nvidia.com/", "nvidia.com/-T4", &long] {
            let refusal = create::<GPUVirtConfig>(t, with(json!([alias(wrong)]))).await;
            refused(refusal, "spec.resourceAliases[0].name");
        }
        let selector = json!({"selector": "1eb8", "name": "nvidia.com/T4"});
        refused(create::<GPUVirtConfig>(t, with(json!([selector]))).await, "spec.resourceAliases[0].selector");
        let twice = json!([alias("nvidia.com/T4"), alias("nvidia.com/Tesla-T4")]);
        refused(create::<GPUVirtConfig>(t, with(twice)).await, "Duplicate value");
        let one_name =
            json!([alias(&long[..long.len() - 1]), {"selector": "10de:1db6", "name": &long[..long.len() - 1]}]);
        create::<GPUVirtConfig>(t, with(one_name)).await.expect("several ids may have one name");
    });
}

#[test]
fn a_gpunode_offers_nothing_in_no_mode() {
    turn(async |t| {
        let node = |spec: Value| json!({"apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUNode", "metadata": {"name": "n1"}, "spec": spec});
        refused(create::<GPUNode>(t, node(json!({"advertise": "Offered"}))).await, "Offered needs a mode");
        create::<GPUNode>(t, node(json!({"advertise": "Offered", "mode": "vm-passthrough"}))).await.expect("accepted");
        refused(patch::<GPUNode>(t, "n1", json!({"spec": {"mode": null}})).await, "Offered needs a mode");
        refused(
            patch::<GPUNode>(t, "n1", json!({"spec": {"gpus": [{"address": "1:0", "mode": "container"}]}})).await,
            "spec.gpus[0].address",
        );
    });
}

#[test]
fn the_peers_default_policy_keeps_every_field_and_is_answered() {
    turn(async |t| {
        let text = source("crds/tests/fixtures/peer-default.yaml");
        let given: Value = serde_saphyr::from_str(&text).expect("the fixture should be YAML");
        let posted: kube::api::DynamicObject = serde_json::from_value(given.clone()).expect("an object");
        let kind = kube::core::ApiResource::erase::<ClusterPolicy>(&());
        let policies: Api<kube::api::DynamicObject> = Api::all_with(t.client.clone(), &kind);
        let stored = policies.create(&PostParams::default(), &posted).await.expect("accepted");
        lacks_nothing(&given["spec"], &stored.data["spec"], "spec");

        let _operator = t.operator("op-1").await;
        let policy = policies::until(t, "cluster-policy", PolicyState::Ready, "NoGPUNodes", &[]).await;
        let images = policy.status.expect("a status").conditions;
        let images = images.iter().find(|c| c.type_ == "ImagesNotUsed").expect("a condition about images");
        assert!(images.status == "True" && images.message.contains("vfioManager"), "{images:?}");
    });
}

/// Everything that was posted has been stored.
fn lacks_nothing(given: &Value, stored: &Value, path: &str) {
    match (given, stored) {
        (Value::Object(given), Value::Object(stored)) => {
            for (key, value) in given {
                let at = format!("{path}.{key}");
                lacks_nothing(value, stored.get(key).unwrap_or_else(|| panic!("{at} was dropped")), &at);
            }
        }
        (given, stored) => assert_eq!(given, stored, "{path}"),
    }
}
