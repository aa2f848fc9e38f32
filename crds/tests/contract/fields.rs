//! `ClusterPolicy` has the peer's fields, all of them and no other, with the peer's constraints.

use serde_json::Value;

/// Facts about the peer's CRD; see the header of the file.
const PEER: &str = include_str!("../fixtures/cluster_policy_paths.txt");

/// Types of Kubernetes and of the Prometheus operator: where they are is compared, what is in them is theirs.
const FOREIGN: [&str; 8] = [
    ".podSecurityContext",
    ".tolerations",
    ".resources",
    ".env",
    ".startupProbe",
    ".livenessProbe",
    ".readinessProbe",
    ".conditions",
];

fn ours() -> Vec<String> {
    let crd = crds::generated().into_iter().find(|(file, _)| *file == "nvidia.com_clusterpolicies.yaml").unwrap().1;
    let crd = serde_json::to_value(&crd).unwrap();
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
    let ours = ours();
    let peer: Vec<&str> = PEER.lines().filter(|line| !line.starts_with('#')).collect();
    let missing: Vec<_> = peer.iter().filter(|line| !ours.iter().any(|our| our == *line)).collect();
    let extra: Vec<_> = ours.iter().filter(|line| !peer.contains(&line.as_str())).collect();
    assert!(missing.is_empty() && extra.is_empty(), "only there: {missing:#?}\nonly here: {extra:#?}");
}

#[test]
fn the_list_of_kubectl_get_is_the_peers() {
    let crd = crds::generated().into_iter().find(|(file, _)| *file == "nvidia.com_clusterpolicies.yaml").unwrap().1;
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
