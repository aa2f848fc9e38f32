//! Our own types: their defaults, and the rules that an API server holds them to.

use crds::v1alpha1::{
    Budget, Discovery, Evict, GPUNode, GPUTransition, GPUTransitionSpec, GPUVirtConfig, KubeVirtMode, TransitionPhase,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

fn schema(file: &str) -> Value {
    let crd = crds::generated().into_iter().find(|(name, _)| *name == file).unwrap().1;
    serde_json::to_value(&crd).unwrap()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

#[test]
fn a_config_that_says_nothing_is_the_safe_one() {
    let config: GPUVirtConfig = serde_json::from_value(json!({"metadata": {"name": "default"}, "spec": {}})).unwrap();
    assert_eq!(config.spec.discovery, Discovery::AllNodes);
    assert_eq!(config.spec.evict, Evict::Never);
    assert_eq!(
        config.spec.budget,
        Budget {
            max_parallel: IntOrString::Int(1),
            max_unavailable: IntOrString::String("25%".to_owned()),
            halt_after_failures: 1,
        }
    );
    assert_eq!(config.spec.kubevirt.mode, KubeVirtMode::Manage);
    assert_eq!(config.spec.resync_seconds, 300);
}

#[test]
fn a_config_has_the_one_name() {
    let rules = &schema("gpuvirt.io_gpuvirtconfigs.yaml")["x-kubernetes-validations"];
    assert_eq!(rules[0]["rule"], format!("self.metadata.name == '{}'", crds::v1alpha1::CONFIG_NAME));
}

#[test]
fn an_agent_may_create_its_node_without_a_spec() {
    let spec = &schema("gpuvirt.io_gpunodes.yaml")["properties"]["spec"];
    assert_eq!(spec["default"], json!({}));
    assert_eq!(spec["properties"]["advertise"]["default"], "Withdrawn");
}

#[test]
fn the_columns_of_a_node_are_those_of_the_contract() {
    let crd = crds::generated().into_iter().find(|(name, _)| *name == "gpuvirt.io_gpunodes.yaml").unwrap().1;
    let columns: Vec<_> =
        crd.spec.versions[0].additional_printer_columns.iter().flatten().map(|column| column.name.clone()).collect();
    assert_eq!(columns, ["Mode", "Ready", "GPUs", "In use", "Driver", "Reason", "Message", "Age"]);
    assert_eq!(crd.spec.names.short_names, Some(vec!["gpun".to_owned()]));
}

#[test]
fn every_printed_column_leads_to_a_field() {
    for (file, crd) in crds::generated() {
        for column in crd.spec.versions[0].additional_printer_columns.iter().flatten() {
            // Metadata is the API server's, and conditions are looked up by type.
            if column.json_path.starts_with(".metadata.") || column.json_path.contains(".conditions[?") {
                continue;
            }
            let pointer = column.json_path.replace('.', "/properties/");
            assert!(schema(file).pointer(&pointer).is_some(), "{file}: {} leads nowhere", column.json_path);
        }
    }
}

#[test]
fn a_transitions_node_and_modes_cannot_change() {
    let spec = &schema("gpuvirt.io_gputransitions.yaml")["properties"]["spec"];
    for field in ["node", "from", "to"] {
        assert_eq!(spec["properties"][field]["x-kubernetes-validations"][0]["rule"], "self == oldSelf", "{field}");
        assert!(spec["required"].as_array().unwrap().contains(&field.into()), "{field} could be left out to change it");
    }
}

#[test]
fn only_the_hash_of_the_present_plan_approves_it() {
    let mut spec = GPUTransitionSpec { plan_hash: "0123abcd".to_owned(), ..GPUTransitionSpec::default() };
    assert!(!spec.is_approved());
    spec.approved = Some("0123abcd".to_owned());
    assert!(spec.is_approved());
    spec.plan_hash = "89ef0123".to_owned();
    assert!(!spec.is_approved());
}

#[test]
fn a_transition_ends_as_done_or_failed() {
    let finals: Vec<String> = schema("gpuvirt.io_gputransitions.yaml")
        .pointer("/properties/status/properties/phase/enum")
        .and_then(Value::as_array)
        .unwrap()
        .iter()
        .filter(|phase| serde_json::from_value::<TransitionPhase>((*phase).clone()).unwrap().is_final())
        .map(|phase| phase.as_str().unwrap().to_owned())
        .collect();
    assert_eq!(finals, ["Done", "Failed"]);
}

#[test]
fn objects_come_back_as_they_went() {
    let node = GPUNode::new(
        "gpu-1",
        serde_json::from_value(json!({
            "mode": "vm-passthrough",
            "gpus": [{"address": "0000:01:00.0", "mode": "container"}],
            "advertise": "Offered",
            "disabled": ["sandbox-device-plugin"],
            "epoch": 4,
        }))
        .unwrap(),
    );
    assert_eq!(serde_json::from_value::<GPUNode>(serde_json::to_value(&node).unwrap()).unwrap(), node);
    let mut transition = GPUTransition::new("gpu-1-1", GPUTransitionSpec::default());
    transition.status = Some(
        serde_json::from_value(json!({
            "phase": "WaitForUsers",
            "affectedVMs": ["default/vm-1"],
            "deadline": "2026-01-01T00:00:00Z",
            "history": [{"phase": "Cordon", "at": "2026-01-01T00:00:00Z"}],
        }))
        .unwrap(),
    );
    assert_eq!(
        serde_json::from_value::<GPUTransition>(serde_json::to_value(&transition).unwrap()).unwrap(),
        transition
    );
}
