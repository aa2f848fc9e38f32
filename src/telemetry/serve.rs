//! Probes over plain HTTP, which the kubelet asks for; metrics beside them, or over TLS for those who may read them.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_TYPE, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
    routing::get,
    serve::Listener,
};
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use kube::Client;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    Telemetry,
    access::{Access, PATH},
    certificate::{self, CertificateError, Origin},
};

/// Handshakes under way; more of them wait in the kernel.
const HANDSHAKES: usize = 32;
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// After an `accept` that failed, as for want of descriptors.
const BREATH: Duration = Duration::from_secs(1);
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("probes cannot be served on {listen}")]
    Probes { listen: SocketAddr, source: io::Error },
    #[error("metrics cannot be served on {listen}")]
    Metrics { listen: SocketAddr, source: io::Error },
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// How metrics are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposure {
    Off,
    /// Beside the probes, to everybody who reaches them.
    Plain,
    /// On a port of their own, to those whom the API server lets `get` them.
    Tls {
        listen: SocketAddr,
        certificate: Origin,
    },
}

/// Where a program is asked how it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doors {
    pub probes: SocketAddr,
    pub metrics: Exposure,
}

impl Telemetry {
    /// Serves for as long as it is polled; returns only when it cannot. `client` is asked who may read metrics.
    pub async fn serve(self, doors: Doors, client: Client) -> ServeError {
        let probes = doors.probes;
        let plain = self.clone().answer(probes, doors.metrics == Exposure::Plain);
        let failed = |source| ServeError::Probes { listen: probes, source };
        match doors.metrics {
            Exposure::Off | Exposure::Plain => failed(plain.await),
            Exposure::Tls { listen, certificate } => tokio::select! {
                source = plain => failed(source),
                error = self.guarded(listen, certificate, client) => error,
            },
        }
    }

    /// Probes, and metrics where they are shown to everybody.
    pub(super) async fn answer(self, listen: SocketAddr, metrics: bool) -> io::Error {
        let router = Router::new().route("/livez", get(|| async { "ok" })).route("/readyz", get(readyz));
        let router = if metrics { router.route(PATH, get(shown)) } else { router };
        match TcpListener::bind(listen).await {
            Ok(listener) => ended(axum::serve(listener, router.with_state(self)).await),
            Err(error) => error,
        }
    }

    async fn guarded(self, listen: SocketAddr, certificate: Origin, client: Client) -> ServeError {
        let config = match certificate::config(certificate) {
            Ok(config) => config,
            Err(error) => return error.into(),
        };
        let failed = |source| ServeError::Metrics { listen, source };
        let listener = match TcpListener::bind(listen).await {
            Ok(listener) => listener,
            Err(source) => return failed(source),
        };
        let listener =
            Tls { listener, acceptor: TlsAcceptor::from(Arc::new(config)), handshakes: FuturesUnordered::new() };
        let state = (self, Arc::new(Access::new(client)));
        let router = Router::new().route(PATH, get(shown_to_readers)).with_state(state);
        failed(ended(axum::serve(listener, router).await))
    }
}

fn ended(served: io::Result<()>) -> io::Error {
    served.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

async fn readyz(State(telemetry): State<Telemetry>) -> (StatusCode, &'static str) {
    match telemetry.is_ready() {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
    }
}

async fn shown(State(telemetry): State<Telemetry>) -> Response {
    match telemetry.metrics() {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn shown_to_readers(State((telemetry, access)): State<(Telemetry, Arc<Access>)>, headers: HeaderMap) -> Response {
    match access.check(&headers).await {
        Ok(()) => shown(State(telemetry)).await,
        Err(refused) => {
            tracing::debug!(%refused, "metrics not shown");
            (refused.status(), [(WWW_AUTHENTICATE, "Bearer")], format!("{refused}\n")).into_response()
        }
    }
}

type Handshake = BoxFuture<'static, Option<(TlsStream<TcpStream>, SocketAddr)>>;

/// Accepts while handshakes go on: one that does not end keeps nobody else waiting.
struct Tls {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handshakes: FuturesUnordered<Handshake>,
}

impl Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.next() => if let Some(connection) = done { return connection },
                accepted = self.listener.accept(), if self.handshakes.len() < HANDSHAKES => match accepted {
                    Ok((stream, address)) => {
                        let handshake = self.acceptor.accept(stream);
                        self.handshakes.push(Box::pin(async move {
                            match timeout(HANDSHAKE_DEADLINE, handshake).await {
                                Ok(Ok(stream)) => Some((stream, address)),
                                Ok(Err(error)) => {
                                    tracing::debug!(%address, %error, "no TLS");
                                    None
                                }
                                Err(_elapsed) => None,
                            }
                        }));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection for metrics cannot be taken, trying again");
                        sleep(BREATH).await;
                    }
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}
