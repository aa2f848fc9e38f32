//! Configurations that have names: a ConfigMap holds them, and a node's label picks one. Pure.
//!
//! Whoever reads the label (the MIG manager, the device plugin's config manager) leaves what there is as it is when it does
//! not know the name; why is said here.

use std::collections::{BTreeMap, BTreeSet};

use crds::{conditions::Verdict, labels, v1::ClusterPolicySpec, v1alpha1::OperatorStatus};
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;

use super::node::gates::{DEVICE_PLUGIN, MIG_MANAGER};
use crate::cluster::events::Notice;

/// Key of a ConfigMap that holds MIG layouts, in the format of nvidia-mig-parted.
const MIG_FILE: &str = "config.yaml";

/// What a label picks from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mig,
    DevicePlugin,
}

impl Kind {
    fn label(self) -> &'static str {
        match self {
            Self::Mig => labels::MIG_CONFIG,
            Self::DevicePlugin => labels::DEVICE_PLUGIN_CONFIG,
        }
    }

    /// Condition: the node's label picks something that there is.
    fn condition(self) -> &'static str {
        match self {
            Self::Mig => "MIGConfigValid",
            Self::DevicePlugin => "DevicePluginConfigValid",
        }
    }

    fn unknown(self) -> &'static str {
        match self {
            Self::Mig => "UnknownMIGConfig",
            Self::DevicePlugin => "UnknownDevicePluginConfig",
        }
    }

    fn default_field(self) -> &'static str {
        match self {
            Self::Mig => "spec.migManager.config.default",
            Self::DevicePlugin => "spec.devicePlugin.config.default",
        }
    }

    /// Of the operand that reads the label: without it nobody does.
    fn gate(self) -> &'static str {
        match self {
            Self::Mig => MIG_MANAGER,
            Self::DevicePlugin => DEVICE_PLUGIN,
        }
    }
}

/// The configurations that a label has to choose from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub kind: Kind,
    pub config_map: String,
    pub names: BTreeSet<String>,
    /// Of nodes without the label.
    pub default: Option<String>,
    /// The operand makes some of its own, of the GPUs that it finds.
    pub open: bool,
}

/// What the ConfigMaps of the operator's namespace hold, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    pub keys: BTreeMap<String, BTreeSet<String>>,
    pub mig: BTreeMap<String, BTreeSet<String>>,
}

impl Maps {
    /// Of ConfigMaps as [`project`] leaves them.
    pub fn of<'a>(maps: impl Iterator<Item = &'a ConfigMap>) -> Self {
        let mut known = Self::default();
        for map in maps.filter(|map| map.metadata.deletion_timestamp.is_none()) {
            let name = map.metadata.name.clone().unwrap_or_default();
            let texts = map.data.iter().flatten();
            let keys = texts.clone().map(|(key, _)| key).chain(map.binary_data.iter().flat_map(BTreeMap::keys));
            known.keys.insert(name.clone(), keys.cloned().collect());
            if let Some((_, layouts)) = texts.into_iter().find(|(key, _)| *key == MIG_FILE) {
                known.mig.insert(name, layouts.lines().map(str::to_owned).collect());
            }
        }
        known
    }
}

/// Leaves of a ConfigMap's values only the names of MIG layouts, one a line.
pub fn project(map: &mut ConfigMap) {
    for (key, text) in map.data.iter_mut().flatten() {
        let names = if key == MIG_FILE { mig_names(text) } else { BTreeSet::new() };
        *text = names.into_iter().collect::<Vec<_>>().join("\n");
    }
    map.binary_data.iter_mut().flat_map(|data| data.values_mut()).for_each(|value| value.0.clear());
}

/// None of what is no such file.
pub fn mig_names(text: &str) -> BTreeSet<String> {
    #[derive(Default, Deserialize)]
    struct File {
        #[serde(rename = "mig-configs", default)]
        configs: BTreeMap<String, serde_json::Value>,
    }
    serde_saphyr::from_str::<File>(text).unwrap_or_default().configs.into_keys().collect()
}

