//! From types to the CRD files under `generated/`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;
use serde_json::{Value, json};

use crate::{v1, v1alpha1};

/// The command that makes the files, as said in each of them and by the test for staleness.
const COMMAND: &str = "cargo run -- crds --write crds/generated";

/// Why the files could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{crd} cannot be written as YAML: {source}")]
    Yaml { crd: String, source: serde_saphyr::ser::Error },
    #[error("cannot write {}: {source}; check that the directory exists and is yours", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Every CRD of the contract with its file name.
pub fn generated() -> Vec<(&'static str, CustomResourceDefinition)> {
    vec![
        ("nvidia.com_clusterpolicies.yaml", crd::<v1::ClusterPolicy>(MissingSpec::Kept)),
        ("nvidia.com_nvidiadrivers.yaml", crd::<v1alpha1::NVIDIADriver>(MissingSpec::Kept)),
        ("gpuvirt.io_gpunodes.yaml", crd::<v1alpha1::GPUNode>(MissingSpec::Defaulted)),
        ("gpuvirt.io_gpuvirtconfigs.yaml", crd::<v1alpha1::GPUVirtConfig>(MissingSpec::Defaulted)),
        ("gpuvirt.io_gputransitions.yaml", crd::<v1alpha1::GPUTransition>(MissingSpec::Refused)),
    ]
}

/// A CRD as its file has it, with the header that names the command.
pub fn to_yaml(crd: &CustomResourceDefinition) -> Result<String, Error> {
    let yaml = serde_saphyr::to_string(crd)
        .map_err(|source| Error::Yaml { crd: crd.metadata.name.clone().unwrap_or_default(), source })?;
    Ok(format!("# Made from the types in crds/src by `{COMMAND}`: change those.\n---\n{yaml}"))
}

/// Writes every CRD into the directory and returns the files.
pub fn write_generated(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    generated()
        .into_iter()
        .map(|(file, crd)| {
            let path = dir.join(file);
            fs::write(&path, to_yaml(&crd)?).map_err(|source| Error::Write { path: path.clone(), source })?;
            Ok(path)
        })
        .collect()
}

/// What the API server does with an object that has no `spec`.
#[derive(Clone, Copy)]
enum MissingSpec {
    /// Stores it as it is. The peer's schema does so.
    Kept,
    /// Gives it the spec of defaults: whoever creates the object need not own that part of it.
    Defaulted,
    Refused,
}

fn crd<K: CustomResourceExt>(missing_spec: MissingSpec) -> CustomResourceDefinition {
    let mut crd = K::crd();
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut().and_then(|validation| validation.open_api_v3_schema.as_mut());
        let root = schema.expect("a derived CRD should have a schema");
        tidy(root, Defaults::Scalars);
        for (name, part) in root.properties.iter_mut().flatten() {
            match (name.as_str(), missing_spec) {
                ("status", _) => tidy(part, Defaults::None),
                ("spec", MissingSpec::Defaulted) => part.default = Some(JSON(json!({}))),
                (_, MissingSpec::Kept | MissingSpec::Defaulted | MissingSpec::Refused) => {}
            }
        }
        match missing_spec {
            MissingSpec::Kept => root.required = None,
            MissingSpec::Defaulted | MissingSpec::Refused => {}
        }
    }
    crd
}

/// Which defaults the API server fills in.
#[derive(Clone, Copy)]
enum Defaults {
    /// A status says what its writer wrote.
    None,
    /// A section's default is that of its fields.
    Scalars,
}

/// Takes out what schemars says and an API server has no use for.
fn tidy(schema: &mut JSONSchemaProps, defaults: Defaults) {
    // A Rust name says nothing to a user.
    schema.title = None;
    // Without `nullable` the API server drops nulls before it stores an object, as it does with the peer's schema.
    schema.nullable = None;
    if let Some(values) = &mut schema.enum_ {
        values.retain(|value| !value.0.is_null());
    }
    // Rust's name for a width, which no API server knows; the limits say the same.
    schema.format.take_if(|format| format.starts_with("uint"));
    schema.default.take_if(|default| match (defaults, &default.0) {
        (Defaults::None, _) | (Defaults::Scalars, Value::Null | Value::Array(_) | Value::Object(_)) => true,
        (Defaults::Scalars, Value::Bool(_) | Value::Number(_) | Value::String(_)) => false,
    });
    for property in schema.properties.iter_mut().flat_map(|properties| properties.values_mut()) {
        tidy(property, defaults);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => tidy(items, defaults),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(|item| tidy(item, defaults)),
        None => {}
    }
    match &mut schema.additional_properties {
        Some(JSONSchemaPropsOrBool::Schema(values)) => tidy(values, defaults),
        Some(JSONSchemaPropsOrBool::Bool(_)) | None => {}
    }
}
