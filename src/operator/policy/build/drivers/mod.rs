//! `NVIDIADriver` objects: what comes of them, and what each of their fields changes.

mod fields;

use std::collections::BTreeMap;

use crds::{
    labels,
    v1::ImageSpec,
    v1alpha1::{DriverType, GPUVirtConfigSpec, NVIDIADriver, NVIDIADriverSpec},
};
use k8s_openapi::api::apps::v1::DaemonSet;

use super::{Operands, build, tests::installation};
use crate::operator::policy::validate::{
    Asked, Facts, GPUNodeFacts, Host, LiveSet, NVIDIADrivers, tests::driver_only, validate,
};

fn driver(name: &str, change: impl FnOnce(&mut NVIDIADriverSpec)) -> NVIDIADriver {
    let mut spec = NVIDIADriverSpec::default();
    spec.container.image = ImageSpec {
        repository: Some("registry.example".to_owned()),
        image: Some("driver".to_owned()),
        version: Some("595".to_owned()),
        ..ImageSpec::default()
    };
    change(&mut spec);
    let mut driver = NVIDIADriver::new(name, spec);
    driver.metadata.uid = Some(format!("uid of {name}"));
    driver
}

fn node(name: &str, os: &str, kernel: &str, labels: &[(&str, &str)]) -> GPUNodeFacts {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    GPUNodeFacts { name: name.to_owned(), host: Host { os: os.to_owned(), kernel: kernel.to_owned() }, labels }
}

fn facts(nodes: Vec<GPUNodeFacts>, drivers: Vec<NVIDIADriver>) -> Facts {
    Facts {
        hosts: nodes.iter().map(|node| node.host.clone()).collect(),
        nodes,
        nvidia_drivers: Some(NVIDIADrivers { all: drivers, undecodable: Vec::new() }),
        ..Facts::default()
    }
}

/// Of a policy that leaves drivers to objects.
fn made(facts: &Facts) -> (Operands, Vec<Asked>) {
    let mut policy = driver_only();
    policy.spec.driver.use_nvidia_driver_crd = Some(true);
    let validated = validate(&policy, &GPUVirtConfigSpec::default(), facts);
    (build(&validated.settings, &installation()), validated.asked)
}

fn sets(operands: &Operands) -> Vec<&DaemonSet> {
    let is_driver = |set: &&DaemonSet| set.metadata.labels.as_ref().is_some_and(|l| l.contains_key(labels::OS));
    operands.daemon_sets.iter().filter(is_driver).collect()
}

fn selector(set: &DaemonSet) -> &BTreeMap<String, String> {
    set.spec.as_ref().unwrap().template.spec.as_ref().unwrap().node_selector.as_ref().unwrap()
}

fn image(set: &DaemonSet) -> &str {
    set.spec.as_ref().unwrap().template.spec.as_ref().unwrap().containers[0].image.as_deref().unwrap()
}

#[test]
fn each_object_has_a_set_for_each_system_of_its_nodes_and_selects_no_other_node() {
    let nodes = vec![
        node("n1", "ubuntu24.04", "a", &[("pool", "a")]),
        node("n2", "rhel9.4", "b", &[("pool", "a")]),
        node("n3", "ubuntu24.04", "a", &[]),
    ];
    let a = driver("a", |spec| spec.node_selector = [("pool".to_owned(), "a".to_owned())].into());
    let rest = driver("rest", |spec| {
        spec.default = true;
        spec.container.image.version = Some("580".to_owned());
    });
    let (operands, asked) = made(&facts(nodes, vec![a, rest]));
    let found: Vec<_> = sets(&operands)
        .iter()
        .map(|set| (selector(set)[labels::DRIVER_OWNER].as_str(), selector(set)[labels::OS].as_str(), image(set)))
        .collect();
    assert_eq!(
        found,
        [
            ("a", "rhel9.4", "registry.example/driver:595-rhel9.4"),
            ("a", "ubuntu24.04", "registry.example/driver:595-ubuntu24.04"),
            ("rest", "ubuntu24.04", "registry.example/driver:580-ubuntu24.04"),
        ]
    );
    let names: Vec<_> = sets(&operands).iter().map(|set| set.metadata.name.clone().unwrap()).collect();
    assert!(names[0].starts_with("nvidia-gpu-driver-rhel9.4-"), "{names:?}");
    assert_eq!([asked[0].sets.clone(), asked[1].sets.clone()].concat(), names);
}

