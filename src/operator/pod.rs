//! What a pod says of itself.

use crds::labels;
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

/// What a pod asks for of NVIDIA's device plugin, as in `2 nvidia.com/gpu`; of a launcher anything of NVIDIA's, since a VM's
/// GPUs have names of their own. Network cards of NVIDIA's (`nvidia.com/hostdev`) are no pod's GPU.
pub fn gpus_asked(pod: &Pod) -> Option<String> {
    let launcher = instance(pod).is_some();
    let is_gpu = |name: &str| labels::is_container_resource(name) || launcher && name.starts_with("nvidia.com/");
    let spec = pod.spec.as_ref()?;
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let resources = containers.filter_map(|container| container.resources.as_ref());
    let mut asked = resources.flat_map(|all| [&all.limits, &all.requests]).flatten().flatten();
    asked.find(|(name, count)| is_gpu(name) && count.0 != "0").map(|(name, count)| format!("{} {name}", count.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn asked(owner: &str, spec: &Value) -> Option<String> {
        let owner = json!({"apiVersion": "x/v1", "kind": owner, "name": "a", "uid": "1", "controller": true});
        let pod = json!({"metadata": {"name": "a", "ownerReferences": [owner]}, "spec": spec});
        gpus_asked(&serde_json::from_value(pod).expect("a Pod"))
    }

    fn limits(limits: &Value) -> Value {
        json!({"containers": [{"name": "side"}, {"name": "c", "resources": {"limits": limits}}]})
    }

    #[test]
    fn whole_gpus_and_parts_of_them_are_asked_for_by_the_names_of_nvidias_device_plugin() {
        let of = |all: Value| asked("Job", &limits(&all));
        assert_eq!(of(json!({"cpu": "1", "nvidia.com/gpu": "2"})).as_deref(), Some("2 nvidia.com/gpu"));
        assert_eq!(of(json!({"nvidia.com/mig-1g.5gb": "1"})).as_deref(), Some("1 nvidia.com/mig-1g.5gb"));
        for other in [json!({"cpu": "1"}), json!({"nvidia.com/gpu": "0"}), json!({"nvidia.com/hostdev": "1"})] {
            assert_eq!(of(other.clone()), None, "{other}");
        }
    }

    #[test]
    fn requests_and_init_containers_count() {
        let resources = json!({"requests": {"nvidia.com/gpu": "1"}});
        let init = json!({"initContainers": [{"name": "i", "resources": resources}], "containers": [{"name": "c"}]});
        assert_eq!(asked("Job", &init).as_deref(), Some("1 nvidia.com/gpu"));
    }

    #[test]
    fn a_launcher_asks_by_the_names_of_its_vms_gpus() {
        let t4 = limits(&json!({"nvidia.com/TU104GL_TESLA_T4": "1"}));
        assert_eq!(asked("VirtualMachineInstance", &t4).as_deref(), Some("1 nvidia.com/TU104GL_TESLA_T4"));
        assert_eq!(asked("Job", &t4), None);
    }
}
