//! Every field of a ClusterPolicy, and what it changes: no field silently does nothing.

mod output;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use crds::v1::ClusterPolicy;
use serde_json::{Value, json};

pub(super) use self::output::{Output, changed, put};
use self::{
    output::output,
    table::{Effect, Row, rows},
};
use super::parity::{matches, merge};
use crate::operator::policy::validate::{Facts, Host, NVIDIADrivers, tests::of_systems};

/// A field of the peer's schema: path below `spec.`, type, and what else the schema says.
struct Field {
    path: String,
    kind: String,
    choices: Vec<Value>,
}

/// Fields that have a value of their own.
fn fields() -> Vec<Field> {
    let text = include_str!("../../../../../crds/tests/fixtures/cluster_policy_paths.txt");
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("spec.") && !line.contains("[]")).collect();
    let parent = |path: &str| lines.iter().any(|line| line.starts_with(&format!("{path}.")));
    let mut fields = Vec::new();
    for line in &lines {
        let mut words = line.split(' ');
        let (path, kind) = (words.next().expect("a path"), words.next().expect("a type"));
        if parent(path) {
            continue;
        }
        let choices = words.find_map(|word| word.strip_prefix("enum=")).unwrap_or_default();
        let choices = serde_json::from_str(&format!("[{choices}]")).expect("choices should be JSON");
        let path = path.strip_prefix("spec.").expect("a field of the spec").to_owned();
        fields.push(Field { path, kind: kind.to_owned(), choices });
    }
    fields
}

impl Field {
    /// Values that the field may have.
    fn values(&self) -> Vec<Value> {
        let name = self.path.rsplit('.').next().expect("a name");
        if !self.choices.is_empty() {
            return self.choices.clone();
        }
        match (self.kind.as_str(), name) {
            ("boolean", _) => vec![json!(true), json!(false)],
            ("integer", _) => vec![json!(7), json!(8)],
            (_, "env") => vec![json!([{"name": "A", "value": "1"}]), json!([{"name": "A", "value": "2"}])],
            (_, "tolerations") => vec![json!([{"operator": "Exists"}]), json!([{"key": "a", "operator": "Exists"}])],
            (_, "podSecurityContext") => vec![json!({"runAsUser": 1}), json!({"runAsUser": 2})],
            (_, "resources") => vec![json!({"limits": {"memory": "1Gi"}}), json!({"limits": {"memory": "2Gi"}})],
            (_, "relabelings") => vec![json!([{"action": "drop"}]), json!([{"action": "keep"}])],
            (_, "runtimeClasses") => vec![json!([{"name": "one"}]), json!([{"name": "two"}])],
            (_, "interval" | "scrapeTimeout") => vec![json!("7s"), json!("8s")],
            (_, "default") if self.path.starts_with("devicePlugin") => vec![json!("a"), json!("b")],
            (_, "maxUnavailable") => vec![json!("2"), json!("30%")],
            (_, "installDir" | "rootFS" | "driverInstallDir" | "kubeletRootDir" | "root" | "directory") => {
                vec![json!("/one"), json!("/two")]
            }
            (_, name) if name.ends_with("Probe") => vec![json!({"periodSeconds": 7}), json!({"periodSeconds": 8})],
            (_, "updateStrategy") => vec![json!("RollingUpdate"), json!("OnDelete")],
            ("array", _) => vec![json!(["one"]), json!(["two"])],
            ("object", _) => vec![json!({"a": "1"}), json!({"a": "2"})],
            _ => vec![json!("one"), json!("two")],
        }
    }

    fn patch(&self, value: &Value) -> Value {
        let patch = self.path.rsplit('.').fold(value.clone(), |inner, name| json!({name: inner}));
        json!({"spec": patch})
    }
}

fn policy(value: &Value) -> ClusterPolicy {
    serde_json::from_value(value.clone()).expect("a ClusterPolicy")
}

/// Every operand that is built, on, with nothing wrong.
fn everything() -> Value {
    EVERYTHING.clone()
}

/// Parsed once for hundreds of policies.
static EVERYTHING: LazyLock<Value> = LazyLock::new(|| {
    let text = include_str!("../../../../../crds/tests/fixtures/peer-default.yaml");
    let mut policy: Value = serde_saphyr::from_str(text).expect("the peer's default policy should be YAML");
    let on = json!({"enabled": true});
    merge(
        &mut policy,
        &json!({"spec": {
            "sandboxWorkloads": on, "dcgm": on, "gds": on, "gdrcopy": on, "driver": {"rdma": on},
            "vgpuManager": {"enabled": true, "repository": "registry.example", "version": "580.95"},
        }}),
    );
    policy
});

