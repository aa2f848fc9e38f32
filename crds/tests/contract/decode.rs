//! Whatever the peer accepts decodes here.

use crds::{
    WorkloadMode,
    v1::{CcMode, ClusterPolicy, ClusterPolicySpec, KernelModuleType, MigStrategy, PolicyState, UpdateStrategy},
};
use k8s_openapi::{
    api::core::v1::{EnvVar, ResourceRequirements},
    apimachinery::pkg::{api::resource::Quantity, util::intstr::IntOrString},
};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

fn peer_default() -> Value {
    serde_saphyr::from_str(include_str!("../fixtures/peer-default.yaml")).unwrap()
}

fn decoded(object: &Value) -> ClusterPolicy {
    serde_json::from_value(object.clone()).unwrap()
}

/// Pointers to every value below this one.
fn pointers(at: &str, value: &Value, all: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(k, v)| (k.replace('~', "~0").replace('/', "~1"), v)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    };
    for (key, child) in children {
        let pointer = format!("{at}/{key}");
        pointers(&pointer, child, all);
        all.push(pointer);
    }
}

#[test]
fn the_peers_default_policy_decodes_to_what_it_says() {
    let policy = decoded(&peer_default());
    let spec = &policy.spec;
    assert_eq!(policy.metadata.name.as_deref(), Some("cluster-policy"));
    assert!(!spec.sandbox_workloads.is_enabled());
    assert_eq!(spec.sandbox_workloads.default_workload, WorkloadMode::Container);
    assert_eq!(spec.driver.component.container.image.version.as_deref(), Some("595.91.07"));
    assert_eq!(spec.driver.manager.image.image.as_deref(), Some("k8s-driver-manager"));
    assert_eq!(spec.driver.kernel_module_type, KernelModuleType::Auto);
    assert_eq!(spec.driver.use_nvidia_driver_crd, Some(false));
    assert_eq!(spec.driver.startup_probe.as_ref().unwrap().failure_threshold, Some(120));
    assert!(spec.driver.upgrade_policy.auto_upgrade);
    assert_eq!(spec.driver.upgrade_policy.max_unavailable, IntOrString::String("25%".to_owned()));
    assert_eq!(spec.daemonsets.update_strategy, UpdateStrategy::RollingUpdate);
    assert_eq!(spec.daemonsets.tolerations[0].key.as_deref(), Some("nvidia.com/gpu"));
    assert_eq!(spec.mig.strategy, Some(MigStrategy::Single));
    assert_eq!(spec.cc_manager.default_mode, Some(CcMode::On));
    assert_eq!(spec.operator.use_ocp_driver_toolkit, Some(false));
    assert_eq!(spec.host_paths.root_fs.as_deref(), Some("/"));
    assert_eq!(spec.dcgm_exporter.component.container.env[0].value, ":9400");
    assert_eq!(spec.dcgm_exporter.component.container.resources.requests["cpu"], Quantity("1".to_owned()));
    assert_eq!(spec.dcgm_exporter.service_monitor.relabelings[0]["targetLabel"], "node");
    assert_eq!(spec.kata_manager.config.runtime_classes[0].name, "kata-qemu-nvidia-gpu");
    assert_eq!(spec.sandbox_device_plugin.container.args, ["--v=2"]);
    assert!(spec.gfd.is_enabled(false) && !spec.node_status_exporter.is_enabled(true));
    assert_eq!(policy.status.unwrap().state, Some(PolicyState::Ready));
}

#[test]
fn no_field_is_lost_from_decoding_to_encoding() {
    let before = peer_default();
    let after = serde_json::to_value(decoded(&before)).unwrap();
    let mut all = Vec::new();
    pointers("", &before, &mut all);
    for pointer in all {
        let (was, is) = (before.pointer(&pointer).unwrap(), after.pointer(&pointer));
        match was {
            Value::Null | Value::Bool(_) | Value::String(_) => assert_eq!(Some(was), is, "{pointer}"),
            // A quantity comes back as text.
            Value::Number(number) => assert!(
                is == Some(was) || is.and_then(Value::as_str) == Some(&number.to_string()),
                "{pointer}: {number} is now {is:?}"
            ),
            // Empty objects and lists say nothing.
            Value::Object(_) | Value::Array(_) => {}
        }
    }
}

#[test]
fn encoding_and_decoding_again_gives_the_same_policy() {
    let once = decoded(&peer_default());
    assert_eq!(decoded(&serde_json::to_value(&once).unwrap()), once);
}

#[test]
fn a_null_anywhere_in_the_spec_counts_as_absent() {
    let object = peer_default();
    let mut all = vec!["/spec".to_owned()];
    pointers("/spec", &object["spec"], &mut all);
    assert!(all.len() > 250, "only {} places", all.len());
    for pointer in all {
        let mut nulled = object.clone();
        *nulled.pointer_mut(&pointer).unwrap() = Value::Null;
        assert!(serde_json::from_value::<ClusterPolicy>(nulled).is_ok(), "{pointer}");
    }
}

#[test]
fn a_section_that_the_schema_requires_may_be_missing() {
    for section in peer_default()["spec"].as_object().unwrap().keys() {
        let mut object = peer_default();
        object["spec"].as_object_mut().unwrap().remove(section);
        decoded(&object);
    }
}

