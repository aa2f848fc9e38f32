//! Commands for a person who has a kubeconfig. They change nothing but what a person says: an approval.

pub mod approve;
pub mod explain;
pub mod plan;
pub mod ready;

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// Which cluster, as kubectl's flags of the same names say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    pub context: Option<String>,
    /// Unset: the context's.
    pub namespace: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("no cluster is configured: set KUBECONFIG, or check --context")]
    Kubeconfig(#[from] KubeconfigError),
    #[error("no connection to the API server can be configured")]
    Client(#[from] kube::Error),
}

impl Target {
    /// And the namespace that counts.
    async fn connect(&self) -> Result<(Client, String), TargetError> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(Kubeconfig::read()?, &options).await?;
        let namespace = self.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        Ok((Client::try_from(config)?, namespace))
    }
}
