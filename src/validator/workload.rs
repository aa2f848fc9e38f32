//! A pod of its own that computes, as the peer's `nvidia-cuda-validator` and `nvidia-device-plugin-validator`: for those who
//! want to see one, or who want to know that a pod can be given a GPU. Off unless the policy sets `WITH_WORKLOAD`.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{Container, EnvVar, Node, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, LogParams, PostParams},
    runtime::wait::{await_condition, conditions},
};
use tokio::time::timeout;

use super::Error;
use crate::{cuda, shutdown::Shutdown};

/// Whose container this is: what the workload takes over from it.
#[derive(Clone, Debug)]
pub struct Own {
    pub namespace: String,
    pub pod: String,
}

/// What the pod is to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// CUDA works in a pod that is given every GPU by the runtime, as a management container.
    Cuda,
    /// A pod that asks the kubelet for a GPU gets one, and it computes.
    Plugin,
}

impl Workload {
    /// The peer's names; `app` is the label that people look for.
    fn app(self) -> &'static str {
        match self {
            Self::Cuda => "nvidia-cuda-validator",
            Self::Plugin => "nvidia-device-plugin-validator",
        }
    }

    /// Runs the pod to its end.
    pub async fn run(self, client: &Client, own: &Own, patience: Duration, shutdown: &Shutdown) -> Result<(), String> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &own.namespace);
        let told = |what: &str, error: &kube::Error| format!("{what}: {}", crate::chain(error));
        let validator = pods.get(&own.pod).await.map_err(|e| told("this pod cannot be read", &e))?;
        let resource = match self {
            Self::Cuda => None,
            Self::Plugin => {
                let node = validator.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
                let node = Api::<Node>::all(client.clone()).get(&node).await;
                let node = node.map_err(|e| told("the node cannot be read", &e))?;
                Some(resource(&node).ok_or("the node offers no GPU to ask for")?)
            }
        };
        let pod = self.pod(&validator, resource);
        let name = pod.name_any();
        // One of an earlier try.
        if let Some(old) = pods.get_opt(&name).await.map_err(|e| told("pods cannot be read", &e))? {
            let at_once = DeleteParams::default().grace_period(0);
            pods.delete(&name, &at_once).await.map_err(|e| told("the last try's pod cannot be deleted", &e))?;
            let uid = old.uid().unwrap_or_default();
            let gone = await_condition(pods.clone(), &name, conditions::is_deleted(&uid));
            timeout(patience, gone)
                .await
                .map_err(|_| format!("pod {name} of the last try does not go"))?
                .map_err(|error| error.to_string())?;
        }
        pods.create(&PostParams::default(), &pod).await.map_err(|e| told("the workload's pod cannot be made", &e))?;
        let ended = tokio::select! {
            ended = timeout(patience, await_condition(pods.clone(), &name, |pod: Option<&Pod>| outcome(pod).is_some())) => ended,
            () = shutdown.begun() => return Err(Error::Interrupted.to_string()),
        };
        let pod = ended
            .map_err(|_| {
                format!("pod {name} has not ended within {} s: see kubectl describe pod {name}", patience.as_secs())
            })?
            .map_err(|error| error.to_string())?;
        if outcome(pod.as_ref()) == Some(true) {
            tracing::info!(pod = name, "a workload's pod has computed");
            return Ok(());
        }
        let log = pods.logs(&name, &LogParams { tail_lines: Some(1), ..LogParams::default() }).await;
        let said = log.unwrap_or_default();
        Err(format!("pod {name} has failed: {}; see kubectl logs {name}", said.trim()))
    }

    /// As this pod: its image, its place, its class, and it leaves with it.
    fn pod(self, validator: &Pod, resource: Option<String>) -> Pod {
        let spec = validator.spec.clone().unwrap_or_default();
        let own = spec.containers.first();
        let env =
            |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None };
        let limits = resource.map(|resource| [(resource, Quantity("1".to_owned()))].into());
        let name = validator.name_any();
        let suffix = name.rsplit('-').next().unwrap_or_default();
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: name.clone(),
            uid: validator.uid().unwrap_or_default(),
            ..OwnerReference::default()
        };
        Pod {
            metadata: ObjectMeta {
                name: Some(format!("{}-{suffix}", self.app())),
                labels: Some([(crds::labels::APP.to_owned(), self.app().to_owned())].into()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                restart_policy: Some("Never".to_owned()),
                node_name: spec.node_name.clone(),
                tolerations: spec.tolerations.clone(),
                priority_class_name: spec.priority_class_name.clone(),
                runtime_class_name: spec.runtime_class_name.clone(),
                image_pull_secrets: spec.image_pull_secrets.clone(),
                service_account_name: spec.service_account_name.clone(),
                automount_service_account_token: Some(false),
                containers: vec![Container {
                    name: self.app().to_owned(),
                    image: own.and_then(|own| own.image.clone()),
                    image_pull_policy: own.and_then(|own| own.image_pull_policy.clone()),
                    args: Some(vec![cuda::COMMAND.to_owned()]),
                    // The kubelet says it to a pod that asked for a GPU.
                    env: (self == Self::Cuda).then(|| vec![env("NVIDIA_VISIBLE_DEVICES", "all")]),
                    resources: Some(ResourceRequirements { limits, ..ResourceRequirements::default() }),
                    security_context: own.filter(|_| self == Self::Cuda).and_then(|own| own.security_context.clone()),
                    termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
                    ..Container::default()
                }],
                ..PodSpec::default()
            }),
            status: None,
        }
    }
}