fn facts() -> Facts {
    let keys: BTreeSet<String> =
        ["a", "b", "dcgm-metrics.csv", "config.yaml", "clients.yaml"].map(str::to_owned).into();
    let mut kernels = of_systems(&["ubuntu24.04"]);
    kernels.hosts =
        kernels.hosts.into_iter().map(|host| Host { kernel: "6.8.0-31-generic".to_owned(), ..host }).collect();
    Facts {
        runtimes: ["containerd://2.1.0".to_owned()].into(),
        config_maps: ["one", "two"].map(|name| (name.to_owned(), keys.clone())).into(),
        service_monitors: true,
        nvidia_drivers: Some(NVIDIADrivers::default()),
        ..kernels
    }
}

fn table() -> BTreeMap<String, Row> {
    let mut table = BTreeMap::new();
    for row in rows() {
        assert!(table.insert(row.field.clone(), row).is_none(), "a field has two rows");
    }
    table
}

#[test]
fn every_field_of_the_peers_schema_has_its_row_and_no_row_is_of_another() {
    let fields: BTreeSet<String> = fields().into_iter().map(|field| field.path).collect();
    let rows: BTreeSet<String> = table().into_keys().collect();
    let missing: Vec<_> = fields.difference(&rows).collect();
    assert!(missing.is_empty(), "{} fields have no row: {missing:#?}", missing.len());
    let unknown: Vec<_> = rows.difference(&fields).collect();
    assert!(unknown.is_empty(), "rows of no field: {unknown:#?}");
}

/// With everything on, a field changes all places of its row and no other one.
#[test]
fn a_field_changes_exactly_what_its_row_names() {
    let (table, facts) = (table(), facts());
    let mut wrong = Vec::new();
    let mut before = BTreeMap::new();
    for field in fields() {
        let row = &table[&field.path];
        let mut base = everything();
        merge(&mut base, &json!({"spec": row.with}));
        let before = before.entry(row.with.to_string()).or_insert_with(|| output(&policy(&base), &facts));
        let mut seen = BTreeSet::new();
        for value in field.values() {
            let mut other = base.clone();
            merge(&mut other, &field.patch(&value));
            seen.extend(changed(before, &output(&policy(&other), &facts)));
        }
        let Effect::Changes(places) = &row.effect else {
            if !seen.is_empty() {
                wrong.push(format!("{} is said to change nothing and changes {seen:?}", field.path));
            }
            continue;
        };
        for place in seen.iter().filter(|place| !places.iter().any(|pattern| matches(pattern, place))) {
            wrong.push(format!("{} changes {place}, which its row does not name", field.path));
        }
        for pattern in places.iter().filter(|pattern| !seen.iter().any(|place| matches(pattern, place))) {
            wrong.push(format!("{} does not change {pattern}, which its row names", field.path));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Numbers that look random and are the same in every run (xorshift).
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).expect("a small number")
    }
}

#[test]
fn in_two_hundred_random_policies_a_field_changes_no_place_that_its_row_does_not_name() {
    let (table, facts, fields) = (table(), facts(), fields());
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let (mut effects, mut wrong) = (0, Vec::new());
    for number in 0..200 {
        let mut random = everything();
        for _ in 0..12 {
            let field = &fields[dice.throw(fields.len())];
            let values = field.values();
            merge(&mut random, &field.patch(&values[dice.throw(values.len())]));
        }
        let before = output(&policy(&random), &facts);
        for _ in 0..2 {
            let field = &fields[dice.throw(fields.len())];
            let values = field.values();
            let mut other = random.clone();
            merge(&mut other, &field.patch(&values[dice.throw(values.len())]));
            let places: &[String] = match &table[&field.path].effect {
                Effect::Changes(places) => places,
                Effect::Elsewhere(_) | Effect::Unused(_) => &[],
            };
            let seen = changed(&before, &output(&policy(&other), &facts));
            effects += usize::from(!seen.is_empty());
            for place in seen.iter().filter(|place| !places.iter().any(|pattern| matches(pattern, place))) {
                wrong.push(format!("policy {number}: {} changes {place}, which its row does not name", field.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(effects > 50, "only {effects} of the changes had an effect");
}
