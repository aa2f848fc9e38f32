//! Logs, metrics and probes: `/metrics`, `/livez`, `/readyz`.

mod described;

#[cfg(test)]
pub use described::check as check_described;
pub use described::{Described, Kind, Unit};

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Logs go to standard error; standard output belongs to commands that print an answer.
pub fn init_logs(level: &str, format: LogFormat) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}

/// What the probes say and the metrics count.
#[derive(Clone, Default)]
pub struct Telemetry {
    ready: Arc<AtomicBool>,
    registry: Arc<Mutex<Registry>>,
}

impl Telemetry {
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Adds metrics; what `register` returns is handed back.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock().expect("registry lock should not be poisoned"))
    }

    fn metrics(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().expect("registry lock should not be poisoned"))?;
        Ok(text)
    }

    /// Serves for as long as it is polled; returns only when it cannot.
    pub async fn serve(self, listen: SocketAddr) -> std::io::Error {
        let listener = match tokio::net::TcpListener::bind(listen).await {
            Ok(listener) => listener,
            Err(error) => return error,
        };
        match axum::serve(listener, self.router()).await {
            Ok(()) => std::io::ErrorKind::UnexpectedEof.into(),
            Err(error) => error,
        }
    }

    fn router(self) -> Router {
        Router::new()
            .route("/livez", get(|| async { "ok" }))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self)
    }
}

async fn readyz(State(telemetry): State<Telemetry>) -> (StatusCode, &'static str) {
    if telemetry.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting")
    }
}

async fn metrics(State(telemetry): State<Telemetry>) -> Result<String, StatusCode> {
    telemetry.metrics().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}
