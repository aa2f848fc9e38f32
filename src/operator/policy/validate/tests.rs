//! One policy with which nothing is wrong, and one thing wrong with it at a time.

use crds::{
    v1::{ClusterPolicy, ClusterPolicySpec, ImageSpec},
    v1alpha1::{AgentFunction, Budget, GPUVirtConfigSpec, ResourceAlias},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Driver, Facts, Host, Rollout, Rules, Validated, Wish, log_levels, node_policy, validate};

/// A policy with which nothing is wrong, for nodes of every mode.
fn valid() -> ClusterPolicy {
    let mut policy = driver_only();
    policy.spec.sandbox_workloads.enabled = Some(true);
    policy
}

/// A policy that asks for the driver alone.
pub(in crate::operator::policy) fn driver_only() -> ClusterPolicy {
    let mut policy = ClusterPolicy::new("cluster-policy", ClusterPolicySpec::default());
    let spec = &mut policy.spec;
    for component in [
        &mut spec.toolkit.component,
        &mut spec.device_plugin.component,
        &mut spec.dcgm_exporter.component,
        &mut spec.gfd,
        &mut spec.mig_manager.component,
    ] {
        component.enabled = Some(false);
    }
    spec.driver.component.container.image = ImageSpec {
        repository: Some("nvcr.io/nvidia".to_owned()),
        image: Some("driver".to_owned()),
        version: Some("595.91.07".to_owned()),
        ..ImageSpec::default()
    };
    policy
}

fn wanted(validated: &Validated) -> &Driver {
    match &validated.settings.drivers.wish {
        Wish::Wanted(drivers) => &drivers[0],
        other @ (Wish::NotWanted | Wish::Unknown) => panic!("no driver: {other:?}"),
    }
}

fn ubuntu() -> Facts {
    of_systems(&["ubuntu24.04"])
}

pub(in crate::operator::policy) fn of_systems(systems: &[&str]) -> Facts {
    let hosts = systems.iter().map(|os| Host { os: (*os).to_owned(), ..Host::default() });
    Facts { hosts: hosts.collect(), ..Facts::default() }
}

fn checked(change: impl FnOnce(&mut ClusterPolicySpec)) -> Validated {
    let mut policy = valid();
    change(&mut policy.spec);
    validate(&policy, &GPUVirtConfigSpec::default(), &ubuntu())
}

#[test]
fn a_valid_policy_has_no_problem_and_one_driver_for_its_os() {
    let validated = checked(|_| {});
    assert_eq!(validated.problems, []);
    assert_eq!(wanted(&validated).container.image.reference.to_string(), "nvcr.io/nvidia/driver:595.91.07-ubuntu24.04");
}

#[test]
fn a_partial_image_is_a_problem_and_the_agent_is_built_all_the_same() {
    let validated = checked(|spec| spec.driver.component.container.image.version = None);
    assert_eq!(validated.problems[0].reason, "InvalidImage");
    assert!(validated.problems[0].message.contains("spec.driver"), "{}", validated.problems[0].message);
    assert_eq!(validated.settings.drivers.wish, Wish::Unknown, "what runs is not taken away by a typing error");
}

#[test]
fn a_partial_image_is_a_problem_before_any_node_has_reported() {
    let mut policy = valid();
    policy.spec.driver.component.container.image.version = None;
    let validated = validate(&policy, &GPUVirtConfigSpec::default(), &Facts::default());
    assert_eq!(validated.problems[0].reason, "InvalidImage");
}

#[test]
fn a_cluster_whose_nodes_have_not_reported_keeps_its_driver() {
    let validated = validate(&valid(), &GPUVirtConfigSpec::default(), &Facts::default());
    assert_eq!((validated.problems, validated.settings.drivers.wish), (vec![], Wish::Unknown));
}

#[test]
fn each_operating_system_has_its_driver_with_its_own_image() {
    let validated = validate(&valid(), &GPUVirtConfigSpec::default(), &of_systems(&["rhel9.4", "ubuntu24.04"]));
    assert_eq!(validated.problems, []);
    let Wish::Wanted(drivers) = validated.settings.drivers.wish else { panic!("no drivers") };
    let images: Vec<String> = drivers.iter().map(|driver| driver.container.image.reference.to_string()).collect();
    assert_eq!(images, ["nvcr.io/nvidia/driver:595.91.07-rhel9.4", "nvcr.io/nvidia/driver:595.91.07-ubuntu24.04"]);
}

