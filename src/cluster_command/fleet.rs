//! What the commands look at: our objects, all of them, read once.

use std::fmt::Debug;

use crds::{
    labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{CONFIG_NAME, GPUNode, GPUTransition, GPUVirtConfig},
};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node};
use kube::{Api, Client, Resource, ResourceExt, api::ListParams, core::DeserializeGuard};
use serde::de::DeserializeOwned;

use super::ReadError;
use crate::{cluster::lease, operator::LEASE};

pub const GPU_NODES: &str = "gpunodes.gpuvirt.io";
pub const TRANSITIONS: &str = "gputransitions.gpuvirt.io";
pub const POLICIES: &str = "clusterpolicies.nvidia.com";
pub const CONFIGS: &str = "gpuvirtconfigs.gpuvirt.io";
/// Where the operator is, unless a policy says otherwise.
const NAMESPACE: &str = "gpuvirt";

#[derive(Clone, Debug, Default)]
pub struct Fleet {
    pub policies: Vec<ClusterPolicy>,
    pub config: Option<GPUVirtConfig>,
    pub gpu_nodes: Vec<GPUNode>,
    pub transitions: Vec<GPUTransition>,
    /// Nodes that are labelled as having a GPU, where the person may list them.
    pub nodes: Vec<Node>,
    /// Why the operator seems not to run.
    pub silence: Option<String>,
    /// Objects that do not decode, and what could not be read: the answer is without them.
    pub remarks: Vec<String>,
}

impl Fleet {
    pub async fn read(client: &Client) -> Result<Self, ReadError> {
        let mut fleet = Self::default();
        let gpu_nodes = list::<GPUNode>(client, GPU_NODES).await?;
        fleet.gpu_nodes = fleet.decoded(gpu_nodes);
        let transitions = list::<GPUTransition>(client, TRANSITIONS).await?;
        fleet.transitions = fleet.decoded(transitions);
        match list::<ClusterPolicy>(client, POLICIES).await {
            Ok(found) => fleet.policies = fleet.decoded(found),
            Err(error) => fleet.remark(&error),
        }
        match list::<GPUVirtConfig>(client, CONFIGS).await {
            Ok(found) => fleet.config = fleet.decoded(found).into_iter().find(|c| c.name_any() == CONFIG_NAME),
            Err(error) => fleet.remark(&error),
        }
        let nodes: Api<Node> = Api::all(client.clone());
        let present = ListParams::default().labels(&format!("{}=true", labels::GPU_PRESENT));
        match nodes.list(&present).await.map_err(ReadError::of("nodes")) {
            Ok(found) => fleet.nodes = found.items,
            Err(error) => fleet.remark(&error),
        }
        let leases: Api<Lease> = Api::namespaced(client.clone(), &fleet.namespace());
        match leases.get_opt(LEASE).await.map_err(ReadError::of("leases.coordination.k8s.io")) {
            Ok(found) => fleet.silence = lease::silence(LEASE, found.as_ref()),
            Err(error) => fleet.remark(&error),
        }
        Ok(fleet.sorted())
    }

    /// Also those that are read again and again come in one order.
    pub fn sorted(mut self) -> Self {
        self.gpu_nodes.sort_by_key(ResourceExt::name_any);
        self.policies.sort_by_key(|policy| (policy.creation_timestamp(), policy.name_any()));
        self
    }

    fn remark(&mut self, error: &ReadError) {
        self.remarks.push(crate::chain(error));
    }

    pub fn decoded<K: Resource<DynamicType = ()>>(&mut self, all: Vec<DeserializeGuard<K>>) -> Vec<K> {
        let mut decoded = Vec::new();
        for guarded in all {
            match guarded.0 {
                Ok(object) => decoded.push(object),
                Err(invalid) => {
                    let name = invalid.metadata.name.unwrap_or_default();
                    self.remarks.push(format!("{} {name} does not decode: {}", K::kind(&()), invalid.error));
                }
            }
        }
        decoded
    }

    /// The policy that counts.
    pub fn policy(&self) -> Option<&ClusterPolicy> {
        let ignored = |policy: &&ClusterPolicy| {
            policy.status.as_ref().is_some_and(|status| status.state == Some(PolicyState::Ignored))
        };
        self.policies.iter().find(|policy| !ignored(policy))
    }

    /// Of the operator and its operands.
    pub fn namespace(&self) -> String {
        let status = self.policy().and_then(|policy| policy.status.as_ref());
        status.and_then(|status| status.namespace.clone()).unwrap_or_else(|| NAMESPACE.to_owned())
    }

    pub fn transition(&self, node: &str) -> Option<&GPUTransition> {
        self.transitions.iter().find(|transition| transition.spec.node == node)
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name_any() == name)
    }
}

async fn list<K>(client: &Client, what: &'static str) -> Result<Vec<DeserializeGuard<K>>, ReadError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
    let found = api.list(&ListParams::default()).await.map_err(ReadError::of(what))?;
    Ok(found.items)
}
