//! What of the chart is made from its `values.yaml` and `values.schema.json`: the list of keys that it knows, and the table
//! in its README.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use serde_json::{Map, Value};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/gpuvirt");
const BEGIN: &str = "<!-- made by `make generate` from values.yaml and values.schema.json -->\n";
const END: &str = "<!-- end -->\n";

/// Which keys there are below one key; `None`: any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known(pub Option<BTreeMap<String, Known>>);

/// File of the chart, and what it should contain.
pub fn files() -> [(&'static str, String); 2] {
    let (schema, values) = (schema(), values());
    [("files/keys.yaml", keys(&schema)), ("README.md", readme(&schema, &values))]
}

pub fn read(file: &str) -> String {
    fs::read_to_string(path(file)).expect("a file of the chart should be readable")
}

pub fn path(file: &str) -> std::path::PathBuf {
    Path::new(CHART).join(file)
}

pub fn schema() -> Value {
    serde_json::from_str(&read("values.schema.json")).expect("the schema should be JSON")
}

pub fn values() -> Value {
    serde_saphyr::from_str(&read("values.yaml")).expect("the values should be YAML")
}

/// A schema with what it refers to, its own part first.
fn parts<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let mut parts = vec![schema];
    let of_all = schema["allOf"].as_array().into_iter().flatten();
    let named = schema["$ref"].as_str().and_then(|name| root.pointer(name.trim_start_matches('#')));
    for part in of_all.chain(named) {
        parts.extend(self::parts(root, part));
    }
    parts
}

/// The schemas of the keys below, by key; those of the schema itself go over those that it refers to.
fn below<'a>(root: &'a Value, schema: &'a Value) -> BTreeMap<String, &'a Value> {
    let mut all = BTreeMap::new();
    for part in parts(root, schema).into_iter().rev() {
        let own = part["properties"].as_object().into_iter().flatten();
        all.extend(own.map(|(key, schema)| (key.clone(), schema)));
    }
    all
}

pub fn known(root: &Value, schema: &Value) -> Known {
    let keys = below(root, schema);
    let open = parts(root, schema).iter().any(|part| part.get("additionalProperties").is_some());
    match keys.is_empty() || open {
        true => Known(None),
        false => Known(Some(keys.into_iter().map(|(key, schema)| (key, known(root, schema))).collect())),
    }
}

fn keys(root: &Value) -> String {
    let mut text =
        "# The keys that the chart knows, made by `make generate` from values.schema.json. Below ~ any may be.\n"
            .to_owned();
    write_keys(&known(root, root), 0, &mut text);
    text
}

fn write_keys(known: &Known, depth: usize, text: &mut String) {
    for (key, below) in known.0.iter().flatten() {
        let tail = if below.0.is_some() { "" } else { " ~" };
        let _ = writeln!(text, "{}{key}:{tail}", "  ".repeat(depth));
        write_keys(below, depth + 1, text);
    }
}

/// The README with its table made anew.
fn readme(schema: &Value, values: &Value) -> String {
    let now = read("README.md");
    let (before, rest) = now.split_once(BEGIN).expect("the README should have the place of its table");
    let (_, after) = rest.split_once(END).expect("the README should have the end of its table");
    let mut rows = Vec::new();
    row(schema, schema, Some(values), "", &mut rows);
    let mut table = "| key | default | |\n|---|---|---|\n".to_owned();
    for (key, default, description) in rows {
        let _ = writeln!(table, "| `{key}` | {default} | {description} |");
    }
    format!("{before}{BEGIN}\n{table}\n{END}{after}")
}

/// One row a value that has a default, and one a further key that this chart describes in its own place.
fn row(root: &Value, schema: &Value, value: Option<&Value>, path: &str, rows: &mut Vec<(String, String, String)>) {
    let all = below(root, schema);
    let nested = value.and_then(Value::as_object).is_some_and(|map| !map.is_empty());
    if all.is_empty() || (!nested && value.is_some()) {
        rows.push((path.to_owned(), shown(value), description(root, schema).replace('|', "\\|")));
        return;
    }
    for (key, schema) in all {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let value = value.and_then(|value| value.get(&key));
        if value.is_some() || described_here(root, schema) {
            row(root, schema, value, &path, rows);
        }
    }
}

/// What all components have is told once, above the table.
fn described_here(root: &Value, schema: &Value) -> bool {
    let common = [&root["$defs"]["component"], &root["$defs"]["image"]];
    let one_of = |all: &Value| all["properties"].as_object().is_some_and(|all| all.values().any(|one| one == schema));
    !common.into_iter().any(one_of)
}

pub fn description<'a>(root: &'a Value, schema: &'a Value) -> &'a str {
    parts(root, schema).into_iter().find_map(|part| part["description"].as_str()).unwrap_or_default()
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => format!("`{}`", Value::from(text.as_str())),
        Some(value) => format!("`{value}`"),
    }
}

/// Paths of a map's keys, `prefix` first; maps without keys and everything else are leaves.
pub fn paths(values: &Map<String, Value>, prefix: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (key, value) in values {
        let path = format!("{prefix}{key}");
        if let Some(map) = value.as_object() {
            all.extend(paths(map, &format!("{path}.")));
        }
        all.push(path);
    }
    all
}

pub enum Found<'a> {
    Nowhere,
    /// Below a key that lets any be.
    Anywhere,
    Here(&'a Value),
}

pub fn find<'a>(root: &'a Value, path: &str) -> Found<'a> {
    let mut at = root;
    for key in path.split('.') {
        let keys = below(root, at);
        match keys.get(key) {
            Some(next) => at = next,
            None if keys.is_empty() => return Found::Anywhere,
            None => return Found::Nowhere,
        }
    }
    Found::Here(at)
}
