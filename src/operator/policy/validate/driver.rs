//! The driver of container nodes.

use crds::v1::{self, ClusterPolicySpec, ContainerProbe, KernelModuleType};
use k8s_openapi::api::core::v1::EnvVar;

use super::{
    Drivers, Facts, Problem, Runtime, Wish, container,
    container::{Container, Image},
    given,
    nvidia_driver::Placement,
    pools::{self, Pool},
};

#[derive(Clone, Debug, PartialEq)]
pub struct Driver {
    pub pool: Pool,
    /// Of one that an `NVIDIADriver` asks for.
    pub placement: Option<Placement>,
    pub container: Container,
    pub secret_env: Option<String>,
    pub kernel_module_type: KernelModuleType,
    pub startup_probe: ContainerProbe,
    pub liveness_probe: Option<ContainerProbe>,
    pub readiness_probe: Option<ContainerProbe>,
    pub rdma: Rdma,
    pub gds: Option<Sidecar>,
    pub gdrcopy: Option<Sidecar>,
    /// Files of the user's ConfigMaps and Secrets in the driver's container.
    pub files: Vec<Files>,
    pub subscription: Subscription,
}

/// `GPUDirect` RDMA, and where the network driver's sources are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rdma {
    Off,
    On,
    WithHostMofed,
}

/// A container beside the driver's that brings another kernel module.
#[derive(Clone, Debug, PartialEq)]
pub struct Sidecar {
    pub image: Image,
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    pub volume: String,
    pub source: Source,
    /// Key, and the file that it becomes in the container.
    pub paths: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    ConfigMap(String),
    Secret(String),
}

/// Whose paid repositories the driver's build needs from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subscription {
    None,
    RedHat,
    Suse,
}

/// Name of the driver's first `DaemonSet`, and what those of further pools begin with.
pub const DRIVER: &str = "nvidia-driver-daemonset";

pub(super) fn drivers(spec: &ClusterPolicySpec, facts: &Facts, problems: &mut Vec<Problem>) -> Drivers<Driver> {
    let driver = &spec.driver;
    if !driver.component.is_enabled(true) {
        return Drivers { wish: Wish::NotWanted, kept: Vec::new() };
    }
    Drivers::of(DRIVER, wanted(spec, facts), |driver| &driver.pool, facts, problems)
}

fn wanted(spec: &ClusterPolicySpec, facts: &Facts) -> Result<Vec<Driver>, Problem> {
    check(spec, facts)?;
    let pools = match spec.driver.use_precompiled.unwrap_or(false) {
        true => pools::by_kernel(DRIVER, facts),
        false => pools::by_system(DRIVER, facts),
    };
    pools.into_iter().map(|pool| of_pool(spec, pool, facts)).collect()
}

/// What can be judged also while there is no node to run it on.
pub(super) fn check(spec: &ClusterPolicySpec, facts: &Facts) -> Result<(), Problem> {
    let driver = &spec.driver;
    container::container("driver", &driver.component.container, None, facts)?;
    match driver.use_precompiled.unwrap_or(false) {
        true => is_branch(driver.component.container.image.version.as_deref()),
        false => Ok(()),
    }
}

/// Images of precompiled drivers are tagged with a branch (`595`), the kernel and the operating system.
fn is_branch(version: Option<&str>) -> Result<(), Problem> {
    match given(version) {
        Some(version) if !version.starts_with("sha256:") && version.contains('.') => Err(Problem {
            reason: "InvalidDriverVersion",
            message: format!(
                "spec.driver.version: {version} is no branch, and precompiled drivers come in branches: set it to {}, or spec.driver.usePrecompiled to false",
                version.split('.').next().unwrap_or_default()
            ),
        }),
        Some(_) | None => Ok(()),
    }
}

pub(super) fn of_pool(spec: &ClusterPolicySpec, pool: Pool, facts: &Facts) -> Result<Driver, Problem> {
    let driver = &spec.driver;
    let suffix = pool.suffix();
    let rdma = &driver.gpu_direct_rdma;
    let distribution = Distribution::of(&pool.os);
    Ok(Driver {
        container: container::container("driver", &driver.component.container, Some(&suffix), facts)?,
        secret_env: given(driver.secret_env.as_deref()).map(str::to_owned),
        kernel_module_type: kernel_module_type(driver),
        startup_probe: driver.startup_probe.clone().unwrap_or_default(),
        liveness_probe: driver.liveness_probe.clone(),
        readiness_probe: driver.readiness_probe.clone(),
        rdma: match (rdma.enabled.unwrap_or(false), rdma.use_host_mofed.unwrap_or(false)) {
            (false, _) => Rdma::Off,
            (true, false) => Rdma::On,
            (true, true) => Rdma::WithHostMofed,
        },
        gds: sidecar("gds", &spec.gds, Some(&pool.os), facts)?,
        gdrcopy: sidecar("gdrcopy", &spec.gdrcopy, Some(&pool.os), facts)?,
        files: files(driver, distribution, facts)?,
        subscription: subscription(distribution, facts),
        pool,
        placement: None,
    })
}

