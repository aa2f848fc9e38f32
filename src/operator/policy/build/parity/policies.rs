//! The ClusterPolicies behind the recordings: the peer's default one, and what each file's sets beside it.

use crds::v1::ClusterPolicy;
use serde_json::{Value, json};

/// Recording (a file of `tests/fixtures/peer-operands`) and merge patch over the base.
pub(super) fn patches() -> Vec<(&'static str, Value)> {
    vec![
        ("base", json!({})),
        ("host-driver", json!({"driver": {"enabled": false}})),
        ("host-driver-and-toolkit", json!({"driver": {"enabled": false}, "toolkit": {"enabled": false}})),
        ("dcgm-and-status-exporter", json!({"dcgm": {"enabled": true}})),
        ("device-plugin-config", json!({"devicePlugin": {"config": {"name": "time-slicing", "default": "any"}}})),
        ("precompiled", json!({"driver": {"usePrecompiled": true}})),
        ("cdi-off", json!({"cdi": {"enabled": false}})),
        ("rdma-gds", json!({"driver": {"rdma": {"enabled": true}}, "gds": {"enabled": true, "version": "2.27.3"}})),
        ("sandbox-off", json!({"sandboxWorkloads": {"enabled": false}})),
        ("kata", json!({"sandboxWorkloads": {"mode": "kata"}})),
        ("passthrough-default", json!({"sandboxWorkloads": {"defaultWorkload": "vm-passthrough"}})),
        ("service-monitor", json!({"dcgmExporter": {"serviceMonitor": {"enabled": true}}})),
        ("mig-mixed", json!({"mig": {"strategy": "mixed"}})),
    ]
}

/// The peer's defaults with sandbox workloads on, as recorded: with a vGPU host driver, and no label of a chart.
fn base() -> Value {
    let text = include_str!("../../../../../crds/tests/fixtures/peer-default.yaml");
    let mut policy: Value = serde_saphyr::from_str(text).expect("the peer's default policy should be YAML");
    let recorded = json!({"spec": {
        "daemonsets": {"labels": null},
        "sandboxWorkloads": {"enabled": true},
        "vgpuManager": {"enabled": true, "repository": "registry.example.com/vgpu", "version": "580.95"},
        "dcgmExporter": {"serviceMonitor": {"enabled": false}},
    }});
    merge(&mut policy, &recorded);
    policy
}

pub(super) fn policy(patch: &Value) -> ClusterPolicy {
    let mut policy = base();
    merge(&mut policy, &json!({"spec": patch}));
    serde_json::from_value(policy).expect("the patched policy should be a ClusterPolicy")
}

/// JSON merge patch, RFC 7386.
pub(in crate::operator::policy::build) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().expect("an object");
    for (name, field) in fields {
        match field {
            Value::Null => {
                target.remove(name);
            }
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
                merge(target.entry(name.clone()).or_insert(Value::Null), field);
            }
        }
    }
}
