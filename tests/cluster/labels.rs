//! Node labels: what users and admins put there, and what the operator makes of it.

use crds::{labels, v1::PolicyState, v1alpha1::GPUNode};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Node},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use crate::{
    modes::{CONTAINER, PASSTHROUGH},
    support::{
        agents::{self, Agent, t4},
        kubelets::Kubelets,
        nodes::{self, deployed, label, until_deployed},
        policies,
        tape::{Tape, Written, version},
        turn::turn,
        wait,
    },
};

const POLICY: &str = "cluster-policy";
const DCGM: &str = "nvidia.com/gpu.deploy.dcgm";

fn label_condition(node: &GPUNode) -> Option<&Condition> {
    agents::operator(node)?.conditions.iter().find(|condition| condition.type_ == "WorkloadConfigValid")
}

#[test]
fn an_unknown_mode_falls_back_to_the_default_and_says_so_on_the_node() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let node = nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthru")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["sandboxWorkloads"]["defaultWorkload"] = json!("vm-passthrough");
        policies::create(t, policy).await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
        let event = nodes::until_event(t, node.metadata.uid, "InvalidWorkloadConfig").await;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let wrong = agent.until(t, "the label is complained about", |n| {
            label_condition(n).is_some_and(|c| c.status == "False" && c.reason == "InvalidWorkloadConfig")
        });
        let wrong = wrong.await;
        for text in [&event.message.expect("a note"), &label_condition(&wrong).expect("a condition").message] {
            assert!(text.contains("n1") && text.contains("vm-passthru") && text.contains("vm-vgpu"), "{text}");
        }
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        agent.until(t, "the complaint ends", |n| label_condition(n).is_some_and(|c| c.status == "True")).await;
    });
}

#[test]
fn a_mig_or_device_plugin_configuration_that_there_is_not_is_named_on_the_node_with_those_that_there_are() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let picks = [
            (labels::MIG_CAPABLE, "true"),
            (labels::MIG_CONFIG, "all-1g.6gbb"),
            (labels::DEVICE_PLUGIN_CONFIG, "halved"),
        ];
        let node = nodes::create(t, "n1", &picks).await;
        let maps: Api<ConfigMap> = t.ours();
        let map = |name: &str, data: serde_json::Value| {
            serde_json::from_value(json!({"metadata": {"name": name}, "data": data})).expect("a ConfigMap")
        };
        let sharing = map("sharing", json!({"shared": "version: v1", "whole": "version: v1"}));
        maps.create(&PostParams::default(), &sharing).await.expect("a ConfigMap");
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["migManager"] =
            json!({"enabled": true, "repository": "localhost", "image": "mig-manager", "version": "test"});
        policy["spec"]["devicePlugin"] = json!({
            "enabled": true, "repository": "localhost", "image": "plugin", "version": "test",
            "config": {"name": "sharing"},
        });
        policies::create(t, policy).await;
        let says = |node: &GPUNode, type_: &str, parts: &[&str]| {
            let conditions = agents::operator(node).map(|o| o.conditions.clone()).unwrap_or_default();
            let of =
                |c: &Condition| c.type_ == type_ && c.status == "False" && parts.iter().all(|p| c.message.contains(p));
            conditions.iter().any(of)
        };
        agent
            .until(t, "both are complained about", |node| {
                says(node, "MIGConfigValid", &["n1", "all-1g.6gbb", "default-mig-parted-config", "all-1g.6gb,"])
                    && says(node, "DevicePluginConfigValid", &["n1", "halved", "sharing", "shared, whole"])
            })
            .await;
        nodes::until_event(t, node.metadata.uid.clone(), "UnknownMIGConfig").await;
        nodes::until_event(t, node.metadata.uid, "UnknownDevicePluginConfig").await;

        label(t, "n1", &[(labels::DEVICE_PLUGIN_CONFIG, Some("whole"))]).await;
        let holds = |node: &GPUNode, type_: &str| {
            agents::operator(node).is_some_and(|o| o.conditions.iter().any(|c| c.type_ == type_ && c.status == "True"))
        };
        agent.until(t, "that one is there", |node| holds(node, "DevicePluginConfigValid")).await;
        let own = map(
            "own",
            json!({"config.yaml": "version: v1\nmig-configs: {halves: [{devices: all, mig-enabled: false}]}"}),
        );
        maps.create(&PostParams::default(), &own).await.expect("a ConfigMap");
        policies::patch(t, POLICY, &json!({"spec": {"migManager": {"config": {"name": "own"}}}})).await;
        agent
            .until(t, "the user's layouts count", |node| says(node, "MIGConfigValid", &["own", "(it has halves)"]))
            .await;
        label(t, "n1", &[(labels::MIG_CONFIG, Some("halves"))]).await;
        agent.until(t, "that one is there too", |node| holds(node, "MIGConfigValid")).await;
        for name in ["sharing", "own"] {
            maps.delete(name, &DeleteParams::default()).await.expect("deletable");
        }
    });
}

