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
    files::{DIRECTORY, Found, Validations},
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
    /// In the order of the chain.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Toolkit, Self::Cuda, Self::Plugin];

    /// The file that says that it has passed.
    pub fn file(self) -> &'static str {
        match self {
            Self::Driver => "driver-ready",
            Self::Toolkit => "toolkit-ready",
            Self::Cuda => "cuda-ready",
            Self::Plugin => "plugin-ready",
        }
    }

    /// The file that says why it has not.
    pub fn failure(self) -> &'static str {
        match self {
            Self::Driver => "driver-failed",
            Self::Toolkit => "toolkit-failed",
            Self::Cuda => "cuda-failed",
            Self::Plugin => "plugin-failed",
        }
    }

    /// The container that writes the files.
    pub fn container(self) -> &'static str {
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

/// Tries until it passes, tells each new reason once, and gives up when `patience` has run out or shutdown has begun.
pub(crate) async fn until_passed<T>(
    patience: Duration,
    shutdown: &Shutdown,
    mut attempt: impl AsyncFnMut() -> Result<T, String>,
    mut tell: impl FnMut(&str) -> Result<(), Error>,
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
        if reason != said {
            tell(&reason)?;
        }
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
    async fn a_check_that_does_not_pass_tells_each_reason_and_ends_with_the_last() {
        let (_stop, shutdown) = Shutdown::manual();
        let (mut tries, mut told) = (0, Vec::new());
        let attempt = async || {
            tries += 1;
            Err::<(), _>(format!("reason {}", tries / 3))
        };
        let tell = |reason: &str| {
            told.push(reason.to_owned());
            Ok(())
        };
        let error = until_passed(Duration::from_secs(60), &shutdown, attempt, tell).await.expect_err("it never passes");
        assert!(matches!(&error, Error::Late { reason, .. } if told.last() == Some(reason)), "{error}: {told:?}");
        assert_eq!(told[..2], ["reason 0", "reason 1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_is_told_to_stop_stops() {
        let (stop, shutdown) = Shutdown::manual();
        stop.send(true).expect("somebody listens");
        let never =
            until_passed(Duration::MAX / 2, &shutdown, async || Err::<(), _>("no".to_owned()), |_| Ok(())).await;
        assert!(matches!(never, Err(Error::Interrupted)), "{never:?}");
    }
}
