//! `gpuvirt crds --apply`: brings the custom resource definitions up to date, as the chart's hook does before the rest.
//!
//! Types of gpuvirt.io are ours alone. Those of nvidia.com may be kept by somebody who knows more fields than this release:
//! taking the fields away would prune them from objects, so such a definition stays as it is.

use std::time::Duration;

use crds::labels;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, JSONSchemaProps, JSONSchemaPropsOrArray,
    JSONSchemaPropsOrBool,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::wait::{await_condition, conditions},
};
use tokio::time::timeout;

const OWN_GROUP: &str = "gpuvirt.io";
/// Far above what an API server takes to serve a type.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a message.
const MOST_NAMED: usize = 5;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("CRD {name} cannot be read or written")]
    Api { name: String, source: Box<kube::Error> },
    #[error("CRD {name} is not served {} s after it was written: see its conditions (kubectl describe crd {name})", PATIENCE.as_secs())]
    NotServed { name: String },
}

pub async fn apply(client: &Client) -> Result<(), Error> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (_, own) in crds::generated() {
        let name = own.name_any();
        let failed = |source| Error::Api { name: name.clone(), source: Box::new(source) };
        let live = api.get_opt(&name).await.map_err(failed)?;
        let foreign = live.as_ref().map(|live| foreign(live, &own)).unwrap_or_default();
        if !foreign.is_empty() {
            let fields = named(&foreign);
            tracing::warn!(name, fields, "has fields that this release does not know: left as it is");
            continue;
        }
        // Forced: what helm or a person has put there before is written by whoever was first.
        let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
        let written = api.patch(&name, &params, &Patch::Apply(&own)).await.map_err(failed)?;
        let changed = live.is_none_or(|live| live.metadata.generation != written.metadata.generation);
        let served = await_condition(api.clone(), &name, conditions::is_crd_established());
        match timeout(PATIENCE, served).await {
            Ok(Ok(_)) => tracing::info!(name, changed, "up to date"),
            Ok(Err(_)) | Err(_) => return Err(Error::NotServed { name }),
        }
    }
    Ok(())
}

fn named(paths: &[String]) -> String {
    let rest = paths.len().saturating_sub(MOST_NAMED);
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    format!("{}{more}", paths[..paths.len() - rest].join(", "))
}

/// What the live definition of somebody else's type has and ours has not: versions, and fields of versions.
fn foreign(live: &CustomResourceDefinition, own: &CustomResourceDefinition) -> Vec<String> {
    if own.spec.group == OWN_GROUP {
        return Vec::new();
    }
    let mut found = Vec::new();
    for version in &live.spec.versions {
        let Some(ours) = own.spec.versions.iter().find(|ours| ours.name == version.name) else {
            found.push(version.name.clone());
            continue;
        };
        if let (Some(live), Some(ours)) = (schema(version), schema(ours)) {
            fields(live, ours, &version.name, &mut found);
        }
    }
    found
}

fn schema(version: &CustomResourceDefinitionVersion) -> Option<&JSONSchemaProps> {
    version.schema.as_ref()?.open_api_v3_schema.as_ref()
}

fn fields(live: &JSONSchemaProps, own: &JSONSchemaProps, path: &str, found: &mut Vec<String>) {
    if own.x_kubernetes_preserve_unknown_fields == Some(true) {
        return;
    }
    for (name, part) in live.properties.iter().flatten() {
        let path = format!("{path}.{name}");
        match own.properties.as_ref().and_then(|properties| properties.get(name)) {
            Some(ours) => fields(part, ours, &path, found),
            None if open(own) => {}
            None => found.push(path),
        }
    }
    if let (Some(JSONSchemaPropsOrArray::Schema(live)), Some(JSONSchemaPropsOrArray::Schema(ours))) =
        (&live.items, &own.items)
    {
        fields(live, ours, &format!("{path}[]"), found);
    }
    if let (Some(JSONSchemaPropsOrBool::Schema(live)), Some(JSONSchemaPropsOrBool::Schema(ours))) =
        (&live.additional_properties, &own.additional_properties)
    {
        fields(live, ours, &format!("{path}.*"), found);
    }
}

/// A map of any keys.
fn open(schema: &JSONSchemaProps) -> bool {
    match &schema.additional_properties {
        Some(JSONSchemaPropsOrBool::Bool(open)) => *open,
        Some(JSONSchemaPropsOrBool::Schema(_)) => true,
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(file: &str) -> CustomResourceDefinition {
        crds::generated().into_iter().find(|(name, _)| *name == file).expect("a definition").1
    }

    fn spec(crd: &mut CustomResourceDefinition) -> &mut JSONSchemaProps {
        let schema = crd.spec.versions[0].schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()).expect("schema");
        schema.properties.as_mut().and_then(|p| p.get_mut("spec")).expect("spec")
    }

    #[test]
    fn a_definition_of_this_release_or_an_earlier_one_is_written() {
        let own = own("nvidia.com_clusterpolicies.yaml");
        assert_eq!(foreign(&own, &own), Vec::<String>::new());
        let mut earlier = own.clone();
        spec(&mut earlier).properties.as_mut().expect("properties").remove("gdrcopy");
        assert_eq!(foreign(&earlier, &own), Vec::<String>::new());
    }

    #[test]
    fn one_that_knows_more_is_left_and_what_it_knows_is_named() {
        let own = own("nvidia.com_clusterpolicies.yaml");
        let mut later = own.clone();
        let sections = spec(&mut later).properties.as_mut().expect("properties");
        let driver = sections.get_mut("driver").and_then(|driver| driver.properties.as_mut()).expect("driver");
        driver.insert("brandNew".to_owned(), JSONSchemaProps::default());
        assert_eq!(foreign(&later, &own), ["v1.spec.driver.brandNew"]);
        let mut version = later.spec.versions[0].clone();
        version.name = "v2".to_owned();
        later.spec.versions = vec![version];
        assert_eq!(foreign(&later, &own), ["v2"]);
    }

    #[test]
    fn a_type_of_ours_is_always_written() {
        let own = own("gpuvirt.io_gpunodes.yaml");
        let mut other = own.clone();
        let gone = JSONSchemaProps::default();
        spec(&mut other).properties.as_mut().expect("properties").insert("gone".to_owned(), gone);
        assert_eq!(foreign(&other, &own), Vec::<String>::new());
    }

    #[test]
    fn a_long_list_is_cut() {
        let paths: Vec<String> = (1..=7).map(|n| n.to_string()).collect();
        assert_eq!(named(&paths), "1, 2, 3, 4, 5 and 2 more");
        assert_eq!(named(&paths[..2]), "1, 2");
    }
}
