//! Where two pod templates differ, by names instead of places. Pure.

use std::collections::BTreeSet;

use serde_json::Value;

/// Longer values say nothing on a line.
const LONGEST: usize = 48;

/// One line a field: what comes, what goes, what changes.
pub fn differences(old: &Value, new: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", old, new, &mut found);
    found
}

fn compare(path: &str, old: &Value, new: &Value, found: &mut Vec<String>) {
    if old == new {
        return;
    }
    match (old, new) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare(&path, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if named(a) && named(b) => {
            let names: BTreeSet<&str> = a.iter().chain(b).filter_map(name).collect();
            for wanted in names {
                let of = |list: &[Value]| list.iter().find(|entry| name(entry) == Some(wanted)).cloned();
                let path = format!("{path}[{wanted}]");
                compare(&path, &of(a).unwrap_or(Value::Null), &of(b).unwrap_or(Value::Null), found);
            }
        }
        (old, new) if is_nothing(old) && is_nothing(new) => {}
        (old, new) if is_nothing(old) => {
            found.push(format!("+ {path}{}", shown(new).map_or_else(String::new, |new| format!(": {new}"))));
        }
        (_, new) if is_nothing(new) => found.push(format!("- {path}")),
        (old, new) => found.push(match (shown(old), shown(new)) {
            (Some(old), Some(new)) => format!("~ {path}: {old} -> {new}"),
            (None, Some(new)) => format!("~ {path}: … -> {new}"),
            (Some(_) | None, None) => format!("~ {path}"),
        }),
    }
}

/// An empty list says what an absent one says.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn name(entry: &Value) -> Option<&str> {
    entry.get("name").or_else(|| entry.get("mountPath"))?.as_str()
}

/// Mounts have names, too, and several of one name: they go by their path.
fn named(list: &[Value]) -> bool {
    let names: BTreeSet<&str> = list.iter().filter_map(name).collect();
    names.len() == list.len()
}

/// `None` where it would not fit.
fn shown(value: &Value) -> Option<String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(list) => list.iter().map(|word| word.as_str()).collect::<Option<Vec<_>>>()?.join(" "),
        Value::Object(_) => return None,
    };
    (text.len() <= LONGEST && !text.contains('\n')).then_some(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_comes_goes_and_changes_is_named_and_places_in_a_list_do_not_count() {
        let old = json!({"labels": {"app": "a"}, "containers": [{"name": "x", "image": "i:1"}, {"name": "y"}]});
        let new =
            json!({"labels": {"app": "a", "more": "b"}, "containers": [{"name": "z"}, {"name": "x", "image": "i:2"}]});
        let expected = ["~ containers[x].image: i:1 -> i:2", "- containers[y]", "+ containers[z]", "+ labels.more: b"];
        assert_eq!(differences(&old, &new), expected);
        assert_eq!(differences(&old, &old), Vec::<String>::new());
    }

    #[test]
    fn a_long_value_is_only_named_and_words_are_shown_in_a_line() {
        let long = "x".repeat(LONGEST + 1);
        assert_eq!(differences(&json!({"args": [long]}), &json!({"args": ["y", "z"]})), ["~ args: … -> y z"]);
        assert_eq!(differences(&json!({"args": "y"}), &json!({"args": [long]})), ["~ args"]);
    }
}
