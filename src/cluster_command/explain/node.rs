//! `kubectl gpuvirt explain node`: its mode, its change, what is wrong, and each of its GPUs.

use std::fmt::Write as _;

use kube::ResourceExt;
use serde::Serialize;

use super::{
    super::{
        Target,
        fleet::Fleet,
        gpus::{GpuReport, Only, report as gpus, text as table_of},
        report::{NodeReport, report},
        status::{offered, told},
    },
    Error, no_node,
};
use crate::{
    answer::Output,
    terminal::{BAD, FAINT, GOOD, STRONG, WARN, WIDTH, paint},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    #[serde(flatten)]
    pub node: NodeReport,
    /// What the change does, one sentence a step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plan: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan_hash: Option<String>,
    #[serde(rename = "gpuDetails")]
    pub gpus: Vec<GpuReport>,
}

/// Whether it serves its mode with nothing wrong.
pub async fn run(target: &Target, name: &str, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    let fleet = Fleet::read(&client).await?;
    let explained = explained(&fleet, name).ok_or_else(|| no_node(&fleet, name))?;
    output.print(&explained, text)?;
    Ok(explained.node.ready)
}

pub fn explained(fleet: &Fleet, name: &str) -> Option<Explained> {
    let node = report(fleet).nodes.into_iter().find(|node| node.name == name)?;
    let transition = fleet.transition(name).filter(|_| node.change.is_some());
    let own = fleet.gpu_nodes.iter().find(|gpu_node| gpu_node.name_any() == name)?;
    Some(Explained {
        plan: transition.and_then(|transition| transition.status.clone()).map(|s| s.plan).unwrap_or_default(),
        plan_hash: transition.map(|transition| transition.spec.plan_hash.clone()),
        gpus: gpus(std::slice::from_ref(own), &Only::default()),
        node,
    })
}

pub fn text(explained: &Explained) -> String {
    let Explained { node, plan, plan_hash, gpus } = explained;
    let (style, state) = match (node.ready, node.is_changing()) {
        (_, true) => (WARN, format!("is changing ({})", node.state())),
        (true, false) => (GOOD, "serves its mode".to_owned()),
        (false, false) => (BAD, "does not serve its mode".to_owned()),
    };
    let mut text = format!("{} {}\n\n", paint(STRONG, &node.name), paint(style, &state));
    for concern in &node.concerns {
        let _ = writeln!(text, "{}", told(concern, 2, WIDTH));
    }
    if node.concerns.is_empty() {
        let _ = writeln!(text, "  Nothing is wrong with it.");
    }
    let mut facts = vec![("mode", node.modes())];
    if let Some(host) = &node.host {
        let iommu = if host.iommu { "IOMMU on" } else { "IOMMU off" };
        facts.push(("host", format!("{}, kernel {}, {}, {iommu}", host.os, host.kernel, host.architecture)));
    }
    let version = node.driver_version.as_ref().filter(|version| !version.is_empty());
    facts.push(("driver", version.map_or_else(|| node.driver.clone(), |v| format!("{} {v}", node.driver))));
    facts.push(("offers", offered(&node.offers)));
    if let Some(since) = node.change.as_ref().and_then(|change| change.since.as_ref()) {
        facts.push(("since", since.0.to_string()));
    }
    if let Some(deadline) = node.change.as_ref().and_then(|change| change.deadline.as_ref()) {
        facts.push(("until", deadline.0.to_string()));
    }
    text.push('\n');
    for (what, fact) in facts.into_iter().filter(|(_, fact)| !fact.is_empty()) {
        let _ = writeln!(text, "  {} {fact}", paint(FAINT, &format!("{what:<7}")));
    }
    if !plan.is_empty() {
        text.push('\n');
        for (number, step) in (1..).zip(plan) {
            let _ = writeln!(text, "{number:>4}. {step}");
        }
    }
    if let (Some(hash), Some(change)) = (plan_hash, &node.change)
        && !change.approved
        && node.concerns.iter().any(|concern| concern.reason == "ApprovalNeeded")
    {
        let _ = writeln!(text, "\n  kubectl gpuvirt approve {} --plan {hash}", node.name);
    }
    if !gpus.is_empty() {
        let _ = write!(text, "\n{}", table_of(gpus));
    }
    text
}
