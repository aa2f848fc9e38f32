//! OpenShift as its types and objects describe it, on a real API server: what the driver takes from them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        authorization::v1::SubjectAccessReview,
        core::v1::ConfigMap,
        rbac::v1::{Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
    core::ApiResource,
};
use serde_json::{Value, json};

use crate::support::{
    NAMESPACE,
    agents::{Agent, t4},
    nodes, policies,
    turn::{OPENSHIFT_CRDS, Turn, turn},
    wait,
};

const POLICY: &str = "cluster-policy";
const RHCOS: &str = "416.94.202405291527-0";
const OSTREE: &str = "feature.node.kubernetes.io/system-os_release.OSTREE_VERSION";

/// A type that keeps whatever it is given.
async fn crd(t: &Turn, name: &str, kind: &str) {
    let (plural, group) = name.split_once('.').expect("a CRD's name");
    let scope = if kind == "ImageStream" { "Namespaced" } else { "Cluster" };
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let crd = json!({
        "metadata": {"name": name, "annotations": {"api-approved.kubernetes.io": "unapproved, a test's own"}},
        "spec": {
            "group": group, "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    });
    let crd: CustomResourceDefinition = serde_json::from_value(crd).expect("a CRD");
    let crds: Api<CustomResourceDefinition> = t.all();
    crds.create(&PostParams::default(), &crd).await.expect("creatable");
    wait::until(&crds, name, "established", |crd: &CustomResourceDefinition| {
        let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|c| c.type_ == "Established" && c.status == "True")
    })
    .await;
}

async fn object(t: &Turn, group: &str, kind: &str, plural: &str, namespace: Option<&str>, object: Value) {
    let kind = ApiResource {
        group: group.to_owned(),
        version: "v1".to_owned(),
        api_version: format!("{group}/v1"),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    };
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(t.client.clone(), namespace, &kind),
        None => Api::all_with(t.client.clone(), &kind),
    };
    let mut object = object;
    object["apiVersion"] = json!(kind.api_version);
    object["kind"] = json!(kind.kind);
    let object: DynamicObject = serde_json::from_value(object).expect("an object");
    wait::eventually("its type is served", async || api.create(&PostParams::default(), &object).await.ok()).await;
}

async fn become_openshift(t: &Turn) {
    for (name, kind) in OPENSHIFT_CRDS {
        crd(t, name, kind).await;
    }
    let version = json!({
        "metadata": {"name": "version"},
        "status": {"history": [{"state": "Completed", "version": "4.16.30"}]},
    });
    object(t, "config.openshift.io", "ClusterVersion", "clusterversions", None, version).await;
    let proxy = json!({
        "metadata": {"name": "cluster"}, "spec": {"trustedCA": {"name": "user-ca-bundle"}},
        "status": {"httpsProxy": "http://proxy:3128", "noProxy": ".cluster.local"},
    });
    object(t, "config.openshift.io", "Proxy", "proxies", None, proxy).await;
    let toolkit = json!({
        "metadata": {"name": "driver-toolkit"},
        "spec": {"tags": [{"name": RHCOS, "from": {"kind": "DockerImage", "name": "quay.example/dtk@sha256:ab"}}]},
    });
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "openshift"}});
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = t.all();
    let _ = namespaces.create(&PostParams::default(), &serde_json::from_value(namespace).expect("a Namespace")).await;
    object(t, "image.openshift.io", "ImageStream", "imagestreams", Some("openshift"), toolkit).await;
}

/// What the chart has for OpenShift alone.
async fn bound(t: &Turn) -> (Api<Role>, Api<RoleBinding>) {
    let only = ["template", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE];
    let text = t
        .cluster
        .helm(&[&only[..], &["--show-only=templates/openshift.yaml", "--set=platform.openshift=true"]].concat());
    let (roles, bindings): (Api<Role>, Api<RoleBinding>) = (t.ours(), t.ours());
    for part in text.expect("a rendering").split("\n---\n").filter(|part| part.contains("kind: ")) {
        let object: Value = serde_saphyr::from_str(part).expect("YAML");
        match object["kind"].as_str() {
            Some("Role") => {
                let role = serde_json::from_value(object).expect("a Role");
                roles.create(&PostParams::default(), &role).await.expect("a Role");
            }
            Some("RoleBinding") => {
                let binding = serde_json::from_value(object).expect("a RoleBinding");
                bindings.create(&PostParams::default(), &binding).await.expect("a RoleBinding");
            }
            other => panic!("{other:?}"),
        }
    }
    (roles, bindings)
}

/// Whether a pod of this account may be admitted by OpenShift's constraint for privileged ones.
async fn may_be_privileged(t: &Turn, account: &str) -> bool {
    let review = json!({"metadata": {}, "spec": {
        "user": format!("system:serviceaccount:{NAMESPACE}:{account}"),
        "resourceAttributes": {
            "group": "security.openshift.io", "resource": "securitycontextconstraints", "name": "privileged", "verb": "use",
            "namespace": NAMESPACE,
        },
    }});
    let reviews: Api<SubjectAccessReview> = t.all();
    let review = serde_json::from_value(review).expect("a SubjectAccessReview");
    let answer = reviews.create(&PostParams::default(), &review).await.expect("an answer");
    answer.status.is_some_and(|status| status.allowed)
}

