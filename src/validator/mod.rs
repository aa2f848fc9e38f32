//! The chain of a container node: driver → toolkit → cuda → plugin, checked by init containers one after the other.
//!
//! `gpuvirt validate CHECK` looks until the check passes or its time is up, and writes the check's file;
//! `gpuvirt wait CHECK` waits for that file. Names and content are those of gpu-operator 26.7, whose images source them.

mod cuda;
mod driver;
mod files;
mod plugin;
mod toolkit;
mod vfio_pci;
mod wait;

use std::{path::PathBuf, time::Duration};

use tokio::time::{Instant, sleep};

pub use self::{
    cuda::Cuda,
    driver::Driver,
    files::{DIRECTORY, Validations},
    plugin::Plugin,
    toolkit::Toolkit,
    vfio_pci::VfioPci,
    wait::wait,
};
use crate::shutdown::Shutdown;

/// A link of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Check {
    Driver,
    Toolkit,
    Cuda,
    Plugin,
}

impl Check {
    /// The file that says that it has passed.
    pub fn file(self) -> &'static str {
        match self {
            Self::Driver => "driver-ready",
            Self::Toolkit => "toolkit-ready",
            Self::Cuda => "cuda-ready",
            Self::Plugin => "plugin-ready",
        }
    }

    /// The container that writes the file.
    fn container(self) -> &'static str {
        match self {
            Self::Driver => "driver-validation",
            Self::Toolkit => "toolkit-validation",
            Self::Cuda => "cuda-validation",
            Self::Plugin => "plugin-validation",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} cannot be written", path = path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{directory} cannot be watched", directory = directory.display())]
    Watch { directory: PathBuf, source: std::io::Error },
    /// What is wrong, and the next step.
    #[error("{0}")]
    Unmet(String),
    #[error("not after {} s: {reason}", waited.as_secs())]
    Late { waited: Duration, reason: String },
    #[error("told to stop before the check had passed")]
    Interrupted,
    #[error("no connection to the API server can be configured")]
    Client(#[source] kube::Error),
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MOST_PAUSE: Duration = Duration::from_secs(15);

/// Tries until it passes, says each new reason once, and gives up when `patience` has run out or shutdown has begun.
async fn until_passed<T>(
    patience: Duration,
    shutdown: &Shutdown,
    mut attempt: impl AsyncFnMut() -> Result<T, String>,
) -> Result<T, Error> {
    let begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    let mut said = String::new();
    loop {
        let tried = tokio::select! {
            tried = attempt() => tried,
            () = shutdown.begun() => return Err(Error::Interrupted),
        };
        let reason = match tried {
            Ok(passed) => return Ok(passed),
            Err(reason) => reason,
        };
        if begun.elapsed() + pause > patience {
            return Err(Error::Late { waited: begun.elapsed(), reason });
        }
        if reason != said {
            tracing::warn!("not yet: {reason}");
            said = reason;
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = shutdown.begun() => return Err(Error::Interrupted),
        }
        pause = (pause * 2).min(MOST_PAUSE);
    }
}

/// The validator's main container: all checks have passed while it runs, and none when it has ended.
pub async fn hold(validations: &Validations, shutdown: &Shutdown) -> Result<(), Error> {
    tracing::info!("all validations are successful");
    shutdown.begun().await;
    validations.clear()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_check_that_does_not_pass_ends_with_its_last_reason() {
        let (_stop, shutdown) = Shutdown::manual();
        let mut tries = 0;
        let error = until_passed(Duration::from_secs(60), &shutdown, async || {
            tries += 1;
            Err::<(), _>(format!("try {tries}"))
        })
        .await
        .expect_err("it never passes");
        assert!(matches!(&error, Error::Late { reason, .. } if *reason == format!("try {tries}")), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_is_told_to_stop_stops() {
        let (stop, shutdown) = Shutdown::manual();
        stop.send(true).expect("somebody listens");
        let never = until_passed(Duration::MAX / 2, &shutdown, async || Err::<(), _>("no".to_owned())).await;
        assert!(matches!(never, Err(Error::Interrupted)), "{never:?}");
    }
}
