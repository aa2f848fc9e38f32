//! Tests take turns on one control plane, and each begins on a clean one.

use std::{collections::BTreeMap, path::Path, sync::OnceLock};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUTransition, GPUVirtConfig, NVIDIADriver},
};
use futures::future::join_all;
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        coordination::v1::Lease,
        core::v1::{ConfigMap, Node, Pod, Service},
        node::v1::RuntimeClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, CustomResourceExt, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    core::{ApiResource, PartialObjectMeta},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use tempfile::TempDir;

use super::{
    NAMESPACE,
    alone::alone,
    cluster::{Cluster, source},
    identity, machine,
    program::Program,
    wait,
};

/// Name of the Lease, as the chart's RBAC has it.
pub const LEASE: &str = "gpuvirt-operator";

/// Types, and their kinds, by which a cluster is OpenShift: none but one test makes them.
pub const OPENSHIFT_CRDS: [(&str, &str); 3] = [
    ("clusterversions.config.openshift.io", "ClusterVersion"),
    ("proxies.config.openshift.io", "Proxy"),
    ("imagestreams.image.openshift.io", "ImageStream"),
];

/// Namespace of pods that use GPUs.
pub const ML: &str = "ml";

static CLUSTER: OnceLock<Result<Cluster, String>> = OnceLock::new();

/// One test's time on the control plane.
pub struct Turn {
    pub cluster: &'static Cluster,
    /// Of the cluster's admin.
    pub client: Client,
    /// Logs and kubeconfigs of this test.
    pub dir: TempDir,
}

/// Runs a test when no other one runs.
pub fn turn(test: impl AsyncFnOnce(&Turn) + Send) {
    let run = async || {
        let turn = Turn::begin().await;
        test(&turn).await;
    };
    alone(run, || {});
}

impl Turn {
    async fn begin() -> Self {
        let first = CLUSTER.get().is_none();
        let mut started = CLUSTER.get_or_init(Cluster::start).as_ref();
        if let (true, Ok(cluster)) = (first, started)
            && let Err(error) = cluster.install_chart().await
        {
            panic!("{error}");
        }
        let cluster = match &mut started {
            Ok(cluster) => *cluster,
            Err(error) => panic!("no control plane: {error}"),
        };
        let turn =
            Self { cluster, client: cluster.client().await, dir: tempfile::tempdir().expect("a temporary directory") };
        if !first {
            turn.clean().await;
        }
        turn
    }

    pub fn all<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    pub fn ours<K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The operator as its pod would run: with the service account's token and nothing more.
    pub async fn operator(&self, pod: &str) -> Program {
        self.operator_logging(pod, "info").await
    }

    pub async fn operator_logging(&self, pod: &str, level: &str) -> Program {
        self.operator_with(pod, level, "127.0.0.1:0").await
    }

    /// `listen`: where its metrics are.
    pub async fn operator_with(&self, pod: &str, level: &str, listen: &str) -> Program {
        let kubeconfig = identity::service_account(self, "gpuvirt-operator", None).await;
        self.operator_by(&kubeconfig, pod, level, listen)
    }

    /// `kubeconfig`: its way to the API server.
    pub fn operator_by(&self, kubeconfig: &Path, pod: &str, level: &str, listen: &str) -> Program {
        Program::start(
            self,
            pod,
            &["operator", "--listen", listen],
            &[
                ("KUBECONFIG", kubeconfig.as_os_str()),
                ("POD_NAMESPACE", NAMESPACE.as_ref()),
                ("POD_NAME", pod.as_ref()),
                ("GPUVIRT_IMAGE", "localhost/gpuvirt:test".as_ref()),
                ("LOG_LEVEL", level.as_ref()),
            ],
        )
    }

    /// Waits until this replica holds the lease.
    pub async fn leads(&self, pod: &str) -> Lease {
        let held_by = |lease: &Lease| lease.spec.as_ref().is_some_and(|s| s.holder_identity.as_deref() == Some(pod));
        wait::until(&self.ours(), LEASE, "the replica holds the lease", held_by).await
    }

