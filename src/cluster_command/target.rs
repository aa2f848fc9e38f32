//! Which cluster is asked, and what to do when it does not answer.

use std::path::PathBuf;

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// Which cluster, as kubectl's flags of the same names say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    pub kubeconfig: Option<PathBuf>,
    pub context: Option<String>,
    /// Unset: the context's.
    pub namespace: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("there is no kubeconfig at {0}: give --kubeconfig FILE, or set KUBECONFIG")]
    NoFile(String),
    #[error("no cluster is configured: give --kubeconfig FILE, set KUBECONFIG, or write ~/.kube/config")]
    NoConfig(#[source] Box<KubeconfigError>),
    #[error("the kubeconfig has no context {wanted:?}: choose with --context one of {}", have.join(", "))]
    NoContext { wanted: String, have: Vec<String> },
    #[error("the kubeconfig has no current context: choose one with --context, or kubectl config use-context")]
    NoCurrentContext,
    #[error("the kubeconfig cannot be used: kubectl config view shows what it says")]
    Unusable(#[source] Box<KubeconfigError>),
    #[error("no connection to {server} can be configured: kubectl config view shows what the kubeconfig says")]
    Client { server: String, source: Box<kube::Error> },
    #[error(
        "{server} does not answer: is the cluster up, and is it the one that you mean (kubectl config current-context)?"
    )]
    Silent { server: String, source: Box<kube::Error> },
    #[error("{server} does not know you: log in again; kubectl auth whoami tells when it does")]
    Unauthorized { server: String },
}

/// Why something could not be read of a cluster that answers.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(
        "you may not read {what}: ask whoever runs the cluster for it; kubectl auth can-i list {what} tells when you may"
    )]
    Forbidden { what: &'static str },
    #[error(
        "this cluster does not know {what}: gpuvirt is not installed in it (helm install gpuvirt …), or it is not the cluster that you mean (kubectl config current-context)"
    )]
    Absent { what: &'static str },
    #[error("{what} cannot be read")]
    Other { what: &'static str, source: Box<kube::Error> },
}

impl ReadError {
    /// Without the next step, for whoever has many of them to tell.
    pub fn brief(&self) -> String {
        match self {
            Self::Forbidden { what } => format!("you may not read {what}"),
            Self::Absent { what } => format!("the cluster does not know {what}"),
            Self::Other { .. } => crate::chain(self),
        }
    }

    pub fn of(what: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |error| {
            let code = if let kube::Error::Api(status) = &error { status.code } else { 0 };
            match code {
                403 => Self::Forbidden { what },
                404 => Self::Absent { what },
                _ => Self::Other { what, source: Box::new(error) },
            }
        }
    }
}

impl Target {
    /// And the namespace that counts. The API server has answered once.
    pub(super) async fn connect(&self) -> Result<(Client, String), TargetError> {
        let kubeconfig = self.read()?;
        let config = self.config(kubeconfig).await?;
        let server = config.cluster_url.to_string();
        let namespace = self.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config)
            .map_err(|source| TargetError::Client { server: server.clone(), source: Box::new(source) })?;
        match client.apiserver_version().await {
            Err(kube::Error::Api(status)) if status.code == 401 => Err(TargetError::Unauthorized { server }),
            // Whoever may not ask for the version may ask for other things.
            Ok(_) | Err(kube::Error::Api(_)) => Ok((client, namespace)),
            Err(source) => Err(TargetError::Silent { server, source: Box::new(source) }),
        }
    }

    fn read(&self) -> Result<Kubeconfig, TargetError> {
        match &self.kubeconfig {
            Some(file) if !file.exists() => Err(TargetError::NoFile(file.display().to_string())),
            Some(file) => Kubeconfig::read_from(file).map_err(|error| TargetError::Unusable(Box::new(error))),
            None => Kubeconfig::read().map_err(|error| TargetError::NoConfig(Box::new(error))),
        }
    }

    async fn config(&self, kubeconfig: Kubeconfig) -> Result<Config, TargetError> {
        let have: Vec<String> = kubeconfig.contexts.iter().map(|context| context.name.clone()).collect();
        let wanted = self.context.clone().or_else(|| kubeconfig.current_context.clone());
        match wanted.filter(|name| !name.is_empty()) {
            None => return Err(TargetError::NoCurrentContext),
            Some(wanted) if !have.contains(&wanted) => return Err(TargetError::NoContext { wanted, have }),
            Some(_) => {}
        }
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
        config.map_err(|error| TargetError::Unusable(Box::new(error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = r#"
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: lab, context: {cluster: c, user: u}}, {name: prod, context: {cluster: c, user: u}}]
current-context: lab
"#;

    /// What a person reads who names this file and context.
    fn said(text: Option<&str>, context: Option<&str>) -> String {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("config");
        if let Some(text) = text {
            std::fs::write(&file, text).expect("a file should be writable");
        }
        let target = Target { kubeconfig: Some(file), context: context.map(str::to_owned), namespace: None };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let Err(error) = runtime.block_on(target.connect()) else { panic!("nobody should answer") };
        crate::chain(&error)
    }

    #[test]
    fn without_a_cluster_the_next_step_is_named() {
        assert!(said(None, None).contains("give --kubeconfig FILE"));
        assert!(said(Some("contexts: 5"), None).contains("kubectl config view"));
        assert!(said(Some(KUBECONFIG), Some("staging")).contains("one of lab, prod"));
        assert!(said(Some(&KUBECONFIG.replace("current-context: lab", "")), None).contains("use-context"));
        let refused = said(Some(KUBECONFIG), None);
        assert!(refused.contains("https://127.0.0.1:1/ does not answer") && refused.contains("refused"), "{refused}");
    }

    #[test]
    fn an_answer_that_is_a_no_names_the_next_step() {
        let no = |code: u16| {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            ReadError::of("gpunodes.gpuvirt.io")(kube::Error::Api(Box::new(status))).to_string()
        };
        assert!(no(403).contains("kubectl auth can-i list gpunodes.gpuvirt.io"));
        assert!(no(404).contains("helm install gpuvirt"));
        assert!(no(500).contains("gpunodes.gpuvirt.io cannot be read"));
    }
}
