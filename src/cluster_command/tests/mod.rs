//! What a person sees of a described cluster, read as prose.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    fleet::Fleet,
    gpus::{self, Only},
    nodes,
    report::report,
    status,
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    policies: Vec<Value>,
    gpu_nodes: Vec<Value>,
    transitions: Vec<Value>,
    nodes: Vec<Value>,
}

fn read<T: serde::de::DeserializeOwned>(kind: &str, group: &str, described: Vec<Value>) -> Vec<T> {
    let whole = |mut object: Value| {
        object["kind"] = json!(kind);
        object["apiVersion"] = json!(group);
        serde_json::from_value(object).unwrap_or_else(|error| panic!("{kind}: {error}"))
    };
    described.into_iter().map(whole).collect()
}

pub fn fleet() -> Fleet {
    let described: Described = serde_saphyr::from_str(include_str!("fleet.yaml")).expect("a described cluster");
    Fleet {
        policies: read("ClusterPolicy", "nvidia.com/v1", described.policies),
        config: None,
        gpu_nodes: read("GPUNode", "gpuvirt.io/v1alpha1", described.gpu_nodes),
        transitions: read("GPUTransition", "gpuvirt.io/v1alpha1", described.transitions),
        nodes: read("Node", "v1", described.nodes),
        silence: None,
        remarks: Vec::new(),
    }
}

fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

#[test]
fn the_status_is_one_screen() {
    insta::assert_snapshot!("status", plain(&status::text(&report(&fleet()), 110)));
}

#[test]
fn nodes_have_a_line_each() {
    insta::assert_snapshot!("nodes", plain(&nodes::text(&report(&fleet()).nodes)));
}

#[test]
fn gpus_and_vgpus_have_a_line_each() {
    insta::assert_snapshot!("gpus", plain(&gpus::text(&gpus::report(&fleet().gpu_nodes, &Only::default()))));
}

#[test]
fn only_the_gpus_of_a_node_or_a_namespace_are_shown_if_asked_for() {
    let addresses = |only: Only| -> Vec<String> {
        gpus::report(&fleet().gpu_nodes, &only).into_iter().map(|gpu| gpu.address).collect()
    };
    let namespace = |name: &str| Only { namespace: Some(name.to_owned()), node: None };
    assert_eq!(addresses(namespace("ml")), ["0000:18:00.0"]);
    assert_eq!(addresses(namespace("vms")), ["0000:43:00.0", "0000:c1:00.0"]);
    assert_eq!(addresses(Only { node: Some("gpu-3".to_owned()), namespace: None }), ["0000:65:00.0", "0000:66:00.0"]);
}

#[test]
fn a_program_reads_the_same_in_a_shape_that_stays() {
    let mut report = report(&fleet());
    report.nodes.truncate(2);
    insta::assert_snapshot!("status-json", crate::answer::json(&report).expect("JSON"));
    let gpus = gpus::report(&fleet().gpu_nodes, &Only { node: Some("gpu-4".to_owned()), namespace: None });
    insta::assert_snapshot!("gpus-json", crate::answer::json(&gpus).expect("JSON"));
}

#[test]
fn a_cluster_without_gpus_says_where_agents_look() {
    let mut fleet = fleet();
    fleet.gpu_nodes.clear();
    fleet.silence = Some("lease gpuvirt-operator has no holder".to_owned());
    let said = plain(&status::text(&report(&fleet), 110));
    assert!(said.contains("OperatorSilent") && said.contains("-l app=gpuvirt-agent"), "{said}");
}
