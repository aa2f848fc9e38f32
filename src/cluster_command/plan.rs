//! `kubectl gpuvirt plan NODE`: what a mode would do to a node of the cluster and to whom, and what does not let it.
//!
//! The engine's own functions decide; here its facts are read, with the rights of the person who asks.

use std::{collections::BTreeMap, fmt::Write as _};

use crds::{
    WorkloadMode, labels,
    v1alpha1::{CONFIG_NAME, GPUNode, GPUTransition, GPUVirtConfig},
};
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    jiff::Timestamp,
};
use kube::{Api, Client, ResourceExt, api::ListParams, core::DeserializeGuard};

use super::{Target, TargetError};
use crate::{
    answer::{self, Output},
    operator::{
        node::{
            decide::{Observed, OperandPod, standing},
            gates::SandboxMode,
            mode::{NodePolicy, Sandbox},
            pods::operand,
            users::UserNames,
        },
        transition::{
            Leave,
            preview::{Facts, Preview, fleet, held, preview},
            rules::Rules,
            windows::Windows,
        },
    },
    terminal::{BAD, GOOD, STRONG, WARN, paint},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("node {node} cannot be read: check its name, and that you may get nodes")]
    Node { node: String, source: Box<kube::Error> },
    #[error("GPUNode {node} cannot be read: the agent makes it where it finds a GPU, so check its pod on that node")]
    GPUNode { node: String, source: Box<kube::Error> },
    #[error("GPUNode {node} has no report of its agent yet: look at the pod of gpuvirt-agent there")]
    NoReport { node: String },
    #[error("{what} cannot be listed: check that you may")]
    List { what: &'static str, source: Box<kube::Error> },
    #[error("GPUVirtConfig default cannot be read: check that you may get it")]
    Config(#[source] Box<kube::Error>),
    #[error(transparent)]
    Form(#[from] answer::Error),
}

/// Whether the change could begin now, or there is nothing to change.
pub async fn run(target: &Target, node: &str, mode: WorkloadMode, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    let preview = previewed(&client, node, mode).await?;
    output.print(&preview, text)?;
    Ok(preview.blocks.is_empty())
}

async fn previewed(client: &Client, name: &str, to: WorkloadMode) -> Result<Preview, Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    let unread = |source| Error::Node { node: name.to_owned(), source: Box::new(source) };
    let node = nodes.get_metadata(name).await.map_err(unread)?;
    let gpu_nodes: Api<GPUNode> = Api::all(client.clone());
    let unread = |source| Error::GPUNode { node: name.to_owned(), source: Box::new(source) };
    let gpu_node = gpu_nodes.get(name).await.map_err(unread)?;
    let agent = gpu_node.status.as_ref().and_then(|status| status.agent.as_ref());
    let agent = agent.ok_or_else(|| Error::NoReport { node: name.to_owned() })?;
    let all = listed::<GPUNode>(client, "gpunodes.gpuvirt.io").await?;
    let transitions = listed::<GPUTransition>(client, "gputransitions.gpuvirt.io").await?;
    let pods = operands(client, name).await?;
    let (users, _) = UserNames::new(client.clone()).of(name, agent, true).await;
    let rules = rules(client).await?;
    let asks: BTreeMap<String, String> =
        node.labels().clone().into_iter().chain([(labels::WORKLOAD_CONFIG.to_owned(), to.to_string())]).collect();
    let policy = NodePolicy::new(String::new(), Sandbox::On { default: to, mode: SandboxMode::default() });
    let standing = standing(&Observed {
        name,
        labels: &asks,
        gpu_node: Some(&gpu_node),
        policy: &policy,
        pods: Some(&pods),
        users: &users,
        layouts: None,
        leave: &Leave::Free,
        upgrade: None,
        epoch: gpu_node.spec.epoch,
    });
    Ok(preview(
        to,
        &Facts {
            node: name,
            now: Timestamp::now(),
            standing: standing.as_ref(),
            rules: &rules,
            held: held(&node),
            transitions: &transitions,
            fleet: fleet(&all, name),
        },
    ))
}

/// All that decode.
async fn listed<K>(client: &Client, what: &'static str) -> Result<Vec<K>, Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
    let found = api.list(&ListParams::default()).await;
    let found = found.map_err(|source| Error::List { what, source: Box::new(source) })?;
    Ok(found.items.into_iter().filter_map(|guarded| guarded.0.ok()).collect())
}

/// Pods of our operands there: they leave by themselves and are nobody's users.
async fn operands(client: &Client, node: &str) -> Result<Vec<OperandPod>, Error> {
    let pods: Api<Pod> = Api::all(client.clone());
    let there = ListParams::default().labels(labels::POLICY).fields(&format!("spec.nodeName={node}"));
    let found = pods.list(&there).await.map_err(|source| Error::List { what: "pods", source: Box::new(source) })?;
    Ok(found.iter().map(operand).collect())
}

async fn rules(client: &Client) -> Result<Rules, Error> {
    let configs: Api<GPUVirtConfig> = Api::all(client.clone());
    let config = configs.get_opt(CONFIG_NAME).await.map_err(|source| Error::Config(Box::new(source)))?;
    let spec = config.map(|config| config.spec).unwrap_or_default();
    let rules = Rules::new(spec.evict, &spec.budget).unwrap_or_default();
    Ok(Rules { windows: Windows::read(&spec.maintenance_windows).unwrap_or(Windows::Unknown), ..rules })
}

fn text(preview: &Preview) -> String {
    let Preview { node, from, to, steps, affected_pods, affected_vms, others, blocks, last } = preview;
    let from = from.map_or_else(|| "no mode".to_owned(), |from| from.to_string());
    let verdict = match (steps.is_empty(), blocks.is_empty()) {
        (_, false) => paint(BAD, "waits"),
        (true, true) => paint(GOOD, "is there already"),
        (false, true) => paint(GOOD, "can begin now"),
    };
    let mut text = format!("node {}: {from} -> {to} {verdict}\n", paint(STRONG, node));
    for (number, step) in (1..).zip(steps) {
        let _ = writeln!(text, "{number:>3}. {step}");
    }
    for (what, names) in [("pods", affected_pods), ("VMs", affected_vms), ("processes", others)] {
        if !names.is_empty() {
            let _ = writeln!(text, "affected {what}: {}", names.join(", "));
        }
    }
    for block in blocks {
        let _ = writeln!(text, "{} {}", paint(WARN, &format!("{}:", block.reason)), block.message);
    }
    if let Some(last) = last {
        let _ = writeln!(
            text,
            "last time ({} -> {}, {}): waited {} s, took {} s",
            last.from, last.to, last.phase, last.waited_seconds, last.took_seconds
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::transition::preview::{Last, Reason};

    #[test]
    fn a_person_reads_the_steps_the_affected_what_blocks_and_how_long_it_took() {
        let preview = Preview {
            node: "n1".to_owned(),
            from: Some(WorkloadMode::Container),
            to: WorkloadMode::VmPassthrough,
            steps: vec!["cordon node n1".to_owned(), "stop VM vms/b".to_owned()],
            affected_pods: Vec::new(),
            affected_vms: vec!["vms/b".to_owned()],
            others: Vec::new(),
            blocks: vec![Reason { reason: "ApprovalNeeded".to_owned(), message: "read the plan".to_owned() }],
            last: Some(Last {
                from: WorkloadMode::VmPassthrough,
                to: WorkloadMode::Container,
                phase: "Done".to_owned(),
                began: Timestamp::UNIX_EPOCH,
                waited_seconds: 60,
                took_seconds: 30,
            }),
        };
        insta::assert_snapshot!(anstream::adapter::strip_str(&text(&preview)), @r"
        node n1: container -> vm-passthrough waits
          1. cordon node n1
          2. stop VM vms/b
        affected VMs: vms/b
        ApprovalNeeded: read the plan
        last time (vm-passthrough -> container, Done): waited 60 s, took 30 s
        ");
    }
}
