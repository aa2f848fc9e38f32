//! A node's vGPUs: the label that shows their state, the condition, and the events. Pure.

use std::collections::BTreeMap;

use crds::{
    conditions::Verdict,
    labels,
    v1alpha1::{OperatorStatus, VgpuProgress},
};

use crate::{cluster::events::Notice, operator::vgpu};

/// Condition: the node's vGPUs are those of its layout.
pub const CONDITION: &str = "VGPULayout";

pub fn label(node: &BTreeMap<String, String>, standing: Option<&vgpu::Standing>) -> Option<(String, Option<String>)> {
    let key = labels::VGPU_CONFIG_STATE;
    let wanted = standing.map(|standing| vgpu::label(standing.progress));
    (node.get(key).map(String::as_str) != wanted).then(|| (key.to_owned(), wanted.map(str::to_owned)))
}

pub fn verdict(standing: &vgpu::Standing) -> Verdict {
    let message = standing.message.clone();
    match standing.progress {
        VgpuProgress::Success => Verdict::yes(CONDITION, standing.reason, message),
        VgpuProgress::Pending | VgpuProgress::Failed => Verdict::no(CONDITION, standing.reason, message),
    }
}

/// Once what it has come to, and each new reason why it fails.
pub fn notice(old: Option<&OperatorStatus>, standing: &vgpu::Standing) -> Option<Notice> {
    let before = old.and_then(|old| old.conditions.iter().find(|condition| condition.type_ == CONDITION));
    let same_reason = before.is_some_and(|before| before.reason == standing.reason);
    let known = same_reason && before.is_some_and(|before| before.message == standing.message);
    let message = standing.message.clone();
    match standing.progress {
        VgpuProgress::Success if !known => Some(Notice::normal(standing.reason, "ApplyVGPULayout", message)),
        VgpuProgress::Failed if !known => Some(Notice::warning(standing.reason, "ApplyVGPULayout", message)),
        VgpuProgress::Success | VgpuProgress::Failed | VgpuProgress::Pending => None,
    }
}
