//! Where a program is asked how it does.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;

use crate::{
    operator::policy::AgentMetrics,
    telemetry::{Doors, Exposure, Origin},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Metrics {
    /// Nowhere.
    Off,
    /// On the port of the probes, to everybody who reaches it.
    Plain,
    /// Over TLS, to those who may `get` the path /metrics.
    Tls,
}

#[derive(Debug, Args)]
pub struct DoorArgs {
    /// Of /livez and /readyz.
    #[arg(long, default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    #[arg(long, env = "METRICS", default_value = "plain", value_enum)]
    metrics: Metrics,
    /// Of /metrics over TLS.
    #[arg(long, default_value = "0.0.0.0:8443")]
    metrics_listen: SocketAddr,
    /// Folder with tls.crt and tls.key; without it the program makes a certificate itself.
    #[arg(long, env = "METRICS_CERTIFICATE")]
    metrics_certificate: Option<PathBuf>,
}

impl DoorArgs {
    /// Agents do as the operator does.
    pub fn of_agents(&self, secret: Option<String>) -> AgentMetrics {
        match self.metrics {
            Metrics::Off => AgentMetrics::Off,
            Metrics::Plain => AgentMetrics::Plain,
            Metrics::Tls => AgentMetrics::Tls { secret },
        }
    }
}

impl From<DoorArgs> for Doors {
    fn from(args: DoorArgs) -> Self {
        let certificate = args.metrics_certificate.map_or(Origin::Own, Origin::Folder);
        let metrics = match args.metrics {
            Metrics::Off => Exposure::Off,
            Metrics::Plain => Exposure::Plain,
            Metrics::Tls => Exposure::Tls { listen: args.metrics_listen, certificate },
        };
        Self { probes: args.listen, metrics }
    }
}