/// What labels have to choose from under a policy. `ours` are the MIG layouts of a policy that names no ConfigMap of them.
/// A ConfigMap that is not there is a problem of the policy, not of nodes.
pub fn named(spec: &ClusterPolicySpec, maps: &Maps, ours: impl FnOnce() -> (String, BTreeSet<String>)) -> Vec<Named> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let mut all = Vec::new();
    if spec.mig_manager.component.is_enabled(true) {
        let config = &spec.mig_manager.config;
        let own = given(&config.name);
        let open = own.is_none();
        let found = match own {
            None => Some(ours()),
            Some(name) => maps.mig.get(&name).cloned().map(|names| (name, names)),
        };
        let default = Some(config.default.clone()).filter(|default| !default.is_empty());
        all.extend(found.map(|(config_map, names)| Named { kind: Kind::Mig, config_map, names, default, open }));
    }
    let config = &spec.device_plugin.config;
    if let Some(name) = given(&config.name).filter(|_| spec.device_plugin.component.is_enabled(true))
        && let Some(names) = maps.keys.get(&name)
    {
        let (kind, names, default) = (Kind::DevicePlugin, names.clone(), given(&config.default));
        all.push(Named { kind, config_map: name, names, default, open: false });
    }
    all
}

impl Named {
    /// Whether the operand that would follow it can.
    pub fn knows(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Of a node with these labels that serves containers; `None`: nothing is picked there, or nobody reads it.
    pub fn verdict(&self, node: &str, of: &BTreeMap<String, String>, deploy: &[String]) -> Option<Verdict> {
        let kind = self.kind;
        deploy.iter().find(|key| key.strip_prefix(labels::DEPLOY_PREFIX) == Some(kind.gate()))?;
        let label = of.get(kind.label()).filter(|value| !value.is_empty());
        let value = label.or(self.default.as_ref())?;
        let said = match label {
            Some(value) => format!("node {node} has label {}={value}", kind.label()),
            None => format!("node {node} has no label {}, and {} is {value}", kind.label(), kind.default_field()),
        };
        let made_there = self.open && of.get(labels::MIG_CONFIG_STATE).is_some_and(|state| state == "success");
        if self.knows(value) || made_there {
            return Some(Verdict::yes(kind.condition(), "Valid", said));
        }
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let names = match (kind, names.is_empty()) {
            (_, false) => format!("it has {}", names.join(", ")),
            (Kind::Mig, true) => format!("its {MIG_FILE} has none: write them below mig-configs"),
            (Kind::DevicePlugin, true) => "it has none".to_owned(),
        };
        let own = if self.open { ", nor has the MIG manager said that it made it of the GPUs there" } else { "" };
        let message = format!(
            "{said}, which ConfigMap {} does not have{own}: the node keeps what it has; set one that there is ({names}), or add it",
            self.config_map
        );
        Some(Verdict::no(kind.condition(), kind.unknown(), message))
    }
}

/// Whether a condition is about what a label picks.
pub fn is_condition(type_: &str) -> bool {
    [Kind::Mig, Kind::DevicePlugin].iter().any(|kind| kind.condition() == type_)
}

/// Once for each new complaint.
pub fn notice(old: Option<&OperatorStatus>, verdict: &Verdict) -> Option<Notice> {
    let told = old.is_some_and(|old| {
        old.conditions.iter().any(|before| before.type_ == verdict.type_ && before.message == verdict.message)
    });
    (!verdict.holds && !told).then(|| Notice::warning(verdict.reason, "ReadLabel", verdict.message.clone()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
    use serde_json::json;

    use super::*;

    const LAYOUTS: &str =
        "version: v1\nmig-configs:\n  all-disabled: [{devices: all, mig-enabled: false}]\n  halves: []\n";

    fn maps(data: &serde_json::Value) -> Maps {
        let mut map: ConfigMap =
            serde_json::from_value(json!({"metadata": {"name": "mine"}, "data": data})).expect("a ConfigMap");
        project(&mut map);
        assert!(!serde_json::to_string(&map).expect("JSON").contains("version"), "values are not kept");
        Maps::of([map].iter())
    }

    fn spec(spec: serde_json::Value) -> ClusterPolicySpec {
        serde_json::from_value(spec).expect("a spec")
    }

    fn of(policy: serde_json::Value, data: &serde_json::Value) -> Vec<Named> {
        named(&spec(policy), &maps(data), || ("ours".to_owned(), mig_names(LAYOUTS)))
    }

    fn mig(data: &serde_json::Value) -> Vec<Named> {
        of(json!({"migManager": {"config": {"name": "mine"}}}), data)
    }

    fn told(named: &[Named], pairs: &[(&str, &str)]) -> Option<Verdict> {
        let labels = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let deploy = [MIG_MANAGER, DEVICE_PLUGIN].map(|gate| format!("{}{gate}", labels::DEPLOY_PREFIX));
        named.iter().find_map(|named| named.verdict("n1", &labels, &deploy))
    }

    #[test]
    fn a_mig_layout_that_the_users_config_map_does_not_have_is_named_with_those_that_it_has() {
        let named = mig(&json!({MIG_FILE: LAYOUTS}));
        let verdict = told(&named, &[(labels::MIG_CONFIG, "thirds")]).expect("a verdict");
        assert_eq!((verdict.holds, verdict.type_, verdict.reason), (false, "MIGConfigValid", "UnknownMIGConfig"));
        for word in ["node n1", "nvidia.com/mig.config=thirds", "ConfigMap mine", "all-disabled, halves"] {
            assert!(verdict.message.contains(word), "{word}: {}", verdict.message);
        }
        assert!(told(&named, &[(labels::MIG_CONFIG, "halves")]).expect("a verdict").holds);
    }

    #[test]
    fn the_policys_default_counts_where_the_node_has_no_label() {
        let named = mig(&json!({MIG_FILE: "version: v1\nmig-configs: {halves: []}"}));
        let verdict = told(&named, &[]).expect("a verdict");
        assert!(!verdict.holds);
        assert!(verdict.message.contains("spec.migManager.config.default is all-disabled"), "{}", verdict.message);
    }

    #[test]
    fn without_a_config_map_of_the_users_the_layouts_are_ours_and_those_that_the_mig_manager_made_itself() {
        let named = of(json!({}), &json!({}));
        let label = (labels::MIG_CONFIG, "all-9g.900gb");
        let verdict = told(&named, &[label]).expect("a verdict");
        assert!(!verdict.holds && verdict.message.contains("ConfigMap ours"), "{}", verdict.message);
        assert!(!told(&named, &[label, (labels::MIG_CONFIG_STATE, "failed")]).expect("a verdict").holds);
        assert!(told(&named, &[label, (labels::MIG_CONFIG_STATE, "success")]).expect("a verdict").holds);
        let fixed = mig(&json!({MIG_FILE: LAYOUTS}));
        assert!(!told(&fixed, &[label, (labels::MIG_CONFIG_STATE, "success")]).expect("a verdict").holds, "is old");
    }

    #[test]
    fn a_file_that_holds_no_layouts_is_told() {
        for text in ["version: v1", "- a\n- b", "{"] {
            let verdict = told(&mig(&json!({MIG_FILE: text})), &[(labels::MIG_CONFIG, "halves")]).expect("a verdict");
            assert!(verdict.message.contains("write them below mig-configs"), "{}", verdict.message);
        }
    }

    #[test]
    fn a_configuration_of_the_device_plugin_is_a_key_of_its_config_map() {
        let policy = json!({"migManager": {"enabled": false}, "devicePlugin": {"config": {"name": "mine"}}});
        let named = of(policy, &json!({"shared": "", "whole": ""}));
        let verdict = told(&named, &[(labels::DEVICE_PLUGIN_CONFIG, "halved")]).expect("a verdict");
        assert_eq!((verdict.holds, verdict.reason), (false, "UnknownDevicePluginConfig"));
        assert!(verdict.message.contains("it has shared, whole"), "{}", verdict.message);
        assert!(told(&named, &[(labels::DEVICE_PLUGIN_CONFIG, "whole")]).expect("a verdict").holds);
        assert_eq!(told(&named, &[]), None, "nothing is picked");
    }

    #[test]
    fn a_label_that_nobody_reads_there_is_no_complaint() {
        let named = mig(&json!({MIG_FILE: LAYOUTS}));
        let labels = [(labels::MIG_CONFIG.to_owned(), "thirds".to_owned())].into();
        assert_eq!(named[0].verdict("n1", &labels, &[]), None);
        let off = json!({"migManager": {"enabled": false, "config": {"name": "mine"}}});
        assert_eq!(of(off, &json!({MIG_FILE: LAYOUTS})), []);
    }

    #[test]
    fn a_config_map_that_is_not_there_is_no_complaint_about_nodes() {
        assert_eq!(of(json!({"migManager": {"config": {"name": "other"}}}), &json!({MIG_FILE: LAYOUTS})), []);
    }

    #[test]
    fn a_complaint_is_told_once() {
        let verdict = told(&mig(&json!({MIG_FILE: LAYOUTS})), &[(labels::MIG_CONFIG, "thirds")]).expect("a verdict");
        assert!(notice(None, &verdict).is_some());
        let now = Time(Timestamp::now());
        let conditions = crds::conditions::merge(&[], std::slice::from_ref(&verdict), None, &now);
        let old = OperatorStatus { conditions, ..OperatorStatus::default() };
        assert!(notice(Some(&old), &verdict).is_none());
    }
}
