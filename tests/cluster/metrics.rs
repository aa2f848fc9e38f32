//! What operator and agents tell Prometheus, asked for as Prometheus does.

mod chart;
mod queries;
pub mod tls;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
};

use crds::{
    labels,
    v1alpha1::{GPUNode, TransitionPhase as Phase},
};
use serde_json::json;

use crate::{
    support::{
        agents::{Agent, qemu, t4},
        kubelets::Kubelets,
        nodes, policies,
        turn::turn,
        wait,
    },
    transitions::{annotate, until_phase},
};

/// One that nobody listens on.
fn address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address")
}

fn scrape(from: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(from).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// The value of a sample, by all that is before it.
fn value(text: &str, sample: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok())
}

/// Objects come to the operator's watches a moment after they are written.
async fn until_says(from: SocketAddr, samples: &[(&str, f64)]) -> String {
    let promise = format!("the metrics say {samples:?}");
    let same = |text: &String| samples.iter().all(|(name, wanted)| value(text, name) == Some(*wanted));
    wait::eventually(&promise, async || scrape(from, "/metrics").filter(same)).await
}

#[test]
fn changes_of_nodes_and_the_peers_own_metrics_say_what_is() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let listen = address();
        let _operator = t.operator_with("op-1", "info", &listen.to_string()).await;
        t.leads("op-1").await;
        until_says(
            listen,
            &[
                ("gpu_operator_reconciliation_status", -1.0),
                ("gpu_operator_gpu_nodes_total", 0.0),
                ("gpu_operator_reconciliation_last_success_ts_seconds", 0.0),
                ("gpu_operator_driver_auto_upgrade_enabled", 0.0),
            ],
        )
        .await;

        let mut policy = policies::valid("cluster-policy");
        policy["spec"]["driver"]["upgradePolicy"] = json!({"autoUpgrade": true, "maxParallelUpgrades": 2});
        policies::create(t, policy).await;
        nodes::create(t, "n1", &[("feature.node.kubernetes.io/pci-10de.present", "true")]).await;
        nodes::create(t, "n2", &[]).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        agent.until_reason(t, true, "Serving").await;
        let other = Agent::start(t, "n2", vec![t4("0000:18:00.0")]).await;
        other.until_reason(t, true, "Serving").await;
        until_says(
            listen,
            &[
                ("gpu_operator_reconciliation_status", 1.0),
                ("gpu_operator_gpu_nodes_total", 2.0),
                ("gpu_operator_reconciliation_has_nfd_labels", 1.0),
                ("gpu_operator_reconciliation_failed_total", 0.0),
                ("gpu_operator_driver_auto_upgrade_enabled", 1.0),
                ("gpu_operator_openshift_driver_toolkit_enabled", 0.0),
            ],
        )
        .await;

        agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
        let passthrough = [(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))];
        nodes::label(t, "n1", &passthrough).await;
        until_phase(t, "n1", Phase::Blocked, "GPUInUse").await;
        annotate(t, "n2", labels::PAUSE, Some("true")).await;
        nodes::label(t, "n2", &passthrough).await;
        until_phase(t, "n2", Phase::Blocked, "Paused").await;
        let text = until_says(
            listen,
            &[
                (r#"gpuvirt_transitions{phase="Blocked",kind="mode"}"#, 2.0),
                (r#"gpuvirt_transitions_blocked{reason="GPUInUse",kind="mode"}"#, 1.0),
                (r#"gpuvirt_transitions_blocked{reason="Paused",kind="mode"}"#, 1.0),
            ],
        )
        .await;
        let since = value(
            &text,
            r#"gpuvirt_transition_phase_start_timestamp_seconds{node="n1",phase="Blocked",reason="GPUInUse",kind="mode"}"#,
        );
        assert!(since.is_some_and(|since| since > 1_700_000_000.0), "{text}");
        let rounds = value(&text, "gpu_operator_reconciliation_total");
        assert!(rounds.is_some_and(|rounds| rounds >= 2.0), "{text}");

        agent.change(|host| host.gpus[0].holders.clear());
        until_phase(t, "n1", Phase::Done, "Serving").await;
        agent.until(t, "it serves", |node: &GPUNode| node.spec.mode.is_some()).await;
        let text = until_says(
            listen,
            &[
                (r#"gpuvirt_transitions{phase="Blocked",kind="mode"}"#, 1.0),
                (r#"gpuvirt_transition_phase_duration_seconds_count{phase="Switch",kind="mode"}"#, 1.0),
                (r#"gpuvirt_transition_phase_duration_seconds_count{phase="Blocked",kind="mode"}"#, 1.0),
            ],
        )
        .await;
        assert!(!text.contains("gpuvirt_transition_failures_total{"), "nothing has failed: {text}");
    });
}
