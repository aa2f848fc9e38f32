//! Whether CUDA works in a container: every GPU that this one has been given computes something, and rightly.

use std::{ffi::OsString, process::Stdio, time::Duration};

use tokio::{process::Command, time::timeout};

use super::{Check, Error, Validations};
use crate::{cuda, shutdown::Shutdown};

pub struct Cuda {
    pub validations: Validations,
    pub patience: Duration,
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
                self.validations.passed(Check::Cuda, "")?;
                tracing::info!("{}", String::from_utf8_lossy(&output.stdout).trim());
                return Ok(());
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
}
