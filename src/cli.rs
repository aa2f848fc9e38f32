//! Commands, flags and environment: the only place that reads them.

use std::{collections::BTreeMap, ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use tracing::Instrument as _;

mod chain;
mod doors;
mod images;
#[cfg(test)]
mod manual_tests;
mod plan_args;
mod takeover_args;

use crate::{
    agent,
    cluster_command::ready,
    cuda,
    host_command::{Subject, gather, inspect},
    kubectl::{ApproveArgs, Explain, TargetArgs},
    nvml,
    operator::{
        self,
        policy::{AgentMetrics, Installation},
        uninstall,
    },
    shutdown::Shutdown,
    telemetry::{Doors, Exposure, LogFormat, Logs, init_logs},
};

/// NVIDIA GPUs for containers and for KubeVirt virtual machines, in one cluster.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Log level, or a filter such as `info,vfio=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info", global = true)]
    log_level: String,
    #[arg(long, env = "LOG_FORMAT", default_value = "text", value_enum, global = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the operator: ClusterPolicy and node labels to operands and GPUNodes.
    Operator(Box<OperatorArgs>),
    /// Runs the agent of one node: GPUs to vfio-pci and back, offered to the kubelet.
    Agent(AgentArgs),
    /// Removes the ClusterPolicies and waits until nodes are brought back; run by the chart before it is removed.
    Uninstall(UninstallArgs),
    /// Makes room for an NVIDIA driver: unloads what an earlier one has left.
    PrepareDriver(chain::PrepareArgs),
    /// Prints what a host has: GPUs, groups, drivers, holders. Needs no cluster.
    Inspect(InspectArgs),
    /// Prints as JSON what a report on a fault needs of a host; `kubectl gpuvirt must-gather` runs it in agents' pods.
    Gather(HostArgs),
    /// Prints what a mode would take on a host, or what forbids it. Changes nothing and needs no cluster.
    ///
    /// With NODE: on a node of the cluster, with the rights of your kubeconfig: the steps, whom they would affect, what
    /// does not let them begin, and how long it took last time. Exits with 2 where a GPU cannot go to that mode now.
    Plan(plan_args::PlanArgs),
    /// Says why something does not run, with the rights of your kubeconfig. Changes nothing.
    Explain {
        #[command(flatten)]
        target: TargetArgs,
        #[command(subcommand)]
        what: Explain,
    },
    /// Shows what a change would do to a node and its VMs, and approves it, with the rights of your kubeconfig.
    Approve {
        #[command(flatten)]
        target: TargetArgs,
        #[command(flatten)]
        args: ApproveArgs,
    },
    /// Takes a cluster over from NVIDIA's GPU Operator, or gives it back, with the rights of your kubeconfig.
    Takeover(takeover_args::TakeoverArgs),
    /// Checks one link of a container node's chain, and writes its file for those who wait; for init containers.
    Validate {
        #[command(subcommand)]
        check: chain::Validate,
    },
    /// Waits until a check has passed on this node; for init containers.
    Wait(chain::WaitArgs),
    /// Tells Prometheus what the checks of a container node have found.
    NodeStatus(chain::NodeStatusArgs),
    /// Asks NVML once; the parent has a deadline for it.
    #[command(name = nvml::COMMAND, hide = true)]
    Nvml(chain::NvmlArgs),
    /// Computes on each GPU once; the parent has a deadline for it.
    #[command(name = cuda::COMMAND, hide = true)]
    CudaCompute(chain::CudaArgs),
    /// Waits until the installation is ready: the operator lives, agents report, ClusterPolicies are ready. Else says what is not.
    Ready(ReadyArgs),
    /// Prints the custom resource definitions, writes them to a folder, or brings those of a cluster up to date.
    Crds {
        #[arg(long)]
        write: Option<PathBuf>,
        /// In the cluster of your kubeconfig, or of this pod. Definitions of nvidia.com that know more fields are left alone.
        #[arg(long, conflicts_with = "write")]
        apply: bool,
    },
    /// Writes one value to one kernel file; the agent runs it with a deadline.
    #[command(name = vfio::kernel::COMMAND, hide = true)]
    KernelWrite {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
struct OperatorArgs {
    #[arg(long, env = "POD_NAMESPACE")]
    namespace: String,
    /// Distinguishes replicas.
    #[arg(long, env = "POD_NAME")]
    identity: String,
    /// Log level of the agent and the helper containers.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    operand_log_level: String,
    /// This program's image, which the agent runs too.
    #[arg(long, env = "GPUVIRT_IMAGE")]
    image: String,
    #[arg(long, env = "GPUVIRT_IMAGE_PULL_POLICY", default_value = "IfNotPresent")]
    image_pull_policy: String,
    #[command(flatten)]
    images: images::ImageArgs,
    /// Name of the chart's release, which may take over what the operator makes in its stead.
    #[arg(long, env = "HELM_RELEASE")]
    release: Option<String>,
    #[command(flatten)]
    doors: doors::DoorArgs,
    /// Secret with the certificate of the agents' metrics, in the operator's namespace.
    #[arg(long, env = "METRICS_SECRET")]
    metrics_secret: Option<String>,
}

#[derive(Debug, Args)]
struct AgentArgs {
    #[arg(long, env = "NODE_NAME")]
    node: String,
    #[arg(long, env = "POD_NAME", default_value = "gpuvirt-agent")]
    identity: String,
    #[command(flatten)]
    host: HostArgs,
    /// The kubelet's directory, as the host sees it.
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_root: PathBuf,
    /// Where a driver pod's root is, as the host sees it.
    #[arg(long, default_value = agent::library::DRIVER_ROOT)]
    driver_root: PathBuf,
    /// Seconds between two looks at the host when no event has asked for one.
    #[arg(long, default_value_t = 300)]
    resync_seconds: u64,
    #[command(flatten)]
    doors: doors::DoorArgs,
}

#[derive(Debug, Args)]
struct HostArgs {
    /// Where the host's `/` is mounted.
    #[arg(long, default_value = "/")]
    host_root: PathBuf,
}

#[derive(Debug, Args)]
struct SubjectArgs {
    /// Where the host's `/` is mounted.
    #[arg(long, visible_alias = "root", default_value = "/")]
    host_root: PathBuf,
    /// A machine described in a file instead, `-` for standard input; the format is in vfio/README.md.
    #[arg(long, value_name = "FILE", conflicts_with = "host_root")]
    machine: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct InspectArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    #[arg(short, long, value_enum, default_value = "table")]
    output: inspect::Output,
}

#[derive(Debug, Args)]
struct UninstallArgs {
    #[arg(long, env = "POD_NAMESPACE")]
    namespace: String,
    /// Distinguishes this from an operator, whose work it does where none lives.
    #[arg(long, env = "POD_NAME", default_value = "gpuvirt-uninstall")]
    identity: String,
    /// Removes also while VMs use GPUs, which stay as they are.
    #[arg(long)]
    force: bool,
    /// As in `90s` or `5m`.
    #[arg(long, default_value = "5m", value_parser = duration)]
    timeout: Duration,
}

#[derive(Debug, Args)]
struct ReadyArgs {
    #[arg(long, env = "POD_NAMESPACE", default_value = "gpuvirt")]
    namespace: String,
    /// As in `90s` or `5m`.
    #[arg(long, default_value = "1m", value_parser = duration)]
    timeout: Duration,
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(char::is_alphabetic).len());
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no duration: use 90s or 5m"))?;
    match unit {
        "s" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_secs(number * 60)),
        "h" => Ok(Duration::from_secs(number * 3600)),
        _ => Err(format!("{text:?} is no duration: use 90s or 5m")),
    }
}

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let logs = init_logs(&cli.log_level, cli.log_format);
    match dispatch(cli.command, cli.log_format, logs) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command, format: LogFormat, logs: Logs) -> anyhow::Result<ExitCode> {
    match command {
        Command::Operator(args) => runtime()?.block_on(Box::pin(async {
            operator::run(args.config(format, logs), shutdown()?).await?;
            anyhow::Ok(())
        }))?,
        Command::Agent(args) => runtime()?.block_on(Box::pin(async {
            let config = args.config(logs);
            // Who reads many nodes' lines as JSON has to tell them apart.
            let span = match format {
                LogFormat::Json => tracing::error_span!("agent", node = config.node),
                LogFormat::Text => tracing::Span::none(),
            };
            agent::run(config, shutdown()?).instrument(span).await?;
            anyhow::Ok(())
        }))?,
        Command::Uninstall(args) => runtime()?.block_on(Box::pin(async {
            uninstall::run(&connected().await?, args.into()).await?;
            anyhow::Ok(())
        }))?,
        Command::PrepareDriver(args) => runtime()?.block_on(async {
            crate::prepare_driver::run(&args.into(), &shutdown()?).await?;
            anyhow::Ok(())
        })?,
        Command::Inspect(args) => inspect::run(&args.subject.into(), args.output)?,
        Command::Gather(args) => gather::run(&args.host_root)?,
        Command::Plan(args) => {
            let possible = args.run()?;
            return Ok(if possible { ExitCode::SUCCESS } else { ExitCode::from(2) });
        }
        Command::Explain { target, what } => return what.run(target),
        Command::Approve { target, args } => return args.run(target),
        Command::Takeover(args) => {
            let clear = runtime()?.block_on(Box::pin(async {
                anyhow::Ok(crate::takeover::run(&connected().await?, &args.into()).await?)
            }))?;
            return Ok(if clear { ExitCode::SUCCESS } else { ExitCode::from(2) });
        }
        Command::Validate { check } => runtime()?.block_on(async {
            chain::validate(check, &shutdown()?).await?;
            anyhow::Ok(())
        })?,
        Command::Wait(args) => runtime()?.block_on(async {
            chain::wait(args, &shutdown()?).await?;
            anyhow::Ok(())
        })?,
        Command::NodeStatus(args) => runtime()?.block_on(async {
            crate::node_status::run(args.into(), shutdown()?).await?;
            anyhow::Ok(())
        })?,
        Command::Nvml(args) => return Ok(chain::nvml(&args)),
        Command::CudaCompute(args) => return Ok(chain::cuda(&args)),
        Command::Ready(args) => runtime()?.block_on(Box::pin(async {
            ready::run(&connected().await?, &args.namespace, args.timeout).await?;
            anyhow::Ok(())
        }))?,
        Command::Crds { apply: true, .. } => runtime()?.block_on(Box::pin(async {
            operator::definitions::apply(&connected().await?).await?;
            anyhow::Ok(())
        }))?,
        Command::Crds { write, apply: false } => crds_command(write)?,
        Command::KernelWrite { args } => {
            let code = vfio::kernel::child_main(args);
            return Ok(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One thread: both programs wait far more than they work, and each further thread costs memory on every node.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("no async runtime")
}

/// As this pod's account, or as the kubeconfig says.
async fn connected() -> anyhow::Result<kube::Client> {
    kube::Client::try_default().await.context("no connection to the API server can be configured")
}

fn shutdown() -> anyhow::Result<Shutdown> {
    Shutdown::on_signals().context("signals cannot be handled")
}

#[expect(clippy::print_stdout, reason = "this command's answer goes to standard output")]
fn crds_command(write: Option<PathBuf>) -> anyhow::Result<()> {
    match write {
        Some(dir) => crds::write_generated(&dir).map(drop)?,
        None => {
            for (_, crd) in crds::generated() {
                print!("{}", crds::to_yaml(&crd)?);
            }
        }
    }
    Ok(())
}

impl OperatorArgs {
    fn config(self, format: LogFormat, logs: Logs) -> operator::Config {
        let args = self;
        operator::Config {
            installation: Installation {
                namespace: args.namespace,
                image: args.image,
                pull_policy: args.image_pull_policy,
                log_level: args.operand_log_level,
                log_format: format,
                metrics: args.doors.of_agents(args.metrics_secret),
                images: args.images.by_section(),
            },
            logs: Some(logs),
            identity: args.identity,
            release: args.release,
            doors: args.doors.into(),
        }
    }
}

impl AgentArgs {
    fn config(self, logs: Logs) -> agent::Config {
        let args = self;
        agent::Config {
            logs,
            node: args.node,
            identity: args.identity,
            host_root: args.host.host_root,
            kubelet_root: args.kubelet_root,
            driver_root: args.driver_root,
            resync: Duration::from_secs(args.resync_seconds.max(1)),
            doors: args.doors.into(),
        }
    }
}

impl From<SubjectArgs> for Subject {
    fn from(args: SubjectArgs) -> Self {
        args.machine.map_or(Self::Host(args.host_root), Self::Described)
    }
}

impl From<UninstallArgs> for uninstall::Options {
    fn from(args: UninstallArgs) -> Self {
        // What is being removed is built no more, so its images do not matter.
        let installation = Installation {
            namespace: args.namespace,
            image: String::new(),
            pull_policy: "IfNotPresent".to_owned(),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            metrics: AgentMetrics::Off,
            images: BTreeMap::new(),
        };
        let doors = Doors { probes: SocketAddr::from(([127, 0, 0, 1], 0)), metrics: Exposure::Off };
        let operator = operator::Config { installation, identity: args.identity, release: None, doors, logs: None };
        Self { operator, force: args.force, timeout: args.timeout }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert!(duration("5").is_err() && duration("m").is_err());
    }
}
