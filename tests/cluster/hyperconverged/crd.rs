//! HyperConverged's CRD, as far as gpuvirt reads, writes or advises on it.
//!
//! Fields after the CRDs of HyperConverged 1.17.0 and 1.20.0, versions after those of 1.14.0 to 1.20.0 (`hco00.crd.yaml`):
//!
//! | release | `v1beta1` | `v1` | conversion |
//! |---|---|---|---|
//! | to 1.17 | stored | none | none |
//! | 1.18 | stored | served | webhook |
//! | from 1.19 | served, deprecated | stored | webhook |
//!
//! `permittedHostDevices` has the same fields in both. `mediatedDevicesConfiguration` has not: `enabled` is new in
//! `v1`; `v1beta1` refuses the field without a type in it (a CEL rule). Both versions are structural, so what is not named
//! is dropped; here as well, and what gpuvirt does not touch is left out.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

use crate::kubevirt::HYPER_CONVERGED;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// And the ones before it.
    V1_17,
    V1_18,
    /// And 1.19.
    V1_20,
    /// One that serves `v1` alone, which the deprecation announces.
    Announced,
    /// No `externalResourceProvider`: none of those above, yet what is dropped has to be noticed.
    Dropping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1Beta1,
    V1,
}

impl Version {
    fn name(self) -> &'static str {
        match self {
            Self::V1Beta1 => "v1beta1",
            Self::V1 => "v1",
        }
    }
}

impl Release {
    /// The version that is stored, and keys that lead to `permittedHostDevices` in it.
    pub fn stored(self) -> (&'static str, &'static [&'static str]) {
        match self.storage() {
            Version::V1Beta1 => ("v1beta1", &["spec", "permittedHostDevices"]),
            Version::V1 => ("v1", &["spec", "virtualization", "permittedHostDevices"]),
        }
    }

    fn storage(self) -> Version {
        match self {
            Self::V1_17 | Self::V1_18 | Self::Dropping => Version::V1Beta1,
            Self::V1_20 | Self::Announced => Version::V1,
        }
    }

    fn serves(self, version: Version) -> bool {
        match (self, version) {
            (Self::V1_17 | Self::Dropping, Version::V1) | (Self::Announced, Version::V1Beta1) => false,
            (Self::V1_17 | Self::Dropping | Self::V1_18 | Self::V1_20, Version::V1Beta1)
            | (Self::V1_18 | Self::V1_20 | Self::Announced, Version::V1) => true,
        }
    }

    /// Without the webhook that converts: a version that is not the stored one shows nothing of the other's fields.
    pub fn crd(self) -> CustomResourceDefinition {
        let versions: Vec<Value> = [Version::V1, Version::V1Beta1].map(|version| self.version(version)).to_vec();
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": HYPER_CONVERGED},
            "spec": {
                "group": "hco.kubevirt.io", "scope": "Namespaced", "conversion": {"strategy": "None"},
                "names": {
                    "kind": "HyperConverged", "listKind": "HyperConvergedList", "plural": "hyperconvergeds",
                    "singular": "hyperconverged", "shortNames": ["hco", "hcos"], "categories": ["all"],
                },
                "versions": versions,
            },
        });
        serde_json::from_value(crd).expect("a CRD")
    }

    fn version(self, version: Version) -> Value {
        let spec = match version {
            Version::V1Beta1 => json!({
                "permittedHostDevices": self.permitted(),
                "mediatedDevicesConfiguration": mediated_v1beta1(),
                "evictionStrategy": eviction_strategy(),
                "featureGates": object(&json!({"disableMDevConfiguration": {"type": "boolean", "default": false}})),
            }),
            Version::V1 => json!({
                "virtualization": object(&json!({
                    "permittedHostDevices": self.permitted(),
                    "mediatedDevicesConfiguration": mediated_v1(),
                    "evictionStrategy": eviction_strategy(),
                })),
                "featureGates": list(&object(&json!({
                    "name": text(), "enabled": {"type": "string", "enum": ["True", "False"]},
                }))),
            }),
        };
        let deprecated = version == Version::V1Beta1 && self.storage() == Version::V1;
        let name = json!({"type": "string", "pattern": "kubevirt-hyperconverged"});
        let status =
            json!({"observedGeneration": {"type": "integer", "format": "int64"}, "systemHealthStatus": text()});
        let schema = json!({
            "apiVersion": text(), "kind": text(), "metadata": object(&json!({"name": name})),
            "spec": object(&spec), "status": object(&status),
        });
        let mut made = json!({
            "name": version.name(), "served": self.serves(version), "storage": version == self.storage(),
            "schema": {"openAPIV3Schema": object(&schema)}, "subresources": {"status": {}},
        });
        if deprecated {
            made["deprecated"] = json!(true);
            made["deprecationWarning"] = json!("v1beta1 will go; use v1");
        }
        made
    }

    fn permitted(self) -> Value {
        let keeps = |mut entry: Value| {
            match self {
                Self::V1_17 | Self::V1_18 | Self::V1_20 | Self::Announced => entry["externalResourceProvider"] = flag(),
                Self::Dropping => {}
            }
            entry
        };
        let by = |selector: &str| {
            let entry = keeps(json!({selector: text(), "resourceName": text(), "disabled": flag()}));
            keyed(selector, &json!([selector, "resourceName"]), &entry)
        };
        let usb = object(&json!({"vendor": text(), "product": text()}));
        let usb = keeps(json!({"resourceName": text(), "disabled": flag(), "selectors": list(&usb)}));
        object(&json!({
            "pciHostDevices": by("pciDeviceSelector"),
            "mediatedDevices": by("mdevNameSelector"),
            "usbHostDevices": keyed("resourceName", &json!(["resourceName"]), &usb),
        }))
    }
}

