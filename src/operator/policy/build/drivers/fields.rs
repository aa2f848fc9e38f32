//! Every field of an `NVIDIADriver`, and what it changes in its set: no field silently does nothing.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{driver, facts, made, node, sets};
use crate::operator::policy::build::{
    fields::{Output, changed, put},
    parity::{matches, merge},
};

enum Effect {
    /// Patterns of places in the set, below `spec.template.spec.` unless they begin with a dot; values of the field.
    Changes(&'static [&'static str], [Value; 2]),
    /// Has tests of its own.
    Elsewhere,
    /// Accepted, and why nothing follows.
    #[expect(dead_code, reason = "for the reader")]
    Unused(&'static str),
}

const MANAGER: &str = "prepare-driver is our own program";

fn text() -> [Value; 2] {
    [json!("one"), json!("two")]
}

fn bools() -> [Value; 2] {
    [json!(true), json!(false)]
}

fn maps() -> [Value; 2] {
    [json!({"a": "1"}), json!({"a": "2"})]
}

fn probes() -> [Value; 2] {
    [json!({"periodSeconds": 7}), json!({"periodSeconds": 8})]
}

/// Of every field that has a value of its own, by its path below `spec.`.
fn effect(field: &str) -> Option<Effect> {
    use Effect::{Changes, Elsewhere, Unused};
    Some(match field {
        "default" | "nodeSelector" => Elsewhere,
        field if field.starts_with("upgradePolicy.") => Elsewhere,
        // Those and their names: each kind is a set of its own.
        "driverType" => Changes(&["*", ".*"], [json!("vgpu"), json!("vgpu-host-manager")]),
        "usePrecompiled" => Changes(&["*", ".*"], bools()),
        "image" | "version" | "repository" => Changes(&["containers[*].image"], text()),
        "imagePullPolicy" => Changes(&["containers[*].imagePullPolicy"], text()),
        "imagePullSecrets" => Changes(&["imagePullSecrets*"], [json!(["one"]), json!(["two"])]),
        "args" => Changes(&["containers[nvidia-driver-ctr].args*"], [json!(["one"]), json!(["two"])]),
        "env" => {
            Changes(&["containers[nvidia-driver-ctr].env[A].*"], [json!([{"name": "A", "value": "1"}]), json!([])])
        }
        "resources" => Changes(
            &["containers[*].resources.*"],
            [json!({"limits": {"memory": "1Gi"}}), json!({"limits": {"memory": "2Gi"}})],
        ),
        "hostNetwork" => Changes(&["hostNetwork", "dnsPolicy"], bools()),
        "kernelModuleType" => Changes(&["containers[nvidia-driver-ctr].env*"], [json!("open"), json!("proprietary")]),
        "useOpenKernelModules" => Changes(&["containers[nvidia-driver-ctr].env*"], bools()),
        "startupProbe" => Changes(&["containers[nvidia-driver-ctr].startupProbe.periodSeconds"], probes()),
        "livenessProbe" => Changes(&["containers[nvidia-driver-ctr].livenessProbe.*"], probes()),
        "readinessProbe" => Changes(&["containers[nvidia-driver-ctr].readinessProbe.*"], probes()),
        "rdma.enabled" => Changes(&["containers[nvidia-peermem-ctr].*", "containers[nvidia-driver-ctr].env*"], bools()),
        "rdma.useHostMofed" => Changes(&["containers[nvidia-driver-ctr].env*", "volumes[mlnx-ofed-usr-src]*"], bools()),
        "gds.enabled" => Changes(&["containers[nvidia-fs-ctr].*", "containers[nvidia-driver-ctr].env*"], bools()),
        "gdrcopy.enabled" => {
            Changes(&["containers[nvidia-gdrcopy-ctr].*", "containers[nvidia-driver-ctr].env*"], bools())
        }
        "secretEnv" => Changes(&["containers[nvidia-driver-ctr].envFrom*"], text()),
        "kernelModuleConfig.name"
        | "repoConfig.name"
        | "certConfig.name"
        | "virtualTopologyConfig.name"
        | "licensingConfig.name"
        | "licensingConfig.secretName" => {
            Changes(&["containers[nvidia-driver-ctr].volumeMounts*", "volumes[*"], text())
        }
        "licensingConfig.nlsEnabled" => {
            Changes(&["containers[nvidia-driver-ctr].volumeMounts*", "volumes[licensing-config].*"], bools())
        }
        "labels" => Changes(&[".spec.template.metadata.labels.a"], maps()),
        "annotations" => Changes(&[".spec.template.metadata.annotations.a"], maps()),
        "tolerations" => Changes(&["tolerations*"], [json!([{"operator": "Exists"}]), json!([])]),
        "priorityClassName" => Changes(&["priorityClassName"], text()),
        "podSecurityContext" => {
            Changes(&["securityContext.runAsUser"], [json!({"runAsUser": 1}), json!({"runAsUser": 2})])
        }
        "nodeAffinity" => Changes(
            &["affinity.nodeAffinity.*"],
            [
                json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}),
                Value::Null,
            ],
        ),
        field if field.starts_with("manager.") => Unused(MANAGER),
        field => return sidecar(field),
    })
}

