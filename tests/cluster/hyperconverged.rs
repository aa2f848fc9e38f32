//! HyperConverged beside KubeVirt: where there is one, it owns KubeVirt's configuration.

pub mod crd;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, PostParams},
};
use serde_json::{Value, json};

use self::crd::Release;
use crate::{
    kubevirt::{HYPER_CONVERGED, nic, offering, until_permitted, until_wired, with_kubevirt},
    support::{
        agents::T4,
        kubelets::Kubelets,
        kubevirt,
        turn::{Turn, turn},
        wait,
    },
};

/// HCO admits no other.
pub const NAME: &str = "kubevirt-hyperconverged";

fn api(t: &Turn, version: &str) -> Api<DynamicObject> {
    let resource = kubevirt::kind("hco.kubevirt.io", version, "HyperConverged");
    Api::namespaced_with(t.client.clone(), kubevirt::NAME, &resource)
}

fn nested(path: &[&str], field: Value) -> Value {
    path.iter().rev().fold(field, |inner, key| json!({*key: inner}))
}

/// Of somebody's.
fn others() -> Value {
    json!({"pciHostDevices": [{"pciDeviceSelector": "8086:1572", "resourceName": "intel.com/x710"}]})
}

/// The one object, with an entry of somebody's; as it is stored.
pub async fn hyper_converged(t: &Turn, release: Release) -> (Api<CustomResourceDefinition>, Api<DynamicObject>) {
    let crds: Api<CustomResourceDefinition> = t.all();
    crds.create(&PostParams::default(), &release.crd()).await.expect("a CRD should be creatable");
    let (version, path) = release.stored();
    let api = api(t, version);
    let mut object = DynamicObject::new(NAME, &kubevirt::kind("hco.kubevirt.io", version, "HyperConverged"));
    object.data = nested(path, others());
    wait::eventually("HyperConverged is served", async || api.create(&PostParams::default(), &object).await.ok()).await;
    (crds, api)
}

/// Ours after the user's, where this release stores them.
async fn until_written(api: &Api<DynamicObject>, release: Release) {
    let ours = json!({"pciDeviceSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true});
    let list = format!("/{}/pciHostDevices", release.stored().1.join("/"));
    let promise = format!("HyperConverged of {release:?} permits the T4");
    let object =
        kubevirt::until(api, NAME, &promise, |object| object.data.pointer(&format!("{list}/1")) == Some(&ours)).await;
    assert_eq!(object.data.pointer(&format!("{list}/0/resourceName")), Some(&json!("intel.com/x710")));
}

/// Ours goes into the object in the version that is stored, and back into KubeVirt's when HyperConverged has gone.
async fn hyper_converged_is_written(t: &Turn, release: Release) {
    with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
    let (crds, api) = hyper_converged(t, release).await;
    let _kubelets = Kubelets::start(t);
    let _operator = t.operator("op-1").await;
    let _agent = offering(t).await;
    until_written(&api, release).await;
    until_wired(t, "True", "Permitted", &["HyperConverged kubevirt/kubevirt-hyperconverged"]).await;
    until_permitted(t, &["intel.com/x710"]).await;
    crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
    until_permitted(t, &["intel.com/x710", T4]).await;
}

#[test]
fn hyperconverged_is_written_instead_of_kubevirt_where_there_is_one() {
    turn(async |t| hyper_converged_is_written(t, Release::V1_17).await);
}

#[test]
fn of_two_versions_of_hyperconverged_the_stored_one_is_written_be_it_the_old_or_the_new() {
    turn(async |t| {
        hyper_converged_is_written(t, Release::V1_18).await;
    });
    turn(async |t| {
        hyper_converged_is_written(t, Release::V1_20).await;
    });
}

#[test]
fn hyperconverged_is_followed_through_an_upgrade_that_ends_the_version_it_was_written_in() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let (crds, old) = hyper_converged(t, Release::V1_17).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        until_written(&old, Release::V1_17).await;
        let mut crd = Release::Announced.crd();
        crd.metadata.resource_version = crds.get(HYPER_CONVERGED).await.expect("the CRD").resource_version();
        crds.replace(HYPER_CONVERGED, &PostParams::default(), &crd).await.expect("a CRD should be replaceable");
        // What HyperConverged's webhook does: the field is where the new version has it.
        let (version, path) = Release::Announced.stored();
        let new = api(t, version);
        wait::eventually("HyperConverged is converted", async || {
            let mut object = new.get(NAME).await.ok()?;
            object.data = nested(path, others());
            new.replace(NAME, &PostParams::default(), &object).await.ok()
        })
        .await;
        until_written(&new, Release::Announced).await;
        crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
    });
}

#[test]
fn a_version_that_drops_a_field_is_named_and_not_written() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let (crds, api) = hyper_converged(t, Release::Dropping).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let words = ["HyperConverged kubevirt/kubevirt-hyperconverged", "too old", "pciHostDevices"];
        until_wired(t, "False", "FieldsDropped", &words).await;
        let object = api.get(NAME).await.expect("HyperConverged should be there");
        let list = object.data.pointer("/spec/permittedHostDevices/pciHostDevices").and_then(Value::as_array);
        assert_eq!(list.map(Vec::len), Some(1), "no entry that lacks what makes it ours: {list:?}");
        crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
    });
}
