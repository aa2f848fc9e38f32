//! Schemas that derive cannot make: validation rules, and parts of Kubernetes without their page-long descriptions.

use k8s_openapi::{
    api::core::v1::{NodeAffinity, PodSecurityContext, Toleration},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema, transform::transform_subschemas};
use serde_json::{Value, json};

/// A duration as Prometheus writes it.
pub(crate) const PROMETHEUS_DURATION: &str =
    "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$";

const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// One CEL rule and what the API server says when it does not hold.
pub(crate) fn rule(rule: &str, message: &str) -> Value {
    json!({ "rule": rule, "message": message })
}

/// A transition rule: the value stays what it was at creation.
pub(crate) fn immutable(field: &str) -> Value {
    rule("self == oldSelf", &format!("{field} is immutable: create another object"))
}

pub(crate) fn quantities(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": { "pattern": QUANTITY, "x-kubernetes-int-or-string": true },
    })
}

pub(crate) fn tolerations(generator: &mut SchemaGenerator) -> Schema {
    let toleration = bare::<Toleration>(generator);
    json_schema!({ "type": "array", "items": toleration })
}

pub(crate) fn pod_security_context(generator: &mut SchemaGenerator) -> Schema {
    bare::<PodSecurityContext>(generator)
}

pub(crate) fn node_affinity(generator: &mut SchemaGenerator) -> Schema {
    bare::<NodeAffinity>(generator)
}

pub(crate) fn conditions(generator: &mut SchemaGenerator) -> Schema {
    let condition = bare::<Condition>(generator);
    json_schema!({
        "type": "array",
        "items": condition,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    })
}

/// Relabelings belong to the Prometheus operator, which checks them when the ServiceMonitor is applied.
pub(crate) fn relabelings(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
    })
}

fn bare<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    fn strip(schema: &mut Schema) {
        schema.remove("description");
        transform_subschemas(&mut strip, schema);
    }
    let mut schema = T::json_schema(generator);
    strip(&mut schema);
    schema
}
