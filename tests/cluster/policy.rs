//! What a ClusterPolicy is told: `ready` only when it is, and why not.

use crds::{
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{GPUVirtConfig, OperandStatus},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, PartialObjectMeta},
};
use serde_json::{Value, json};

use crate::support::{
    NAMESPACE,
    agents::{Agent, qemu, t4},
    kubelets::Kubelets,
    nodes, policies,
    turn::turn,
    wait,
};

const AGENT: &str = "gpuvirt-agent";
const POLICY: &str = "cluster-policy";

#[test]
fn without_gpu_nodes_a_policy_is_ready_and_says_that_there_are_none() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "plain", &[]).await;
        let _operator = t.operator("op-1").await;
        let created = policies::create(t, policies::valid(POLICY)).await;
        let policy = policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &["no node"]).await;
        assert_eq!(policy.status.as_ref().and_then(|s| s.namespace.as_deref()), Some(NAMESPACE));
        let condition = policies::ready(&policy).expect("a Ready condition");
        assert_eq!(condition.observed_generation, policy.metadata.generation);
        nodes::until_event(t, created.metadata.uid, "NoGPUNodes").await;
    });
}

#[test]
fn the_charts_own_policy_becomes_ready() {
    turn(async |t| {
        let show = ["template", "gpuvirt", "charts/gpuvirt", "-n", NAMESPACE, "--show-only"];
        let rendered = t.cluster.helm(&[&show[..], &["templates/clusterpolicy.yaml"]].concat()).expect("a rendering");
        let policy: Value = serde_saphyr::from_str(&rendered).expect("the chart should render YAML");
        let _operator = t.operator("op-1").await;
        policies::create(t, policy).await;
        policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &[]).await;
    });
}

#[test]
fn a_policy_is_ready_only_when_its_gpu_node_is() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &[]).await;

        // The agent's first look: no driver has taken the GPU yet.
        let mut bare = t4("0000:18:00.0");
        (bare.mode, bare.driver) = (Some(crds::WorkloadMode::Container), None);
        let agent = Agent::start(t, "n1", vec![bare]).await;
        let reason = "see the pods of nvidia-driver-daemonset";
        policies::until(t, POLICY, PolicyState::NotReady, "GPUNodeNotReady", &["n1", "0000:18:00.0", reason]).await;
        agent.until_reason(t, false, "DriverNotLoaded").await;

        agent.change(|host| host.gpus[0].driver = Some("nvidia".to_owned()));
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &["1 GPU node(s)"]).await;

        // A policy is not ready either while an operand's pod is not.
        nodes::label(t, "n1", &[("nvidia.com/gpu.deploy.driver", Some("paused"))]).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        let _gone = nodes::until_deployed(t, "n1", &CONTAINER_WITHOUT_DRIVER).await;
    });
}

const CONTAINER_WITHOUT_DRIVER: [&str; 8] = [
    "client",
    "container-toolkit",
    "dcgm",
    "dcgm-exporter",
    "device-plugin",
    "gpu-feature-discovery",
    "node-status-exporter",
    "operator-validator",
];

fn report(config: &GPUVirtConfig) -> &[OperandStatus] {
    config.status.as_ref().map(|status| status.operands.as_slice()).unwrap_or_default()
}

#[test]
fn an_image_that_cannot_be_pulled_is_named_in_the_policy_and_in_the_report() {
    turn(async |t| {
        nodes::create(t, "n1", &[]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let pods: Api<Pod> = t.ours();
        let driver = ListParams::default().labels("app=nvidia-driver-daemonset");
        let pod = wait::eventually("the driver's pod is there", async || {
            pods.list(&driver).await.expect("listable").items.into_iter().next()
        })
        .await;
        let (pod, image) = (pod.name_any(), "localhost/nvidia-driver:test-ubuntu24.04");
        let waiting = json!({"reason": "ImagePullBackOff", "message": "manifest unknown"});
        let status = json!({"status": {"phase": "Pending", "containerStatuses": [{
            "name": "nvidia-driver-ctr", "image": image, "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": waiting},
        }]}});
        pods.patch_status(&pod, &PatchParams::default(), &Patch::Merge(&status)).await.expect("patchable");
        let parts = ["on node n1", "nvidia-driver-ctr", image, "ImagePullBackOff: manifest unknown"];
        policies::until(t, POLICY, PolicyState::NotReady, "OperandNotReady", &parts).await;
        wait::until(&t.all(), "default", "the operator's own object has the report", |config: &GPUVirtConfig| {
            let operand = report(config).iter().find(|operand| operand.name == "nvidia-driver-daemonset");
            let failing = operand.and_then(|operand| operand.failing.as_ref());
            failing.is_some_and(|failing| failing.node == "n1" && failing.pod == pod && failing.image == image)
        })
        .await;
        // Once it runs, nothing of it is left.
        let _kubelets = Kubelets::start(t);
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        wait::until(&t.all(), "default", "and all is well", |config: &GPUVirtConfig| {
            report(config).iter().all(|operand| operand.failing.is_none() && operand.reason.is_empty())
        })
        .await;
    });
}

