//! How the operator does with thousands of nodes: a real etcd and kube-apiserver, played nodes and agents, and the operator
//! as a process with its pod's identity. Prints a table, writes `target/scale/NODES.json`, and compares with `baseline.json`.
//!
//! `make bench FILTER=scale NODES=5000`; KEEP=1 makes the run the baseline.

#![expect(clippy::print_stdout, reason = "a table is what it is for")]

#[path = "../../tests/support/mod.rs"]
mod support;

mod fleet;
mod meter;
mod operands;
mod phases;
mod report;
mod wire;

use std::{env, path::Path, process::ExitCode};

use crate::support::turn::turn;

#[expect(clippy::disallowed_methods, reason = "a benchmark's size is named by the environment")]
fn asked(variable: &str) -> Option<String> {
    env::var(variable).ok().filter(|value| !value.is_empty())
}

fn main() -> ExitCode {
    // It is one of all benchmarks, and takes a cluster of its own: tests/bench.sh names its size.
    let Some(nodes) = asked("NODES").and_then(|nodes| nodes.parse().ok()) else { return ExitCode::SUCCESS };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut over = Vec::new();
    turn(async |turn| {
        let run = phases::run(turn, nodes).await;
        run.print();
        run.write(&root.join(format!("target/scale/{nodes}.json")));
        over = run.compare(&root.join("benches/scale/baseline.json"), asked("KEEP").is_some());
    });
    for figure in &over {
        println!("MORE THAN IT WAS: {figure}");
    }
    if over.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
