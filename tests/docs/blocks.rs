//! What the pages show: YAML that a cluster would take, links that lead somewhere.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// README.md and everything below docs/.
pub fn pages() -> Vec<PathBuf> {
    let mut pages = vec![PathBuf::from("README.md")];
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the docs should be readable") {
            let path = entry.expect("an entry").path();
            match path.extension().and_then(|end| end.to_str()) {
                None if path.is_dir() => folders.push(path),
                Some("md") => pages.push(path),
                None | Some(_) => {}
            }
        }
    }
    pages.sort();
    pages
}

/// Language and text of each fenced block.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(language), None) => open = Some((language.trim().to_owned(), String::new())),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some((_, block))) => {
                block.push_str(line);
                block.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Where a value does not fit a schema, an unknown field among it.
fn misfits(path: &str, value: &Value, schema: &Value, found: &mut Vec<String>) {
    let fits = match (schema["type"].as_str(), value) {
        (_, Value::Null) | (None, _) => true,
        (Some("object"), value) => value.is_object(),
        (Some("array"), value) => value.is_array(),
        (Some("string"), value) => value.is_string(),
        (Some("boolean"), value) => value.is_boolean(),
        (Some("integer"), value) => value.is_i64() || value.is_u64(),
        (Some("number"), value) => value.is_number(),
        (Some(_), _) => false,
    };
    if !fits {
        found.push(format!("{path}: {value} is no {}", schema["type"]));
    }
    if schema["enum"].as_array().is_some_and(|values| !value.is_null() && !values.contains(value)) {
        found.push(format!("{path}: {value} is none of {}", schema["enum"]));
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        match (&schema["properties"][name], &schema["additionalProperties"]) {
            (Value::Object(_), _) => misfits(&path, field, &schema["properties"][name], found),
            (_, Value::Object(_)) => misfits(&path, field, &schema["additionalProperties"], found),
            (_, _) if schema["x-kubernetes-preserve-unknown-fields"] == true || schema["properties"].is_null() => {}
            (_, _) => found.push(format!("{path}: no such field")),
        }
    }
    for (number, item) in value.as_array().into_iter().flatten().enumerate() {
        misfits(&format!("{path}[{number}]"), item, &schema["items"], found);
    }
}

fn schemas() -> BTreeMap<String, Value> {
    let schema = |crd: Value| {
        let spec = &crd["spec"];
        let version = &spec["versions"][0];
        let name = format!("{}/{} {}", text(&spec["group"]), text(&version["name"]), text(&spec["names"]["kind"]));
        (name, version["schema"]["openAPIV3Schema"].clone())
    };
    crds::generated().into_iter().map(|(_, crd)| schema(serde_json::to_value(crd).expect("a CRD"))).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What is wrong with the YAML of a page, and how many objects of ours it has.
pub fn wrong_yaml(page: &Path) -> (Vec<String>, usize) {
    let schemas = schemas();
    let (mut wrong, mut ours) = (Vec::new(), 0);
    let content = fs::read_to_string(page).expect("a page should be readable");
    for (_, block) in blocks(&content).iter().filter(|(language, _)| language == "yaml") {
        for document in block.split("\n---\n") {
            let object: Value = match serde_saphyr::from_str(document) {
                Ok(object) => object,
                Err(error) => {
                    wrong.push(format!("{}: {error} in\n{document}", page.display()));
                    continue;
                }
            };
            let kind = format!("{} {}", text(&object["apiVersion"]), text(&object["kind"]));
            let of_us = kind.starts_with("nvidia.com/") || kind.starts_with("gpuvirt.io/");
            match schemas.get(&kind) {
                Some(schema) => {
                    ours += 1;
                    let mut found = Vec::new();
                    let mut object = object;
                    // Kubernetes' own.
                    for field in ["apiVersion", "kind", "metadata"] {
                        object.as_object_mut().map(|fields| fields.remove(field));
                    }
                    misfits(&kind, &object, schema, &mut found);
                    wrong.extend(found.iter().map(|misfit| format!("{}: {misfit}", page.display())));
                }
                None if of_us => wrong.push(format!("{}: there is no {kind}", page.display())),
                None => {}
            }
        }
    }
    (wrong, ours)
}

/// As the heading's anchor is written.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Links of a page to files and headings that are not there.
pub fn dead_links(page: &Path) -> Vec<String> {
    let content = fs::read_to_string(page).expect("a page should be readable");
    let folder = page.parent().unwrap_or(Path::new(""));
    let mut dead = Vec::new();
    for link in content.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        if link.contains("://") || link.starts_with("mailto:") {
            continue;
        }
        let (file, wanted) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() { page.to_path_buf() } else { folder.join(file) };
        let there = target.exists();
        let headed = wanted.is_empty() || {
            let target = fs::read_to_string(&target).unwrap_or_default();
            target
                .lines()
                .filter(|line| line.starts_with('#'))
                .any(|line| anchor(line.trim_start_matches('#').trim()) == wanted)
        };
        if !there || !headed {
            dead.push(format!("{}: {link}", page.display()));
        }
    }
    dead
}
