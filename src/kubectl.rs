//! `kubectl gpuvirt …`: commands and flags of the plugin, a small program of its own that also runs on macOS and Windows.
//! `gpuvirt` has some of these commands too, and takes them from here.

mod complete;
mod reference;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::{
    Args, CommandFactory, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use clap_complete::Shell;
use crds::WorkloadMode;

pub use self::reference::page;
use crate::{
    answer::Output,
    chain,
    cluster_command::{Target, approve, doctor, explain, gather, gpus, nodes, plan, status},
    terminal::{BAD, paint, print},
};

/// NVIDIA GPUs of a cluster, for containers and for KubeVirt virtual machines: what is so, why, and what to do.
#[derive(Debug, Parser)]
#[command(name = "kubectl-gpuvirt", bin_name = "kubectl gpuvirt", version)]
pub struct Kubectl {
    #[command(flatten)]
    target: TargetArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The cluster on one screen: each node's mode, changes, GPUs, what it offers, and why something is not ready.
    ///
    /// Exits with 2 where something is not ready.
    Status(StatusArgs),
    /// A line for each GPU node: its mode, host, driver and GPUs.
    Nodes(OutputArgs),
    /// A line for each GPU and vGPU: where it is, what drives it, and who has it.
    Gpus(GpusArgs),
    /// What a mode would do to a node and to whom, and what does not let it begin. Changes nothing.
    ///
    /// Exits with 2 where it cannot begin now.
    Plan(PlanArgs),
    /// Shows what a change would do to a node and its VMs, and approves it.
    Approve(ApproveArgs),
    /// Says why something is as it is, and what to do. Changes nothing.
    ///
    /// Exits with 2 where something is wrong with it.
    #[command(subcommand)]
    Explain(Explain),
    /// Whether the cluster and its KubeVirt are fit for GPUs, also before gpuvirt is installed: each finding with what was
    /// seen and what to do.
    ///
    /// Exits with 2 where something is wrong; warnings and advice do not count.
    Doctor(OutputArgs),
    /// Writes one archive for a report on a fault: our objects, nodes, hosts by their agents, logs, events, KubeVirt's
    /// configuration. Secrets and personal data are taken out.
    MustGather(MustGatherArgs),
    /// Prints the completion of a shell: `source <(kubectl gpuvirt completion bash)`.
    ///
    /// That completes `kubectl-gpuvirt`; for `kubectl gpuvirt` see docs/kubectl-gpuvirt.md.
    Completion { shell: Shell },
    /// Candidates for kubectl's own completion.
    #[command(hide = true)]
    Complete {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Which cluster, as kubectl's flags of the same names say it.
#[derive(Clone, Debug, Default, Args)]
pub struct TargetArgs {
    /// The kubeconfig file to use. KUBECONFIG, or ~/.kube/config, without it.
    #[arg(long, value_name = "FILE", global = true, help_heading = "Cluster")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig to use.
    #[arg(long, value_name = "NAME", global = true, help_heading = "Cluster")]
    context: Option<String>,
}

impl TargetArgs {
    pub fn of(self, namespace: Option<String>) -> Target {
        Target { kubeconfig: self.kubeconfig, context: self.context, namespace }
    }
}

#[derive(Debug, Args)]
pub struct OutputArgs {
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Debug, Args)]
struct StatusArgs {
    /// Goes on: redrawn whenever something changes, until Ctrl-C. Piped, each change is printed below the last.
    #[arg(short, long, conflicts_with = "output")]
    watch: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct GpusArgs {
    /// Only those of this node.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Only those that pods and VMs of this namespace have.
    #[arg(short, long)]
    namespace: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct MustGatherArgs {
    /// The archive to write. `gpuvirt-must-gather-<time>.tar.gz` here without it.
    #[arg(long, value_name = "FILE")]
    dest: Option<PathBuf>,
    /// Only these nodes' hosts and agents; all when none is named. May be repeated.
    #[arg(long, value_name = "NAME")]
    node: Vec<String>,
    /// Asks no agent for its host: it takes the right to create pods/exec.
    #[arg(long)]
    no_hosts: bool,
    /// Of gpuvirt, where its ClusterPolicy does not say it.
    #[arg(short, long)]
    namespace: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

fn modes() -> impl TypedValueParser<Value = WorkloadMode> {
    PossibleValuesParser::new(WorkloadMode::ALL.map(WorkloadMode::as_str)).try_map(|text| text.parse::<WorkloadMode>())
}

#[derive(Debug, Args)]
struct PlanArgs {
    node: String,
    #[arg(long, default_value = "vm-passthrough", value_parser = modes())]
    mode: WorkloadMode,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct ApproveArgs {
    node: String,
    /// The hash of the plan that you have read. Without it the plan is shown and nothing is approved.
    #[arg(long, value_name = "HASH")]
    plan: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Subcommand)]
pub enum Explain {
    /// A node with GPUs: its mode, what changes, what is wrong, and each of its GPUs.
    Node {
        node: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// A GPU: what drives it, who has it, what is wrong, and which modes it can be in.
    Gpu {
        /// As in `gpu-1/0000:43:00.0`, or the address alone if one node only has it.
        #[arg(value_name = "NODE/ADDRESS")]
        gpu: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// A ClusterPolicy: what became of it, operand by operand. The one that counts if none is named.
    #[command(visible_alias = "policy")]
    Clusterpolicy {
        name: Option<String>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// A virtual machine instance that asks for GPUs: why it does not run.
    Vmi {
        /// As in `vms/training-1`, or a name in the namespace of your context.
        #[arg(value_name = "NAMESPACE/NAME")]
        vmi: String,
        #[arg(short, long)]
        namespace: Option<String>,
        #[command(flatten)]
        output: OutputArgs,
    },
}

impl ApproveArgs {
    pub fn run(self, target: TargetArgs) -> anyhow::Result<ExitCode> {
        runtime()?.block_on(Box::pin(approve::run(
            &target.of(None),
            &self.node,
            self.plan.as_deref(),
            self.output.output,
        )))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Explain {
    pub fn run(self, target: TargetArgs) -> anyhow::Result<ExitCode> {
        let runtime = runtime()?;
        let fine = match self {
            Self::Node { node, output } => {
                runtime.block_on(Box::pin(explain::node(&target.of(None), &node, output.output)))?
            }
            Self::Gpu { gpu, output } => {
                runtime.block_on(Box::pin(explain::gpu(&target.of(None), &gpu, output.output)))?
            }
            Self::Clusterpolicy { name, output } => {
                runtime.block_on(Box::pin(explain::policy(&target.of(None), name.as_deref(), output.output)))?
            }
            Self::Vmi { vmi, namespace, output } => {
                runtime.block_on(Box::pin(explain::vmi(&target.of(namespace), &vmi, output.output)))?
            }
        };
        Ok(code(fine))
    }
}

/// 2 is an answer, and not the failure to give one.
fn code(fine: bool) -> ExitCode {
    if fine { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

/// The commands as clap knows them.
fn command() -> clap::Command {
    Kubectl::command()
}

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    let Kubectl { target, command } = Kubectl::parse();
    match dispatch(target, command) {
        Ok(code) => code,
        Err(error) => {
            anstream::eprintln!("{} {}", paint(BAD, "error:"), chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(target: TargetArgs, command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Status(StatusArgs { watch, output }) => {
            let target = target.of(None);
            let asked = status::run(&target, watch, output.output);
            Ok(code(runtime()?.block_on(Box::pin(asked))?))
        }
        Command::Nodes(OutputArgs { output }) => {
            runtime()?.block_on(Box::pin(nodes::run(&target.of(None), output)))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Gpus(GpusArgs { node, namespace, output }) => {
            let only = gpus::Only { node, namespace };
            runtime()?.block_on(Box::pin(gpus::run(&target.of(None), &only, output.output)))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Plan(PlanArgs { node, mode, output }) => {
            let target = target.of(None);
            let asked = plan::run(&target, &node, mode, output.output);
            Ok(code(runtime()?.block_on(Box::pin(asked))?))
        }
        Command::Approve(args) => args.run(target),
        Command::Explain(what) => what.run(target),
        Command::Doctor(OutputArgs { output }) => {
            Ok(code(runtime()?.block_on(Box::pin(doctor::run(&target.of(None), output)))?))
        }
        Command::MustGather(MustGatherArgs { dest, node, no_hosts, namespace, output }) => {
            let wish = gather::Wish { dest, nodes: node, hosts: !no_hosts, namespace: namespace.clone() };
            runtime()?.block_on(Box::pin(gather::run(&target.of(namespace), wish, output.output)))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Kubectl::command(), "kubectl-gpuvirt", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
        Command::Complete { words } => {
            let mut all = Kubectl::command();
            all.build();
            print(&complete::answer(&all, &words))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("no async runtime")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn the_cluster_can_be_named_before_and_after_the_command() {
        for line in [["kubectl-gpuvirt", "--context", "c", "nodes"], ["kubectl-gpuvirt", "nodes", "--context", "c"]] {
            assert_eq!(Kubectl::parse_from(line).target.context.as_deref(), Some("c"), "{line:?}");
        }
    }

    #[test]
    fn each_shell_has_a_completion() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "kubectl-gpuvirt", &mut script);
            assert!(String::from_utf8_lossy(&script).contains("must-gather"), "{shell}");
        }
    }
}
