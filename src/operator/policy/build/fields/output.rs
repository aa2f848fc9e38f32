//! All that comes of a policy, as places with values: objects field by field, what is kept, what is a problem.

use std::collections::BTreeMap;

use crds::{v1::ClusterPolicy, v1alpha1::GPUVirtConfigSpec};
use serde_json::Value;

use super::super::{build, tests::installation};
use crate::operator::policy::validate::{Facts, validate};

/// Place, as in `DaemonSet nvidia-dcgm spec.template.spec.containers[nvidia-dcgm-ctr].image`, and what is there.
pub(in crate::operator::policy::build) type Output = BTreeMap<String, String>;

pub(super) fn output(policy: &ClusterPolicy, facts: &Facts) -> Output {
    let validated = validate(policy, &GPUVirtConfigSpec::default(), facts);
    let operands = build(&validated.settings, &installation());
    let mut output = Output::new();
    for problem in &validated.problems {
        output.insert(format!("Problem {}", problem.reason), problem.message.clone());
    }
    for name in &operands.kept {
        output.insert(format!("Kept {name}"), String::new());
    }
    add(&mut output, "DaemonSet", &operands.daemon_sets);
    add(&mut output, "ConfigMap", &operands.config_maps);
    add(&mut output, "Service", &operands.services);
    add(&mut output, "RuntimeClass", &operands.runtime_classes);
    add(&mut output, "ServiceMonitor", &operands.monitors);
    output
}

fn add<K: serde::Serialize>(output: &mut Output, kind: &str, objects: &[K]) {
    for object in objects {
        let object = serde_json::to_value(object).expect("an object should serialize");
        let name = object["metadata"]["name"].as_str().expect("an object should have a name");
        put(output, &format!("{kind} {name}"), " ", &object);
    }
}

pub(in crate::operator::policy::build) fn put(output: &mut Output, place: &str, separator: &str, value: &Value) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (name, field) in fields {
                put(output, &format!("{place}{separator}{name}"), ".", field);
            }
        }
        Value::Array(entries) => {
            for (index, entry) in entries.iter().enumerate() {
                // Two mounts may be of one volume, so those are told apart by where they are.
                let name = entry.get("mountPath").or_else(|| entry.get("name")).and_then(Value::as_str);
                let name = name.map_or_else(|| index.to_string(), str::to_owned);
                put(output, &format!("{place}[{name}]"), ".", entry);
            }
        }
        Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            output.insert(place.to_owned(), value.to_string());
        }
    }
}

/// Places where the two differ.
pub(in crate::operator::policy::build) fn changed(before: &Output, after: &Output) -> Vec<String> {
    let mut places: Vec<String> = before.keys().chain(after.keys()).cloned().collect();
    places.sort();
    places.dedup();
    places.retain(|place| before.get(place) != after.get(place));
    places
}
