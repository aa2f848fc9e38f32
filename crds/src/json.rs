//! What "absent" looks like in JSON.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// The value without null members, as the API server stores it where a schema has no `nullable`.
pub(crate) fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(_, member)| !member.is_null())
            .map(|(key, member)| (key, without_nulls(member)))
            .collect(),
        Value::Array(items) => items.into_iter().filter(|item| !item.is_null()).map(without_nulls).collect(),
        leaf @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => leaf,
    }
}

/// The value without members that say nothing: null, and objects and lists that are empty or become so.
pub(crate) fn without_empty(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .map(|(key, member)| (key, without_empty(member)))
            .filter(|(_, member)| match member {
                Value::Null => false,
                Value::Object(map) => !map.is_empty(),
                Value::Array(items) => !items.is_empty(),
                Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
            })
            .collect(),
        leaf_or_list @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            leaf_or_list
        }
    }
}

/// For fields that are never null in Rust but may be in JSON.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}
