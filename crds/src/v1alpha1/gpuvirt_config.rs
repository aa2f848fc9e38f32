//! `GPUVirtConfig`: settings of ours that the peer's `ClusterPolicy` has no field for, and the report per operand and mode.
//!
//! The object is optional and there is one, named `default`. Without it every default below holds.

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::Condition, util::intstr::IntOrString};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{WorkloadMode, schema};

/// The only name that a `GPUVirtConfig` may have.
pub const CONFIG_NAME: &str = "default";

#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type of its own")]
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gpuvirt.io",
    version = "v1alpha1",
    kind = "GPUVirtConfig",
    plural = "gpuvirtconfigs",
    category = "gpu",
    status = "GPUVirtConfigStatus",
    doc = "Settings of gpuvirt, and what of it is ready. The one object is named `default`.",
    derive = "PartialEq",
    derive = "Default",
    validation = Rule::new("self.metadata.name == 'default'")
        .message("there is one GPUVirtConfig and its name is default: rename this object"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(default, rename_all = "camelCase")]
pub struct GPUVirtConfigSpec {
    /// Which nodes the agent runs on.
    pub discovery: Discovery,
    /// Resource names in place of those made from the PCI id table.
    #[schemars(
        length(max = 256),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["selector"])
    )]
    pub resource_aliases: Vec<ResourceAlias>,
    /// What may be ended on a node so that its mode can change.
    pub evict: Evict,
    /// How many nodes change at a time.
    pub budget: Budget,
    /// When changes of nodes may begin; without any, at any time. One that has begun goes on.
    #[schemars(length(max = 32))]
    pub maintenance_windows: Vec<MaintenanceWindow>,
    /// What is done in KubeVirt's own configuration.
    pub kubevirt: KubeVirt,
    /// How much gpuvirt's own programs log, without a restart.
    pub logging: Logging,
    /// Seconds between two looks of an agent at its node when no event has asked for one; jitter is added.
    #[schemars(range(min = 10, max = 86_400))]
    pub resync_seconds: u32,
}

impl Default for GPUVirtConfigSpec {
    fn default() -> Self {
        Self {
            discovery: Discovery::default(),
            resource_aliases: Vec::new(),
            evict: Evict::default(),
            budget: Budget::default(),
            maintenance_windows: Vec::new(),
            kubevirt: KubeVirt::default(),
            logging: Logging::default(),
            resync_seconds: 300,
        }
    }
}

/// Which nodes the agent runs on. A node with `nvidia.com/gpu.deploy.operands=false` has no agent either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Discovery {
    /// Every Linux node; nothing else has to label them.
    #[default]
    AllNodes,
    /// Nodes that carry NFD's PCI labels or `nvidia.com/gpu.present=true`.
    Labels,
}

/// One device id and the name that it is offered under.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceAlias {
    /// Vendor and device id in lower case, as in `10de:1eb8`.
    #[schemars(regex(pattern = r"^[0-9a-f]{4}:[0-9a-f]{4}$"))]
    pub selector: String,
    /// Full resource name, as in `nvidia.com/T4`.
    #[schemars(
        length(max = 317),
        regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
    )]
    pub name: String,
}

/// What may be ended on a node so that its mode can change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Evict {
    /// Nothing: a change waits until the GPUs are free.
    #[default]
    Never,
    /// Pods that use a GPU, by the eviction API. Virtual machines block the change.
    Pods,
    /// Virtual machines too, once a person has approved the plan that names them.
    #[serde(rename = "PodsAndVMs")]
    PodsAndVms,
}

/// How many nodes change at a time. Both limits hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Budget {
    /// Nodes in transition at once, as a count or a share like `25%`, rounded up; at least one.
    pub max_parallel: IntOrString,
    /// GPU nodes that may be unavailable at once, as a count or a share like `25%`, rounded up.
    pub max_unavailable: IntOrString,
    /// Nodes whose driver upgrade has failed at which no further node begins one.
    #[schemars(range(min = 1, max = 10_000))]
    pub halt_after_failures: u32,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            max_parallel: IntOrString::Int(1),
            max_unavailable: IntOrString::String("25%".to_owned()),
            halt_after_failures: 1,
        }
    }
}