#[test]
fn a_precompiled_driver_needs_a_branch_and_has_an_image_for_each_kernel() {
    let mut policy = valid();
    policy.spec.driver.use_precompiled = Some(true);
    let host = |kernel: &str| Host { os: "ubuntu24.04".to_owned(), kernel: kernel.to_owned(), rhcos: None };
    let facts = Facts { hosts: [host("6.8.0-31-generic"), host("6.8.0-32-generic")].into(), ..Facts::default() };
    let of = |policy: &ClusterPolicy, facts: &Facts| validate(policy, &GPUVirtConfigSpec::default(), facts);
    let whole = of(&policy, &facts);
    assert_eq!((whole.problems[0].reason, whole.settings.drivers.wish), ("InvalidDriverVersion", Wish::Unknown));
    assert!(whole.problems[0].message.contains("set it to 595"), "{}", whole.problems[0].message);
    policy.spec.driver.component.container.image.version = Some("595".to_owned());
    let Wish::Wanted(drivers) = of(&policy, &facts).settings.drivers.wish else { panic!("no drivers") };
    let images: Vec<String> = drivers.iter().map(|driver| driver.container.image.reference.to_string()).collect();
    let tag = |kernel: &str| format!("nvcr.io/nvidia/driver:595-{kernel}-ubuntu24.04");
    assert_eq!(images, [tag("6.8.0-31-generic"), tag("6.8.0-32-generic")]);
    let unknown = of(&policy, &ubuntu());
    assert_eq!((unknown.problems, unknown.settings.drivers.wish), (vec![], Wish::Unknown), "no kernel is known yet");
}

#[test]
fn a_reserved_alias_is_a_problem_and_reaches_no_agent() {
    let alias = |name: &str| ResourceAlias { selector: "10de:1eb8".to_owned(), name: name.to_owned() };
    let config =
        GPUVirtConfigSpec { resource_aliases: vec![alias("nvidia.com/mig-1g")], ..GPUVirtConfigSpec::default() };
    assert_eq!(validate(&valid(), &config, &ubuntu()).problems[0].reason, "ReservedResourceName");
    assert_eq!(node_policy(&valid(), &config, None).aliases, []);
    let config = GPUVirtConfigSpec { resource_aliases: vec![alias("nvidia.com/T4")], ..config };
    assert_eq!(node_policy(&valid(), &config, None).aliases, [alias("nvidia.com/T4")]);
}

#[test]
fn a_budget_that_is_no_share_is_named_and_nodes_change_one_at_a_time() {
    let budget = Budget { max_unavailable: IntOrString::String("some".to_owned()), ..Budget::default() };
    let config = GPUVirtConfigSpec { budget, ..GPUVirtConfigSpec::default() };
    let problem = &validate(&valid(), &config, &ubuntu()).problems[0];
    assert_eq!(problem.reason, "InvalidBudget");
    assert!(problem.message.contains("\"some\""), "{}", problem.message);
    assert_eq!(node_policy(&valid(), &config, None).rules, Rules::default());
}

#[test]
fn an_image_of_the_environment_stands_in_for_none_and_not_for_half_of_one() {
    let mut facts = ubuntu();
    facts.images.insert("driver".to_owned(), "registry.example/driver:1".to_owned());
    let mut policy = valid();
    let of = |policy: &ClusterPolicy| validate(policy, &GPUVirtConfigSpec::default(), &facts);
    let own = of(&policy);
    assert_eq!(wanted(&own).container.image.reference.to_string(), "nvcr.io/nvidia/driver:595.91.07-ubuntu24.04");
    policy.spec.driver.component.container.image.version = None;
    assert_eq!(of(&policy).problems[0].reason, "InvalidImage");
    policy.spec.driver.component.container.image = ImageSpec::default();
    let none = of(&policy);
    assert_eq!(wanted(&none).container.image.reference.to_string(), "registry.example/driver:1-ubuntu24.04");
    facts.images.insert("driver".to_owned(), "registry.example/driver@sha256:ab".to_owned());
    let digest = validate(&policy, &GPUVirtConfigSpec::default(), &facts);
    assert_eq!(wanted(&digest).container.image.reference.to_string(), "registry.example/driver@sha256:ab");
}

