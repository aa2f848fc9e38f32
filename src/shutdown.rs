//! One token that says "stop", for every task of the process.

use tokio::sync::watch;

/// Cloneable; resolves for all clones once shutdown has begun.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

impl Shutdown {
    /// A token that SIGTERM or SIGINT trips.
    #[cfg(unix)]
    pub fn on_signals() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let (tx, rx) = watch::channel(false);
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        tokio::spawn(async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            tracing::info!("shutting down");
            // The token may have no holder left; then there is nobody to tell.
            let _ = tx.send(true);
        });
        Ok(Self(rx))
    }

    /// A token and the sender that trips it.
    pub fn manual() -> (watch::Sender<bool>, Self) {
        let (tx, rx) = watch::channel(false);
        (tx, Self(rx))
    }

    pub async fn begun(&self) {
        let mut rx = self.0.clone();
        // A dropped sender means that the process is ending.
        let _ = rx.wait_for(|stop| *stop).await;
    }

    pub fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// The channel behind the token, for rooms that know nothing of this one.
    pub fn receiver(&self) -> watch::Receiver<bool> {
        self.0.clone()
    }
}
