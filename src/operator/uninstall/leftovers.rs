//! What the kubelet leaves in a node's status of a device plugin that has gone: its resources, at 0.
//!
//! It never takes them away itself, so that a scheduler sees that there is none (kubelet, `MachineInfo` of nodestatus), and
//! for five minutes after a plugin's end it lists them again (`endpointStopGracePeriod` of its device manager).

use std::collections::BTreeSet;

use crds::v1alpha1::GPUNode;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::api::resource::Quantity};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

const FIELDS: [&str; 2] = ["capacity", "allocatable"];

/// Best effort: the release goes all the same, and what could not be done is said.
pub async fn forget(client: &Client, gpu_nodes: &[GPUNode]) {
    let nodes: Api<Node> = Api::all(client.clone());
    for gpu_node in gpu_nodes {
        let name = gpu_node.name_any();
        let done = match nodes.get_opt(&name).await {
            Ok(Some(node)) => remove(&nodes, &node, &offered(gpu_node)).await,
            Ok(None) => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        match done {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::info!(
                node = name,
                resources = removed.join(", "),
                "removed from the node's status; for five minutes after a device plugin's end the kubelet may list them \
                 again, at 0: take them away then with kubectl patch node {name} --subresource=status --type=json -p '{}'",
                patch_of(&removed)
            ),
            Err(error) => tracing::warn!(node = name, %error, "resources at 0 stay in the node's status"),
        }
    }
}

/// Names that the node's agent has offered, other than those of NVIDIA.
fn offered(gpu_node: &GPUNode) -> BTreeSet<String> {
    let agent = gpu_node.status.as_ref().and_then(|status| status.agent.as_ref());
    let reported = agent.into_iter().flat_map(|agent| agent.resources.iter().map(|resource| resource.name.clone()));
    reported.chain(gpu_node.spec.aliases.iter().map(|alias| alias.name.clone())).collect()
}

/// Resources of GPUs of which there are none, in any of the two lists.
fn stale(node: &Node, offered: &BTreeSet<String>) -> Vec<String> {
    let status = node.status.clone().unwrap_or_default();
    let (capacity, allocatable) = (status.capacity.unwrap_or_default(), status.allocatable.unwrap_or_default());
    let zero = |quantity: Option<&Quantity>| quantity.is_none_or(|quantity| quantity.0 == "0");
    let ours = |name: &&String| name.starts_with("nvidia.com/") || offered.contains(*name);
    let names: BTreeSet<&String> = capacity.keys().chain(allocatable.keys()).filter(ours).collect();
    let gone = |name: &&String| zero(capacity.get(*name)) && zero(allocatable.get(*name));
    names.into_iter().filter(gone).cloned().collect()
}

async fn remove(nodes: &Api<Node>, node: &Node, offered: &BTreeSet<String>) -> Result<Vec<String>, kube::Error> {
    let stale = stale(node, offered);
    if stale.is_empty() {
        return Ok(stale);
    }
    let nulls: serde_json::Map<String, Value> = stale.iter().map(|name| (name.clone(), Value::Null)).collect();
    // Whoever has written meanwhile may have some again: then the resource version refuses this.
    let patch = json!({
        "metadata": {"uid": node.uid(), "resourceVersion": node.resource_version()},
        "status": {FIELDS[0]: nulls, FIELDS[1]: nulls},
    });
    nodes.patch_status(&node.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(stale)
}

/// The same, as a person would say it.
fn patch_of(names: &[String]) -> Value {
    let one = |name: &String, field: &str| json!({"op": "remove", "path": format!("/status/{field}/{}", name.replace('~', "~0").replace('/', "~1"))});
    names.iter().flat_map(|name| FIELDS.map(|field| one(name, field))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(status: &Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": "n1"}, "status": status})).expect("a Node")
    }

    #[test]
    fn only_gpus_of_which_there_are_none_are_stale() {
        let counts = json!({"cpu": "0", "nvidia.com/gpu": "0", "nvidia.com/used": "2", "amd.com/gpu": "0", "vms.example/t4": "0"});
        let known: BTreeSet<String> = ["vms.example/t4".to_owned()].into();
        let found = stale(&node(&json!({"capacity": counts, "allocatable": counts})), &known);
        assert_eq!(found, ["nvidia.com/gpu", "vms.example/t4"]);
    }

    #[test]
    fn a_device_that_is_only_unhealthy_is_not_stale() {
        let found = stale(
            &node(&json!({"capacity": {"nvidia.com/a": "1"}, "allocatable": {"nvidia.com/a": "0"}})),
            &BTreeSet::new(),
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn a_person_is_told_the_patch_with_its_slashes_escaped() {
        let told = patch_of(&["nvidia.com/gpu".to_owned()]).to_string();
        assert!(told.contains("/status/capacity/nvidia.com~1gpu") && told.contains("/status/allocatable/"), "{told}");
    }
}
