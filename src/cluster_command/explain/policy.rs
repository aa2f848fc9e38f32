//! `kubectl gpuvirt explain clusterpolicy`: what became of it, operand by operand and mode by mode.

use std::fmt::Write as _;

use crds::{
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::{ModeStatus, OperandStatus},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde::Serialize;

use super::{super::Target, super::fleet::Fleet, Error};
use crate::{
    answer::Output,
    terminal::{BAD, Cell, FAINT, GOOD, PLAIN, STRONG, WARN, indented, paint, table},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<PolicyState>,
    pub conditions: Vec<Condition>,
    /// Of the policy that counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operands: Vec<OperandStatus>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modes: Vec<ModeStatus>,
}

/// The one that counts if none is named. Whether it is ready.
pub async fn run(target: &Target, name: Option<&str>, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    let explained = explained(&Fleet::read(&client).await?, name)?;
    output.print(&explained, text)?;
    Ok(explained.state == Some(PolicyState::Ready))
}

pub fn explained(fleet: &Fleet, name: Option<&str>) -> Result<Explained, Error> {
    let counting = fleet.policy().map(ResourceExt::name_any);
    let policy = match name {
        None => fleet.policy().ok_or(Error::NoPolicyAtAll)?,
        Some(name) => fleet.policies.iter().find(|policy| policy.name_any() == name).ok_or_else(|| {
            let have = fleet.policies.iter().map(ResourceExt::name_any).collect();
            Error::NoPolicy { wanted: name.to_owned(), have }
        })?,
    };
    Ok(of(policy, fleet, counting.as_deref() == Some(&*policy.name_any())))
}

fn of(policy: &ClusterPolicy, fleet: &Fleet, counts: bool) -> Explained {
    let status = policy.status.clone().unwrap_or_default();
    let config = fleet.config.as_ref().filter(|_| counts).and_then(|config| config.status.clone()).unwrap_or_default();
    let mut conditions = status.conditions;
    for condition in config.conditions {
        if conditions.iter().all(|known| known.type_ != condition.type_) {
            conditions.push(condition);
        }
    }
    Explained {
        name: policy.name_any(),
        state: status.state,
        conditions,
        operands: config.operands,
        modes: config.modes,
    }
}

pub fn text(explained: &Explained) -> String {
    let Explained { name, state, conditions, operands, modes } = explained;
    let (style, word) = match state {
        Some(PolicyState::Ready) => (GOOD, "is ready"),
        Some(PolicyState::NotReady) => (BAD, "is not ready"),
        Some(PolicyState::Ignored) => (WARN, "is ignored: an older one counts"),
        None => (WARN, "has not been looked at by the operator yet"),
    };
    let mut text = format!("{} {}\n", paint(STRONG, name), paint(style, word));
    // `Error` is the other face of `Ready`.
    for condition in conditions.iter().filter(|condition| condition.type_ != "Error") {
        let bad = match condition.type_.as_str() {
            "ImagesNotUsed" => false,
            _ => condition.status != "True",
        };
        let style = if bad { WARN } else { FAINT };
        let head = format!("{} {} ({})", condition.type_, condition.status, condition.reason);
        let _ = write!(text, "\n{}\n{}\n", paint(style, &head), indented(&condition.message));
    }
    if !operands.is_empty() {
        let head = ["OPERAND", "DESIRED", "UPDATED", "READY", "REASON"];
        let mut rows: Vec<Vec<Cell>> = vec![head.map(|title| Cell::new(STRONG, title)).into()];
        rows.extend(operands.iter().map(|operand| {
            let style = if operand.reason.is_empty() { PLAIN } else { BAD };
            let reason = operand.failing.as_ref().map_or(&operand.reason, |failing| &failing.reason);
            vec![
                Cell::new(PLAIN, operand.name.clone()),
                Cell::new(PLAIN, operand.desired.to_string()),
                Cell::new(PLAIN, operand.updated.to_string()),
                Cell::new(style, operand.ready.to_string()),
                Cell::plain(Some(reason.clone())),
            ]
        }));
        let _ = write!(text, "\n{}", table(&rows));
    }
    if !modes.is_empty() {
        let mut rows: Vec<Vec<Cell>> = vec![["MODE", "NODES", "READY"].map(|title| Cell::new(STRONG, title)).into()];
        rows.extend(modes.iter().map(|mode| {
            let style = if mode.ready == mode.nodes { GOOD } else { WARN };
            vec![
                Cell::new(PLAIN, mode.mode.to_string()),
                Cell::new(PLAIN, mode.nodes.to_string()),
                Cell::new(style, mode.ready.to_string()),
            ]
        }));
        let _ = write!(text, "\n{}", table(&rows));
    }
    text
}
