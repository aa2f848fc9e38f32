//! HyperConverged beside KubeVirt: where there is one, it owns KubeVirt's configuration.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, PostParams},
};
use serde_json::{Value, json};

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

/// What its CRD knows.
#[derive(Clone, Copy)]
enum Age {
    Current,
    /// No `externalResourceProvider`.
    Old,
}

/// As its CRD has the field in a version: a map keyed by the selector. The rest of the object is left open.
async fn hyper_converged(
    t: &Turn,
    version: &str,
    path: &[&str],
    age: Age,
) -> (Api<CustomResourceDefinition>, Api<DynamicObject>) {
    let text = json!({"type": "string"});
    let flag = json!({"type": "boolean"});
    let mut entry = json!({"pciDeviceSelector": text, "resourceName": text, "disabled": flag});
    match age {
        Age::Current => entry["externalResourceProvider"] = flag,
        Age::Old => {}
    }
    let pci = json!({
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["pciDeviceSelector"],
        "items": {"type": "object", "required": ["pciDeviceSelector", "resourceName"], "properties": entry},
    });
    let permitted = json!({"type": "object", "properties": {"pciHostDevices": pci}});
    let nest = |inner, key: &&str| json!({"type": "object", "properties": {*key: inner}});
    let schema = path.iter().rev().fold(permitted, nest);
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": HYPER_CONVERGED},
        "spec": {
            "group": "hco.kubevirt.io", "scope": "Namespaced",
            "names": {"kind": "HyperConverged", "plural": "hyperconvergeds", "singular": "hyperconverged", "listKind": "HyperConvergedList"},
            "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    });
    let crds: Api<CustomResourceDefinition> = t.all();
    let crd: CustomResourceDefinition = serde_json::from_value(crd).expect("a CRD");
    crds.create(&PostParams::default(), &crd).await.expect("a CRD should be creatable");
    let resource = kubevirt::kind("hco.kubevirt.io", version, "HyperConverged");
    let api = Api::namespaced_with(t.client.clone(), kubevirt::NAME, &resource);
    let mut object = DynamicObject::new("kubevirt-hyperconverged", &resource);
    let nic = json!({"pciDeviceSelector": "8086:1572", "resourceName": "intel.com/x710"});
    let field = json!({"pciHostDevices": [nic]});
    object.data = path.iter().rev().fold(field, |inner, key| json!({*key: inner}));
    wait::eventually("HyperConverged is served", async || api.create(&PostParams::default(), &object).await.ok()).await;
    (crds, api)
}

/// Ours goes into the object that the version has, and back into KubeVirt's when HyperConverged has gone.
async fn hyper_converged_is_written(t: &Turn, version: &str, path: &[&str]) {
    with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
    let (crds, api) = hyper_converged(t, version, path, Age::Current).await;
    let _kubelets = Kubelets::start(t);
    let _operator = t.operator("op-1").await;
    let _agent = offering(t).await;
    let name = "kubevirt-hyperconverged";
    let ours = json!({"pciDeviceSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true});
    let list = format!("/{}/pciHostDevices", path.join("/"));
    let object = kubevirt::until(&api, name, "HyperConverged permits the T4", |object| {
        object.data.pointer(&format!("{list}/1")) == Some(&ours)
    })
    .await;
    assert_eq!(object.data.pointer(&format!("{list}/0/resourceName")), Some(&json!("intel.com/x710")));
    until_wired(t, "True", "Permitted", &["HyperConverged kubevirt/kubevirt-hyperconverged"]).await;
    until_permitted(t, &["intel.com/x710"]).await;
    crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
    until_permitted(t, &["intel.com/x710", T4]).await;
}

#[test]
fn hyperconverged_is_written_instead_of_kubevirt_where_there_is_one() {
    turn(async |t| hyper_converged_is_written(t, "v1beta1", &["spec", "permittedHostDevices"]).await);
}

#[test]
fn hyperconverged_that_is_served_in_version_v1_only_is_written_there() {
    turn(async |t| hyper_converged_is_written(t, "v1", &["spec", "virtualization", "permittedHostDevices"]).await);
}

#[test]
fn a_version_that_drops_a_field_is_named_and_not_written() {
    turn(async |t| {
        with_kubevirt(t, json!({"pciHostDevices": [nic()]})).await;
        let (crds, api) = hyper_converged(t, "v1beta1", &["spec", "permittedHostDevices"], Age::Old).await;
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let _agent = offering(t).await;
        let words = ["HyperConverged kubevirt/kubevirt-hyperconverged", "too old", "pciHostDevices"];
        until_wired(t, "False", "FieldsDropped", &words).await;
        let object = api.get("kubevirt-hyperconverged").await.expect("HyperConverged should be there");
        let list = object.data.pointer("/spec/permittedHostDevices/pciHostDevices").and_then(Value::as_array);
        assert_eq!(list.map(Vec::len), Some(1), "no entry that lacks what makes it ours: {list:?}");
        crds.delete(HYPER_CONVERGED, &DeleteParams::default()).await.expect("deletable");
    });
}