/// A time that comes again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceWindow {
    /// When it opens, in the five fields of a cron expression: minute, hour, day of month, month, day of week.
    #[schemars(length(max = 128), regex(pattern = "^[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4}$"))]
    pub schedule: String,
    /// How long it is open, as in `4h` or `1h30m`; from 5 minutes to 168 hours.
    #[schemars(
        length(min = 2, max = 16),
        regex(pattern = "^([0-9]+h)?([0-9]+m)?$"),
        extend("x-kubernetes-validations" = [schema::rule(
            "duration(self) >= duration('5m') && duration(self) <= duration('168h')",
            "a window is open for 5m to 168h",
        )])
    )]
    pub duration: String,
    /// In the IANA database, as in `Europe/Berlin`.
    #[serde(default = "utc")]
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-validations" = [schema::rule(
            "timestamp('2026-01-01T12:00:00Z').getFullYear(self) == 2026",
            "this is no time zone of the IANA database, as Europe/Berlin is one",
        )])
    )]
    pub time_zone: String,
}

fn utc() -> String {
    "UTC".to_owned()
}

/// How much gpuvirt's own programs log: a level, as in `debug`, or a filter, as in `info,vfio=debug`. What is not set is as at
/// the program's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Logging {
    /// Of all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub level: Option<String>,
    /// Of the operator that leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub operator: Option<String>,
    /// Of the agents.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub agent: Option<String>,
}

impl Logging {
    /// The operator's, if any is set.
    pub fn of_operator(&self) -> Option<&str> {
        self.operator.as_deref().or(self.level.as_deref())
    }

    /// The agents', if any is set.
    pub fn of_agents(&self) -> Option<&str> {
        self.agent.as_deref().or(self.level.as_deref())
    }
}

/// What is done in KubeVirt's own configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct KubeVirt {
    /// Whether advertised resources are entered in `permittedHostDevices`.
    pub mode: KubeVirtMode,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KubeVirtMode {
    /// Advertised resources are kept in `permittedHostDevices` of `HyperConverged`, or else of `KubeVirt`, where one is found.
    #[default]
    Manage,
    /// Both are read and neither is written: the condition `KubeVirtWired` shows the entries to add.
    Report,
    /// Neither is read nor written; the resources are permitted there by hand, and what was entered before stays.
    Off,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct GPUVirtConfigStatus {
    /// `metadata.generation` of the spec that this answers.
    pub observed_generation: i64,
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    /// Per operand how many nodes have it, and why not all.
    pub operands: Vec<OperandStatus>,
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["mode"]))]
    /// Per mode how many nodes serve it, and why not all.
    pub modes: Vec<ModeStatus>,
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// One operand's DaemonSet or Deployment. It is ready when `desired == updated == ready`, also at 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OperandStatus {
    pub name: String,
    /// Nodes whose mode asks for it.
    #[serde(default)]
    pub desired: i32,
    /// Pods of the current revision.
    #[serde(default)]
    pub updated: i32,
    /// Pods that are ready.
    #[serde(default)]
    pub ready: i32,
    /// One CamelCase word; empty while all is well.
    #[serde(default)]
    pub reason: String,
    /// A sentence for a person.
    #[serde(default)]
    pub message: String,
    /// The pod that says most about why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<FailingPod>,
}

/// A pod that is not ready, in its kubelet's words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailingPod {
    pub node: String,
    pub pod: String,
    /// Empty while no node takes the pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// Of the container.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// One CamelCase word, as in `ImagePullBackOff`.
    #[serde(default)]
    pub reason: String,
    /// Cut to its end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The nodes of one mode.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModeStatus {
    pub mode: WorkloadMode,
    /// GPU nodes that are to be in it.
    #[serde(default)]
    pub nodes: i32,
    /// How many of them are.
    #[serde(default)]
    pub ready: i32,
    /// Why the others are not, one sentence each; of many nodes the first, and how many more there are.
    #[serde(default)]
    pub reasons: Vec<String>,
}
