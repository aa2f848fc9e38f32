//! What all operand DaemonSets share.

use std::collections::BTreeMap;

use crds::v1::{Daemonsets, HostPaths, UpdateStrategy};
use k8s_openapi::{
    api::core::v1::{PodSecurityContext, Toleration},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::given;

#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub tolerations: Vec<Toleration>,
    pub priority_class: String,
    pub rollout: Rollout,
    pub pod_security_context: Option<PodSecurityContext>,
    pub root_fs: String,
    pub kubelet_root: String,
    pub driver_install_dir: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rollout {
    Rolling { max_unavailable: IntOrString },
    OnDelete,
}

/// Where a pod of the stack must be able to run: nodes that are kept free for GPUs.
pub fn gpu_nodes() -> Toleration {
    Toleration {
        key: Some("nvidia.com/gpu".to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoSchedule".to_owned()),
        ..Toleration::default()
    }
}

pub const PRIORITY_CLASS: &str = "system-node-critical";

pub(super) fn common(daemonsets: &Daemonsets, paths: &HostPaths) -> Common {
    let tolerations = match daemonsets.tolerations.is_empty() {
        false => daemonsets.tolerations.clone(),
        true => vec![gpu_nodes()],
    };
    let max_unavailable = given(daemonsets.rolling_update.max_unavailable.as_deref()).unwrap_or("1").to_owned();
    Common {
        labels: daemonsets.labels.clone(),
        annotations: daemonsets.annotations.clone(),
        tolerations,
        priority_class: given(daemonsets.priority_class_name.as_deref()).unwrap_or(PRIORITY_CLASS).to_owned(),
        rollout: match daemonsets.update_strategy {
            UpdateStrategy::OnDelete => Rollout::OnDelete,
            UpdateStrategy::RollingUpdate => Rollout::Rolling {
                max_unavailable: max_unavailable.parse().map_or(IntOrString::String(max_unavailable), IntOrString::Int),
            },
        },
        pod_security_context: daemonsets.pod_security_context.clone(),
        root_fs: given(paths.root_fs.as_deref()).unwrap_or("/").to_owned(),
        kubelet_root: given(Some(&paths.kubelet_root_dir)).unwrap_or("/var/lib/kubelet").to_owned(),
        driver_install_dir: given(paths.driver_install_dir.as_deref()).unwrap_or("/run/nvidia/driver").to_owned(),
    }
}
