//! `ClusterPolicy` and `NVIDIADriver` have the peer's fields, all of them and no other, with the peer's constraints.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// Facts about the peer's CRDs; see the headers of the files.
const PEER: [(&str, &str); 2] = [
    ("nvidia.com_clusterpolicies.yaml", include_str!("../fixtures/cluster_policy_paths.txt")),
    ("nvidia.com_nvidiadrivers.yaml", include_str!("../fixtures/nvidia_driver_paths.txt")),
];

/// Types of Kubernetes and of the Prometheus operator: where they are is compared, what is in them is theirs.
const FOREIGN: [&str; 9] = [
    ".podSecurityContext",
    ".tolerations",
    ".resources",
    ".env",
    ".startupProbe",
    ".livenessProbe",
    ".readinessProbe",
    ".conditions",
    ".nodeAffinity",
];

fn crd(file: &str) -> CustomResourceDefinition {
    crds::generated().into_iter().find(|(name, _)| *name == file).unwrap().1
}

fn ours(file: &str) -> Vec<String> {
    let crd = serde_json::to_value(crd(file)).unwrap();
    let mut lines = Vec::new();
    describe("", &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], &mut lines);
    lines.sort();
    lines
}

fn describe(path: &str, schema: &Value, lines: &mut Vec<String>) {
    let required = |name: &str| schema["required"].as_array().is_some_and(|all| all.contains(&name.into()));
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        lines.push(line(&path, property, required(name)));
        if FOREIGN.iter().any(|foreign| path.ends_with(foreign)) {
            continue;
        }
        describe(&path, property, lines);
        if property["items"]["properties"].is_object() {
            lines.push(line(&format!("{path}[]"), &property["items"], false));
            describe(&format!("{path}[]"), &property["items"], lines);
        }
    }
}

fn line(path: &str, schema: &Value, required: bool) -> String {
    let said = |keyword: &str| schema.get(keyword).map(|value| format!("{keyword}={value}"));
    let text = |keyword: &str| schema[keyword].as_str().map(|value| format!("{keyword}={value}"));
    let choices = schema["enum"].as_array().map(|choices| {
        let choices: Vec<_> = choices.iter().map(Value::to_string).collect();
        format!("enum={}", choices.join(","))
    });
    let parts = [
        Some(path.to_owned()),
        Some(schema["type"].as_str().unwrap_or("int-or-string").to_owned()),
        required.then(|| "required".to_owned()),
        said("default"),
        choices,
        text("format"),
        schema["minimum"].as_f64().map(|minimum| format!("minimum={minimum}")),
        text("pattern"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_field_of_the_peer_is_here_as_it_is_there_and_no_field_is_ours() {
    for (file, peer) in PEER {
        let ours = ours(file);
        let peer: Vec<&str> = peer.lines().filter(|line| !line.starts_with('#')).collect();
        let missing: Vec<_> = peer.iter().filter(|line| !ours.iter().any(|our| our == *line)).collect();
        let extra: Vec<_> = ours.iter().filter(|line| !peer.contains(&line.as_str())).collect();
        assert!(missing.is_empty() && extra.is_empty(), "{file}: only there: {missing:#?}\nonly here: {extra:#?}");
    }
}

#[test]
fn the_list_of_kubectl_get_is_the_peers() {
    let crd = crd("nvidia.com_clusterpolicies.yaml");
    let version = &crd.spec.versions[0];
    let columns: Vec<_> = version
        .additional_printer_columns
        .iter()
        .flatten()
        .map(|column| (column.name.as_str(), column.type_.as_str(), column.json_path.as_str()))
        .collect();
    assert_eq!(columns, [("Status", "string", ".status.state"), ("Age", "string", ".metadata.creationTimestamp")]);
    assert_eq!((crd.spec.scope.as_str(), crd.spec.names.short_names.as_ref()), ("Cluster", None));
    assert!(version.subresources.as_ref().unwrap().status.is_some());
}

#[test]
fn a_driver_object_is_listed_as_the_peers_is_and_keeps_what_must_not_change() {
    let crd = crd("nvidia.com_nvidiadrivers.yaml");
    let columns: Vec<_> =
        crd.spec.versions[0].additional_printer_columns.iter().flatten().map(|column| column.name.as_str()).collect();
    assert_eq!(columns, ["Status", "Default", "Age"]);
    assert_eq!(crd.spec.names.short_names.unwrap(), ["nvd", "nvdriver", "nvdrivers"]);
    let schema = serde_json::to_value(crd.spec.versions[0].schema.clone()).unwrap();
    let spec = &schema["openAPIV3Schema"]["properties"]["spec"];
    for field in ["driverType", "usePrecompiled"] {
        assert_eq!(spec["properties"][field]["x-kubernetes-validations"][0]["rule"], "self == oldSelf", "{field}");
    }
    assert!(spec["x-kubernetes-validations"][0]["rule"].as_str().unwrap().contains("size(self.nodeSelector) == 0"));
}
