//! `NVIDIADriver` objects on a real API server: whose nodes get which driver, and what each is told.

use crds::{
    labels,
    v1::PolicyState,
    v1alpha1::{DriverState, NVIDIADriver},
};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::support::{
    agents::{Agent, t4},
    kubelets::Kubelets,
    nodes, policies,
    turn::{Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";

fn driver(name: &str, more: &Value) -> NVIDIADriver {
    let mut spec = json!({
        "driverType": "gpu", "default": false,
        "repository": "registry.example", "image": "driver", "version": "595.91.07",
    });
    spec.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let driver = json!({
        "apiVersion": "nvidia.com/v1alpha1", "kind": "NVIDIADriver", "metadata": {"name": name}, "spec": spec,
    });
    serde_json::from_value(driver).expect("an NVIDIADriver")
}

async fn create(t: &Turn, name: &str, more: &Value) -> Result<NVIDIADriver, String> {
    let api: Api<NVIDIADriver> = t.all();
    api.create(&PostParams::default(), &driver(name, more)).await.map_err(|error| error.to_string())
}

async fn until(t: &Turn, name: &str, state: DriverState, reason: &str, part: &str) {
    wait::until(&t.all(), name, &format!("{state:?}, {reason}, {part}"), |driver: &NVIDIADriver| {
        driver.status.as_ref().is_some_and(|status| {
            let ready = status.conditions.iter().find(|c| c.type_ == "Ready");
            status.state == Some(state) && ready.is_some_and(|c| c.reason == reason && c.message.contains(part))
        })
    })
    .await;
}

async fn by_objects(t: &Turn, yes: bool) {
    policies::patch(t, POLICY, &json!({"spec": {"driver": {"useNvidiaDriverCRD": yes}}})).await;
}

#[test]
fn an_object_brings_its_driver_to_its_nodes_and_a_conflict_is_told_to_both() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[("pool", "a")]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let _operator = t.operator("op-1").await;
        let by_hand = json!({"nodeSelector": {"pool": "a"}, "upgradePolicy": {"autoUpgrade": false}});
        create(t, "a", &by_hand).await.expect("creatable");
        policies::create(t, policies::valid(POLICY)).await;
        until(t, "a", DriverState::Disabled, "NotUsed", "useNvidiaDriverCRD").await;

        by_objects(t, true).await;
        wait::until(&t.all(), "n1", "its owner's label", |node: &Node| {
            node.labels().get(labels::DRIVER_OWNER).is_some_and(|owner| owner == "a")
        })
        .await;
        // The old driver's pod runs on, and keeps the new one waiting: it is to be renewed by hand.
        let pods: Api<Pod> = t.ours();
        let old = ListParams::default().labels("app=nvidia-driver-daemonset");
        let old = pods.list(&old).await.expect("listable").items.pop().expect("the old driver's pod");
        wait::eventually("the policy's own set is gone", async || {
            let sets: Api<DaemonSet> = t.ours();
            sets.get_opt("nvidia-driver-daemonset").await.expect("readable").is_none().then_some(())
        })
        .await;
        let stays = pods.get(&old.name_any()).await.expect("it is still there");
        assert!(stays.metadata.deletion_timestamp.is_none() && stays.owner_references().is_empty());
        until(t, "a", DriverState::NotReady, "DriverNotReady", "0 of 1 pod(s) ready").await;
        pods.delete(&old.name_any(), &DeleteParams::default()).await.expect("deletable");
        until(t, "a", DriverState::Ready, "Reconciled", "").await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;

        create(t, "b", &json!({})).await.expect("creatable");
        until(t, "a", DriverState::NotReady, "ConflictingNodeSelector", "n1 are selected by NVIDIADriver b").await;
        until(t, "b", DriverState::NotReady, "ConflictingNodeSelector", "n1 are selected by NVIDIADriver a").await;
        let api: Api<NVIDIADriver> = t.all();
        api.delete("b", &DeleteParams::default()).await.expect("deletable");
        until(t, "a", DriverState::Ready, "Reconciled", "").await;
        api.delete("a", &DeleteParams::default()).await.expect("deletable");
        wait::until(&t.all(), "n1", "nobody's", |node: &Node| !node.labels().contains_key(labels::DRIVER_OWNER)).await;
        wait::eventually("its set goes", async || {
            let sets = t.ours::<DaemonSet>().list(&ListParams::default().labels(labels::NVIDIA_DRIVER)).await;
            sets.expect("listable").items.is_empty().then_some(())
        })
        .await;
    });
}

#[test]
fn the_api_server_refuses_a_default_with_a_selector_and_a_change_of_kind() {
    turn(async |t| {
        let error = create(t, "d", &json!({"default": true, "nodeSelector": {"a": "b"}})).await.expect_err("refused");
        assert!(error.contains("must not have a nodeSelector"), "{error}");
        create(t, "d", &json!({"default": true, "usePrecompiled": false})).await.expect("creatable");
        let api: Api<NVIDIADriver> = t.all();
        for change in [json!({"driverType": "vgpu"}), json!({"usePrecompiled": true})] {
            let patch = Patch::Merge(json!({"spec": change}));
            let error = api.patch("d", &PatchParams::default(), &patch).await.expect_err("immutable").to_string();
            assert!(error.contains("immutable"), "{error}");
        }
    });
}