#[test]
fn a_disabled_driver_needs_no_image() {
    let validated = checked(|spec| {
        spec.driver.component.enabled = Some(false);
        spec.driver.component.container.image = ImageSpec::default();
    });
    assert_eq!((validated.problems, validated.settings.drivers.wish), (vec![], Wish::NotWanted));
}

#[test]
fn the_last_of_two_environment_entries_wins() {
    let entry = |value: &str| crds::v1::EnvVar { name: "A".to_owned(), value: value.to_owned() };
    let validated = checked(|spec| spec.driver.component.container.env = vec![entry("1"), entry("2")]);
    let env = &wanted(&validated).container.env;
    assert_eq!((env.len(), env[0].value.as_deref()), (1, Some("2")));
}

#[test]
fn a_count_and_a_share_of_unavailable_nodes_both_parse() {
    let rollout = |text: &str| {
        checked(|spec| spec.daemonsets.rolling_update.max_unavailable = Some(text.to_owned())).settings.common.rollout
    };
    assert_eq!(rollout("2"), Rollout::Rolling { max_unavailable: IntOrString::Int(2) });
    assert_eq!(rollout("10%"), Rollout::Rolling { max_unavailable: IntOrString::String("10%".to_owned()) });
}

#[test]
fn files_of_a_config_map_are_mounted_one_by_one_where_the_distribution_looks_for_them() {
    let named = |spec: &mut ClusterPolicySpec| spec.driver.repo_config.config_map_name = Some("repos".to_owned());
    let mut policy = valid();
    named(&mut policy.spec);
    let problems = validate(&policy, &GPUVirtConfigSpec::default(), &ubuntu()).problems;
    assert_eq!(problems[0].reason, "ConfigMapNotFound");
    assert!(problems[0].message.contains("spec.driver.repoConfig.configMapName: there is no ConfigMap repos"));
    let mut facts = ubuntu();
    facts.config_maps.insert("repos".to_owned(), ["custom.list".to_owned()].into());
    let validated = validate(&policy, &GPUVirtConfigSpec::default(), &facts);
    let path = &wanted(&validated).files[0].paths[0].1;
    assert_eq!(path, "/etc/apt/sources.list.d/custom.list");
    facts.hosts = of_systems(&["talos1.11"]).hosts;
    assert_eq!(validate(&policy, &GPUVirtConfigSpec::default(), &facts).problems[0].reason, "UnknownDistribution");
}

fn with_stack(change: impl FnOnce(&mut ClusterPolicySpec), runtimes: &[&str]) -> Validated {
    let mut policy = valid();
    let image = ImageSpec { image: Some("registry.example/image:1".to_owned()), ..ImageSpec::default() };
    for component in [
        &mut policy.spec.toolkit.component,
        &mut policy.spec.device_plugin.component,
        &mut policy.spec.gfd,
        &mut policy.spec.mig_manager.component,
    ] {
        component.enabled = None;
        component.container.image = image.clone();
    }
    change(&mut policy.spec);
    let mut facts = ubuntu();
    facts.runtimes = runtimes.iter().map(|version| (*version).to_owned()).collect();
    facts.config_maps.insert("configs".to_owned(), ["any".to_owned()].into());
    validate(&policy, &GPUVirtConfigSpec::default(), &facts)
}

#[test]
fn a_stack_with_which_nothing_is_wrong_has_no_problem() {
    let validated = with_stack(|_| {}, &["containerd://2.1.0"]);
    assert_eq!(validated.problems, []);
    assert!(matches!(validated.settings.stacked.toolkit, Wish::Wanted(_)));
}

#[test]
fn the_toolkit_waits_for_the_first_node_and_the_rest_does_not() {
    let validated = with_stack(|_| {}, &[]);
    assert_eq!(validated.problems, []);
    assert_eq!(validated.settings.stacked.toolkit, Wish::Unknown);
    assert!(matches!(validated.settings.stacked.device_plugin, Wish::Wanted(_)));
}

#[test]
fn two_runtimes_and_an_unknown_one_are_a_problem_that_names_them() {
    for runtimes in [&["containerd://2.1.0", "cri-o://1.33"][..], &["frisbee://1"]] {
        let problems = with_stack(|_| {}, runtimes).problems;
        assert_eq!(problems[0].reason, "ContainerRuntimeNotSupported");
        assert!(runtimes.iter().all(|runtime| problems[0].message.contains(runtime)), "{}", problems[0].message);
    }
}

