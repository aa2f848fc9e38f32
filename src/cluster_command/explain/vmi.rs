//! `kubectl gpuvirt explain vmi`: why a virtual machine that asks for GPUs does not run.
//!
//! The operator's own function decides; here its facts are read with the rights of the person who asks.

use std::fmt::Write as _;

use crds::{v1::ClusterPolicy, v1alpha1::GPUNode};
use kube::{Api, Client, Resource, api::ListParams, core::DeserializeGuard};
use serde::de::DeserializeOwned;

use super::super::{Target, TargetError};
use crate::{
    answer::{self, Output},
    operator::vmi::{
        explain::{Explanation, Reason, Request},
        look,
    },
    terminal::{BAD, Cell, GOOD, PLAIN, STRONG, WARN, indented, paint, table},
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Look(#[from] look::Error),
    #[error("GPUNodes cannot be listed: is gpuvirt installed, and may you read gpunodes.gpuvirt.io?")]
    GPUNodes(#[source] kube::Error),
    #[error(transparent)]
    Form(#[from] answer::Error),
    #[error("the answer cannot be written")]
    Output(#[from] std::io::Error),
}

/// `vmi` is `namespace/name`, or a name. Whether no GPU keeps it from running.
pub async fn run(target: &Target, vmi: &str, output: Output) -> Result<bool, Error> {
    let (client, own) = target.connect().await?;
    let (namespace, name) = vmi.split_once('/').unwrap_or((own.as_str(), vmi));
    let explanation = explained(&client, namespace, name).await?;
    output.print(&explanation, text)?;
    Ok(!explanation.reason.is_about_gpus())
}

async fn explained(client: &Client, namespace: &str, name: &str) -> Result<Explanation, Error> {
    let instance = look::instance(client, namespace, name).await?;
    let gpu_nodes: Vec<GPUNode> = decoded(client).await.map_err(Error::GPUNodes)?;
    // Who may not read policies gets an answer without the operator's own complaint.
    let policies: Vec<ClusterPolicy> = decoded(client).await.unwrap_or_default();
    let statuses = policies.iter().filter_map(|policy| policy.status.as_ref());
    let complaint = statuses.into_iter().find_map(|status| look::complaint(&status.conditions));
    Ok(look::explained(client, &instance, &gpu_nodes, complaint).await?)
}

/// All that decode.
async fn decoded<K>(client: &Client) -> Result<Vec<K>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let all: Api<DeserializeGuard<K>> = Api::all(client.clone());
    Ok(all.list(&ListParams::default()).await?.items.into_iter().filter_map(|guarded| guarded.0.ok()).collect())
}

pub fn text(explanation: &Explanation) -> String {
    let Explanation { vmi, reason, message, requests, blocks_drain } = explanation;
    let (style, state) = match reason {
        Reason::Runs => (GOOD, "runs"),
        Reason::Starting => (GOOD, "is starting"),
        Reason::Ended => (WARN, "has ended"),
        Reason::NoGPURequested | Reason::NotTheGPU => (WARN, "is not kept by a GPU"),
        Reason::GPUNotPermitted
        | Reason::GPUNameUnknown
        | Reason::NoNodeHasGPU
        | Reason::GPUInUse
        | Reason::NodeInTransition
        | Reason::GPUUnhealthy
        | Reason::VGPULayoutFailed
        | Reason::RefusedByNode => (BAD, "does not run"),
    };
    let heading = paint(style, &format!("{state} ({})", reason.as_str()));
    let mut text = format!("{} {heading}\n\n{}\n", paint(STRONG, vmi), indented(message));
    if !requests.is_empty() {
        let head = ["REQUESTS", "NODE", "MODE", "FREE", "USED BY"];
        let mut rows = vec![head.map(|title| Cell::new(STRONG, title)).into()];
        rows.extend(requests.iter().flat_map(rows_of));
        let _ = write!(text, "\n{}", table(&rows));
    }
    if let Some(why) = blocks_drain {
        let _ = write!(text, "\n{}\n\n{}\n", paint(WARN, "blocks drains"), indented(why));
    }
    text
}

/// A line for each node, and further ones for further users.
fn rows_of(request: &Request) -> Vec<Vec<Cell>> {
    let cells = |row: [String; 5]| row.map(|text| Cell::new(PLAIN, text)).into();
    let asked = format!("{} {}", request.count, request.resource);
    if request.nodes.is_empty() {
        return vec![vec![Cell::new(PLAIN, asked), Cell::new(BAD, "none")]];
    }
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for node in &request.nodes {
        let first = if rows.is_empty() { asked.clone() } else { String::new() };
        let mut users = node.users.iter().cloned();
        let free = format!("{} of {}", node.free, node.all);
        rows.push(cells([first, node.node.clone(), node.mode.clone(), free, users.next().unwrap_or_default()]));
        rows.extend(users.map(|user| {
            let [a, b, c, d] = <[String; 4]>::default();
            cells([a, b, c, d, user])
        }));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::vmi::explain::NodeSupply;

    fn explanation() -> Explanation {
        let node = |name: &str, free, users: &[&str]| NodeSupply {
            node: name.to_owned(),
            mode: "vm-passthrough".to_owned(),
            free,
            all: 2,
            users: users.iter().map(|user| (*user).to_owned()).collect(),
        };
        Explanation {
            vmi: "vms/a".to_owned(),
            reason: Reason::GPUInUse,
            message: "2 nvidia.com/TU104GL_TESLA_T4, and too few are free: one of those VMs has to end first"
                .to_owned(),
            requests: vec![Request {
                resource: "nvidia.com/TU104GL_TESLA_T4".to_owned(),
                count: 2,
                nodes: vec![
                    node("gpu-1", 0, &["0000:43:00.0 by VM vms/b", "0000:44:00.0 by VM vms/c"]),
                    node("gpu-2", 1, &["0000:43:00.0 by VM vms/d"]),
                ],
            }],
            blocks_drain: Some("VM vms/a waits for ever".to_owned()),
        }
    }

    #[test]
    fn a_person_sees_the_reason_and_who_has_what() {
        insta::assert_snapshot!(anstream::adapter::strip_str(&text(&explanation())), @r"
        vms/a does not run (GPUInUse)

          2 nvidia.com/TU104GL_TESLA_T4, and too few are free: one of those VMs has to end first

        REQUESTS                       NODE   MODE            FREE    USED BY
        2 nvidia.com/TU104GL_TESLA_T4  gpu-1  vm-passthrough  0 of 2  0000:43:00.0 by VM vms/b
                                                                      0000:44:00.0 by VM vms/c
                                       gpu-2  vm-passthrough  1 of 2  0000:43:00.0 by VM vms/d

        blocks drains

          VM vms/a waits for ever
        ");
    }

    #[test]
    fn a_script_sees_the_same() {
        let json = serde_json::to_value(explanation()).expect("JSON");
        assert_eq!(json["reason"], "GPUInUse");
        assert_eq!(json["requests"][0]["nodes"][0]["users"][1], "0000:44:00.0 by VM vms/c");
        assert_eq!(json["blocksDrain"], "VM vms/a waits for ever");
    }
}
