//! Whether KubeVirt makes mediated devices itself. Where it does, its virt-handler removes those that others have made and
//! that it is not told of (KubeVirt 1.6 to 1.9, `mediated_devices_types.go`), so it is told to make none. Pure.

use crds::{conditions::Verdict, labels, v1alpha1::KubeVirtMode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use kube::{ResourceExt, api::DynamicObject};
use serde_json::{Value, json};

use super::{
    decide::{Change, Decision, Problem},
    dialect::{Dialect, Place},
    offers::Offers,
};

const GATE: &str = "DisableMDEVConfiguration";

/// How an object says it: what its CRD has decides, since a field that it does not know would be dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Switch {
    /// `mediatedDevicesConfiguration.enabled`, false (KubeVirt 1.8 and newer).
    Field(Vec<&'static str>),
    /// A name in the list of feature gates, before.
    Gate(Vec<&'static str>),
    /// A gate of `HyperConverged` that is a field of its own, true.
    Flag(Vec<&'static str>),
}

impl Switch {
    pub fn of(dialect: Dialect, crd: &CustomResourceDefinition) -> Option<Self> {
        let version = dialect.gvk().version;
        let served = crd.spec.versions.iter().find(|served| served.name == version)?;
        let schema = served.schema.as_ref()?.open_api_v3_schema.as_ref()?;
        let candidates = match dialect {
            Dialect::KubeVirt => vec![
                Self::Field(vec!["spec", "configuration", "mediatedDevicesConfiguration", "enabled"]),
                Self::Gate(vec!["spec", "configuration", "developerConfiguration", "featureGates"]),
            ],
            Dialect::HyperConvergedV1Beta1 => vec![
                Self::Field(vec!["spec", "mediatedDevicesConfiguration", "enabled"]),
                Self::Flag(vec!["spec", "featureGates", "disableMDevConfiguration"]),
            ],
            Dialect::HyperConvergedV1 => {
                vec![Self::Field(vec!["spec", "virtualization", "mediatedDevicesConfiguration", "enabled"])]
            }
        };
        candidates.into_iter().find(|switch| has(schema, switch.path()))
    }

    fn path(&self) -> &[&'static str] {
        match self {
            Self::Field(path) | Self::Gate(path) | Self::Flag(path) => path,
        }
    }

    /// As it is when KubeVirt leaves them alone, or as it would be.
    fn off(&self, now: Option<&Value>) -> Value {
        match self {
            Self::Field(_) => json!(false),
            Self::Flag(_) => json!(true),
            Self::Gate(_) => {
                let mut gates = gates(now);
                if !gates.iter().any(|gate| gate == GATE) {
                    gates.push(json!(GATE));
                }
                Value::Array(gates)
            }
        }
    }

    /// Without what we have set.
    fn back(&self, now: Option<&Value>) -> Value {
        match self {
            Self::Field(_) | Self::Flag(_) => Value::Null,
            Self::Gate(_) => {
                let left: Vec<Value> = gates(now).into_iter().filter(|gate| gate != GATE).collect();
                if left.is_empty() { Value::Null } else { Value::Array(left) }
            }
        }
    }
}

fn gates(now: Option<&Value>) -> Vec<Value> {
    now.and_then(Value::as_array).cloned().unwrap_or_default()
}

fn has(schema: &JSONSchemaProps, path: &[&str]) -> bool {
    let next = |schema, key: &&str| -> Option<&JSONSchemaProps> {
        let schema: &JSONSchemaProps = schema;
        schema.properties.as_ref()?.get(*key)
    };
    path.iter().try_fold(schema, next).is_some()
}

/// What an object says of it now.
pub struct Mediated {
    place: Place,
    switch: Option<Switch>,
    now: Option<Value>,
    /// Types that KubeVirt is to make, and where they stand.
    types: Option<String>,
    marked: bool,
}

impl Mediated {
    pub fn read(dialect: Dialect, switch: Option<&Switch>, object: &DynamicObject) -> Self {
        let at = |path: &[&str]| path.iter().try_fold(&object.data, |value, key| value.get(*key)).cloned();
        let own = dialect.path();
        let configuration = [&own[..own.len() - 1], &["mediatedDevicesConfiguration"]].concat();
        let lists = ["mediatedDeviceTypes", "mediatedDevicesTypes", "nodeMediatedDeviceTypes"];
        let filled = |list: &&str| {
            let found = at(&[&configuration[..], &[list]].concat());
            found.is_some_and(|found| found.as_array().is_some_and(|types| !types.is_empty()))
        };
        let types = lists.into_iter().find(filled).map(|list| format!("{}.{list}", configuration.join(".")));
        Self {
            place: Place::of(dialect, object),
            switch: switch.cloned(),
            now: switch.and_then(|switch| at(switch.path())),
            types,
            marked: object.annotations().contains_key(labels::MEDIATED_DEVICES_OFF),
        }
    }

    fn is_off(&self) -> bool {
        self.switch.as_ref().is_some_and(|switch| self.now.as_ref() == Some(&switch.off(self.now.as_ref())))
    }

    /// Adds to what was decided on the lists what these offers ask for here.
    pub fn serve(&self, decision: Decision, offers: &Offers, mode: KubeVirtMode) -> Decision {
        if !offers.mediated {
            return if offers.complete { self.withdraw(decision) } else { decision };
        }
        if self.is_off() {
            return decision;
        }
        let place = &self.place;
        let path = self.switch.as_ref().map_or("mediatedDevicesConfiguration".to_owned(), |s| s.path().join("."));
        let writes = match mode {
            KubeVirtMode::Manage => true,
            KubeVirtMode::Report | KubeVirtMode::Off => false,
        };
        let chosen = match &self.switch {
            Some(Switch::Field(_)) => self.now.as_ref().and_then(Value::as_bool),
            Some(Switch::Flag(_)) => self.now.as_ref().and_then(Value::as_bool).map(|off| !off),
            Some(Switch::Gate(_)) | None => None,
        };
        let why = match (&self.types, chosen, &self.switch) {
            (Some(types), _, _) => format!("{place} has KubeVirt make the types of {types}"),
            (None, Some(true), _) => format!("{place} sets {path}"),
            (None, _, None) => format!("{place} has no setting that this version knows"),
            (None, _, Some(_)) if !writes => format!("{place} lets KubeVirt make mediated devices"),
            (None, _, Some(switch)) => {
                return with_patch(decision, nested(switch.path(), switch.off(self.now.as_ref())), Some("true"));
            }
        };
        objecting(
            decision,
            &Problem {
                reason: "KubeVirtMakesMediatedDevices",
                message: format!(
                    "{why}, and nodes make vGPUs as mediated devices, which KubeVirt then removes: leave them to gpuvirt by {path} (or the feature gate {GATE} before KubeVirt 1.8)"
                ),
            },
        )
    }

    /// Takes back what we have set.
    pub fn withdraw(&self, decision: Decision) -> Decision {
        match &self.switch {
            Some(switch) if self.marked && self.is_off() => {
                with_patch(decision, nested(switch.path(), switch.back(self.now.as_ref())), None)
            }
            Some(_) | None if self.marked => with_patch(decision, json!({}), None),
            Some(_) | None => decision,
        }
    }
}

fn nested(path: &[&'static str], value: Value) -> Value {
    path.iter().rev().fold(value, |inner, key| json!({*key: inner}))
}

fn with_patch(decision: Decision, patch: Value, mark: Option<&str>) -> Decision {
    let empty = Change { permitted: Vec::new(), withdrawn: Vec::new(), patch: json!({}) };
    let mut change = decision.change.unwrap_or(empty);
    join(&mut change.patch, patch);
    join(&mut change.patch, json!({"metadata": {"annotations": {labels::MEDIATED_DEVICES_OFF: mark}}}));
    Decision { change: Some(change), ..decision }
}

/// Two merge patches of different places.
fn join(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                join(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// One more thing that is not as it should be.
pub fn objecting(decision: Decision, problem: &Problem) -> Decision {
    let verdict = &decision.verdict;
    let (reason, message) = match verdict.holds {
        true => (problem.reason, problem.message.clone()),
        false => (verdict.reason, format!("{}; {}", verdict.message, problem.message)),
    };
    Decision { verdict: Verdict::no(verdict.type_, reason, message), ..decision }
}