#[test]
fn the_nri_plugin_needs_cdi_and_the_toolkit() {
    let problem = |change: fn(&mut ClusterPolicySpec)| with_stack(change, &["containerd://2.1.0"]).problems.remove(0);
    let without_cdi = problem(|spec| (spec.cdi.nri_plugin_enabled, spec.cdi.enabled) = (true, false));
    assert!(without_cdi.message.contains("it needs spec.cdi.enabled"), "{}", without_cdi.message);
    let without_toolkit =
        problem(|spec| (spec.cdi.nri_plugin_enabled, spec.toolkit.component.enabled) = (true, Some(false)));
    assert!(without_toolkit.message.contains("spec.toolkit.enabled"), "{}", without_toolkit.message);
}

#[test]
fn a_configuration_that_is_no_key_is_one_problem_and_what_runs_stays() {
    let named = |default: &str| {
        let default = default.to_owned();
        with_stack(
            |spec| {
                spec.device_plugin.config.name = Some("configs".to_owned());
                spec.device_plugin.config.default = Some(default);
            },
            &["containerd://2.1.0"],
        )
    };
    assert_eq!(named("any").problems, []);
    let validated = named("some");
    assert_eq!(validated.problems.len(), 1, "the plugin and feature discovery fail for one reason");
    assert!(validated.problems[0].message.contains("ConfigMap configs has no key some: it has any"));
    assert_eq!(validated.settings.stacked.device_plugin, Wish::Unknown);
}

#[test]
fn a_file_of_the_runtime_must_be_an_absolute_path() {
    let env = |value: &str| crds::v1::EnvVar { name: "CONTAINERD_CONFIG".to_owned(), value: value.to_owned() };
    let with = |value: &str| {
        let env = env(value);
        with_stack(|spec| spec.toolkit.component.container.env = vec![env], &["containerd://2.1.0"])
    };
    assert_eq!(with("/var/lib/rancher/k3s/agent/etc/containerd/config.toml").problems, []);
    assert_eq!(with("config.toml").problems[0].reason, "InvalidToolkitFile");
}

#[test]
fn an_operand_that_is_off_switches_the_agents_function_off_and_a_mig_default_needs_its_manager() {
    let nodes = |change: fn(&mut ClusterPolicySpec)| {
        let mut policy = valid();
        change(&mut policy.spec);
        node_policy(&policy, &GPUVirtConfigSpec::default(), None)
    };
    assert_eq!(nodes(|_| {}).disabled, []);
    assert_eq!(nodes(|spec| spec.vfio_manager.component.enabled = Some(false)).disabled, [AgentFunction::VfioManager]);
    assert_eq!(
        nodes(|spec| spec.sandbox_device_plugin.enabled = Some(false)).disabled,
        [AgentFunction::SandboxDevicePlugin]
    );
    assert_eq!(
        nodes(|spec| spec.vgpu_device_manager.component.enabled = Some(false)).disabled,
        [AgentFunction::VgpuDeviceManager]
    );
    assert_eq!(nodes(|_| {}).mig_default, None, "its manager is off in this policy");
    assert_eq!(nodes(|spec| spec.mig_manager.component.enabled = None).mig_default, Some("all-disabled"));
    let left_alone = nodes(|spec| {
        spec.mig_manager.component.enabled = None;
        spec.mig_manager.config.default = String::new();
    });
    assert_eq!(left_alone.mig_default, None);
}

#[test]
fn a_log_level_that_does_not_read_is_a_problem_and_reaches_no_agent() {
    let config = |agent: &str| {
        let logging =
            crds::v1alpha1::Logging { level: Some("debug".to_owned()), operator: None, agent: Some(agent.to_owned()) };
        GPUVirtConfigSpec { logging, ..GPUVirtConfigSpec::default() }
    };
    assert_eq!(log_levels(&config("info,vfio=trace")), None);
    let problem = log_levels(&config("gpuvirt=loud")).expect("a problem");
    assert!(problem.reason == "InvalidLogLevel" && problem.message.contains("gpuvirt=loud"), "{problem:?}");
}
