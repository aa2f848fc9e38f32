//! How a new driver reaches nodes that have one.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct UpgradePolicy {
    pub auto_upgrade: bool,
    /// Nodes at once; 0 is no limit.
    pub max_parallel_upgrades: u64,
    /// GPU nodes that may be unavailable at once, as a count or a share, rounded up.
    pub max_unavailable: IntOrString,
    pub pod_deletion: PodDeletion,
    pub wait_for_completion: WaitForCompletion,
    pub drain: Drain,
}

impl Default for UpgradePolicy {
    fn default() -> Self {
        Self {
            auto_upgrade: false,
            max_parallel_upgrades: 1,
            max_unavailable: IntOrString::String("25%".to_owned()),
            pod_deletion: PodDeletion::default(),
            wait_for_completion: WaitForCompletion::default(),
            drain: Drain::default(),
        }
    }
}

/// Deletion of pods that use a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct PodDeletion {
    /// Also pods without a controller.
    pub force: bool,
    pub timeout_seconds: u64,
    /// Also pods with data in an emptyDir.
    pub delete_empty_dir: bool,
}

impl Default for PodDeletion {
    fn default() -> Self {
        Self { force: false, timeout_seconds: 300, delete_empty_dir: false }
    }
}

/// Waiting for jobs to end by themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct WaitForCompletion {
    pub pod_selector: Option<String>,
    /// 0 is no limit.
    pub timeout_seconds: u64,
}

/// Drain of the whole node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Drain {
    pub enable: bool,
    /// Also pods without a controller.
    pub force: bool,
    pub pod_selector: Option<String>,
    pub timeout_seconds: u64,
    /// Also pods with data in an emptyDir.
    pub delete_empty_dir: bool,
}

impl Default for Drain {
    fn default() -> Self {
        Self { enable: false, force: false, pod_selector: None, timeout_seconds: 300, delete_empty_dir: false }
    }
}
