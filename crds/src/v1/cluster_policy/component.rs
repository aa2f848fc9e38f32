//! What most sections of a `ClusterPolicy` have in common: an image and how its container runs.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{EnvVar as PodEnvVar, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// An image in the peer's three parts. How they become a reference, and which parts must come together, is not decided here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ImageSpec {
    /// Registry and path, as in `nvcr.io/nvidia`.
    pub repository: Option<String>,
    /// Image name, or a full reference if the other two are unset.
    pub image: Option<String>,
    /// Tag, or a digest that starts with `sha256:`.
    pub version: Option<String>,
    pub image_pull_policy: Option<String>,
    /// Names of pull secrets in the operator's namespace.
    pub image_pull_secrets: Vec<String>,
}

/// A helper container whose image and environment can be set: the driver manager of driver, vGPU and VFIO pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DriverManager {
    #[serde(flatten)]
    pub image: ImageSpec,
    pub env: Vec<EnvVar>,
}

/// A container next to the driver's: `gds` and `gdrcopy`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DriverSidecar {
    pub enabled: Option<bool>,
    #[serde(flatten)]
    pub image: ImageSpec,
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
}

/// An operand's main container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    #[serde(flatten)]
    pub image: ImageSpec,
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
    pub resources: Resources,
    /// Whether the pod is in the host's network namespace.
    pub host_network: Option<bool>,
}

/// An operand that can be switched off.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Component {
    pub enabled: Option<bool>,
    #[serde(flatten)]
    pub container: Container,
}

impl Component {
    /// Whether the user wants it; `unset` is the operand's own default.
    pub fn is_enabled(&self, unset: bool) -> bool {
        self.enabled.unwrap_or(unset)
    }
}

impl DriverSidecar {
    /// Whether the user wants it. Both sidecars are off unless asked for.
    pub fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(false)
    }
}

/// An environment variable. The peer knows literal values only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    #[serde(default)]
    #[schemars(!default)]
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
}

impl From<&EnvVar> for PodEnvVar {
    fn from(env: &EnvVar) -> Self {
        Self { name: env.name.clone(), value: Some(env.value.clone()), value_from: None }
    }
}

/// Requests and limits. The peer has no resource claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Resources {
    #[schemars(schema_with = "schema::quantities")]
    pub limits: BTreeMap<String, Quantity>,
    #[schemars(schema_with = "schema::quantities")]
    pub requests: BTreeMap<String, Quantity>,
}

impl Resources {
    pub fn is_empty(&self) -> bool {
        self.limits.is_empty() && self.requests.is_empty()
    }
}

impl From<&Resources> for ResourceRequirements {
    fn from(resources: &Resources) -> Self {
        let some = |map: &BTreeMap<String, Quantity>| (!map.is_empty()).then(|| map.clone());
        Self { claims: None, limits: some(&resources.limits), requests: some(&resources.requests) }
    }
}

/// A ConfigMap by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ConfigMapName {
    pub name: Option<String>,
}