#[test]
fn a_policy_without_spec_or_with_an_empty_one_is_all_defaults() {
    for object in [
        json!({"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}),
        json!({"metadata": {"name": "cluster-policy"}, "spec": null, "status": null}),
        json!({"metadata": {"name": "cluster-policy"}, "spec": {}, "status": {}}),
    ] {
        assert_eq!(decoded(&object).spec, ClusterPolicySpec::default());
    }
}

#[test]
fn unknown_fields_and_those_of_older_versions_are_passed_over() {
    let mut object = peer_default();
    let expected = decoded(&object);
    for (pointer, field, value) in [
        ("/spec", "nodeFeatureDiscovery", json!({"enabled": true})),
        ("/spec/operator", "defaultGPUMode", json!("container")),
        ("/spec/driver", "licensing", json!(["x"])),
        ("/spec/driver", "rollingUpdate", json!({"maxUnavailable": 1})),
        ("/spec/driver/manager", "resources", json!(null)),
        ("/spec/toolkit", "securityContext", json!({"privileged": true, "seLinuxOptions": {"level": "s0"}})),
        ("/spec/devicePlugin", "nodeSelector", json!({"a": "b"})),
        ("/spec/devicePlugin", "affinity", json!({"nodeAffinity": {}})),
        ("/spec/dcgmExporter/env/0", "valueFrom", json!({"fieldRef": {"fieldPath": "spec.nodeName"}})),
        ("/spec/dcgmExporter/resources", "claims", json!([])),
        ("/spec/sandboxWorkloads", "patchKubevirt", json!(true)),
        ("/status", "observedGeneration", json!(7)),
    ] {
        object.pointer_mut(pointer).unwrap()[field] = value;
    }
    assert_eq!(decoded(&object), expected);
}

#[test]
fn deprecated_fields_that_the_schema_still_has_are_kept() {
    let mut object = peer_default();
    object["spec"]["operator"]["defaultRuntime"] = json!("containerd");
    object["spec"]["operator"]["initContainer"] = json!({"repository": "nvcr.io/nvidia", "image": "cuda"});
    object["spec"]["psp"] = json!({"enabled": false});
    object["spec"]["dcgm"]["hostPort"] = json!(5555);
    object["spec"]["driver"]["useOpenKernelModules"] = json!(true);
    object["spec"]["driver"]["licensingConfig"]["configMapName"] = json!("licensing");
    let spec = decoded(&object).spec;
    assert_eq!(spec.operator.default_runtime.as_deref(), Some("containerd"));
    assert_eq!(spec.operator.init_container.image.as_deref(), Some("cuda"));
    assert_eq!(spec.psp.enabled, Some(false));
    assert_eq!(spec.dcgm.host_port, Some(5555));
    assert_eq!(spec.driver.use_open_kernel_modules, Some(true));
    assert_eq!(spec.driver.licensing_config.config_map_name.as_deref(), Some("licensing"));
}

#[test]
fn a_count_is_as_good_as_a_share_for_max_unavailable() {
    let mut object = peer_default();
    object["spec"]["driver"]["upgradePolicy"]["maxUnavailable"] = json!(3);
    assert_eq!(decoded(&object).spec.driver.upgrade_policy.max_unavailable, IntOrString::Int(3));
}

#[test]
fn a_value_that_the_schema_refuses_does_not_decode_and_the_error_names_the_choices() {
    let mut object = peer_default();
    object["spec"]["sandboxWorkloads"]["mode"] = json!("kubevrt");
    let refused = serde_json::from_value::<ClusterPolicy>(object).unwrap_err().to_string();
    assert!(refused.contains("kubevrt") && refused.contains("kata"), "{refused}");
}

#[test]
fn one_policy_that_does_not_decode_keeps_its_name_and_leaves_the_others_alone() {
    let mut bad = peer_default();
    bad["metadata"]["name"] = json!("second");
    bad["spec"]["driver"]["kernelModuleType"] = json!("closed");
    let all: Vec<DeserializeGuard<ClusterPolicy>> = serde_json::from_value(json!([bad, peer_default()])).unwrap();
    let refused = all[0].0.as_ref().unwrap_err();
    assert_eq!(refused.metadata.name.as_deref(), Some("second"));
    assert!(refused.error.contains("closed"), "{}", refused.error);
    assert_eq!(all[1].0.as_ref().unwrap(), &decoded(&peer_default()));
}

#[test]
fn resources_and_environment_go_into_a_pod_as_they_are() {
    let container = decoded(&peer_default()).spec.dcgm_exporter.component.container;
    let resources = ResourceRequirements::from(&container.resources);
    assert_eq!(
        serde_json::to_value(resources).unwrap(),
        json!({"limits": {"memory": "256Mi"}, "requests": {"cpu": "1"}})
    );
    let env = EnvVar::from(&container.env[0]);
    assert_eq!(serde_json::to_value(env).unwrap(), json!({"name": "DCGM_EXPORTER_LISTEN", "value": ":9400"}));
}

#[test]
fn what_rust_fills_in_is_what_the_api_server_fills_in() {
    let spec = ClusterPolicySpec::default();
    assert!(spec.cdi.enabled);
    assert_eq!(spec.operator.runtime_class, "nvidia");
    assert_eq!(spec.host_paths.kubelet_root_dir, "/var/lib/kubelet");
    assert_eq!(spec.mig_manager.config.default, "all-disabled");
    assert_eq!(spec.vgpu_device_manager.config.default, "default");
    assert!(!spec.driver.upgrade_policy.auto_upgrade);
}
