//! Golden operands, to be read as prose: `cargo insta review` after a change.

mod runtimes;
mod scripts;

use crds::{
    v1::ClusterPolicy,
    v1alpha1::{Discovery, GPUVirtConfigSpec},
};

use crate::telemetry::LogFormat;

use super::{AgentMetrics, Installation, Operands, build};
use crate::operator::policy::validate::{
    tests::{driver_only, of_systems},
    validate,
};

pub(super) fn installation() -> Installation {
    Installation {
        metrics: AgentMetrics::Tls { secret: None },
        namespace: "gpuvirt".to_owned(),
        image: "registry.example/gpuvirt:1".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        log_level: "info".to_owned(),
        log_format: LogFormat::Text,
        images: std::collections::BTreeMap::new(),
    }
}

fn built(policy: &ClusterPolicy, config: &GPUVirtConfigSpec) -> Operands {
    let facts = of_systems(&["ubuntu24.04"]);
    build(&validate(policy, config, &facts).settings, &installation())
}

#[test]
fn the_agent_with_nothing_set() {
    insta::assert_yaml_snapshot!(built(&driver_only(), &GPUVirtConfigSpec::default()).daemon_sets[0]);
}

#[test]
fn the_driver_with_only_its_image_set() {
    insta::assert_yaml_snapshot!(built(&driver_only(), &GPUVirtConfigSpec::default()).daemon_sets[1]);
}

#[test]
fn without_the_driver_there_is_only_the_agent() {
    let mut policy = driver_only();
    policy.spec.driver.component.enabled = Some(false);
    let operands = built(&policy, &GPUVirtConfigSpec::default());
    assert_eq!((operands.daemon_sets.len(), operands.config_maps.len()), (1, 0));
}

#[test]
fn discovery_by_labels_keeps_the_agent_to_nodes_that_hint_at_a_gpu() {
    let config = GPUVirtConfigSpec { discovery: Discovery::Labels, ..GPUVirtConfigSpec::default() };
    let agent = &built(&driver_only(), &config).daemon_sets[0];
    let affinity = agent.spec.as_ref().and_then(|s| s.template.spec.as_ref()).and_then(|s| s.affinity.as_ref());
    insta::assert_yaml_snapshot!(affinity);
}

#[test]
fn a_user_can_add_labels_and_cannot_replace_ours() {
    let mut policy = driver_only();
    policy.spec.daemonsets.labels =
        [("team", "gpu"), ("app", "mine")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let operands = built(&policy, &GPUVirtConfigSpec::default());
    let template = operands.daemon_sets[1].spec.as_ref().unwrap().template.metadata.as_ref().unwrap();
    let labels = template.labels.as_ref().unwrap();
    assert_eq!((labels["team"].as_str(), labels["app"].as_str()), ("gpu", "nvidia-driver-daemonset"));
}

#[test]
fn sets_of_two_systems_share_a_value_of_app_and_neither_pods_nor_nodes() {
    let validated = validate(&driver_only(), &GPUVirtConfigSpec::default(), &of_systems(&["rhel9.4", "ubuntu24.04"]));
    let operands = build(&validated.settings, &installation());
    let sets: Vec<_> = operands.daemon_sets.iter().skip(1).collect();
    let names: Vec<_> = sets.iter().map(|set| set.metadata.name.as_deref().unwrap()).collect();
    assert_eq!(names, ["nvidia-driver-daemonset", "nvidia-driver-daemonset-ubuntu24.04"]);
    let spec = |n: usize| sets[n].spec.as_ref().unwrap();
    let pod_labels = |n| spec(n).template.metadata.as_ref().unwrap().labels.as_ref().unwrap();
    assert_eq!(pod_labels(0)["app"], pod_labels(1)["app"]);
    let selector = spec(1).selector.match_labels.as_ref().unwrap();
    assert!(selector.iter().all(|(key, value)| pod_labels(1).get(key) == Some(value)));
    assert!(selector.iter().any(|(key, value)| pod_labels(0).get(key) != Some(value)), "its own pods only");
    let system = |n| &spec(n).template.spec.as_ref().unwrap().node_selector.as_ref().unwrap()["gpuvirt.io/os"];
    assert_eq!((system(0).as_str(), system(1).as_str()), ("rhel9.4", "ubuntu24.04"));
}