#[test]
fn a_precompiled_driver_has_a_set_for_each_kernel() {
    let nodes = vec![node("n1", "ubuntu24.04", "6.8.0-1", &[]), node("n2", "ubuntu24.04", "6.8.0-2", &[])];
    let precompiled = driver("a", |spec| spec.use_precompiled = Some(true));
    let (operands, _) = made(&facts(nodes, vec![precompiled]));
    let images: Vec<&str> = sets(&operands).into_iter().map(image).collect();
    let tag = |kernel: &str| format!("registry.example/driver:595-{kernel}-ubuntu24.04");
    assert_eq!(images, [tag("6.8.0-1"), tag("6.8.0-2")]);
}

#[test]
fn nodes_that_two_objects_select_are_named_at_both_and_get_no_second_driver() {
    let nodes = vec![
        node("n1", "ubuntu24.04", "a", &[("pool", "a"), (labels::DRIVER_OWNER, "a")]),
        node("n2", "ubuntu24.04", "a", &[]),
    ];
    let a = driver("a", |spec| spec.node_selector = [("pool".to_owned(), "a".to_owned())].into());
    let (operands, asked) = made(&facts(nodes, vec![a, driver("b", |_| {})]));
    let owners: Vec<&str> = sets(&operands).iter().map(|set| selector(set)[labels::DRIVER_OWNER].as_str()).collect();
    assert_eq!(owners, ["a", "b"], "the present driver of n1 stays, and n2 is b's alone");
    for (asked, other) in asked.iter().zip(["b", "a"]) {
        let problem = asked.problem.as_ref().expect("a problem");
        assert_eq!(problem.reason, "ConflictingNodeSelector");
        let named = format!("node(s) n1 are selected by NVIDIADriver {other} too");
        assert!(problem.message.contains(&named), "{}", problem.message);
    }
}

#[test]
fn a_host_driver_goes_to_vgpu_nodes_and_takes_its_time_to_leave() {
    let nodes = vec![node("n1", "ubuntu24.04", "a", &[])];
    let host = driver("host", |spec| spec.driver_type = DriverType::VgpuHostManager);
    let (operands, _) = made(&facts(nodes, vec![host]));
    let set = sets(&operands)[0];
    let pod = set.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
    assert_eq!(selector(set)["nvidia.com/gpu.deploy.vgpu-manager"], "true");
    assert_eq!((pod.termination_grace_period_seconds, &pod.containers[0].startup_probe), (Some(120), &None));
    let component = &set.metadata.labels.as_ref().unwrap()[labels::APP_COMPONENT];
    assert!(super::VGPU_HOST_DRIVERS.contains(&component.as_str()), "the guard must find its pods");
}

#[test]
fn what_is_not_known_or_cannot_be_followed_keeps_its_pods() {
    let live = |owner: &str, wanted| LiveSet { owner: Some(owner.to_owned()), wanted, ..LiveSet::default() };
    let mut facts = facts(vec![], vec![driver("a", |spec| spec.container.image.version = None)]);
    facts.nvidia_drivers.as_mut().unwrap().undecodable.push("odd".to_owned());
    facts.live = [("of-a", live("a", false)), ("of-odd", live("odd", false)), ("of-nobody", live("gone", true))]
        .map(|(name, set)| (name.to_owned(), set))
        .into();
    let (operands, asked) = made(&facts);
    assert_eq!(operands.kept, ["of-a", "of-odd"]);
    assert!(asked[0].problem.as_ref().unwrap().message.contains("spec: image"), "{asked:?}");
    facts.nvidia_drivers = None;
    let kept = made(&facts).0.kept;
    assert!(facts.live.keys().all(|name| kept.contains(name)), "the objects have not been listed: {kept:?}");
}

#[test]
fn the_policys_own_driver_leaves_without_its_pods_when_objects_take_over() {
    let mut facts = facts(vec![node("n1", "ubuntu24.04", "a", &[])], vec![driver("a", |_| {})]);
    let own = LiveSet { os: Some("ubuntu24.04".to_owned()), wanted: true, ..LiveSet::default() };
    facts.live.insert("nvidia-driver-daemonset".to_owned(), own);
    let (operands, _) = made(&facts);
    assert_eq!((operands.orphaned, operands.kept), (vec!["nvidia-driver-daemonset".to_owned()], vec![]));
}
