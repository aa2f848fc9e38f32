//! The pages of docs/reference, made from the schemas of the custom resources and from crds/src/labels.rs.

use std::{fmt::Write as _, fs, path::PathBuf};

use serde_json::Value;

const HEADER: &str = "<!-- made by `make generate` from the types in crds/src: change those -->\n\n";
/// Types of Kubernetes itself, whose fields its own reference tells.
const KUBERNETES: [&str; 9] = [
    "env",
    "tolerations",
    "resources",
    "affinity",
    "podSecurityContext",
    "conditions",
    "nodeAffinity",
    "matchExpressions",
    "limits",
];

/// Path and text of every page.
pub fn pages() -> Vec<(PathBuf, String)> {
    let mut pages: Vec<(PathBuf, String)> = crds::generated()
        .into_iter()
        .map(|(_, crd)| {
            let crd = serde_json::to_value(crd).expect("a CRD should serialize");
            let kind = crd["spec"]["names"]["kind"].as_str().expect("a kind").to_lowercase();
            (path(&kind), page(&crd))
        })
        .collect();
    pages.push((path("labels"), labels()));
    pages
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/reference").join(name).with_extension("md")
}

fn page(crd: &Value) -> String {
    let (names, version) = (&crd["spec"]["names"], &crd["spec"]["versions"][0]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut page = format!("# {}\n\n{HEADER}", text(&names["kind"]));
    let _ = writeln!(
        page,
        "`{}/{}`, {}. `kubectl get {}`, short {}.\n",
        text(&crd["spec"]["group"]),
        text(&version["name"]),
        if crd["spec"]["scope"] == "Cluster" { "one for the cluster" } else { "in a namespace" },
        text(&names["plural"]),
        names["shortNames"].as_array().map_or("none".to_owned(), |all| all
            .iter()
            .map(text)
            .collect::<Vec<_>>()
            .join(", ")),
    );
    let root = &version["schema"]["openAPIV3Schema"];
    let _ = writeln!(page, "{}\n", text(&root["description"]).replace('\n', " "));
    for part in ["spec", "status"] {
        if root["properties"][part].is_object() {
            let _ = writeln!(page, "## {part}\n\n| field | type | default | |\n|---|---|---|---|");
            rows(&mut page, "", &root["properties"][part]);
            page.push('\n');
        }
    }
    page.trim_end().to_owned() + "\n"
}

fn rows(page: &mut String, prefix: &str, schema: &Value) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let default = Some(&field["default"]).filter(|default| !default.is_null());
        let default = default.map_or_else(String::new, |default| format!("`{default}`"));
        let description = field["description"].as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|");
        let _ = writeln!(page, "| `{path}` | {} | {default} | {description} |", kind(field));
        if KUBERNETES.contains(&name.as_str()) {
            continue;
        }
        rows(page, &path, field);
        rows(page, &format!("{path}[]"), &field["items"]);
    }
}

fn kind(field: &Value) -> String {
    let values: Vec<&str> = field["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !values.is_empty() {
        return values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    }
    match field["type"].as_str() {
        Some("array") => format!("list of {}", kind(&field["items"])),
        Some("object") if field["additionalProperties"].is_object() => "map".to_owned(),
        Some(other) => other.to_owned(),
        None if field["x-kubernetes-int-or-string"] == true => "number or string".to_owned(),
        None => "any".to_owned(),
    }
}

/// Every key with what is said of it.
fn labels() -> String {
    let source = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/crds/src/labels.rs")).expect("the keys");
    let mut page = format!("# Labels, annotations and other keys\n\n{HEADER}| key | |\n|---|---|\n");
    let mut said: Vec<&str> = Vec::new();
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            said.push(text);
            continue;
        }
        let value = line.strip_prefix("pub const ").and_then(|rest| rest.split('"').nth(1));
        if let Some(key) = value.filter(|_| !said.is_empty()) {
            let _ = writeln!(page, "| `{key}` | {} |", said.join(" ").replace('|', "\\|"));
        }
        said.clear();
    }
    page
}
