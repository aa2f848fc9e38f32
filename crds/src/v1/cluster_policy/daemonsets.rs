//! What all operand DaemonSets share, and where things are on the host.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodSecurityContext, Toleration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Daemonsets {
    /// On every pod. `app` and `app.kubernetes.io/part-of` cannot be replaced.
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    #[schemars(schema_with = "schema::tolerations")]
    pub tolerations: Vec<Toleration>,
    pub priority_class_name: Option<String>,
    pub update_strategy: UpdateStrategy,
    pub rolling_update: RollingUpdate,
    #[schemars(schema_with = "schema::pod_security_context")]
    pub pod_security_context: Option<PodSecurityContext>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpdateStrategy {
    #[default]
    RollingUpdate,
    OnDelete,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RollingUpdate {
    /// A count or a share, as text: `1` or `10%`.
    pub max_unavailable: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct HostPaths {
    /// The host's root file system, `/` if unset.
    #[serde(rename = "rootFS")]
    pub root_fs: Option<String>,
    /// Where the driver container puts the driver's files, `/run/nvidia/driver` if unset.
    pub driver_install_dir: Option<String>,
    pub kubelet_root_dir: String,
}

impl Default for HostPaths {
    fn default() -> Self {
        Self { root_fs: None, driver_install_dir: None, kubelet_root_dir: "/var/lib/kubelet".to_owned() }
    }
}

/// Whether the operator labels its namespace for privileged pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Psa {
    pub enabled: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Psp {
    pub enabled: Option<bool>,
}
