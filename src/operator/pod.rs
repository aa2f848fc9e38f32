//! What a pod says of itself.

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::ResourceExt;

pub fn ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Who makes it again.
pub fn controller(pod: &Pod) -> Option<&OwnerReference> {
    pod.owner_references().iter().find(|owner| owner.controller == Some(true))
}

/// `namespace/name` of the virtual machine instance that it runs. KubeVirt 1.6-1.9: that is its launcher's controlling owner.
pub fn instance(pod: &impl ResourceExt) -> Option<String> {
    let owner = pod.owner_references().iter().find(|owner| owner.kind == "VirtualMachineInstance")?;
    Some(format!("{}/{}", pod.namespace().unwrap_or_default(), owner.name))
}
