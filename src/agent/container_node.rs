//! What the agent sees of a container node beside its GPUs: the driver, and how far the checks have come. Both are written
//! by others, and told here to the cluster.

use std::path::Path;

use crds::{
    WorkloadMode,
    conditions::Verdict,
    v1alpha1::{DriverOrigin, NvidiaDriver},
};
use vfio::Root;

use super::wish::Wish;
use crate::{
    host_driver::{self, Origin},
    validator::{Check, DIRECTORY, Found, Validations},
};

/// As it was at one moment.
#[derive(Clone, Debug)]
pub struct ContainerNode {
    pub driver: Option<NvidiaDriver>,
    checks: Vec<(Check, Found)>,
}

impl ContainerNode {
    pub fn look(host_root: &Path) -> Self {
        let validations = Validations::new(super::below(host_root, Path::new(DIRECTORY)));
        Self {
            driver: Root::new(host_root).ok().and_then(|root| host_driver::look(&root)).map(|driver| NvidiaDriver {
                version: driver.version,
                origin: match driver.origin {
                    Origin::Host => DriverOrigin::Host,
                    Origin::HostIdle => DriverOrigin::HostIdle,
                    Origin::Pod => DriverOrigin::Pod,
                },
            }),
            checks: Check::ALL.map(|check| (check, validations.found(check))).to_vec(),
        }
    }

    /// Nothing where nobody checks: a node of VMs, or a policy without a container stack.
    pub fn verdicts(&self, wish: &Wish) -> Vec<Verdict> {
        let checked = self.checks.iter().any(|(_, found)| *found != Found::Nothing);
        match (wish.spec.mode, checked) {
            (Some(WorkloadMode::Container) | None, true) => self.checks.iter().map(verdict).collect(),
            (Some(WorkloadMode::VmPassthrough | WorkloadMode::VmVgpu), _) | (_, false) => Vec::new(),
        }
    }
}

fn verdict((check, found): &(Check, Found)) -> Verdict {
    let (type_, what) = match check {
        Check::Driver => (crds::conditions::DRIVER_VALIDATED, "the driver works"),
        Check::Toolkit => (crds::conditions::TOOLKIT_VALIDATED, "containers get GPUs"),
        Check::Cuda => (crds::conditions::CUDA_VALIDATED, "GPUs compute"),
        Check::Plugin => (crds::conditions::PLUGIN_VALIDATED, "the kubelet offers GPUs"),
    };
    let container = check.container();
    match found {
        Found::Passed => Verdict::yes(type_, "Passed", what),
        Found::Failed(why) => Verdict::no(type_, "Failed", why.clone()),
        Found::Nothing => Verdict::no(
            type_,
            "NotChecked",
            format!("container {container} of nvidia-operator-validator has given no verdict yet"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::GPUNodeSpec;

    use super::*;

    fn wish(mode: WorkloadMode) -> Wish {
        Wish { spec: GPUNodeSpec { mode: Some(mode), ..GPUNodeSpec::default() } }
    }

    #[test]
    fn a_failing_check_is_told_in_its_own_words_on_a_container_node_only() {
        let host = tempfile::tempdir().expect("tempdir");
        assert_eq!(ContainerNode::look(host.path()).verdicts(&wish(WorkloadMode::Container)), []);
        let validations = Validations::new(host.path().join("run/nvidia/validations"));
        validations.passed(Check::Driver, "").expect("writable");
        validations.failed(Check::Toolkit, "no GPU was given").expect("writable");
        let node = ContainerNode::look(host.path());
        let told: Vec<_> = node.verdicts(&wish(WorkloadMode::Container));
        let told: Vec<_> = told.iter().map(|v| (v.type_, v.reason, v.message.contains("no GPU was given"))).collect();
        assert_eq!(
            told,
            [
                ("DriverValidated", "Passed", false),
                ("ToolkitValidated", "Failed", true),
                ("CudaValidated", "NotChecked", false),
                ("PluginValidated", "NotChecked", false),
            ]
        );
        assert_eq!(node.verdicts(&wish(WorkloadMode::VmPassthrough)), []);
    }
}
