//! How a change of operands goes over the nodes.

use crds::{
    WorkloadMode,
    v1::{ClusterPolicy, PolicyState},
};
use k8s_openapi::{api::apps::v1::DaemonSet, apimachinery::pkg::util::intstr::IntOrString};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::support::{
    agents::{Agent, t4},
    kubelets::Kubelets,
    nodes, policies,
    turn::turn,
    wait,
};

const POLICY: &str = "cluster-policy";
const TOOLKIT: &str = "nvidia-container-toolkit-daemonset";
const PLUGIN: &str = "nvidia-device-plugin-daemonset";

fn image(set: &DaemonSet) -> String {
    let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()).expect("a pod");
    pod.containers[0].image.clone().unwrap_or_default()
}

#[test]
fn the_device_plugin_changes_only_once_the_toolkit_has_changed_on_every_node_one_after_the_other() {
    turn(async |t| {
        let kubelets = Kubelets::start(t);
        let mut agents = Vec::new();
        for name in ["n1", "n2"] {
            nodes::create(t, name, &[]).await;
            let mut gpu = t4("0000:18:00.0");
            (gpu.mode, gpu.driver) = (Some(WorkloadMode::Container), Some("nvidia".to_owned()));
            agents.push(Agent::start(t, name, vec![gpu]).await);
        }
        let _operator = t.operator("op-1").await;
        let version = |version: &str| {
            let of =
                |image: &str| json!({"enabled": true, "repository": "localhost", "image": image, "version": version});
            json!({"spec": {"toolkit": of("toolkit"), "devicePlugin": of("plugin")}})
        };
        let mut policy = policies::valid(POLICY);
        policy["spec"]["toolkit"] = version("1")["spec"]["toolkit"].clone();
        policy["spec"]["devicePlugin"] = version("1")["spec"]["devicePlugin"].clone();
        policies::create(t, policy).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &["2 GPU node(s)"]).await;

        // Old pods take their time to end.
        kubelets.hold_endings();
        policies::patch(t, POLICY, &version("2")).await;
        let sets: Api<DaemonSet> = t.ours();
        let rolling = wait::until(&sets, TOOLKIT, "the toolkit is on its way", |set: &DaemonSet| {
            let status = set.status.clone().unwrap_or_default();
            let told = status.observed_generation == set.metadata.generation;
            image(set).ends_with(":2") && told && status.updated_number_scheduled.unwrap_or(0) < 2
        })
        .await;
        let strategy = rolling.spec.and_then(|spec| spec.update_strategy?.rolling_update?.max_unavailable);
        assert_eq!(strategy, Some(IntOrString::Int(1)), "one node at a time");
        policies::until(t, POLICY, PolicyState::NotReady, "OperandNotReady", &[TOOLKIT, PLUGIN]).await;
        let plugin = sets.get(PLUGIN).await.expect("it is there");
        assert!(image(&plugin).ends_with(":1"), "{} went before the toolkit: {}", plugin.name_any(), image(&plugin));

        kubelets.let_end();
        wait::until(&sets, PLUGIN, "then the plugin follows", |set: &DaemonSet| image(set).ends_with(":2")).await;
        let toolkit = sets.get(TOOLKIT).await.expect("it is there").status.unwrap_or_default();
        assert_eq!(toolkit.updated_number_scheduled, Some(2));
        wait::until(&t.all(), POLICY, "and all is well", |policy: &ClusterPolicy| {
            policy.status.as_ref().is_some_and(|status| status.state == Some(PolicyState::Ready))
        })
        .await;
    });
}
