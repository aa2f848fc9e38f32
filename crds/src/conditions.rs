//! Conditions as Kubernetes knows them, and the one way to change a list of them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Longest message of a condition, in characters: `maxLength` in metav1.Condition, which the peer's schema repeats.
const MESSAGE_LIMIT: usize = 32_768;

/// Verdicts of a container node's checks, in `status.agent` of its `GPUNode`.
pub const DRIVER_VALIDATED: &str = "DriverValidated";
pub const TOOLKIT_VALIDATED: &str = "ToolkitValidated";
pub const CUDA_VALIDATED: &str = "CudaValidated";
pub const PLUGIN_VALIDATED: &str = "PluginValidated";
/// In the order of the chain.
pub const CHAIN: [&str; 4] = [DRIVER_VALIDATED, TOOLKIT_VALIDATED, CUDA_VALIDATED, PLUGIN_VALIDATED];

/// What a condition of ours says, before it meets the list that it goes into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub type_: &'static str,
    pub holds: bool,
    /// One CamelCase word that a program can match.
    pub reason: &'static str,
    /// A sentence for a person: object, cause, next step.
    pub message: String,
}

impl Verdict {
    pub fn yes(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self { type_, holds: true, reason, message: message.into() }
    }

    pub fn no(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self { type_, holds: false, reason, message: message.into() }
    }
}

/// The list after these verdicts: conditions of other types stay, and the transition time moves only when the status does.
pub fn merge(old: &[Condition], verdicts: &[Verdict], generation: Option<i64>, now: &Time) -> Vec<Condition> {
    let mut merged: Vec<Condition> =
        old.iter().filter(|c| verdicts.iter().all(|v| v.type_ != c.type_)).cloned().collect();
    for verdict in verdicts {
        let status = if verdict.holds { "True" } else { "False" };
        let since = old
            .iter()
            .find(|c| c.type_ == verdict.type_ && c.status == status)
            .map_or_else(|| now.clone(), |c| c.last_transition_time.clone());
        merged.push(Condition {
            type_: verdict.type_.to_owned(),
            status: status.to_owned(),
            reason: verdict.reason.to_owned(),
            message: within_limit(&verdict.message),
            last_transition_time: since,
            observed_generation: generation,
        });
    }
    merged.sort_by(|a, b| a.type_.cmp(&b.type_));
    merged
}

/// One sentence too many must not make the API server refuse the whole status.
fn within_limit(message: &str) -> String {
    match message.char_indices().nth(MESSAGE_LIMIT) {
        None => message.to_owned(),
        Some(_) => message.chars().take(MESSAGE_LIMIT - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        serde_json::from_value(serde_json::json!(format!("2026-01-01T00:00:{second:02}Z"))).unwrap()
    }

    fn ready(second: i64) -> Vec<Condition> {
        merge(&[], &[Verdict::yes("Ready", "Reconciled", "all operands are ready")], Some(1), &at(second))
    }

    #[test]
    fn a_new_condition_is_as_old_as_now() {
        assert_eq!(ready(5)[0].last_transition_time, at(5));
    }

    #[test]
    fn an_unchanged_status_keeps_its_transition_time_while_reason_message_and_generation_follow() {
        let later = merge(&ready(5), &[Verdict::yes("Ready", "NoGPUNodes", "no node has a GPU")], Some(2), &at(9));
        assert_eq!(later[0].last_transition_time, at(5));
        assert_eq!(later[0].reason, "NoGPUNodes");
        assert_eq!(later[0].message, "no node has a GPU");
        assert_eq!(later[0].observed_generation, Some(2));
    }

    #[test]
    fn a_changed_status_moves_the_transition_time() {
        let later = merge(&ready(5), &[Verdict::no("Ready", "OperandNotReady", "driver: 1 of 2")], Some(1), &at(9));
        assert_eq!((later[0].status.as_str(), &later[0].last_transition_time), ("False", &at(9)));
    }

    #[test]
    fn conditions_of_other_types_stay_and_the_list_is_sorted() {
        let merged = merge(&ready(5), &[Verdict::no("Error", "Reconciled", "")], None, &at(9));
        assert_eq!(merged.iter().map(|c| c.type_.as_str()).collect::<Vec<_>>(), ["Error", "Ready"]);
        assert_eq!(merged[1], ready(5)[0]);
    }

    #[test]
    fn saying_the_same_again_changes_nothing() {
        let verdicts = [Verdict::yes("Ready", "Reconciled", "all operands are ready")];
        assert_eq!(merge(&ready(5), &verdicts, Some(1), &at(9)), ready(5));
    }

    #[test]
    fn a_message_longer_than_the_schema_takes_is_cut_at_a_character() {
        let cut = |length: usize| {
            let merged = merge(&[], &[Verdict::no("Ready", "Long", "ä".repeat(length))], None, &at(5));
            merged[0].message.clone()
        };
        assert_eq!(cut(MESSAGE_LIMIT), "ä".repeat(MESSAGE_LIMIT));
        assert_eq!(cut(MESSAGE_LIMIT + 1).chars().count(), MESSAGE_LIMIT);
        assert!(cut(MESSAGE_LIMIT + 1).ends_with('…'));
    }
}
