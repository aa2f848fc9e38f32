//! `kubectl gpuvirt approve NODE`: a person agrees to what a change would do to the VMs on a node.

use std::fmt::Write as _;

use crds::{
    WorkloadMode,
    v1alpha1::{DriverRenewal, GPUTransition, TransitionPhase},
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde::Serialize;
use serde_json::json;

use super::{Target, TargetError};
use crate::answer::{self, Output};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("GPUTransition {node} cannot be read")]
    Read { node: String, source: Box<kube::Error> },
    #[error(
        "node {node} has no change to approve: its GPUTransition appears when its workload label asks for another mode, or when its driver is to be renewed"
    )]
    NoChange { node: String },
    #[error("the change of node {node} waits for no approval: {phase:?}, {message}")]
    NotAsked { node: String, phase: TransitionPhase, message: String },
    #[error("the plan of node {node} is {now} by now, not {read}: read it again, then approve it")]
    OtherPlan { node: String, read: String, now: String },
    #[error("the plan of node {node} cannot be approved")]
    Refused { node: String, source: Box<kube::Error> },
    #[error(transparent)]
    Form(#[from] answer::Error),
}

/// Prints the plan; approves it if `plan` is its hash.
pub async fn run(target: &Target, node: &str, plan: Option<&str>, output: Output) -> Result<(), Error> {
    let (client, _) = target.connect().await?;
    let api: Api<GPUTransition> = Api::all(client);
    let read = |source| Error::Read { node: node.to_owned(), source: Box::new(source) };
    let object = api.get_opt(node).await.map_err(read)?.ok_or_else(|| Error::NoChange { node: node.to_owned() })?;
    let Some(plan) = plan else {
        return Ok(output.print(&Plan::of(&object), text)?);
    };
    let patch = checked(&object, plan)?;
    let refused = |source| Error::Refused { node: node.to_owned(), source: Box::new(source) };
    let object = api.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.map_err(refused)?;
    Ok(output.print(&Plan::of(&object), |_| format!("approved: plan {plan} of node {node}\n"))?)
}

/// The hash that was read is the hash that is approved: what came between is refused here, and by the API server.
fn checked(object: &GPUTransition, plan: &str) -> Result<serde_json::Value, Error> {
    let node = object.name_any();
    let now = object.spec.plan_hash.clone();
    if now != plan {
        return Err(Error::OtherPlan { node, read: plan.to_owned(), now });
    }
    let status = object.status.clone().unwrap_or_default();
    if status.phase.is_final() || status.switched {
        return Err(Error::NotAsked { node, phase: status.phase, message: status.message });
    }
    let metadata = json!({"uid": object.uid(), "resourceVersion": object.resource_version()});
    Ok(json!({"metadata": metadata, "spec": {"approved": plan}}))
}

/// What is to be agreed to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Plan {
    node: String,
    from: WorkloadMode,
    to: WorkloadMode,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<DriverRenewal>,
    phase: TransitionPhase,
    message: String,
    steps: Vec<String>,
    affected_pods: Vec<String>,
    #[serde(rename = "affectedVMs")]
    affected_vms: Vec<String>,
    hash: String,
    approved: bool,
}

impl Plan {
    fn of(object: &GPUTransition) -> Self {
        let status = object.status.clone().unwrap_or_default();
        let spec = object.spec.clone();
        Self {
            approved: spec.is_approved(),
            node: spec.node,
            from: spec.from,
            to: spec.to,
            driver: spec.driver,
            phase: status.phase,
            message: status.message,
            steps: status.plan,
            affected_pods: status.affected_pods,
            affected_vms: status.affected_vms,
            hash: spec.plan_hash,
        }
    }
}

fn text(plan: &Plan) -> String {
    let Plan { node, from, to, driver, phase, message, steps, hash, approved, .. } = plan;
    let mut text = match driver {
        None => format!("node {node}: {from} -> {to}\n"),
        Some(driver) => format!("node {node}: driver {} -> {}\n", driver.from, driver.to),
    };
    let _ = writeln!(text, "phase {phase:?}: {message}");
    for (number, step) in (1..).zip(steps) {
        let _ = writeln!(text, "{number:>3}. {step}");
    }
    let _ = match approved {
        true => writeln!(text, "approved: plan {hash}"),
        false => writeln!(text, "to approve it: kubectl gpuvirt approve {node} --plan {hash}"),
    };
    text
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUTransitionSpec, GPUTransitionStatus};

    use super::*;

    fn object() -> GPUTransition {
        let spec = GPUTransitionSpec {
            node: "n1".to_owned(),
            from: WorkloadMode::VmPassthrough,
            to: WorkloadMode::Container,
            driver: None,
            plan_hash: "0123456789abcdef".to_owned(),
            approved: None,
        };
        let mut object = GPUTransition::new("n1", spec);
        object.status = Some(GPUTransitionStatus {
            phase: TransitionPhase::Blocked,
            message: "VMs vms/a would be stopped".to_owned(),
            plan: vec!["cordon node n1".to_owned(), "stop VM vms/a".to_owned()],
            ..GPUTransitionStatus::default()
        });
        object
    }

    #[test]
    fn a_plan_is_shown_with_the_command_that_approves_this_one() {
        let expected = "node n1: vm-passthrough -> container\nphase Blocked: VMs vms/a would be stopped\n  1. cordon node n1\n  2. stop VM vms/a\nto approve it: kubectl gpuvirt approve n1 --plan 0123456789abcdef\n";
        assert_eq!(text(&Plan::of(&object())), expected);
    }

    #[test]
    fn only_the_plan_that_was_read_is_approved_and_only_while_it_is_to_be_done() {
        assert_eq!(checked(&object(), "0123456789abcdef").unwrap()["spec"]["approved"], "0123456789abcdef");
        assert!(matches!(checked(&object(), "fedcba9876543210"), Err(Error::OtherPlan { .. })));
        let mut over = object();
        over.status.as_mut().unwrap().phase = TransitionPhase::Done;
        assert!(matches!(checked(&over, "0123456789abcdef"), Err(Error::NotAsked { .. })));
    }
}
