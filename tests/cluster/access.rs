//! What the programs' identities may do, and what not: RBAC and the admission policy `gpuvirt-agent-own-node`.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUNode, GPUNodeSpec},
};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    core::v1::Pod,
    rbac::v1::ClusterRoleBinding,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::support::{
    NAMESPACE, cluster, identity, nodes,
    turn::{Turn, turn},
    wait,
};

const AGENT: &str = "gpuvirt-agent";

/// The agent of a node, with the token that its pod would have.
async fn agent_on(t: &Turn, node: &str) -> Api<GPUNode> {
    nodes::create(t, node, &[]).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("agent-{node}")},
        "spec": {"nodeName": node, "serviceAccountName": AGENT, "containers": [{"name": "c", "image": "c"}]},
    });
    let pods: Api<Pod> = t.ours();
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(pod).expect("a Pod")).await.expect("a pod");
    let own = Api::all(client(t, AGENT, Some(&pod)).await);
    in_force(&own).await;
    own
}

/// An admission policy is in force a moment after it was made, and nothing that can be watched says when.
async fn in_force(agent: &Api<GPUNode>) {
    let probe = PostParams { dry_run: true, field_manager: None };
    let foreign = GPUNode::new("nobodys", GPUNodeSpec::default());
    wait::eventually("the admission policy is in force", async || {
        agent.create(&probe, &foreign).await.is_err().then_some(())
    })
    .await;
}

async fn client(t: &Turn, account: &str, pod: Option<&Pod>) -> Client {
    cluster::client(&identity::service_account(t, account, pod).await).await
}

async fn create(api: &Api<GPUNode>, node: &str, spec: GPUNodeSpec) -> Result<(), String> {
    let done = api.create(&PostParams::default(), &GPUNode::new(node, spec)).await;
    done.map(drop).map_err(|error| error.to_string())
}

async fn merge_status(api: &Api<GPUNode>, node: &str, status: &Value) -> Result<GPUNode, String> {
    let patch = json!({"status": status});
    let done = api.patch_status(node, &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.map_err(|error| error.to_string())
}

/// As the agent writes.
async fn apply_status(api: &Api<GPUNode>, node: &str, version: &str) -> Result<GPUNode, String> {
    let patch = json!({
        "apiVersion": "gpuvirt.io/v1alpha1", "kind": "GPUNode", "metadata": {"name": node},
        "status": {"agent": {"version": version}},
    });
    let done = api.patch_status(node, &PatchParams::apply(labels::AGENT_MANAGER).force(), &Patch::Apply(&patch)).await;
    done.map_err(|error| error.to_string())
}

async fn merge_spec(api: &Api<GPUNode>, node: &str) -> Result<GPUNode, String> {
    let patch = json!({"spec": {"mode": "container"}});
    let done = api.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.map_err(|error| error.to_string())
}

async fn delete(api: &Api<GPUNode>, node: &str) -> Result<(), String> {
    api.delete(node, &DeleteParams::default()).await.map(drop).map_err(|error| error.to_string())
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, String>, why: &str) {
    let error = result.expect_err("should have been refused");
    assert!(error.contains(why), "{error}");
}

fn version(version: &str) -> Value {
    json!({"agent": {"version": version}})
}

#[test]
fn an_agent_creates_and_reports_its_own_gpunode_and_nothing_else() {
    turn(async |t| {
        let (a, b) = (agent_on(t, "a").await, agent_on(t, "b").await);
        let foreign = "the agent on node a may change only GPUNode a, not b";
        let empty = "creates GPUNode a with an empty spec";
        refused(create(&a, "b", GPUNodeSpec::default()).await, foreign);
        let mode = GPUNodeSpec { mode: Some(WorkloadMode::VmPassthrough), ..GPUNodeSpec::default() };
        refused(create(&a, "a", mode).await, empty);
        refused(create(&a, "a", GPUNodeSpec { epoch: 5, ..GPUNodeSpec::default() }).await, empty);
        create(&a, "a", GPUNodeSpec::default()).await.expect("its own");
        create(&b, "b", GPUNodeSpec::default()).await.expect("its own");

        merge_status(&a, "a", &version("1")).await.expect("its own part");
        let applied = apply_status(&a, "a", "2").await.expect("its own part");
        assert_eq!(applied.status.and_then(|s| s.agent).expect("an agent's status").version, "2");
        let admin: Api<GPUNode> = t.all();
        merge_status(&admin, "a", &json!({"operator": {"ready": "True"}})).await.expect("the operator's part");
        merge_status(&a, "a", &version("3")).await.expect("beside the operator's part");

        refused(merge_status(&a, "b", &version("1")).await, foreign);
        refused(apply_status(&a, "b", "1").await, foreign);
        let own = "may change only status.agent of GPUNode";
        refused(merge_status(&a, "a", &json!({"operator": {"ready": "False"}})).await, own);
        refused(merge_status(&a, "a", &json!({"operator": null})).await, own);
        refused(merge_status(&b, "b", &json!({"operator": {"ready": "True"}})).await, own);
        refused(merge_spec(&a, "a").await, "cannot patch resource \"gpunodes\"");
        refused(delete(&a, "a").await, "cannot delete resource \"gpunodes\"");
        let both = json!({"spec": {"mode": "container"}, "status": version("4")});
        let _ = a.patch_status("a", &PatchParams::default(), &Patch::Merge(&both)).await;
        assert_eq!(admin.get("a").await.expect("a").spec.mode, None, "a spec in a status patch changes nothing");
        merge_spec(&admin, "b").await.expect("others are not held by the policy");
    });
}

#[test]
fn a_token_that_names_no_node_changes_no_gpunode() {
    turn(async |t| {
        let free: Api<GPUNode> = Api::all(client(t, AGENT, None).await);
        in_force(&free).await;
        let admin: Api<GPUNode> = t.all();
        create(&admin, "a", GPUNodeSpec::default()).await.expect("the admin may");
        refused(create(&free, "b", GPUNodeSpec::default()).await, "names no node");
        refused(merge_status(&free, "a", &version("1")).await, "names no node");
    });
}

#[test]
fn the_admission_policy_holds_an_agent_that_has_every_right() {
    turn(async |t| {
        let a = agent_on(t, "a").await;
        create(&a, "a", GPUNodeSpec::default()).await.expect("its own");
        create(&t.all(), "b", GPUNodeSpec::default()).await.expect("the admin may");
        let all = Everything::give(t, AGENT).await;
        refused(merge_spec(&a, "a").await, "and patch its status, not UPDATE the object");
        refused(delete(&a, "a").await, "and patch its status, not DELETE the object");
        refused(delete(&a, "b").await, "may change only GPUNode a, not b");
        all.take_back(t).await;
    });
}

/// All rights for a service account, while a test looks at what else holds it.
struct Everything(ClusterRoleBinding);

impl Everything {
    async fn give(t: &Turn, account: &str) -> Self {
        let name = format!("test-{account}-everything");
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
        });
        let binding = serde_json::from_value(binding).expect("a binding");
        let bindings: Api<ClusterRoleBinding> = t.all();
        let _left = bindings.delete(&name, &DeleteParams::default()).await;
        let made = bindings.create(&PostParams::default(), &binding).await.expect("the admin may");
        let own = client(t, account, None).await;
        wait::eventually("the rights are there", async || {
            may(&own, "delete gpunodes.gpuvirt.io", NAMESPACE).await.then_some(())
        })
        .await;
        Self(made)
    }

    async fn take_back(self, t: &Turn) {
        let bindings: Api<ClusterRoleBinding> = t.all();
        bindings.delete(&self.0.name_any(), &DeleteParams::default()).await.expect("the admin may");
    }
}

