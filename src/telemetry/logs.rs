//! Logs: to standard error, one line an event, and as much as is asked for while the program runs.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use tracing_subscriber::{EnvFilter, reload};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    /// A JSON object a line, its fields beside `timestamp`, `level`, `target` and `message`.
    Json,
}

impl LogFormat {
    /// As the option has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// Changes what is logged.
#[derive(Clone)]
pub struct Logs {
    change: Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>,
    start: String,
    now: Arc<Mutex<String>>,
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs").field("start", &self.start).finish_non_exhaustive()
    }
}

/// Standard output belongs to commands that print an answer.
pub fn init_logs(level: &str, format: LogFormat) -> Logs {
    let (start, filter) = match EnvFilter::try_new(level) {
        Ok(filter) => (level, filter),
        Err(_unreadable) => ("info", EnvFilter::new("info")),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => {
            let builder = builder.with_ansi(false).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Logs::new(start, move |filter| handle.reload(filter))
        }
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).with_span_list(false).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Logs::new(start, move |filter| handle.reload(filter))
        }
    }
}

/// Whether a filter can be used, or why not.
pub fn readable(filter: &str) -> Result<(), String> {
    EnvFilter::try_new(filter).map(drop).map_err(|error| error.to_string())
}

impl Logs {
    fn new(start: &str, change: impl Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync + 'static) -> Self {
        let now = Arc::new(Mutex::new(start.to_owned()));
        Self { change: Arc::new(change), start: start.to_owned(), now }
    }

    /// Logs by this filter from now on, or as at the start. One that cannot be used leaves it as it is.
    pub fn set(&self, filter: Option<&str>) {
        let wanted = filter.unwrap_or(&self.start);
        let mut now = self.now.lock().expect("log level lock should not be poisoned");
        if *now == wanted {
            return;
        }
        // Also a filter that fails: it is told once.
        let before = std::mem::replace(&mut *now, wanted.to_owned());
        let filter = match EnvFilter::try_new(wanted) {
            Ok(filter) => filter,
            Err(error) => return tracing::warn!(wanted, %error, "log level cannot be used, it stays as it is"),
        };
        // Under the one of both that shows it.
        tracing::info!(before, wanted, "log level changes");
        match (self.change)(filter) {
            Ok(()) => tracing::info!(before, wanted, "log level has changed"),
            Err(error) => tracing::warn!(wanted, %error, "log level cannot be changed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs() -> (Logs, Arc<Mutex<Vec<String>>>) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let here = seen.clone();
        let logs = Logs::new("info", move |filter: EnvFilter| {
            here.lock().expect("unpoisoned").push(filter.to_string());
            Ok(())
        });
        (logs, seen)
    }

    #[test]
    fn the_level_changes_once_for_each_other_one_and_goes_back_to_that_of_the_start() {
        let (logs, seen) = logs();
        for wanted in [None, Some("info"), Some("debug"), Some("debug"), None] {
            logs.set(wanted);
        }
        assert_eq!(*seen.lock().expect("unpoisoned"), ["debug", "info"]);
    }

    #[test]
    fn a_filter_that_cannot_be_used_changes_nothing() {
        let (logs, seen) = logs();
        logs.set(Some("gpuvirt=loud"));
        assert!(seen.lock().expect("unpoisoned").is_empty());
        assert!(readable("gpuvirt=loud").is_err() && readable("info,vfio=debug").is_ok());
    }
}
