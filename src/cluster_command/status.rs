//! `kubectl gpuvirt status`: the cluster on one screen.

use std::fmt::Write as _;

use super::{
    ReadError, Target, TargetError,
    fleet::Fleet,
    live,
    report::{Concern, Count, Level, NodeReport, Offer, StatusReport, report},
};
use crate::{
    answer::{self, Output},
    terminal::{BAD, Cell, FAINT, GOOD, PLAIN, STRONG, WARN, paint, table, wrapped},
};
use anstyle::Style;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Form(#[from] answer::Error),
    #[error("the answer cannot be printed")]
    Print(#[from] std::io::Error),
}

/// Whether all is ready. `watch` goes on until it is interrupted.
pub async fn run(target: &Target, watch: bool, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    if watch {
        live::run(&client).await?;
        return Ok(true);
    }
    let report = report(&Fleet::read(&client).await?);
    output.print(&report, |report| text(report, usize::MAX))?;
    Ok(report.cluster.ready)
}

/// A screen of so many columns.
pub fn text(report: &StatusReport, columns: usize) -> String {
    let mut text = headline(report);
    for concern in &report.cluster.concerns {
        let _ = writeln!(text, "{}", told(concern, 2, columns));
    }
    text.push('\n');
    if report.nodes.is_empty() {
        text.push_str("No node with an NVIDIA GPU has been found. Agents look on every node that they run on:\n");
        text.push_str("kubectl get pods -A -l app=gpuvirt-agent -o wide\n");
    } else {
        text.push_str(&nodes(&report.nodes, columns));
    }
    for remark in &report.remarks {
        let _ = writeln!(text, "\n{}", paint(FAINT, &format!("not shown: {remark}")));
    }
    text
}

fn headline(report: &StatusReport) -> String {
    let cluster = &report.cluster;
    let (style, word) = match (cluster.ready, cluster.nodes.changing) {
        (true, _) => (GOOD, "ready"),
        (false, 0) => (BAD, "not ready"),
        (false, _) => (WARN, "changing"),
    };
    let policy = cluster.policy.as_deref().unwrap_or("no ClusterPolicy");
    let nodes = cluster.nodes;
    let mut parts = vec![format!("{} of {} nodes ready", nodes.ready, nodes.total)];
    if nodes.changing > 0 {
        parts.push(paint(WARN, &format!("{} changing", nodes.changing)));
    }
    let Count { total, in_use, unhealthy } = cluster.gpus;
    parts.push(format!("{in_use} of {total} GPUs in use"));
    if unhealthy > 0 {
        parts.push(paint(BAD, &format!("{unhealthy} unhealthy")));
    }
    format!("{} {}   {}\n", paint(STRONG, policy), paint(style.bold(), word), parts.join(" · "))
}

fn nodes(nodes: &[NodeReport], columns: usize) -> String {
    let head = ["NODE", "STATE", "MODE", "GPUS", "IN USE", "UNHEALTHY", "OFFERS"];
    let mut rows: Vec<Vec<Cell>> = vec![head.map(|title| Cell::new(STRONG, title)).into()];
    rows.extend(nodes.iter().map(row));
    let all = table(&rows);
    let mut text = String::new();
    let mut lines = all.lines();
    let _ = writeln!(text, "{}", lines.next().unwrap_or_default());
    for (line, node) in lines.zip(nodes) {
        let _ = writeln!(text, "{line}");
        let Some((first, others)) = node.concerns.split_first() else { continue };
        let _ = writeln!(text, "{}", told(first, 2, columns));
        if !others.is_empty() {
            let more = format!("and {} more: kubectl gpuvirt explain node {}", others.len(), node.name);
            let _ = writeln!(text, "  {}", paint(FAINT, &more));
        }
    }
    text
}

/// How it looks.
pub fn style(level: Level) -> Style {
    match level {
        Level::Error => BAD,
        Level::Warning => WARN,
        Level::Info => PLAIN,
    }
}

/// The reason, and what there is to do about it, in lines below each other.
pub fn told(concern: &Concern, by: usize, columns: usize) -> String {
    let width = columns.saturating_sub(by).clamp(40, 110);
    let all = wrapped(&format!("{}: {}", concern.reason, concern.message), by, width);
    match all.split_once(':') {
        // The reason is one word, so that it stands in the first line whole.
        Some((reason, rest)) => format!("{}:{rest}", paint(style(concern.level), reason)),
        None => all,
    }
}

fn row(node: &NodeReport) -> Vec<Cell> {
    let state = match (node.ready, node.is_changing()) {
        (_, true) => WARN,
        (true, false) => GOOD,
        (false, false) => BAD,
    };
    let cordoned = if node.cordoned { " (cordoned)" } else { "" };
    let mode = if node.modes().contains('→') { WARN } else { PLAIN };
    let number = |style: Style, number: usize| match number {
        0 => Cell::new(FAINT, "-"),
        _ => Cell::new(style, number.to_string()),
    };
    vec![
        Cell::new(PLAIN, node.name.clone()),
        Cell::new(state, format!("{}{cordoned}", node.state())),
        Cell::new(mode, node.modes()),
        number(PLAIN, node.gpus.total),
        number(PLAIN, node.gpus.in_use),
        number(BAD, node.gpus.unhealthy),
        Cell::plain(Some(offered(&node.offers))),
    ]
}

/// As in `2 nvidia.com/gpu`, and how many of them the kubelet has where that is another number.
pub fn offered(offers: &[Offer]) -> String {
    let one = |offer: &Offer| match offer.allocatable {
        Some(kubelet) if kubelet != offer.count => format!("{} ({kubelet} allocatable) {}", offer.count, offer.name),
        Some(_) | None => format!("{} {}", offer.count, offer.name),
    };
    offers.iter().map(one).collect::<Vec<_>>().join(", ")
}
