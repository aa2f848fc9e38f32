//! What a person sees of a described cluster, read as prose.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    explain,
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
fn a_node_is_explained_with_its_change_its_users_and_its_gpus() {
    let of = |node: &str| plain(&explain::node_text(&explain::node_of(&fleet(), node).expect("a node")));
    insta::assert_snapshot!("explain-node", [of("gpu-2"), of("gpu-3"), of("gpu-5")].join("────\n"));
}

#[test]
fn a_gpu_is_explained_with_or_without_its_node() {
    let of = |gpu: &str| explain::gpu_of(&fleet(), gpu).map(|gpu| plain(&explain::gpu_text(&gpu)));
    let by_address = of("65:00.0").expect("a GPU");
    assert_eq!(of("gpu-3/0000:65:00.0").expect("a GPU"), by_address);
    let mut hindered = fleet();
    let gpu = &mut hindered.gpu_nodes[1].status.as_mut().unwrap().agent.as_mut().unwrap().gpus[1];
    gpu.obstacles = vec![crds::v1alpha1::Obstacle {
        mode: crds::WorkloadMode::VmPassthrough,
        reason: "ForeignDeviceInGroup".to_owned(),
        message: "0000:3c:00.0 (nvme) is in its group: another slot".to_owned(),
    }];
    let hindered = plain(&explain::gpu_text(&explain::gpu_of(&hindered, "3b:00.0").expect("a GPU")));
    insta::assert_snapshot!("explain-gpu", [by_address, hindered, of("c1:00.0").expect("a GPU")].join("────\n"));
    assert!(of("99:00.0").unwrap_err().to_string().contains("kubectl gpuvirt gpus"));
    let mut twice = fleet();
    twice.gpu_nodes.push(twice.gpu_nodes[0].clone());
    assert!(explain::gpu_of(&twice, "43:00.0").unwrap_err().to_string().contains("name one"));
}

#[test]
fn a_policy_is_explained_operand_by_operand() {
    let mut fleet = fleet();
    let status = json!({
        "operands": [
            {"name": "nvidia-driver-daemonset", "desired": 2, "updated": 2, "ready": 1, "reason": "NotReady", "message": "m",
             "failing": {"node": "gpu-2", "pod": "p", "reason": "ImagePullBackOff"}},
            {"name": "gpuvirt-agent", "desired": 5, "updated": 5, "ready": 5},
        ],
        "modes": [{"mode": "vm-passthrough", "nodes": 3, "ready": 2, "reasons": ["node gpu-2: waits"]}],
    });
    let mut config = crds::v1alpha1::GPUVirtConfig::new("default", crds::v1alpha1::GPUVirtConfigSpec::default());
    config.status = Some(serde_json::from_value(status).expect("a status"));
    fleet.config = Some(config);
    insta::assert_snapshot!("explain-policy", plain(&explain::policy_text(&explain::policy_of(&fleet, None).unwrap())));
    assert!(explain::policy_of(&fleet, Some("other")).unwrap_err().to_string().contains("there is: cluster-policy"));
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
