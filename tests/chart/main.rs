//! The chart's values: what is documented, what is known, and that what is made from them is up to date. What becomes of
//! them is tried on a real API server, in `tests/cluster/chart.rs`.

mod generate;

use std::fs;

use generate::{Found, description, files, find, paths, read, schema, values};
use serde_json::Value;

#[test]
fn what_is_made_from_the_values_is_up_to_date() {
    for (file, text) in files() {
        assert!(read(file) == text, "charts/gpuvirt/{file} is stale: make generate");
    }
}

#[test]
fn every_value_has_a_description() {
    let (schema, values) = (schema(), values());
    let mut bare = Vec::new();
    for path in paths(values.as_object().expect("a map"), "") {
        match find(&schema, &path) {
            Found::Nowhere => bare.push(format!("{path}: not in the schema")),
            Found::Here(part) if description(&schema, part).is_empty() => bare.push(format!("{path}: no description")),
            Found::Here(_) | Found::Anywhere => {}
        }
    }
    assert!(bare.is_empty(), "{bare:#?}");
}

/// What the chart has instead of a field of the ClusterPolicy.
const OTHERWISE: &[&str] = &[
    // driver.nvidiaDriverCRD.enabled, as in the peer's chart.
    "driver.useNvidiaDriverCRD",
];

#[test]
fn every_field_of_a_clusterpolicy_can_be_set() {
    let schema = schema();
    let fields = fs::read_to_string("crds/tests/fixtures/cluster_policy_paths.txt").expect("the list of fields");
    let mut missing = Vec::new();
    for line in fields.lines() {
        let path = line.split_whitespace().next().unwrap_or_default();
        let Some(path) = path.strip_prefix("spec.").filter(|path| !path.contains("[]")) else { continue };
        if matches!(find(&schema, path), Found::Nowhere) && !OTHERWISE.contains(&path) {
            missing.push(path.to_owned());
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_key_of_the_peers_chart_is_known() {
    let schema = schema();
    let peer = fs::read_to_string("tests/fixtures/peer-values/defaults.yaml").expect("the peer's defaults");
    let peer: Value = serde_saphyr::from_str(&peer).expect("YAML");
    let mut unknown = paths(peer.as_object().expect("a map"), "");
    unknown.retain(|path| matches!(find(&schema, path), Found::Nowhere));
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// A list of images for who copies them to a registry of their own.
#[test]
fn the_charts_annotation_lists_every_image_that_it_names_by_default() {
    let chart: Value = serde_saphyr::from_str(&read("Chart.yaml")).expect("YAML");
    let listed: Value =
        serde_saphyr::from_str(chart["annotations"]["artifacthub.io/images"].as_str().expect("images")).expect("YAML");
    let listed: Vec<&str> = listed.as_array().expect("a list").iter().filter_map(|one| one["image"].as_str()).collect();
    let values = values();
    let mut missing = Vec::new();
    for (section, of) in values.as_object().expect("a map") {
        let part = |key: &str| of[key].as_str().filter(|text| !text.is_empty());
        let Some(image) = part("repository").zip(part("image")).zip(part("version")) else { continue };
        let ((repository, name), version) = image;
        let image = format!("{repository}/{name}:{version}");
        // A driver's tag ends with the node's operating system.
        if !listed.iter().any(|listed| listed.starts_with(&image)) {
            missing.push(format!("{section}: {image}"));
        }
    }
    let nfd = &values["nfd"]["image"];
    let nfd = format!("{}:{}", nfd["repository"].as_str().expect("text"), nfd["tag"].as_str().expect("text"));
    assert!(listed.contains(&nfd.as_str()), "{nfd}");
    assert!(missing.is_empty(), "{missing:#?}");
}