    /// Takes away what an earlier test has left. No operator runs any more.
    async fn clean(&self) {
        self.restore_policy_schema().await;
        let released = json!({"metadata": {"finalizers": null}});
        let policies: Api<PartialObjectMeta<ClusterPolicy>> = self.metadata_of();
        for policy in list(&policies).await {
            let _ = policies.patch_metadata(&policy, &PatchParams::default(), &Patch::Merge(&released)).await;
        }
        remove(&policies).await;
        // NVIDIA's operator, with which ours would wait.
        remove_named(&self.ours::<Deployment>(), &["gpu-operator".to_owned()]).await;
        remove_named(&self.ours::<Lease>(), &["53822513.nvidia.com".to_owned()]).await;
        let crds: Api<CustomResourceDefinition> = self.all();
        remove_named(&crds, &OPENSHIFT_CRDS.map(|(name, _)| name.to_owned())).await;
        remove(&self.metadata_of::<GPUTransition>()).await;
        remove(&self.metadata_of::<NVIDIADriver>()).await;
        remove(&self.metadata_of::<GPUVirtConfig>()).await;
        let ours = ListParams::default().labels(labels::POLICY);
        let _ = self.ours::<DaemonSet>().delete_collection(&DeleteParams::background(), &ours).await;
        let _ = self.ours::<ConfigMap>().delete_collection(&DeleteParams::default(), &ours).await;
        remove(&self.ours::<DaemonSet>()).await;
        let _ = self.all::<RuntimeClass>().delete_collection(&DeleteParams::default(), &ours).await;
        let services: Api<Service> = self.ours();
        for service in services.list_metadata(&ours).await.expect("services should be listable") {
            let _ = services.delete(&service.name_any(), &DeleteParams::default()).await;
        }
        let at_once = DeleteParams::default().grace_period(0);
        let pods: Api<Pod> = self.ours();
        join_all(list(&pods).await.iter().map(|pod| pods.delete(pod, &at_once))).await;
        // Users' pods stay when their played node goes, and the next test's have the same names.
        let users: Api<Pod> = Api::namespaced(self.client.clone(), ML);
        let left = list(&users).await;
        join_all(left.iter().map(|pod| users.delete(pod, &at_once))).await;
        let (params, free) = (PatchParams::default(), Patch::Merge(&released));
        join_all(left.iter().map(|pod| users.patch(pod, &params, &free))).await;
        remove_named(&users, &left).await;
        remove(&self.metadata_of::<GPUNode>()).await;
        let nodes: Api<Node> = self.all();
        let (real, fake): (Vec<String>, Vec<String>) =
            list(&nodes).await.into_iter().partition(|node| node == machine::NODE);
        remove_named(&nodes, &fake).await;
        for node in real {
            empty(&nodes, &node).await;
        }
        remove_named(&self.ours::<Lease>(), &[LEASE.to_owned()]).await;
    }

    fn metadata_of<K: Resource<DynamicType = ()>>(&self) -> Api<PartialObjectMeta<K>> {
        Api::all_with(self.client.clone(), &())
    }

    /// Makes the API server accept any ClusterPolicy, as another version's schema might.
    pub async fn loosen_policy_schema(&self) {
        let loose = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let schema = json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec", "value": loose}]);
        self.patch_policy_schema(&schema).await;
        self.accepts_odd_policies(true).await;
    }

    async fn restore_policy_schema(&self) {
        let crds: Api<CustomResourceDefinition> = self.all();
        let live = crds.get(ClusterPolicy::crd_name()).await.expect("the CRD should be there");
        let schema = live.spec.versions[0].schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref());
        let spec = schema.and_then(|s| s.properties.as_ref()).and_then(|p| p.get("spec"));
        if spec.is_some_and(|spec| spec.x_kubernetes_preserve_unknown_fields != Some(true)) {
            return;
        }
        let own = source("crds/generated/nvidia.com_clusterpolicies.yaml");
        let own: serde_json::Value = serde_saphyr::from_str(&own).expect("the CRD should be YAML");
        let path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
        let own = own.pointer(path).expect("the CRD should have a schema");
        self.patch_policy_schema(&json!([{"op": "replace", "path": path, "value": own}])).await;
        self.accepts_odd_policies(false).await;
    }

    async fn patch_policy_schema(&self, patch: &serde_json::Value) {
        let patch = serde_json::from_value(patch.clone()).expect("a JSON patch");
        let crds: Api<CustomResourceDefinition> = self.all();
        let done = crds.patch(ClusterPolicy::crd_name(), &PatchParams::default(), &Patch::Json::<()>(patch)).await;
        done.expect("the CRD should be patchable");
    }

    /// A changed schema is served a moment after it was written, and nothing that can be watched says when.
    async fn accepts_odd_policies(&self, accepted: bool) {
        let policies: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<ClusterPolicy>(&()));
        let mut odd = DynamicObject::new("odd", &ApiResource::erase::<ClusterPolicy>(&()));
        odd.data = json!({"spec": {"operator": 5}});
        let try_it = kube::api::PostParams { dry_run: true, field_manager: None };
        wait::eventually("the changed schema is served", async || {
            (policies.create(&try_it, &odd).await.is_ok() == accepted).then_some(())
        })
        .await;
    }
}

/// Operands that a test has let onto the real node would never be ready for the others, and an operator that the test
/// took with it at its end has not taken their labels back.
async fn empty(nodes: &Api<Node>, name: &str) {
    let node = nodes.get_metadata(name).await.expect("a node should be readable");
    let deploys =
        node.labels().keys().filter(|key| key.starts_with(labels::DEPLOY_PREFIX) || *key == labels::GPU_PRESENT);
    let mut labels: BTreeMap<&str, Option<&str>> = deploys.map(|key| (key.as_str(), None)).collect();
    labels.insert(labels::DEPLOY_OPERANDS, Some("false"));
    let patch = json!({"metadata": {"labels": labels}});
    let done = nodes.patch_metadata(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.expect("a node should be patchable");
}

async fn list<K: Resource + Clone + DeserializeOwned + std::fmt::Debug>(api: &Api<K>) -> Vec<String> {
    let found = api.list_metadata(&ListParams::default()).await.expect("objects should be listable");
    found.items.iter().map(ResourceExt::name_any).collect()
}

async fn remove<K>(api: &Api<K>)
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    remove_named(api, &list(api).await).await;
}

async fn remove_named<K>(api: &Api<K>, names: &[String])
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    join_all(names.iter().map(|name| async move {
        let _ = api.delete(name, &DeleteParams::background()).await;
    }))
    .await;
    wait::eventually("what an earlier test made has gone", async || {
        let left = list(api).await;
        names.iter().all(|name| !left.contains(name)).then_some(())
    })
    .await;
}