#[test]
fn the_accounts_of_all_operands_may_be_privileged_on_openshift_and_nowhere_else() {
    turn(async |t| {
        nodes::create(t, "n1", &[]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let _operator = t.operator("op-1").await;
        let on = |image: &str| json!({"enabled": true, "repository": "localhost", "image": image, "version": "test"});
        let mut policy = policies::valid(POLICY);
        for section in ["toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd", "migManager", "vgpuManager"] {
            policy["spec"][section] = on(&section.to_lowercase());
        }
        policy["spec"]["nodeStatusExporter"] = json!({"enabled": true});
        policies::create(t, policy).await;
        let sets: Api<DaemonSet> = t.ours();
        let until = async |name: &'static str| {
            wait::until(&sets, name, "it is applied", |_: &DaemonSet| true).await;
        };
        let mut accounts = BTreeSet::new();
        for (mode, last) in [("kubevirt", "nvidia-vgpu-manager-daemonset"), ("kata", "nvidia-cc-manager")] {
            let kata = on("kata-sandbox-device-plugin");
            let cc = json!({"enabled": true, "repository": "localhost", "image": "cc-manager", "version": "test", "defaultMode": "off"});
            let sandbox =
                json!({"spec": {"sandboxWorkloads": {"mode": mode}, "kataSandboxDevicePlugin": kata, "ccManager": cc}});
            policies::patch(t, POLICY, &sandbox).await;
            for name in [last, "nvidia-driver-daemonset", "nvidia-mig-manager", "nvidia-node-status-exporter"] {
                until(name).await;
            }
            let listed = sets.list(&ListParams::default()).await.expect("listable").items;
            accounts.extend(listed.into_iter().filter_map(|set| set.spec?.template.spec?.service_account_name));
        }
        assert!(accounts.len() >= 12, "{accounts:?}");
        for account in &accounts {
            assert!(!may_be_privileged(t, account).await, "{account}: on other platforms there is nothing to use");
        }
        let (roles, bindings) = bound(t).await;
        for account in &accounts {
            // The API server's own view follows in a moment.
            wait::eventually(&format!("{account} may be privileged"), async || {
                may_be_privileged(t, account).await.then_some(())
            })
            .await;
        }
        assert!(!may_be_privileged(t, "gpuvirt-operator").await, "it talks to the API server only");
        roles.delete("gpuvirt-privileged", &DeleteParams::default()).await.expect("deletable");
        bindings.delete("gpuvirt-privileged", &DeleteParams::default()).await.expect("deletable");
    });
}

fn environment(set: &DaemonSet, container: &str) -> BTreeMap<String, String> {
    let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).expect("a pod");
    let container = pod.containers.iter().find(|c| c.name == container).expect("the container");
    container.env.iter().flatten().filter_map(|entry| Some((entry.name.clone(), entry.value.clone()?))).collect()
}

#[test]
fn on_openshift_the_driver_is_built_by_its_toolkit_with_the_clusters_proxy_and_certificates() {
    turn(async |t| {
        become_openshift(t).await;
        nodes::create(t, "n1", &[(OSTREE, RHCOS)]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let _operator = t.operator("op-1").await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["operator"]["use_ocp_driver_toolkit"] = json!(true);
        policies::create(t, policy).await;
        let name = format!("nvidia-driver-daemonset-{RHCOS}");
        let set = wait::until(&t.ours(), &name, "the driver of this version", |_: &DaemonSet| true).await;
        let main = environment(&set, "nvidia-driver-ctr");
        assert_eq!(main["OPENSHIFT_VERSION"], "4.16");
        assert_eq!((main["https_proxy"].as_str(), main["NO_PROXY"].as_str()), ("http://proxy:3128", ".cluster.local"));
        assert_eq!(environment(&set, "openshift-driver-toolkit-ctr")["RHCOS_VERSION"], RHCOS);
        let injected = |map: &ConfigMap| {
            let labels = map.metadata.labels.as_ref().expect("labels");
            labels.get("config.openshift.io/inject-trusted-cabundle").is_some_and(|value| value == "true")
        };
        wait::until(&t.ours(), "gpu-operator-trusted-ca", "OpenShift is asked to fill it", injected).await;

        // A node of which NFD says nothing: no set is made up for it, and what runs stays.
        nodes::label(t, "n1", &[(OSTREE, None)]).await;
        let _second = {
            nodes::create(t, "n2", &[]).await;
            Agent::start(t, "n2", vec![t4("0000:18:00.0")]).await
        };
        policies::until(t, POLICY, crds::v1::PolicyState::NotReady, "RHCOSVersionUnknown", &["Node Feature Discovery"])
            .await;
        t.ours::<DaemonSet>().get(&name).await.expect("it is still there");
        let policies: Api<crds::v1::ClusterPolicy> = t.all();
        policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
    });
}