fn sidecar(field: &str) -> Option<Effect> {
    let (section, field) = field.split_once('.')?;
    let of = |gds: &'static [&'static str], gdrcopy: &'static [&'static str]| match section {
        "gds" => Some(gds),
        "gdrcopy" => Some(gdrcopy),
        _ => None,
    };
    let lists = [json!(["one"]), json!(["two"])];
    let (places, values) = match field {
        "image" | "version" | "repository" => {
            (of(&["containers[nvidia-fs-ctr].image"], &["containers[nvidia-gdrcopy-ctr].image"])?, text())
        }
        "imagePullPolicy" => (
            of(&["containers[nvidia-fs-ctr].imagePullPolicy"], &["containers[nvidia-gdrcopy-ctr].imagePullPolicy"])?,
            text(),
        ),
        "imagePullSecrets" => (of(&["imagePullSecrets*"], &["imagePullSecrets*"])?, lists),
        "args" => (of(&["containers[nvidia-fs-ctr].args*"], &["containers[nvidia-gdrcopy-ctr].args*"])?, lists),
        "env" => (
            of(&["containers[nvidia-fs-ctr].env*"], &["containers[nvidia-gdrcopy-ctr].env*"])?,
            [json!([{"name": "A", "value": "1"}]), json!([])],
        ),
        _ => return None,
    };
    Some(Effect::Changes(places, values))
}

/// Fields that have a value of their own.
fn fields() -> Vec<&'static str> {
    let text = include_str!("../../../../../crds/tests/fixtures/nvidia_driver_paths.txt");
    let paths: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').next()?.strip_prefix("spec."))
        .filter(|p| !p.contains("[]"))
        .collect();
    let parent = |path: &str| paths.iter().any(|other| other.starts_with(&format!("{path}.")));
    paths.iter().copied().filter(|path| !parent(path)).collect()
}

fn output(spec: &Value) -> Output {
    let nodes = vec![node("n1", "ubuntu24.04", "6.8.0-31-generic", &[])];
    let mut facts = facts(nodes, vec![driver("a", |own| *own = serde_json::from_value(spec.clone()).expect("a spec"))]);
    facts.config_maps = ["one", "two"].map(|name| (name.to_owned(), BTreeSet::from(["key".to_owned()]))).into();
    let (operands, asked) = made(&facts);
    assert_eq!(asked[0].problem, None, "{spec}");
    let mut output = BTreeMap::new();
    let set = serde_json::to_value(sets(&operands)[0]).expect("a set should serialize");
    put(&mut output, "", ".", &set);
    output
}

#[test]
fn a_field_of_a_driver_object_changes_exactly_what_its_row_names() {
    let image = json!({"repository": "registry.example", "image": "driver", "version": "595"});
    let mut base = image.clone();
    let sidecar = merged(&image, &json!({"enabled": true}));
    merge(
        &mut base,
        &json!({
            "driverType": "gpu", "default": false, "rdma": {"enabled": true}, "gds": sidecar, "gdrcopy": sidecar,
            "licensingConfig": {"secretName": "licence"},
        }),
    );
    // A change of the driver's container is a change of its digest, in both containers that have it.
    let digest = "*ontainers[*].env[DRIVER_CONFIG_DIGEST].value";
    let (mut wrong, mut rows) = (Vec::new(), 0);
    for field in fields() {
        let Some(effect) = effect(field) else { panic!("spec.{field} has no row") };
        let Effect::Changes(places, values) = effect else { continue };
        rows += 1;
        let mut seen = BTreeSet::new();
        let mut start = base.clone();
        // A secret comes before a ConfigMap.
        if field.starts_with("licensingConfig.") && field != "licensingConfig.nlsEnabled" {
            start["licensingConfig"] = json!({});
        }
        let before = output(&start);
        for value in values {
            let patch = field.rsplit('.').fold(value, |inner, name| json!({name: inner}));
            seen.extend(changed(&before, &output(&merged(&start, &patch))));
        }
        let seen: Vec<String> = seen.into_iter().map(|place| place.trim_start_matches('.').to_owned()).collect();
        let whole = |place: &&str| match place.strip_prefix('.') {
            Some(place) => place.to_owned(),
            None => format!("spec.template.spec.{place}"),
        };
        let places: Vec<String> = places.iter().map(whole).collect();
        let named = |place: &String| places.iter().any(|pattern| matches(pattern, place));
        for place in seen.iter().filter(|place| !named(place) && !matches(digest, place)) {
            wrong.push(format!("{field} changes {place}, which its row does not name"));
        }
        for pattern in places.iter().filter(|pattern| !seen.iter().any(|place| matches(pattern, place))) {
            wrong.push(format!("{field} does not change {pattern}, which its row names"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(rows > 40, "only {rows} fields have an effect");
}

fn merged(base: &Value, patch: &Value) -> Value {
    let mut merged = base.clone();
    merge(&mut merged, patch);
    merged
}