async fn may(client: &Client, right: &str, namespace: &str) -> bool {
    let (verb, what) = right.split_once(' ').expect("a right should be a verb and a resource");
    let (what, name) = what.split_once('/').map_or((what, None), |(what, name)| (what, Some(name.to_owned())));
    let (what, subresource) =
        what.split_once(':').map_or((what, None), |(what, subresource)| (what, Some(subresource.to_owned())));
    let (resource, group) = what.split_once('.').unwrap_or((what, ""));
    let attributes = ResourceAttributes {
        group: Some(group.to_owned()),
        name,
        namespace: Some(namespace.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await.expect("everybody may ask");
    answer.status.expect("an answer").allowed
}

/// `verb resource.group[:subresource][/name]`
struct Rights {
    account: &'static str,
    may: &'static [&'static str],
    may_not: &'static [&'static str],
}

const RIGHTS: [Rights; 4] = [
    Rights {
        account: AGENT,
        may: &["create events.events.k8s.io", "create gpunodes.gpuvirt.io", "watch gpunodes.gpuvirt.io"],
        may_not: &[
            "get nodes",
            "list pods",
            "get configmaps",
            "get secrets",
            "patch gpunodes.gpuvirt.io",
            "delete gpunodes.gpuvirt.io",
            "get clusterpolicies.nvidia.com",
        ],
    },
    Rights {
        account: "gpuvirt-operator",
        may: &[
            "list nodes",
            "patch gpunodes.gpuvirt.io:status",
            "create daemonsets.apps",
            "update leases.coordination.k8s.io/gpuvirt-operator",
            "get customresourcedefinitions.apiextensions.k8s.io/clusterpolicies.nvidia.com",
            "watch customresourcedefinitions.apiextensions.k8s.io/kubevirts.kubevirt.io",
            "patch kubevirts.kubevirt.io",
            "patch hyperconvergeds.hco.kubevirt.io",
            "list virtualmachineinstances.kubevirt.io",
            "create pods:eviction",
            "update virtualmachines.subresources.kubevirt.io:stop",
        ],
        may_not: &[
            "approve gputransitions.gpuvirt.io",
            "delete virtualmachineinstances.kubevirt.io",
            "patch virtualmachineinstances.kubevirt.io",
            "delete kubevirts.kubevirt.io",
            "get secrets",
            "create gpunodes.gpuvirt.io",
            "delete nodes",
            "create pods",
            "update leases.coordination.k8s.io/other",
            "list customresourcedefinitions.apiextensions.k8s.io",
        ],
    },
    Rights {
        account: "gpuvirt-uninstall",
        may: &["delete clusterpolicies.nvidia.com", "patch nodes:status", "delete daemonsets.apps"],
        may_not: &["delete nodes", "get secrets", "create clusterpolicies.nvidia.com"],
    },
    Rights { account: "nvidia-driver", may: &[], may_not: &["get nodes", "get pods", "patch nodes", "get secrets"] },
];

#[test]
fn each_identity_may_do_its_own_work_and_no_more() {
    turn(async |t| {
        let mut wrong = Vec::new();
        for Rights { account, may: yes, may_not: no } in RIGHTS {
            let own = client(t, account, None).await;
            for right in yes.iter().chain(no) {
                let allowed = may(&own, right, NAMESPACE).await;
                if allowed != yes.contains(right) {
                    wrong.push(format!("{account}: {right}: {allowed}"));
                }
            }
        }
        let operator = client(t, "gpuvirt-operator", None).await;
        // A driver's pod is deleted where its DaemonSet is, and no other pod anywhere.
        for right in ["create daemonsets.apps", "delete pods"] {
            if may(&operator, right, "default").await {
                wrong.push(format!("the operator may {right} outside of its namespace"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    });
}
