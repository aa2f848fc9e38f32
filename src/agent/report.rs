//! The agent's writes: its own `GPUNode`, made when a GPU is seen, and `status.agent` when it has changed.

use crds::{
    labels,
    v1alpha1::{AgentStatus, GPUNode, GPUNodeSpec},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::cluster::gone;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("GPUNode {node} cannot be created")]
    Create { node: String, source: Box<kube::Error> },
    #[error("status of GPUNode {node} cannot be written")]
    Status { node: String, source: Box<kube::Error> },
}

pub struct Reporter {
    api: Api<GPUNode>,
    node: String,
}

impl Reporter {
    pub fn new(client: Client, node: String) -> Self {
        Self { api: Api::all(client), node }
    }

    /// The object that proves a GPU. Its status follows once the watch has brought it.
    pub async fn create(&self) -> Result<(), Error> {
        let object = GPUNode::new(&self.node, GPUNodeSpec::default());
        match self.api.create(&PostParams::default(), &object).await {
            Ok(_) => {
                tracing::info!(node = self.node, "GPUNode created");
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(source) => Err(Error::Create { node: self.node.clone(), source: Box::new(source) }),
        }
    }

    /// Written only when it differs from what the object shows.
    pub async fn write(&self, gpu_node: &GPUNode, status: &AgentStatus) -> Result<(), Error> {
        if gpu_node.status.as_ref().and_then(|live| live.agent.as_ref()) == Some(status) {
            return Ok(());
        }
        let patch = json!({
            "apiVersion": GPUNode::api_version(&()),
            "kind": GPUNode::kind(&()),
            "metadata": {"name": self.node, "uid": gpu_node.uid()},
            "status": {"agent": status},
        });
        let params = PatchParams::apply(labels::AGENT_MANAGER).force();
        match self.api.patch_status(&self.node, &params, &Patch::Apply(&patch)).await {
            Ok(_) => Ok(()),
            // It has gone, or was made anew: the watch says so, and the next round writes to the new one.
            Err(error) if gone(&error) => Ok(()),
            Err(source) => Err(Error::Status { node: self.node.clone(), source: Box::new(source) }),
        }
    }
}
