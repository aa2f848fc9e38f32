//! Flags of the chain's commands.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Subcommand, builder::BoolishValueParser};

use super::duration;
use crate::{
    cuda, node_status, nvml, prepare_driver,
    shutdown::Shutdown,
    validator::{self, Check, Cuda, DIRECTORY, Driver, Own, Plugin, Toolkit, Validations, VfioPci},
};

/// This program, whatever has become of its file.
const SELF: &str = "/proc/self/exe";

#[derive(Debug, Subcommand)]
pub(super) enum Validate {
    /// The NVIDIA driver of this node works.
    Driver(DriverArgs),
    /// Containers are given GPUs: this one is.
    Toolkit(ValidationsArgs),
    /// The GPUs of this container compute.
    Cuda {
        #[command(flatten)]
        validations: ValidationsArgs,
        /// As in `90s` or `5m`.
        #[arg(long, default_value = "5m", value_parser = duration)]
        timeout: Duration,
        #[command(flatten)]
        workload: WorkloadArgs,
    },
    /// The kubelet offers GPUs.
    Plugin {
        #[command(flatten)]
        validations: ValidationsArgs,
        #[arg(long, env = "NODE_NAME")]
        node: String,
        /// As in `90s` or `5m`.
        #[arg(long, default_value = "150s", value_parser = duration)]
        timeout: Duration,
        #[command(flatten)]
        workload: WorkloadArgs,
    },
    /// The GPUs of this node are bound for virtual machines.
    VfioPci {
        #[command(flatten)]
        validations: ValidationsArgs,
        #[arg(long, default_value = "/sys/bus/pci/devices")]
        devices: PathBuf,
        /// As in `90s` or `5m`.
        #[arg(long, default_value = "30m", value_parser = duration)]
        timeout: Duration,
    },
    /// Stays while the node's checks hold, and takes their files away at the end.
    Hold(ValidationsArgs),
}

#[derive(Debug, Args)]
pub(super) struct WorkloadArgs {
    /// Lets a pod of its own compute, too.
    #[arg(long, env = "WITH_WORKLOAD", default_value = "false", action = clap::ArgAction::Set, value_parser = BoolishValueParser::new(), requires_if("true", "pod"))]
    with_workload: bool,
    /// This pod, which the other one is like.
    #[arg(long, env = "POD_NAME")]
    pod: Option<String>,
    #[arg(long, env = "OPERATOR_NAMESPACE", default_value = "gpuvirt")]
    namespace: String,
}

impl WorkloadArgs {
    fn own(self) -> Option<Own> {
        let Self { with_workload, pod, namespace } = self;
        pod.filter(|_| with_workload).map(|pod| Own { namespace, pod })
    }
}

#[derive(Debug, Args)]
pub(super) struct ValidationsArgs {
    /// Where the files of checks are.
    #[arg(long, default_value = DIRECTORY)]
    validations: PathBuf,
}

#[derive(Debug, Args)]
pub(super) struct DriverArgs {
    #[command(flatten)]
    validations: ValidationsArgs,
    /// Where the host's `/` is mounted.
    #[arg(long, default_value = "/host")]
    host_root: PathBuf,
    /// The host's root, as the host calls it.
    #[arg(long, default_value = "/")]
    root_fs: String,
    /// Where the driver pod's root is mounted.
    #[arg(long, default_value = "/run/nvidia/driver")]
    install_dir: PathBuf,
    /// The driver pod's root, as the host calls it.
    #[arg(long, default_value = "/run/nvidia/driver")]
    install_dir_on_host: String,
    /// Where the host's `/dev/char` is mounted.
    #[arg(long, default_value = "/host-dev-char")]
    dev_char: PathBuf,
    /// Makes no links in `/dev/char`.
    #[arg(long, env = "DISABLE_DEV_CHAR_SYMLINK_CREATION", default_value_t = false, action = clap::ArgAction::Set)]
    disable_dev_char_symlink_creation: bool,
    /// Opens no GPU, as where virtual machines have some of them.
    #[arg(long, env = "DRIVER_VALIDATION_SKIP_GPU_INIT", default_value_t = false, action = clap::ArgAction::Set)]
    skip_gpu_init: bool,
    /// As in `90s` or `5m`: building a driver takes minutes.
    #[arg(long, default_value = "30m", value_parser = duration)]
    timeout: Duration,
}

#[derive(Debug, Args)]
pub(super) struct WaitArgs {
    check: Check,
    #[command(flatten)]
    validations: ValidationsArgs,
}

#[derive(Debug, Args)]
pub(super) struct PrepareArgs {
    /// Where the host's `/` is mounted.
    #[arg(long, default_value = "/host")]
    host_root: PathBuf,
    /// Where the host's `/run/nvidia` is mounted, with what is unmounted there unmounted on the host.
    #[arg(long, default_value = "/run/nvidia")]
    run_dir: PathBuf,
    /// Of the driver that is to come: one that is loaded with the same stays.
    #[arg(long, env = "DRIVER_CONFIG_DIGEST")]
    digest: Option<String>,
    /// How long users of an old driver are waited for, as in `90s` or `5m`.
    #[arg(long, default_value = "10m", value_parser = duration)]
    timeout: Duration,
}

