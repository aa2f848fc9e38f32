//! What is read once, when the question comes up.

use crds::v1alpha1::GPUNode;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Condition};
use kube::{Api, Client, ResourceExt, api::ListParams};

use super::{
    explain::{Explanation, Facts, Launcher, explain},
    instance::{self, Instance, Progress, Vmi},
};
use crate::operator::kubevirt::{self, WIRED};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no VirtualMachineInstance {0}: a VM that is not started has none; see kubectl get vm,vmi")]
    NotFound(String),
    #[error("there is no KubeVirt in this cluster: CRD {} is missing", instance::CRD)]
    NoKubeVirt,
    #[error("VirtualMachineInstance {0} cannot be read")]
    Read(String, #[source] Box<kube::Error>),
    #[error("pods of {0} cannot be listed")]
    Pods(String, #[source] Box<kube::Error>),
    #[error(transparent)]
    KubeVirt(#[from] kubevirt::Error),
}

pub async fn instance(client: &Client, namespace: &str, name: &str) -> Result<Instance, Error> {
    let api: Api<Vmi> = Api::namespaced_with(client.clone(), namespace, &instance::resource());
    match api.get(name).await {
        Ok(vmi) => Ok(Instance::of(&vmi)),
        Err(kube::Error::Api(status)) if status.code == 404 && status.reason == "NotFound" => {
            Err(Error::NotFound(format!("{namespace}/{name}")))
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Err(Error::NoKubeVirt),
        Err(source) => Err(Error::Read(format!("{namespace}/{name}"), Box::new(source))),
    }
}

/// Its pod, the newest if there are several (a migration makes another).
pub async fn launcher(client: &Client, instance: &Instance) -> Result<Option<Launcher>, Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &instance.namespace);
    let own = ListParams::default().labels(&format!("kubevirt.io/created-by={}", instance.uid));
    let found = pods.list(&own).await.map_err(|source| Error::Pods(instance.key(), Box::new(source)))?;
    Ok(found.items.iter().max_by_key(|pod| pod.creation_timestamp()).map(launcher_of))
}

fn launcher_of(pod: &Pod) -> Launcher {
    let status = pod.status.clone().unwrap_or_default();
    Launcher {
        name: pod.name_any(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_else(|| "no node".to_owned()),
        phase: status.phase.unwrap_or_default(),
        reason: status.reason.unwrap_or_default(),
        message: status.message.unwrap_or_default(),
    }
}

/// What the operator is not content with in KubeVirt's configuration.
pub fn complaint(conditions: &[Condition]) -> Option<&str> {
    let wired = conditions.iter().find(|condition| condition.type_ == WIRED && condition.status == "False")?;
    Some(&wired.message)
}

/// Asks for what the instance's state makes a question of, and explains.
pub async fn explained(
    client: &Client,
    instance: &Instance,
    gpu_nodes: &[GPUNode],
    complaint: Option<&str>,
) -> Result<Explanation, Error> {
    let (mut permitted, mut pod) = (None, None);
    match &instance.progress {
        Progress::Refused(_) => permitted = kubevirt::permitted_now(client).await?,
        Progress::Failed | Progress::Starting => pod = launcher(client, instance).await?,
        Progress::Unschedulable(_) | Progress::Runs | Progress::Succeeded => {}
    }
    Ok(explain(&Facts { instance, gpu_nodes, permitted: permitted.as_ref(), complaint, launcher: pod.as_ref() }))
}
