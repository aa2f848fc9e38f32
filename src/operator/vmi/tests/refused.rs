//! KubeVirt makes no pod.

use serde_json::json;

use super::{super::explain::Reason, Cluster, Progress, T4};

/// As virt-controller says it (KubeVirt 1.8), of a cluster that offers T4s.
fn cluster() -> Cluster {
    let mut cluster = super::cluster();
    cluster.instance.progress = Progress::Refused(format!(
        "failed to render launch manifest: GPU {T4} is not permitted in permittedHostDevices configuration"
    ));
    cluster.permitted = Some(json!({"pciHostDevices": []}));
    cluster
}

#[test]
fn a_gpu_that_is_offered_and_not_permitted_is_told_with_the_entry_to_add() {
    cluster().says(
        Reason::GPUNotPermitted,
        &[
            "KubeVirt kubevirt/kubevirt does not permit",
            r#""pciVendorSelector":"10DE:1EB8""#,
            "externalResourceProvider",
        ],
    );
}

#[test]
fn what_the_operator_complains_of_is_the_reason() {
    let mut cluster = cluster();
    cluster.complaint = Some("an entry of yours has another name");
    cluster.says(Reason::GPUNotPermitted, &["because an entry of yours has another name"]);
}

#[test]
fn a_gpu_that_is_permitted_by_now_needs_patience_only() {
    let mut cluster = cluster();
    let entry = json!({"pciVendorSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true});
    cluster.permitted = Some(json!({"pciHostDevices": [entry]}));
    cluster.says(Reason::GPUNotPermitted, &["permitted by now"]);
}

#[test]
fn a_gpu_that_no_node_offers_yet_is_told_with_what_would_make_one_offer_it() {
    let mut cluster = cluster();
    cluster.operator().serving = Some(crds::WorkloadMode::Container);
    cluster.agent().resources.clear();
    cluster.says(Reason::GPUNotPermitted, &["once a node offers it", "kubectl label --overwrite node node"]);
}

#[test]
fn a_wrong_spelling_is_told_before_anything_else() {
    let mut cluster = cluster();
    let wrong = "nvidia.com/TU104GL_Tesla_T4";
    cluster.instance.asks = [(wrong.to_owned(), 1)].into();
    cluster.instance.progress =
        Progress::Refused(format!("GPU {wrong} is not permitted in permittedHostDevices configuration"));
    cluster.says(Reason::GPUNameUnknown, &["did you mean nvidia.com/TU104GL_TESLA_T4?"]);
}

#[test]
fn what_kubevirt_refuses_for_another_reason_is_not_ours() {
    let mut cluster = cluster();
    cluster.instance.progress = Progress::Refused("the PVC is missing".to_owned());
    cluster.says(Reason::NotTheGPU, &["the PVC is missing"]);
}

#[test]
fn without_rights_to_read_kubevirt_the_answer_says_where_to_look() {
    let mut cluster = cluster();
    cluster.permitted = None;
    cluster.says(Reason::GPUNotPermitted, &["permittedHostDevices of the KubeVirt or HyperConverged object"]);
}
