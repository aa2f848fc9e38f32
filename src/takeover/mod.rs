//! `gpuvirt takeover`: a cluster of NVIDIA's GPU Operator becomes ours, or goes back.
//!
//! ```text
//! look     what is there: its operator, operands, nodes, VMs                       (reads)
//! compare  which fields of a pod template differ                                   (pure)
//! plan     what will be adopted, roll, stay, and what stands in the way            (pure)
//! act      its operator to 0 ─▶ nodes marked ─▶ operands adopted ─▶ its device plugin for VMs withdrawn, last
//! back     the same the other way round
//! ```
//! Each step asks what is so already, so that a run that was interrupted is begun again. The operator waits until the last
//! sign of the peer is gone (`operator::peer`): no node ever has two device plugins for one resource, and no GPU changes
//! its driver.

mod act;
mod back;
mod compare;
mod look;
mod plan;

use std::time::Duration;

use kube::Client;
use tokio::time::timeout;

use crate::terminal::print;

/// What the agent does in their stead (gpu-operator 26.7), in the order in which they are withdrawn: that which offers GPUs
/// to VMs is the last, since the agent begins when it has gone.
const WITHDRAWN: [&str; 3] = ["nvidia-sandbox-validator", "nvidia-vgpu-device-manager", DEVICE_PLUGIN];
const DEVICE_PLUGIN: &str = "nvidia-sandbox-device-plugin-daemonset";
/// At its end, and at its start, its pod unbinds every GPU of its node, those of running VMs too (k8s-driver-manager 0.12).
const VFIO_MANAGER: &str = "nvidia-vfio-manager";
/// Of its pods, which have no other label.
const VFIO_MANAGER_PODS: &str = "name=nvidia-vfio-manager";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what} cannot be read: you need the rights of a cluster's admin")]
    Read { what: &'static str, source: Box<kube::Error> },
    #[error("{what} cannot be written")]
    Write { what: String, source: Box<kube::Error> },
    #[error("no sign of NVIDIA's GPU Operator: no Deployment gpu-operator, and no ClusterPolicy with operands")]
    Nothing,
    #[error("nothing has been changed, since this stands in the way:\n  {}", .0.join("\n  "))]
    InTheWay(Vec<String>),
    #[error("not done after {} s; what is done stays done: run it again to go on", waited.as_secs())]
    Timeout { waited: Duration },
    #[error("the answer cannot be written")]
    Output(#[from] std::io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Take,
    GiveBack,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub direction: Direction,
    /// Else only the plan is printed.
    pub apply: bool,
    /// Go on although workloads are disturbed as the plan says.
    pub accept_disruption: bool,
    /// The peer's; unset: where its Deployment is.
    pub namespace: Option<String>,
    pub timeout: Duration,
}

/// Whether nothing stands in the way.
pub async fn run(client: &Client, options: &Options) -> Result<bool, Error> {
    let found = look::look(client, options.namespace.as_deref()).await?;
    let plan = match options.direction {
        Direction::Take => plan::take(&found),
        Direction::GiveBack => back::plan(&found),
    };
    print(&plan.text())?;
    let obstacles = plan.obstacles(options.accept_disruption);
    if !options.apply {
        return Ok(obstacles.is_empty());
    }
    if !obstacles.is_empty() {
        return Err(Error::InTheWay(obstacles));
    }
    let done = async {
        match options.direction {
            Direction::Take => act::take(client, &found).await,
            Direction::GiveBack => back::give(client, &found).await,
        }
    };
    match timeout(options.timeout, done).await {
        Ok(done) => done.map(|()| true),
        Err(_elapsed) => Err(Error::Timeout { waited: options.timeout }),
    }
}

fn tell(line: &str) -> Result<(), Error> {
    Ok(print(&format!("{line}\n"))?)
}