/// Whole GPUs before parts.
fn resource(node: &Node) -> Option<String> {
    let allocatable = node.status.as_ref()?.allocatable.as_ref()?;
    let offered =
        allocatable.iter().filter(|(name, count)| crds::labels::is_container_resource(name) && count.0 != "0");
    offered.map(|(name, _)| name.clone()).min_by_key(|name| name != "nvidia.com/gpu")
}

fn outcome(pod: Option<&Pod>) -> Option<bool> {
    match pod?.status.as_ref()?.phase.as_deref() {
        Some("Succeeded") => Some(true),
        Some("Failed") => Some(false),
        Some(_) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_workload_is_where_and_as_the_validator_is_and_asks_for_a_gpu_only_to_try_the_plugin() {
        let validator = json!({
            "metadata": {"name": "nvidia-operator-validator-x7k2p", "uid": "u"},
            "spec": {"nodeName": "n1", "runtimeClassName": "nvidia", "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "c", "image": "registry/gpuvirt:1", "securityContext": {"privileged": true}}]},
        });
        let validator: Pod = serde_json::from_value(validator).expect("a Pod");
        let cuda = Workload::Cuda.pod(&validator, None);
        assert_eq!(cuda.name_any(), "nvidia-cuda-validator-x7k2p");
        assert_eq!(cuda.labels()["app"], "nvidia-cuda-validator");
        assert_eq!(cuda.owner_references()[0].uid, "u");
        let spec = cuda.spec.expect("a spec");
        assert_eq!((spec.node_name.as_deref(), spec.runtime_class_name.as_deref()), (Some("n1"), Some("nvidia")));
        let container = &spec.containers[0];
        assert_eq!(container.image.as_deref(), Some("registry/gpuvirt:1"));
        assert_eq!(container.env.as_ref().map(Vec::len), Some(1));

        let plugin = Workload::Plugin.pod(&validator, Some("nvidia.com/gpu".to_owned()));
        let container = &plugin.spec.expect("a spec").containers[0];
        let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        assert!(limits.is_some_and(|limits| limits.contains_key("nvidia.com/gpu")));
        assert_eq!((&container.env, &container.security_context), (&None, &None), "only what the kubelet gives it");
    }

    #[test]
    fn whole_gpus_are_asked_for_before_parts() {
        let node = |resources: serde_json::Value| {
            serde_json::from_value::<Node>(json!({"status": {"allocatable": resources}})).expect("a Node")
        };
        let both = node(json!({"nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "7"}));
        assert_eq!(resource(&both).as_deref(), Some("nvidia.com/gpu"));
        assert_eq!(resource(&node(json!({"nvidia.com/gpu": "0"}))), None);
    }
}
