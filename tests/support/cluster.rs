//! The control plane: etcd, API server, controllers and scheduler as processes of this host, and the chart in it.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, Client, Config,
    api::{Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;

use super::NAMESPACE;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Taken down, with all that lies in it, when this process has ended, however it ended: `up.sh` sees to it.
pub struct Cluster {
    state: PathBuf,
    bin: PathBuf,
}

impl Cluster {
    /// Starts one. About ten seconds.
    pub fn start() -> Result<Self, String> {
        let bin = tools()?;
        let state = Self::state_of_this_process();
        let owner = process::id().to_string();
        script("tests/cluster/up.sh", [&state], &[("BIN", bin.as_os_str()), ("OWNER", owner.as_ref())])?;
        Ok(Self { state, bin })
    }

    /// Where the one that this process starts lies. Short: the sockets of a node lie in it.
    pub fn state_of_this_process() -> PathBuf {
        PathBuf::from(format!("/tmp/gpuvirt-{}", process::id()))
    }

    pub fn state(&self) -> &Path {
        &self.state
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.state.join("admin.kubeconfig")
    }

    pub async fn client(&self) -> Client {
        client(&self.kubeconfig()).await
    }

    /// `helm` with these arguments, on this cluster. Its standard output.
    pub fn helm(&self, args: &[&str]) -> Result<String, String> {
        self.helm_of("helm", args)
    }

    /// The same with another major version: `helm` is 4, `helm3` is 3.
    pub fn helm_of(&self, program: &str, args: &[&str]) -> Result<String, String> {
        let home = self.state.join(program).with_extension("home");
        let kubeconfig = self.kubeconfig();
        let mut command = command(self.bin.join(program), args);
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, &home);
        }
        run(command.env("KUBECONFIG", kubeconfig))
    }

    /// `kubectl` with these arguments, on this cluster. Its standard output.
    pub fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        run(command(self.bin.join("kube"), std::iter::once(&"kubectl").chain(args))
            .env("KUBECONFIG", self.kubeconfig()))
    }

    /// The chart as it is, but nobody runs its Deployment and no ClusterPolicy comes with it: tests start the operator
    /// and make the policies.
    pub async fn install_chart(&self) -> Result<(), String> {
        self.helm(&[
            "install",
            "gpuvirt",
            "charts/gpuvirt",
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--set",
            // Nobody runs the Job, either.
            "clusterPolicy.deployCR=false,nfd.enabled=false,operator.upgradeCRD=false",
        ])?;
        let deployments: Api<Deployment> = Api::namespaced(self.client().await, NAMESPACE);
        let nobody = json!({"spec": {"replicas": 0}});
        let scaled = deployments.patch_scale("gpuvirt-operator", &PatchParams::default(), &Patch::Merge(&nobody)).await;
        scaled.map(drop).map_err(|error| format!("the operator's Deployment cannot be scaled down: {error}"))
    }
}

/// A client for whoever the kubeconfig is of.
pub async fn client(kubeconfig: &Path) -> Client {
    Client::try_from(config(kubeconfig).await).expect("a client should be buildable")
}

/// The same, which takes the server's no for an answer: an eviction that is refused would be tried for minutes.
pub async fn impatient_client(kubeconfig: &Path) -> Client {
    let mut config = config(kubeconfig).await;
    config.default_retry = false;
    Client::try_from(config).expect("a client should be buildable")
}

async fn config(kubeconfig: &Path) -> Config {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("the kubeconfig should be readable");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.expect("the kubeconfig should be complete")
}

/// The folder that `tests/cluster/build.sh` filled.
#[expect(clippy::disallowed_methods, reason = "a test's equipment is named by the environment")]
pub fn tools() -> Result<PathBuf, String> {
    let given = env::var_os("GPUVIRT_CLUSTER_BIN").map(PathBuf::from);
    let built = given.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/gpuvirt/cluster")));
    let built = built.ok_or("set GPUVIRT_CLUSTER_BIN to the folder that tests/cluster/build.sh filled")?;
    match built.join("kube").exists() {
        true => Ok(built),
        false => Err(format!("{} has no test cluster: run `make tools`", built.display())),
    }
}

/// A command in the repository's root, with nothing to read.
#[expect(clippy::disallowed_methods, reason = "a test's equipment is programs")]
pub fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(ROOT).stdin(Stdio::null());
    command
}

/// Runs to the end. Its standard output, or all that it said and how it ended.
pub fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(said(&output.stdout)),
        false => Err(format!("{command:?}: {}\n{}{}", output.status, said(&output.stdout), said(&output.stderr))),
    }
}

/// A script of this repository.
pub fn script<S: AsRef<OsStr>>(
    path: &str,
    args: impl IntoIterator<Item = S>,
    environment: &[(&str, &OsStr)],
) -> Result<String, String> {
    run(command(Path::new(ROOT).join(path), args).envs(environment.iter().copied()))
}

/// A file of this repository.
pub fn source(path: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(path)).expect("a file of the repository should be readable")
}