fn sidecar(
    section: &str,
    spec: &v1::DriverSidecar,
    os: Option<&str>,
    facts: &Facts,
) -> Result<Option<Sidecar>, Problem> {
    if !spec.is_enabled() {
        return Ok(None);
    }
    Ok(Some(Sidecar {
        image: container::image(section, &spec.image, os, facts)?,
        args: spec.args.clone(),
        env: container::environment(&spec.env),
    }))
}

fn kernel_module_type(driver: &v1::Driver) -> KernelModuleType {
    match (driver.kernel_module_type, driver.use_open_kernel_modules) {
        (KernelModuleType::Auto, Some(true)) => KernelModuleType::Open,
        (set @ (KernelModuleType::Auto | KernelModuleType::Open | KernelModuleType::Proprietary), _) => set,
    }
}

/// What decides where repositories and certificates are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distribution {
    Ubuntu,
    RedHat { subscribed: bool },
    Suse,
    Other,
}

impl Distribution {
    /// `os` as in `rhel9.4`.
    fn of(os: &str) -> Self {
        match os.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
            "ubuntu" => Self::Ubuntu,
            "rhel" => Self::RedHat { subscribed: true },
            "centos" | "rocky" | "rhcos" => Self::RedHat { subscribed: false },
            "sles" | "sl-micro" => Self::Suse,
            _ => Self::Other,
        }
    }

    fn repositories(self) -> Option<&'static str> {
        match self {
            Self::Ubuntu => Some("/etc/apt/sources.list.d"),
            Self::RedHat { .. } => Some("/etc/yum.repos.d"),
            Self::Suse => Some("/etc/zypp/repos.d"),
            Self::Other => None,
        }
    }

    fn certificates(self) -> Option<&'static str> {
        match self {
            Self::Ubuntu => Some("/usr/local/share/ca-certificates"),
            Self::RedHat { .. } => Some("/etc/pki/ca-trust/extracted/pem"),
            Self::Suse => Some("/etc/pki/trust/anchors"),
            Self::Other => None,
        }
    }
}

/// CRI-O mounts the host's subscription by itself.
fn subscription(distribution: Distribution, facts: &Facts) -> Subscription {
    match distribution {
        Distribution::RedHat { subscribed: true } if facts.runtime() != Ok(Some(Runtime::CriO)) => Subscription::RedHat,
        Distribution::Suse => Subscription::Suse,
        Distribution::Ubuntu | Distribution::RedHat { .. } | Distribution::Other => Subscription::None,
    }
}

/// In the places where the peer's driver images look for them.
fn files(driver: &v1::Driver, distribution: Distribution, facts: &Facts) -> Result<Vec<Files>, Problem> {
    let mut files = Vec::new();
    files.extend(licensing(&driver.licensing_config));
    if let Some(name) = given(driver.virtual_topology.config.as_deref()) {
        files.push(Files {
            volume: "topology-config".to_owned(),
            source: Source::ConfigMap(name.to_owned()),
            paths: vec![("nvidia-topologyd.conf".to_owned(), "/etc/nvidia-topologyd/nvidia-topologyd.conf".to_owned())],
        });
    }
    files.extend(kernel_modules("driver.kernelModuleConfig.name", driver.kernel_module_config.name.as_deref(), facts)?);
    let whole = [
        ("driver.repoConfig.configMapName", driver.repo_config.config_map_name.as_deref(), distribution.repositories()),
        ("driver.certConfig.name", driver.cert_config.name.as_deref(), distribution.certificates()),
    ];
    for (field, name, directory) in whole {
        files.extend(whole_map(field, name, directory, facts)?);
    }
    Ok(files)
}

/// Files with kernel module parameters, where driver images look for them.
pub(super) fn kernel_modules(field: &str, name: Option<&str>, facts: &Facts) -> Result<Option<Files>, Problem> {
    whole_map(field, name, Some("/drivers"), facts)
}

/// Every key of a ConfigMap as a file of `directory`.
fn whole_map(
    field: &str,
    name: Option<&str>,
    directory: Option<&str>,
    facts: &Facts,
) -> Result<Option<Files>, Problem> {
    let Some(name) = given(name) else { return Ok(None) };
    let directory = directory.ok_or_else(|| Problem {
        reason: "UnknownDistribution",
        message: format!(
            "spec.{field}: it is not known where this operating system keeps such files; leave it empty and put them into the driver image"
        ),
    })?;
    let keys = facts.keys(field, name)?;
    Ok(Some(Files {
        volume: name.to_owned(),
        source: Source::ConfigMap(name.to_owned()),
        paths: keys.into_iter().map(|key| (key.clone(), format!("{directory}/{key}"))).collect(),
    }))
}

fn licensing(config: &v1::LicensingConfig) -> Option<Files> {
    let secret = given(config.secret_name.as_deref()).map(|name| Source::Secret(name.to_owned()));
    let map = given(config.config_map_name.as_deref()).map(|name| Source::ConfigMap(name.to_owned()));
    let token = "client_configuration_token.tok";
    let mut paths = vec![("gridd.conf".to_owned(), "/drivers/gridd.conf".to_owned())];
    if config.nls_enabled.unwrap_or(true) {
        paths.push((token.to_owned(), format!("/drivers/ClientConfigToken/{token}")));
    }
    Some(Files { volume: "licensing-config".to_owned(), source: secret.or(map)?, paths })
}
