//! `gpuvirt plan`: of a node of the cluster, of this host, or of a described machine.

use std::path::PathBuf;

use clap::Args;

use super::{SubjectArgs, runtime};
use crate::{
    answer::Output,
    cluster_command,
    host_command::{early, plan, vgpus},
    kubectl::TargetArgs,
};

#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// A node of the cluster, instead of this host.
    #[arg(conflicts_with_all = ["host_root", "machine", "early", "config", "layout", "device"])]
    node: Option<String>,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    subject: SubjectArgs,
    #[arg(long, value_enum, default_value = "vm-passthrough")]
    mode: plan::Mode,
    /// Prints instead what gives the GPUs to VFIO at boot, before any other driver has them: a udev rule, modprobe.d,
    /// kernel arguments, and for `OpenShift` an object with all of it. For machines where taking them later hangs (8×H100).
    #[arg(long, conflicts_with = "mode")]
    early: bool,
    /// With --mode vm-vgpu: a file of vGPU layouts as NVIDIA's vgpu-device-manager reads it (version v1). Our own layouts
    /// without it.
    #[arg(long, value_name = "FILE", conflicts_with = "early")]
    config: Option<PathBuf>,
    /// With --mode vm-vgpu: the layout, as in the label `nvidia.com/vgpu.config`. `default` without it.
    #[arg(long, value_name = "NAME", conflicts_with = "early")]
    layout: Option<String>,
    /// A GPU, as in 0000:01:00.0; all when none is named. May be repeated.
    #[arg(long, value_name = "ADDRESS")]
    device: Vec<vfio::PciAddress>,
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

impl PlanArgs {
    /// Whether all of it can be done.
    pub(super) fn run(self) -> anyhow::Result<bool> {
        if let Some(node) = self.node {
            let target = self.target.of(None);
            let asked = cluster_command::plan::run(&target, &node, self.mode.workload(), self.output);
            return Ok(runtime()?.block_on(Box::pin(asked))?);
        }
        let subject = self.subject.into();
        if self.early {
            return Ok(early::run(&subject, &self.device, self.output)?);
        }
        match self.mode {
            plan::Mode::VmVgpu => {
                let choice = vgpus::Choice { config: self.config, layout: self.layout };
                let asked = vgpus::run(&subject, &choice, &self.device, self.output);
                Ok(runtime()?.block_on(Box::pin(asked))?)
            }
            mode @ (plan::Mode::VmPassthrough | plan::Mode::Container) => {
                anyhow::ensure!(
                    self.config.is_none() && self.layout.is_none(),
                    "--config and --layout choose vGPUs: they go with --mode vm-vgpu"
                );
                Ok(plan::run(&subject, mode, &self.device, self.output)?)
            }
        }
    }
}