#[test]
fn a_mode_label_has_no_effect_while_sandbox_workloads_are_off_and_says_how_to_turn_them_on() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let node = nodes::create(t, "n1", &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["sandboxWorkloads"]["enabled"] = json!(false);
        policies::create(t, policy).await;
        until_deployed(t, "n1", &CONTAINER).await;
        let event = nodes::until_event(t, node.metadata.uid, "SandboxWorkloadsDisabled").await;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let text = event.message.expect("a note");
        assert!(text.contains("n1") && text.contains("vm-passthrough"), "{text}");
        assert!(text.contains("kubectl patch clusterpolicy cluster-policy"), "{text}");
        agent
            .until(t, "a condition too", |n| label_condition(n).is_some_and(|c| c.reason == "SandboxWorkloadsDisabled"))
            .await;
        // The line that it names helps.
        policies::patch(t, POLICY, &json!({"spec": {"sandboxWorkloads": {"enabled": true}}})).await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
        agent.until(t, "the complaint ends", |n| label_condition(n).is_some_and(|c| c.status == "True")).await;
    });
}

#[test]
fn an_admins_false_survives_mode_changes_and_a_deleted_label_comes_back() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[(DCGM, "false")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        let without: Vec<&str> = CONTAINER.into_iter().filter(|suffix| *suffix != "dcgm").collect();
        until_deployed(t, "n1", &without).await;
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        let there = until_deployed(t, "n1", &PASSTHROUGH).await;
        assert_eq!(there.labels()[DCGM], "false");
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await;
        let back = until_deployed(t, "n1", &without).await;
        assert_eq!(back.labels()[DCGM], "false");

        label(t, "n1", &[("nvidia.com/gpu.deploy.driver", None)]).await;
        until_deployed(t, "n1", &without).await;
        agent.until_reason(t, true, "Serving").await;
    });
}

#[test]
fn a_vanished_hint_tears_nothing_down() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let hint = labels::NFD_HINTS[0];
        nodes::create(t, "n1", &[(hint, "true"), (labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        nodes::create(t, "n2", &[(hint, "true")]).await;
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        agent.until_reason(t, true, "Serving").await;
        until_deployed(t, "n1", &PASSTHROUGH).await;
        let nodes: Api<Node> = t.all();
        let present = |node: &Node| node.labels().get(labels::GPU_PRESENT).is_some_and(|value| value == "true");
        wait::until(&nodes, "n2", "a hint is worth one label", present).await;

        let first = Tape::<Node>::of(t.all(), "n1").await;
        let second = Tape::<Node>::of(t.all(), "n2").await;
        let written = Tape::<GPUNode>::start(t.all()).await;
        let gone = version(&label(t, "n1", &[(hint, None)]).await);
        label(t, "n2", &[(hint, None)]).await;
        // What is answered later was seen later: both nodes' changes have been dealt with by then.
        label(t, "n1", &[("nvidia.com/gpu.deploy.client", None)]).await;
        let after = until_deployed(t, "n1", &PASSTHROUGH).await;
        assert!(present(&after));
        let closed = |n: &Node| deployed(n).len() < PASSTHROUGH.len() - 1;
        assert!(!first.ever(gone, |w| matches!(w, Written::Is(n) if !present(n) || closed(n))), "labels stay");
        assert!(!second.ever(gone, |w| matches!(w, Written::Is(n) if !present(n))), "a hint's label stays");
        let mode_kept = |n: &GPUNode| n.spec.mode == Some(crds::WorkloadMode::VmPassthrough);
        assert!(!written.ever(gone, |w| matches!(w, Written::Is(n) if !mode_kept(n))), "the mode stays");
    });
}

#[test]
fn a_deleted_node_is_not_brought_back_and_neither_is_its_gpunode() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        for name in ["n1", "n2"] {
            nodes::create(t, name, &[(labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        }
        let _operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let other = Agent::start(t, "n2", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        other.until_reason(t, true, "Serving").await;
        let served = agent.until_reason(t, true, "Serving").await;
        let nodes: Api<Node> = t.all();
        let node = nodes.get("n1").await.expect("n1");
        let written = Tape::<GPUNode>::start(t.all()).await;
        let labelled = Tape::<Node>::start(t.all()).await;
        nodes.delete("n1", &DeleteParams::default()).await.expect("deletable");
        wait::until_gone(&nodes, &node, "the node goes").await;
        wait::until_gone(&t.all(), &served, "the GPUNode goes with its node").await;
        let gone = written.first(0, "gone", |w| matches!(w, Written::Gone(n) if n.name_any() == "n1")).await;
        // The operator goes on with the others.
        label(t, "n2", &[(labels::WORKLOAD_CONFIG, None)]).await;
        until_deployed(t, "n2", &CONTAINER).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &["1 GPU node(s)"]).await;
        assert!(!written.ever(gone, |w| matches!(w, Written::Is(n) if n.name_any() == "n1")), "no GPUNode comes back");
        let left = labelled.first(0, "gone", |w| matches!(w, Written::Gone(n) if n.name_any() == "n1")).await;
        assert!(!labelled.ever(left, |w| matches!(w, Written::Is(n) if n.name_any() == "n1")), "no Node comes back");
    });
}
