//! `GPUTransition`: one node on its way from a mode to another, or from a driver to a newer one, with the plan, who is
//! affected, and the approval.
//!
//! The operator creates it and removes it some time after the end. A person writes `spec.approved` and nothing else.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{WorkloadMode, schema};

#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type of its own")]
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpuvirt.io",
    version = "v1alpha1",
    kind = "GPUTransition",
    plural = "gputransitions",
    shortname = "gput",
    category = "gpu",
    status = "GPUTransitionStatus",
    doc = "One node on its way from a workload mode to another, or from a driver to a newer one.",
    derive = "PartialEq",
    derive = "Default",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node"),
    printcolumn(name = "From", type_ = "string", json_path = ".spec.from"),
    printcolumn(name = "To", type_ = "string", json_path = ".spec.to"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".spec.driver.to"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [schema::rule(
    "!has(self.approved) || self.approved == self.planHash",
    "approved must equal planHash: read status.plan again, then approve the hash that belongs to it",
)]))]
pub struct GPUTransitionSpec {
    /// Name of the node.
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("node")]))]
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// The mode that the node leaves.
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("from")]))]
    pub from: WorkloadMode,
    /// The mode that the node goes to. The one that it leaves, where only its driver changes.
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("to")]))]
    pub to: WorkloadMode,
    /// The driver that is renewed; unset where the mode changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [schema::immutable("driver")]))]
    pub driver: Option<DriverRenewal>,
    /// Hash of `status.plan` and of the pods and VMs that it affects, lower-case hex.
    /// Whoever writes a new one removes `approved` in the same write.
    #[schemars(length(max = 64), regex(pattern = "^[0-9a-f]{8,64}$"))]
    pub plan_hash: String,
    /// The hash of the plan that a person agrees to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub approved: Option<String>,
}

/// A driver's pod on its way to the newest revision of its DaemonSet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct DriverRenewal {
    /// Name of the DaemonSet.
    #[schemars(length(max = 253))]
    pub daemon_set: String,
    /// The image that the node leaves.
    #[schemars(length(max = 1024))]
    pub from: String,
    /// The image that the node goes to.
    #[schemars(length(max = 1024))]
    pub to: String,
    /// `controller-revision-hash` that the new pod has.
    #[schemars(length(max = 63))]
    pub revision: String,
    /// The new pod has the very driver that is loaded, with the same settings: it stays, under whoever uses it.
    pub same_driver: bool,
}

impl GPUTransitionSpec {
    /// Whether a person has agreed to this very plan.
    pub fn is_approved(&self) -> bool {
        self.approved.as_deref() == Some(self.plan_hash.as_str())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct GPUTransitionStatus {
    /// `metadata.generation` of the spec that this answers.
    pub observed_generation: i64,
    pub phase: TransitionPhase,
    /// When the present phase was entered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// One CamelCase word: what it waits for, or why it ended.
    pub reason: String,
    /// What it waits for, or why it ended: a sentence for a person.
    pub message: String,
    /// What will be done, one sentence a step, in order.
    pub plan: Vec<String>,
    /// Pods that use the node's GPUs, as `namespace/name`.
    pub affected_pods: Vec<String>,
    /// Virtual machine instances that use the node's GPUs, as `namespace/name`.
    #[serde(rename = "affectedVMs")]
    pub affected_vms: Vec<String>,
    /// The agent has been asked for the new mode: from here on a way back is a change of its own.
    pub switched: bool,
    /// When the present phase is given up, or told about again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
    /// Phases that it has been through, oldest first.
    pub history: Vec<TransitionEvent>,
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Where a node is on its way, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TransitionPhase {
    /// The plan is made and checked against what the node shows.
    #[default]
    Preflight,
    /// The budget lets another node go first.
    WaitForSlot,
    /// No new pod may come to the node.
    Cordon,
    /// Someone uses a GPU; the change waits for them to end.
    WaitForUsers,
    /// Users are being evicted.
    Evict,
    /// Advertisements and operands of the old mode are leaving.
    Quiesce,
    /// The agent has been asked for the new mode.
    Switch,
    /// The kernel is read until it shows the new mode.
    Verify,
    /// Labels and advertisements of the new mode appear.
    Advertise,
    /// The node takes pods again.
    Uncordon,
    /// The node serves the new mode.
    Done,
    /// Only a person can go on: `message` names the next step.
    Blocked,
    /// It was given up; the old mode is back where that was possible.
    Failed,
}

/// What a phase means for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitionStage {
    /// The old mode serves; a cordon and evictions aside, nothing has been done.
    Approach,
    /// The node is between its modes.
    Passage,
    /// It waits for somebody.
    Stopped,
    /// Nothing more will happen.
    Ended,
}

impl TransitionPhase {
    pub const fn stage(self) -> TransitionStage {
        match self {
            Self::Preflight | Self::WaitForSlot | Self::Cordon | Self::WaitForUsers | Self::Evict => {
                TransitionStage::Approach
            }
            Self::Quiesce | Self::Switch | Self::Verify | Self::Advertise | Self::Uncordon => TransitionStage::Passage,
            Self::Blocked => TransitionStage::Stopped,
            Self::Done | Self::Failed => TransitionStage::Ended,
        }
    }

    /// Whether nothing more will happen.
    pub const fn is_final(self) -> bool {
        matches!(self.stage(), TransitionStage::Ended)
    }
}

/// The entry into a phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransitionEvent {
    pub phase: TransitionPhase,
    /// When it was entered.
    pub at: Time,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}
