//! One fit cluster, and one change to it per test.

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Namespace, Node},
    },
    apimachinery::pkg::version::Info,
};
use serde_json::json;

use super::*;
use crate::cluster_command::tests::fleet;

fn from<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).expect("an object of that kind")
}

fn kubevirt(spec: &serde_json::Value) -> kube::api::DynamicObject {
    from(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": spec,
        "status": {"phase": "Deployed", "observedKubeVirtVersion": "v1.8.2"},
    }))
}

/// A cluster with nothing to complain of: one passthrough node that serves.
fn fit() -> Facts {
    let mut fleet = fleet();
    fleet.gpu_nodes.truncate(1);
    fleet.nodes.truncate(1);
    fleet.transitions.clear();
    for node in &mut fleet.gpu_nodes {
        node.status.as_mut().unwrap().operator.as_mut().unwrap().conditions.clear();
    }
    let policy = &mut fleet.policies[0];
    policy.spec = from(json!({"sandboxWorkloads": {"enabled": true}}));
    policy.status = Some(from(json!({"state": "ready", "namespace": "gpuvirt"})));
    let node: Node = from(json!({
        "metadata": {"name": "gpu-1", "labels": {
            "nvidia.com/gpu.workload.config": "vm-passthrough", "feature.node.kubernetes.io/pci-10de.present": "true"}},
        "status": {"allocatable": {"hugepages-1Gi": "64Gi", "nvidia.com/TU104GL_TESLA_T4": "2"}},
    }));
    Facts {
        kubernetes: Ok(Info {
            major: "1".to_owned(),
            minor: "34+".to_owned(),
            git_version: "v1.34.1".to_owned(),
            ..Info::default()
        }),
        fleet: Ok(Some(fleet)),
        kubevirt: Ok(Some(kubevirt(&json!({"configuration": {
            "developerConfiguration": {"featureGates": ["HostDevices"]},
            "permittedHostDevices": {"pciHostDevices": [{"pciVendorSelector": "10DE:1EB8",
                "resourceName": "nvidia.com/TU104GL_TESLA_T4", "externalResourceProvider": true}]},
        }})))),
        hyperconverged: Ok(None),
        nodes: Ok(vec![node]),
        daemon_sets: Ok(vec![from(json!({"metadata": {"name": "nfd-worker", "namespace": "nfd"}}))]),
        deployments: Ok(Vec::new()),
        namespace: Ok(from(json!({"metadata": {"name": "gpuvirt",
            "labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}))),
    }
}

/// `check severity object: evidence`, one a finding.
fn found(facts: &Facts) -> Vec<String> {
    let report = report(facts);
    let all = report.checks.iter().flat_map(|check| check.verdict.findings().iter().map(move |f| (check.check, f)));
    all.map(|(check, f)| format!("{check} {:?} {}: {}", f.severity, f.object, f.evidence)).collect()
}

/// The one finding that a change to the fit cluster makes.
fn after(change: impl FnOnce(&mut Facts)) -> String {
    let mut facts = fit();
    change(&mut facts);
    let found = found(&facts);
    let [only] = found.as_slice() else { panic!("not one finding: {found:#?}") };
    only.clone()
}

#[test]
fn a_fit_cluster_passes_every_check() {
    assert_eq!(found(&fit()), Vec::<String>::new());
    let report = report(&fit());
    let skipped: Vec<_> = report.checks.iter().filter(|c| matches!(c.verdict, Verdict::Skipped { .. })).collect();
    assert!(skipped.is_empty(), "{skipped:?}");
}

#[test]
fn an_old_kubernetes_or_kubevirt_is_named() {
    let kubernetes =
        |minor: &'static str| move |facts: &mut Facts| facts.kubernetes.as_mut().unwrap().minor = minor.to_owned();
    assert!(after(kubernetes("29")).starts_with("kubernetes Error"));
    assert!(after(kubernetes("31+")).contains("tokens do not say"));
    let mut facts = fit();
    facts.kubevirt.as_mut().unwrap().as_mut().unwrap().data["status"]["observedKubeVirtVersion"] = json!("v1.5.0");
    assert!(found(&facts)[0].starts_with("kubevirt Error KubeVirt kubevirt/kubevirt: version v1.5.0"));
}

#[test]
fn others_that_would_do_the_same_work_are_named() {
    let said = after(|facts| {
        let theirs: Deployment = from(json!({"metadata": {"name": "gpu-operator", "namespace": "gpu-operator",
            "labels": {"app": "gpu-operator"}}, "spec": {"replicas": 1, "selector": {}, "template": {}}}));
        facts.deployments.as_mut().unwrap().push(theirs);
    });
    assert!(said.starts_with("nvidia-operator Error Deployment gpu-operator/gpu-operator"), "{said}");
    let plugin = |labels: serde_json::Value| {
        from::<DaemonSet>(json!({
            "metadata": {"name": "dp", "namespace": "kube-system", "labels": labels},
            "spec": {"selector": {}, "template": {"spec": {"containers":
                [{"name": "c", "image": "nvcr.io/nvidia/kubevirt-gpu-device-plugin:v1.4"}]}}},
        }))
    };
    let said = after(|facts| facts.daemon_sets.as_mut().unwrap().push(plugin(json!({}))));
    assert!(said.starts_with("device-plugins Error DaemonSet kube-system/dp"), "{said}");
    let mut ours = fit();
    ours.daemon_sets.as_mut().unwrap().push(plugin(json!({"gpuvirt.io/policy": "cluster-policy"})));
    assert_eq!(found(&ours), Vec::<String>::new(), "operands of ours are no conflict");
}

#[test]
fn what_kubevirt_would_do_to_gpus_itself_is_an_error() {
    let configured = |key: &'static str, value: serde_json::Value| {
        move |facts: &mut Facts| {
            facts.kubevirt.as_mut().unwrap().as_mut().unwrap().data["spec"]["configuration"][key] = value;
        }
    };
    let own = json!({"pciHostDevices": [{"pciVendorSelector": "10DE:1EB8", "resourceName": "nvidia.com/T4"}]});
    assert!(after(configured("permittedHostDevices", own)).contains("without externalResourceProvider"));
    let types = json!({"mediatedDeviceTypes": ["nvidia-222"]});
    assert!(after(configured("mediatedDevicesConfiguration", types)).starts_with("kubevirt-mediated Warning"));
    assert!(after(configured("evictionStrategy", json!("LiveMigrate"))).starts_with("eviction-strategy Warning"));
    let overcommit = json!({"featureGates": ["HostDevices"], "memoryOvercommit": 150});
    assert!(after(configured("developerConfiguration", overcommit)).contains("memoryOvercommit is 150"));
    assert!(after(configured("developerConfiguration", json!({}))).starts_with("kubevirt-gates Advice"));
}

#[test]
fn where_hyperconverged_keeps_the_configuration_it_is_the_one_to_change() {
    let said = after(|facts| {
        let object = from(json!({"apiVersion": "hco.kubevirt.io/v1beta1", "kind": "HyperConverged",
            "metadata": {"name": "kubevirt-hyperconverged", "namespace": "kubevirt-hyperconverged"}}));
        facts.hyperconverged = Ok(Some((crate::operator::kubevirt::Dialect::HyperConvergedV1Beta1, object)));
        facts.kubevirt.as_mut().unwrap().as_mut().unwrap().data["spec"]["configuration"]["evictionStrategy"] =
            json!("LiveMigrate");
    });
    assert!(said.contains("HyperConverged kubevirt-hyperconverged/kubevirt-hyperconverged"), "{said}");
}

fn agent(facts: &mut Facts) -> &mut crds::v1alpha1::AgentStatus {
    let fleet = facts.fleet.as_mut().unwrap().as_mut().unwrap();
    fleet.gpu_nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap()
}

#[test]
fn what_is_wrong_with_a_host_is_told_of_its_node() {
    let said = after(|facts| agent(facts).host.iommu = false);
    assert!(said.starts_with("iommu Error node gpu-1: its IOMMU is off"), "{said}");
    let said = after(|facts| {
        let message = "vfio-pci cannot be loaded: Key was rejected by service".to_owned();
        agent(facts).gpus[1].refusal = Some(crds::v1alpha1::Refusal { reason: "ModuleNotLoaded".to_owned(), message });
    });
    assert!(said.starts_with("kernel-modules Error node gpu-1"), "{said}");
    let said = after(|facts| facts.nodes.as_mut().unwrap()[0].status = None);
    assert!(said.starts_with("vm-memory Advice node gpu-1: no 1 GiB hugepages"), "{said}");
    let said = after(|facts| {
        let fleet = facts.fleet.as_mut().unwrap().as_mut().unwrap();
        fleet.nodes[0] = from(json!({"metadata": {"name": "gpu-1"}, "status": {"allocatable": {}}}));
    });
    assert!(said.contains("2 nvidia.com/TU104GL_TESLA_T4 are offered, and 0 are allocatable"), "{said}");
}

#[test]
fn an_installation_that_cannot_work_is_told() {
    let said = after(|facts| facts.fleet.as_mut().unwrap().as_mut().unwrap().silence = Some("no holder".to_owned()));
    assert!(said.starts_with("operator Error"), "{said}");
    let said = after(|facts| facts.fleet.as_mut().unwrap().as_mut().unwrap().policies[0].spec = from(json!({})));
    assert!(said.starts_with("sandbox-workloads Error") && said.contains("gpu-1"), "{said}");
    let restricted = json!({"metadata": {"name": "gpuvirt",
        "labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    let said = after(|facts| facts.namespace = Ok(from::<Namespace>(restricted)));
    assert!(said.starts_with("pod-security Error"), "{said}");
    let said = after(|facts| {
        let second = from(json!({"metadata": {"name": "nfd-worker", "namespace": "gpu-operator"}}));
        facts.daemon_sets.as_mut().unwrap().push(second);
    });
    assert!(said.starts_with("feature-discovery Warning"), "{said}");
}

#[test]
fn what_may_not_be_read_is_a_check_that_was_not_made() {
    let mut facts = fit();
    facts.deployments = Err("you may not read deployments.apps".to_owned());
    facts.fleet = Ok(None);
    let report = report(&facts);
    let of = |name: &str| report.checks.iter().find(|check| check.check == name).map(|check| check.verdict.clone());
    assert_eq!(of("nvidia-operator"), Some(Verdict::skipped("you may not read deployments.apps")));
    assert_eq!(of("operator"), Some(Verdict::skipped("gpuvirt is not installed")));
    assert_eq!(report.errors, 0, "a preflight of a fit cluster has no error");
}

#[test]
fn a_person_reads_what_was_seen_and_what_to_do() {
    let mut facts = fit();
    facts.fleet = Ok(Some(fleet()));
    facts.nodes = Err("you may not read nodes: ask whoever runs the cluster for it".to_owned());
    let text = text(&report(&facts));
    insta::assert_snapshot!("doctor", anstream::adapter::strip_str(&text).to_string());
}
