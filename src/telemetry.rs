//! Logs, metrics and probes: `/metrics`, `/livez`, `/readyz`.

mod access;
mod certificate;
mod described;
mod logs;
#[cfg(test)]
mod reference;
mod serve;

pub use certificate::Origin;
#[cfg(test)]
pub use described::check as check_described;
pub use described::{Described, Kind, Unit};
pub use logs::{LogFormat, Logs, init_logs, readable};
pub use serve::{Doors, Exposure, ServeError};

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use prometheus_client::{encoding::text::encode, registry::Registry};

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

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// Metrics and probes for everybody, as the exporters of the peer have them.
    pub async fn serve_plain(self, listen: SocketAddr) -> std::io::Error {
        self.answer(listen, true).await
    }
}