#[derive(Debug, Args)]
pub(super) struct NodeStatusArgs {
    #[command(flatten)]
    validations: ValidationsArgs,
    #[arg(long, env = "NODE_NAME")]
    node: String,
    /// Where the host's `/` is mounted.
    #[arg(long, default_value = "/host")]
    host_root: PathBuf,
    /// Where the driver pod's root is.
    #[arg(long, default_value = "/run/nvidia/driver")]
    driver_root: PathBuf,
    #[arg(long, default_value = "0.0.0.0:8000")]
    listen: SocketAddr,
}

#[derive(Debug, Args)]
pub(super) struct NvmlArgs {
    /// The root that has the driver.
    #[arg(long, default_value = "/")]
    root: PathBuf,
    /// Opens no GPU.
    #[arg(long)]
    version_only: bool,
    /// What there is to say of vGPUs instead.
    #[arg(long, conflicts_with = "version_only")]
    vgpus: bool,
    /// Does something to this GPU instead.
    #[arg(long, requires = "act", value_name = "ADDRESS")]
    gpu: Option<vfio::PciAddress>,
    /// What, in JSON.
    #[arg(long, requires = "gpu", value_parser = parse_act)]
    act: Option<vfio::vgpu::MigAct>,
}

#[derive(Debug, Args)]
pub(super) struct CudaArgs {
    #[arg(long, default_value = cuda::LIBRARY)]
    library: OsString,
}

impl From<ValidationsArgs> for Validations {
    fn from(args: ValidationsArgs) -> Self {
        Self::new(args.validations)
    }
}

pub(super) async fn validate(check: Validate, shutdown: &Shutdown) -> Result<(), validator::Error> {
    match check {
        Validate::Driver(args) => Driver::from(args).run(shutdown).await,
        Validate::Toolkit(args) => Toolkit { validations: args.into(), helper: SELF.into() }.run().await,
        Validate::Cuda { validations, timeout, workload } => {
            let workload = match workload.own() {
                Some(own) => Some((kube::Client::try_default().await.map_err(validator::Error::Client)?, own)),
                None => None,
            };
            let check = Cuda { validations: validations.into(), patience: timeout, workload, helper: SELF.into() };
            check.run(shutdown).await
        }
        Validate::Plugin { validations, node, timeout, workload } => {
            let client = kube::Client::try_default().await.map_err(validator::Error::Client)?;
            let check = Plugin { validations: validations.into(), node, patience: timeout, workload: workload.own() };
            check.run(client, shutdown).await
        }
        Validate::VfioPci { validations, devices, timeout } => {
            VfioPci { validations: validations.into(), devices, patience: timeout }.run(shutdown).await
        }
        Validate::Hold(args) => validator::hold(&args.into(), shutdown).await,
    }
}

pub(super) async fn wait(args: WaitArgs, shutdown: &Shutdown) -> Result<(), validator::Error> {
    validator::wait(&args.validations.into(), args.check, shutdown).await
}

impl From<PrepareArgs> for prepare_driver::Options {
    fn from(args: PrepareArgs) -> Self {
        Self {
            host_root: args.host_root,
            run_dir: args.run_dir,
            digest: args.digest,
            patience: args.timeout,
            helper: SELF.into(),
        }
    }
}

impl From<NodeStatusArgs> for node_status::Config {
    fn from(args: NodeStatusArgs) -> Self {
        Self {
            node: args.node,
            listen: args.listen,
            host_root: args.host_root,
            validations: args.validations.into(),
            driver_root: args.driver_root,
            helper: SELF.into(),
        }
    }
}

impl From<DriverArgs> for Driver {
    fn from(args: DriverArgs) -> Self {
        Self {
            validations: args.validations.into(),
            host_root: args.host_root,
            root_fs: args.root_fs,
            install_dir: args.install_dir,
            install_dir_on_host: args.install_dir_on_host,
            dev_char: (!args.disable_dev_char_symlink_creation).then_some(args.dev_char),
            skip_gpus: args.skip_gpu_init,
            patience: args.timeout,
            helper: SELF.into(),
        }
    }
}

/// The parent reads the answer from standard output, and a reason from the last line of standard error.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a child's answer to its parent")]
pub(super) fn nvml(args: &NvmlArgs) -> ExitCode {
    let answer = match (args.gpu.zip(args.act.as_ref()), args.vgpus) {
        (Some((gpu, act)), _) => nvml::act(&args.root, gpu, act).map(|()| serde_json::to_string(&())),
        (None, true) => nvml::vgpus(&args.root).map(|report| serde_json::to_string(&report)),
        (None, false) => nvml::answer(&args.root, args.version_only).map(|report| serde_json::to_string(&report)),
    };
    match answer {
        Ok(report) => {
            println!("{}", report.expect("a report should serialize"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", crate::chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn parse_act(text: &str) -> Result<vfio::vgpu::MigAct, serde_json::Error> {
    serde_json::from_str(text)
}

/// As [`nvml`].
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a child's answer to its parent")]
pub(super) fn cuda(args: &CudaArgs) -> ExitCode {
    match cuda::compute(&args.library) {
        Ok(gpus) => {
            println!("{gpus} GPU(s) computed rightly");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", crate::chain(&error));
            ExitCode::FAILURE
        }
    }
}
