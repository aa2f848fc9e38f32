//! What an API server demands of a CRD's schema before it serves the type ("structural schema").

use serde_json::{Map, Value};

/// Every schema node of every CRD with its path.
fn nodes() -> Vec<(String, Map<String, Value>)> {
    let mut found = Vec::new();
    for (file, crd) in crds::generated() {
        for version in serde_json::to_value(&crd).unwrap()["spec"]["versions"].as_array().unwrap() {
            walk(file, &version["schema"]["openAPIV3Schema"], &mut found);
        }
    }
    assert!(found.len() > 500, "only {} nodes: nothing was walked", found.len());
    found
}

fn walk(path: &str, schema: &Value, found: &mut Vec<(String, Map<String, Value>)>) {
    let Some(node) = schema.as_object() else { panic!("{path}: not a schema: {schema}") };
    found.push((path.to_owned(), node.clone()));
    for (name, property) in node.get("properties").and_then(Value::as_object).into_iter().flatten() {
        walk(&format!("{path}.{name}"), property, found);
    }
    if let Some(items) = node.get("items") {
        walk(&format!("{path}[]"), items, found);
    }
    if let Some(values) = node.get("additionalProperties") {
        walk(&format!("{path}{{}}"), values, found);
    }
}

#[test]
fn every_node_has_a_type_or_is_int_or_string() {
    for (path, node) in nodes() {
        let typed = node.contains_key("type");
        let int_or_string = node.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true));
        assert!(typed != int_or_string, "{path}: {node:?}");
    }
}

#[test]
fn no_node_has_a_keyword_that_structural_schemas_forbid() {
    let forbidden =
        ["$ref", "$schema", "definitions", "dependencies", "deprecated", "discriminator", "id", "patternProperties"];
    let logic = ["allOf", "anyOf", "oneOf", "not"];
    for (path, node) in nodes() {
        for keyword in forbidden.iter().chain(&logic).chain(&["nullable", "title", "uniqueItems"]) {
            assert!(!node.contains_key(*keyword), "{path}: {keyword}");
        }
    }
}

#[test]
fn properties_and_additional_properties_exclude_each_other() {
    for (path, node) in nodes() {
        assert!(!(node.contains_key("properties") && node.contains_key("additionalProperties")), "{path}");
    }
}

#[test]
fn an_array_says_what_is_in_it() {
    for (path, node) in nodes() {
        assert_eq!(node.get("type") == Some(&"array".into()), node.contains_key("items"), "{path}");
    }
}

#[test]
fn what_is_required_exists() {
    for (path, node) in nodes() {
        for name in node.get("required").and_then(Value::as_array).into_iter().flatten() {
            assert!(node["properties"].get(name.as_str().unwrap()).is_some(), "{path}: {name}");
        }
    }
}

#[test]
fn the_keys_of_a_list_map_are_required_scalars_of_its_items() {
    let mut maps = 0;
    for (path, node) in nodes() {
        if node.get("x-kubernetes-list-type") != Some(&"map".into()) {
            continue;
        }
        maps += 1;
        for key in node["x-kubernetes-list-map-keys"].as_array().unwrap() {
            assert!(node["items"]["required"].as_array().unwrap().contains(key), "{path}: {key}");
            assert_eq!(node["items"]["properties"][key.as_str().unwrap()]["type"], "string", "{path}: {key}");
        }
    }
    assert!(maps > 5, "only {maps} list maps");
}

#[test]
fn a_default_is_of_its_type_and_one_of_the_choices() {
    for (path, node) in nodes() {
        let Some(default) = node.get("default") else { continue };
        let fits = match node.get("type").and_then(Value::as_str) {
            Some("boolean") => default.is_boolean(),
            Some("integer") => default.is_i64(),
            Some("string") => default.is_string(),
            // Only an absent spec has an object for default; its fields' own defaults fill it.
            Some("object") => path.ends_with(".yaml.spec") && *default == Value::Object(Map::new()),
            None => default.is_string() || default.is_i64(),
            Some(other) => panic!("{path}: default of a {other}"),
        };
        assert!(fits, "{path}: {default}");
        if let Some(choices) = node.get("enum") {
            assert!(choices.as_array().unwrap().contains(default), "{path}: {default} is none of {choices}");
        }
    }
}

#[test]
fn a_status_says_only_what_its_writer_wrote() {
    for (path, node) in nodes() {
        assert!(!(path.contains(".yaml.status") && node.contains_key("default")), "{path}");
    }
}

#[test]
fn formats_are_those_that_an_api_server_knows() {
    for (path, node) in nodes() {
        if let Some(format) = node.get("format") {
            assert!(["int32", "int64", "date-time"].contains(&format.as_str().unwrap()), "{path}: {format}");
        }
    }
}

#[test]
fn choices_are_strings() {
    for (path, node) in nodes() {
        for choice in node.get("enum").and_then(Value::as_array).into_iter().flatten() {
            assert!(choice.is_string(), "{path}: {choice}");
        }
    }
}
