//! How Prometheus is told about an operand.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::schema;

/// Settings of a `ServiceMonitor` of the Prometheus operator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceMonitor {
    pub enabled: Option<bool>,
    #[schemars(extend("pattern" = schema::PROMETHEUS_DURATION))]
    pub interval: Option<String>,
    #[schemars(extend("pattern" = schema::PROMETHEUS_DURATION))]
    pub scrape_timeout: Option<String>,
    pub honor_labels: Option<bool>,
    pub additional_labels: BTreeMap<String, String>,
    /// Passed on as they are.
    #[schemars(schema_with = "schema::relabelings")]
    pub relabelings: Vec<Value>,
}
