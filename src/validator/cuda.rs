//! Whether CUDA works in a container: every GPU that this one has been given computes something, and rightly.

use std::{ffi::OsString, process::Stdio, time::Duration};

use kube::Client;
use tokio::{process::Command, time::timeout};

use super::{Check, Error, Own, Validations, Workload};
use crate::{cuda, shutdown::Shutdown};

pub struct Cuda {
    pub validations: Validations,
    pub patience: Duration,
    /// A pod of its own shows it too.
    pub workload: Option<(Client, Own)>,
    /// This program, to be run as a child.
    pub helper: OsString,
}

impl Cuda {
    /// One try: a container that cannot compute will not learn it.
    pub async fn run(&self, shutdown: &Shutdown) -> Result<(), Error> {
        let child = Command::new(&self.helper).arg(cuda::COMMAND).stdin(Stdio::null()).kill_on_drop(true).output();
        let ended = tokio::select! {
            ended = timeout(self.patience, child) => ended,
            () = shutdown.begun() => return Err(Error::Interrupted),
        };
        let reason = match ended {
            Ok(Ok(output)) if output.status.success() => {
                tracing::info!("{}", String::from_utf8_lossy(&output.stdout).trim());
                match self.in_a_pod(shutdown).await {
                    Ok(()) => return self.validations.passed(Check::Cuda, ""),
                    Err(reason) => reason,
                }
            }
            Ok(Ok(output)) => {
                let said = String::from_utf8_lossy(&output.stderr);
                said.lines()
                    .rev()
                    .find(|line| !line.trim().is_empty())
                    .unwrap_or("the child ended without a word")
                    .to_owned()
            }
            Ok(Err(error)) => format!("the child that computes does not start: {error}"),
            Err(_) => format!("no answer within {} s", self.patience.as_secs()),
        };
        let reason = format!("CUDA does not work in this container: {reason}; see nvidia-smi and dmesg on the node");
        self.validations.failed(Check::Cuda, &reason)?;
        Err(Error::Unmet(reason))
    }

    async fn in_a_pod(&self, shutdown: &Shutdown) -> Result<(), String> {
        match &self.workload {
            None => Ok(()),
            Some((client, own)) => Workload::Cuda.run(client, own, self.patience, shutdown).await,
        }
    }
}