#[test]
fn the_reports_object_leaves_with_the_policy_unless_somebody_has_set_something_in_it() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let configs: Api<GPUVirtConfig> = t.all();
        let policies: Api<ClusterPolicy> = t.all();
        for keep in [false, true] {
            let policy = policies::create(t, policies::valid(POLICY)).await;
            wait::until(&configs, "default", "it is made", |config: &GPUVirtConfig| !report(config).is_empty()).await;
            if keep {
                let own = json!({"spec": {"resyncSeconds": 60}});
                configs.patch("default", &PatchParams::default(), &Patch::Merge(&own)).await.expect("patchable");
                wait::until(&t.ours(), AGENT, "it is seen", |agent: &DaemonSet| {
                    let args = agent.spec.as_ref().and_then(|s| s.template.spec.as_ref()?.containers[0].args.clone());
                    args.into_iter().flatten().any(|arg| arg == "--resync-seconds=60")
                })
                .await;
            }
            policies.delete(POLICY, &DeleteParams::default()).await.expect("deletable");
            wait::until_gone(&policies, &policy, "the policy goes").await;
            assert_eq!(configs.get_opt("default").await.expect("readable").is_some(), keep);
        }
    });
}

#[test]
fn a_policy_waits_for_its_operands_pods() {
    turn(async |t| {
        nodes::create(t, "n1", &[]).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        // Nobody plays the kubelet: the agent's pod is there and does not run.
        let waits = ["DaemonSet gpuvirt-agent", "0 of 1 pod(s) ready"];
        policies::until(t, POLICY, PolicyState::NotReady, "OperandNotReady", &waits).await;
        let _kubelets = Kubelets::start(t);
        policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &[]).await;
    });
}

#[test]
fn a_partial_image_is_named_while_the_agent_runs_all_the_same_and_a_fix_recovers() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let _operator = t.operator("op-1").await;
        let mut policy = policies::valid(POLICY);
        policy["spec"]["driver"]["version"] = Value::Null;
        policies::create(t, policy).await;
        policies::until(t, POLICY, PolicyState::NotReady, "InvalidImage", &["spec.driver", "lacks version"]).await;
        let is_there = |set: &DaemonSet| set.metadata.deletion_timestamp.is_none();
        wait::until(&t.ours(), AGENT, "the agent's DaemonSet is there", is_there).await;
        policies::patch(t, POLICY, &json!({"spec": {"driver": {"version": "test"}}})).await;
        policies::until(t, POLICY, PolicyState::Ready, "NoGPUNodes", &[]).await;
    });
}

#[test]
fn the_older_of_two_policies_counts_and_the_younger_takes_over_when_it_goes() {
    turn(async |t| {
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid("a-older")).await;
        policies::until(t, "a-older", PolicyState::Ready, "NoGPUNodes", &[]).await;
        // One of the same second would be ordered by name.
        policies::create(t, policies::valid("b-younger")).await;
        policies::until(t, "b-younger", PolicyState::Ignored, "OlderPolicyCounts", &["a-older", "delete one"]).await;
        let policies: Api<ClusterPolicy> = t.all();
        policies.delete("a-older", &DeleteParams::default()).await.expect("deletable");
        policies::until(t, "b-younger", PolicyState::Ready, "NoGPUNodes", &[]).await;
        let owner = |set: &DaemonSet| {
            set.metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(crds::labels::POLICY))
                .is_some_and(|p| p == "b-younger")
        };
        wait::until(&t.ours(), AGENT, "the agent is the younger policy's", owner).await;
    });
}

#[test]
fn a_policy_that_does_not_decode_says_so_and_the_good_one_goes_on() {
    turn(async |t| {
        t.loosen_policy_schema().await;
        let kind = ApiResource::erase::<ClusterPolicy>(&());
        let any: Api<DynamicObject> = Api::all_with(t.client.clone(), &kind);
        let mut odd = DynamicObject::new("a-broken", &kind);
        odd.data = json!({"spec": {"sandboxWorkloads": {"mode": 5}}});
        any.create(&PostParams::default(), &odd).await.expect("the loose schema should take it");
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid("b-good")).await;
        policies::until(t, "b-good", PolicyState::Ready, "NoGPUNodes", &[]).await;
        wait::until(&any, "a-broken", "it is told", |policy: &DynamicObject| {
            let conditions = policy.data["status"]["conditions"].as_array();
            conditions.into_iter().flatten().any(|c| {
                let message = c["message"].as_str().unwrap_or_default();
                c["reason"] == "Undecodable" && message.contains("does not decode") && message.contains('5')
            })
        })
        .await;
        // It is left alone: no finalizer keeps it, and the other one is not disturbed by its end.
        any.delete("a-broken", &DeleteParams::default()).await.expect("deletable");
        let left: Api<PartialObjectMeta<ClusterPolicy>> = Api::all(t.client.clone());
        wait::eventually("the broken one has gone", async || {
            left.get_metadata_opt("a-broken").await.expect("readable").is_none().then_some(())
        })
        .await;
        policies::patch(t, "b-good", &json!({"spec": {"driver": {"version": null}}})).await;
        policies::until(t, "b-good", PolicyState::NotReady, "InvalidImage", &[]).await;
    });
}

#[test]
fn a_gpu_in_use_by_a_vm_is_no_reason_to_be_not_ready() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[(crds::labels::WORKLOAD_CONFIG, "vm-passthrough")]).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        agent.until_reason(t, true, "Serving").await;
        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        agent
            .until(t, "the VM is reported", |node| {
                crate::support::agents::agent(node).is_some_and(|a| a.summary.in_use == 1)
            })
            .await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        agent.until_reason(t, true, "Serving").await;
    });
}
