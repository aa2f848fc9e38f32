//! Doing a plan. The only caller that changes a host.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::address::PciAddress;
use crate::inventory::{PCI_DRIVERS, device_path};
use crate::journal::{Journal, JournalError, Pending};
use crate::kernel::{Kernel, KernelError};
use crate::plan::{Plan, Step};

/// Where a plan came to a stop. What was done before stands; a new plan goes on from there, or back.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The kernel did not do a step; where the write hangs, the journal has it.
    #[error("gpu {gpu}: could not {step}: {source}")]
    Kernel { gpu: PciAddress, step: Box<Step>, source: KernelError },
    /// A step could not be noted, so it was not done.
    #[error("gpu {gpu}: could not {step}: {source}")]
    Journal { gpu: PciAddress, step: Box<Step>, source: JournalError },
}

/// Does a plan step by step and stops at the first that fails.
///
/// Success says that the kernel took every write, not that the devices are where they should be:
/// [`deviations`](crate::verify::deviations) says that.
pub fn execute(plan: &Plan, kernel: &mut impl Kernel, journal: &mut Journal) -> Result<(), ExecuteError> {
    let gpu = plan.gpu;
    for step in &plan.steps {
        let failed = |source| ExecuteError::Journal { gpu, step: Box::new(step.clone()), source };
        tracing::info!(%gpu, %step, "step");
        let noted = match step {
            Step::RecordOriginal { address, ids, origin } => journal.record(*address, *ids, origin.clone()),
            Step::ForgetOriginal { address } => journal.forget(*address),
            Step::LoadModule { .. }
            | Step::SetOverride { .. }
            | Step::Unbind { .. }
            | Step::Probe { .. }
            | Step::ClearOverride { .. } => Ok(()),
        };
        noted.map_err(failed)?;
        let Err(source) = watched(step, kernel, journal).map_err(failed)? else { continue };
        if let (Some(address), KernelError::Hung { path, pid, start_time, .. }) = (step.address(), &source) {
            let pending = Pending { pid: *pid, start_time: *start_time, path: path.clone() };
            journal.add_pending(address, pending).map_err(failed)?;
        }
        return Err(ExecuteError::Kernel { gpu, step: Box::new(step.clone()), source });
    }
    Ok(())
}

/// An unbind may never come back, and who waits for it may be killed meanwhile: whoever comes next must know that the
/// device's lock is held, so it is noted before.
fn watched(
    step: &Step,
    kernel: &mut impl Kernel,
    journal: &mut Journal,
) -> Result<Result<(), KernelError>, JournalError> {
    let Step::Unbind { address, driver } = step else { return Ok(act(step, kernel)) };
    match kernel.writer() {
        Ok(Some((pid, start_time))) => {
            journal.add_pending(*address, Pending { pid, start_time, path: unbind(driver) })?;
            let done = act(step, kernel);
            if !matches!(done, Err(KernelError::Hung { .. })) {
                journal.end_pending(*address)?;
            }
            Ok(done)
        }
        Ok(None) => Ok(act(step, kernel)),
        Err(error) => Ok(Err(error)),
    }
}

fn act(step: &Step, kernel: &mut impl Kernel) -> Result<(), KernelError> {
    match step {
        Step::LoadModule { module } => kernel.load_module(module),
        Step::SetOverride { address, driver } => kernel.write(&driver_override(*address), driver),
        // The driver's own file, not the device's: it does nothing to a device that has moved on to another driver.
        Step::Unbind { address, driver } => {
            let result = kernel.write(&unbind(driver), &address.to_string());
            match result.as_ref().err().and_then(KernelError::errno) {
                Some(Errno::ENODEV | Errno::ENOENT) => Ok(()),
                Some(_) | None => result,
            }
        }
        Step::Probe { address, .. } => kernel.write(Path::new("/sys/bus/pci/drivers_probe"), &address.to_string()),
        Step::ClearOverride { address } => kernel.write(&driver_override(*address), "\n"),
        Step::RecordOriginal { .. } | Step::ForgetOriginal { .. } => Ok(()),
    }
}

fn unbind(driver: &str) -> PathBuf {
    PathBuf::from(PCI_DRIVERS).join(driver).join("unbind")
}

fn driver_override(address: PciAddress) -> PathBuf {
    device_path(address).join("driver_override")
}