fn text() -> Value {
    json!({"type": "string"})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn object(properties: &Value) -> Value {
    json!({"type": "object", "properties": properties})
}

fn list(items: &Value) -> Value {
    json!({"type": "array", "x-kubernetes-list-type": "atomic", "items": items})
}

/// A list in which each value of a key may occur once.
fn keyed(key: &str, required: &Value, properties: &Value) -> Value {
    json!({
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key],
        "items": {"type": "object", "required": required, "properties": properties},
    })
}

fn eviction_strategy() -> Value {
    json!({"type": "string", "enum": ["None", "LiveMigrate", "LiveMigrateIfPossible", "External"]})
}

fn node_types(mut types: Value) -> Value {
    types["nodeSelector"] = json!({"type": "object", "additionalProperties": text()});
    json!({"type": "object", "required": ["nodeSelector"], "properties": types})
}

fn mediated_v1() -> Value {
    let types = json!({"mediatedDeviceTypes": list(&text())});
    let mut fields = types.clone();
    fields["enabled"] = flag();
    fields["nodeMediatedDeviceTypes"] = list(&node_types(types));
    object(&fields)
}

fn mediated_v1beta1() -> Value {
    let some = |key: &str| format!("(has(self.{key}) && size(self.{key})>0)");
    let rule = format!("{} || {}", some("mediatedDeviceTypes"), some("mediatedDevicesTypes"));
    let rules = json!([{"rule": rule, "message": "a type is required"}]);
    let bounded = json!({"type": "array", "x-kubernetes-list-type": "atomic", "items": text()});
    let types = json!({"mediatedDeviceTypes": bounded, "mediatedDevicesTypes": bounded});
    let mut of_node = node_types(types.clone());
    of_node["x-kubernetes-validations"] = rules.clone();
    let mut fields = types;
    fields["nodeMediatedDeviceTypes"] = list(&of_node);
    let mut whole = object(&fields);
    whole["x-kubernetes-validations"] = rules;
    whole
}
