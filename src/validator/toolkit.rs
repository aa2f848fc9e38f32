//! Whether containers get GPUs: this one was started as a management container, so it must see them all.

use std::{ffi::OsString, path::Path, time::Duration};

use super::{Check, Error, Validations};
use crate::nvml;

const NVML_PATIENCE: Duration = Duration::from_secs(120);

pub struct Toolkit {
    pub validations: Validations,
    /// This program, to be run as a child.
    pub helper: OsString,
}

impl Toolkit {
    /// One try: what the runtime has not put into this container will not come any more, only into the next one.
    pub async fn run(&self) -> Result<(), Error> {
        let asked = nvml::ask(&self.helper, Path::new("/"), false, NVML_PATIENCE).await;
        let reason = match asked {
            Ok(report) if !report.gpus.is_empty() => {
                self.validations.passed(Check::Toolkit, "")?;
                tracing::info!(driver = report.driver, gpus = report.gpus.len(), "containers get GPUs");
                return Ok(());
            }
            Ok(_) => "the driver is here, and no GPU".to_owned(),
            Err(error) => crate::chain(&error),
        };
        let reason = format!(
            "this container has been given no GPU ({reason}): the container runtime may not know the class nvidia yet; see kubectl logs ds/nvidia-container-toolkit-daemonset"
        );
        self.validations.failed(Check::Toolkit, &reason)?;
        Err(Error::Unmet(reason))
    }
}
