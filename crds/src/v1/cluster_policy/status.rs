//! The status, no wider than the peer's schema keeps it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("required" = ["state"]))]
pub struct ClusterPolicyStatus {
    /// Unset only in an object that nobody has answered yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<PolicyState>,
    /// Namespace of the operands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, deserialize_with = "crate::json::or_default", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// The one word that says how far the cluster is. `ignored`: an older `ClusterPolicy` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum PolicyState {
    Ignored,
    Ready,
    NotReady,
}
