//! Whether the ClusterPolicy CRD that the cluster serves keeps the fields that we read.
//!
//! The peer's CRD may be installed already, in any version, and an API server drops what its schema does not name.

use crds::{conditions::Verdict, v1::ClusterPolicy};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::{Api, Client, CustomResourceExt};

use super::status::SCHEMA_COMPLETE;

/// Fields whose loss would change what we do. Whole sections that we only pass on are not listed.
const USED: &[&str] = &[
    "spec.cdi.enabled",
    "spec.cdi.nriPluginEnabled",
    "spec.daemonsets.tolerations",
    "spec.daemonsets.updateStrategy",
    "spec.dcgm.enabled",
    "spec.dcgmExporter.enabled",
    "spec.devicePlugin.config",
    "spec.devicePlugin.enabled",
    "spec.driver.enabled",
    "spec.driver.image",
    "spec.driver.kernelModuleType",
    "spec.driver.repository",
    "spec.driver.startupProbe",
    "spec.driver.useNvidiaDriverCRD",
    "spec.driver.usePrecompiled",
    "spec.driver.version",
    "spec.gfd.enabled",
    "spec.hostPaths.driverInstallDir",
    "spec.hostPaths.kubeletRootDir",
    "spec.hostPaths.rootFS",
    "spec.mig.strategy",
    "spec.migManager.enabled",
    "spec.sandboxWorkloads.defaultWorkload",
    "spec.sandboxWorkloads.enabled",
    "spec.sandboxWorkloads.mode",
    "spec.toolkit.enabled",
    "spec.toolkit.installDir",
    "spec.vgpuManager.enabled",
    "status.conditions",
    "status.namespace",
    "status.state",
];

pub(super) async fn verdict(client: &Client) -> Verdict {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    match api.get(ClusterPolicy::crd_name()).await {
        Ok(crd) => judge(&missing(&crd)),
        Err(error) => Verdict::no(
            SCHEMA_COMPLETE,
            "Unknown",
            format!("CRD {} cannot be read: {error}", ClusterPolicy::crd_name()),
        ),
    }
}

fn judge(missing: &[&str]) -> Verdict {
    match missing.is_empty() {
        true => {
            Verdict::yes(SCHEMA_COMPLETE, "Complete", "the served ClusterPolicy schema has every field that is used")
        }
        false => Verdict::no(
            SCHEMA_COMPLETE,
            "FieldsPruned",
            format!(
                "the served CRD {} drops {}: apply the chart's crds folder to get them",
                ClusterPolicy::crd_name(),
                missing.join(", ")
            ),
        ),
    }
}

fn missing(crd: &CustomResourceDefinition) -> Vec<&'static str> {
    let version = crd.spec.versions.iter().find(|v| v.name == "v1");
    let Some(schema) = version.and_then(|v| v.schema.as_ref()).and_then(|s| s.open_api_v3_schema.as_ref()) else {
        return USED.to_vec();
    };
    USED.iter().filter(|path| !keeps(schema, path)).copied().collect()
}

fn keeps(schema: &JSONSchemaProps, path: &str) -> bool {
    let mut at = schema;
    for name in path.split('.') {
        if at.x_kubernetes_preserve_unknown_fields == Some(true) {
            return true;
        }
        match at.properties.as_ref().and_then(|properties| properties.get(name)) {
            Some(next) => at = next,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties<'a>(crd: &'a mut CustomResourceDefinition, section: &str) -> &'a mut JSONSchemaProps {
        let schema = crd.spec.versions[0].schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()).expect("schema");
        let spec = schema.properties.as_mut().and_then(|p| p.get_mut("spec")).expect("spec");
        spec.properties.as_mut().and_then(|p| p.get_mut(section)).expect("section")
    }

    #[test]
    fn our_own_schema_has_every_field_that_is_used() {
        assert_eq!(missing(&ClusterPolicy::crd()), Vec::<&str>::new());
    }

    #[test]
    fn a_field_that_an_older_crd_lacks_is_named() {
        let mut crd = ClusterPolicy::crd();
        properties(&mut crd, "sandboxWorkloads").properties.as_mut().expect("properties").remove("mode");
        let verdict = judge(&missing(&crd));
        assert!(!verdict.holds && verdict.message.contains("spec.sandboxWorkloads.mode"), "{}", verdict.message);
    }
}
