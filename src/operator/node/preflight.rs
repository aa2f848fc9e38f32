//! What would stop a mode change, seen before anything is touched.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode,
    v1alpha1::{AgentStatus, GPUStatus, Holder},
};

use super::{claims::Claimant, users::Users};

/// Why a node cannot leave its mode, and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preflight {
    Clear,
    Blocked(Blocked),
    /// A holder may be one of our own operands; that is known once the node's operand pods are.
    NeedsPods,
}

/// What the change meets on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What stands in the way, users aside.
    pub obstacle: Option<Blocked>,
    pub users: Vec<InUse>,
    /// A holder may be one of our own operands, or pods could not be listed.
    pub needs_pods: bool,
}

/// Somebody has a GPU that is to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    pub who: Who,
    /// Device, holder, next step.
    pub said: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// `namespace/name` of a virtual machine instance.
    Vm(String),
    /// `namespace/name`.
    Pod(String),
    /// A process of the host, or of a pod that the kubelet has given nothing.
    Process,
}

impl Findings {
    pub fn verdict(self) -> Preflight {
        if let Some(obstacle) = self.obstacle {
            return Preflight::Blocked(obstacle);
        }
        match (self.users.into_iter().next(), self.needs_pods) {
            (Some(user), _) => Preflight::Blocked(Blocked { reason: "GPUInUse".to_owned(), message: user.said }),
            (None, true) => Preflight::NeedsPods,
            (None, false) => Preflight::Clear,
        }
    }
}

/// `operands`: UIDs of our operands' pods on the node, which leave in the quiesce step and so do not block; `None` while
/// they are not known.
pub fn findings(
    agent: &AgentStatus,
    desired: WorkloadMode,
    operands: Option<&BTreeSet<String>>,
    users: &Users,
) -> Findings {
    let mut findings = Findings::default();
    for gpu in agent.gpus.iter().filter(|gpu| gpu.mode != Some(desired)) {
        if let Some(obstacle) = gpu.obstacles.iter().find(|o| o.mode == desired)
            && findings.obstacle.is_none()
        {
            let (reason, message) = (obstacle.reason.clone(), obstacle.message.clone());
            findings.obstacle = Some(Blocked { reason, message });
        }
        for holder in gpu.all_holders() {
            match (&holder.pod, operands) {
                (Some(pod), Some(operands)) if operands.contains(pod) => {}
                (Some(_), None) => findings.needs_pods = true,
                (Some(_), Some(_)) | (None, _) => findings.users.push(in_use(gpu, holder, desired.as_str(), users)),
            }
        }
    }
    // A promise names no address, and a change is of the whole node.
    findings.needs_pods |= users.unread;
    if agent.gpus.iter().any(|gpu| gpu.mode != Some(desired)) {
        let ours = |uid: &String| operands.is_some_and(|operands| operands.contains(uid));
        for claimant in users.claims.iter().filter(|claimant| !ours(&claimant.uid)) {
            let user = claimed(claimant, desired.as_str());
            if findings.users.iter().all(|known| known.who != user.who) {
                findings.users.push(user);
            }
        }
    }
    findings
}

fn claimed(claimant: &Claimant, next: &str) -> InUse {
    let Claimant { pod, what, .. } = claimant;
    let who = claimant.vmi.clone().map_or_else(|| Who::Pod(pod.clone()), Who::Vm);
    let by = claimant.vmi.as_ref().map_or_else(|| format!("pod {pod}"), |vm| format!("VM {vm} (pod {pod})"));
    let said = format!("{what} is allocated to {by}: {next} begins by itself once that has ended");
    InUse { who, said }
}

const NEW_DRIVER: &str = "its new driver";

/// Who has GPUs of this mode, whose driver is to be renewed. `operands` as above.
pub fn drivers_users(
    agent: &AgentStatus,
    mode: WorkloadMode,
    operands: Option<&BTreeSet<String>>,
    users: &Users,
) -> Vec<InUse> {
    let mut found = Vec::new();
    for gpu in agent.gpus.iter().filter(|gpu| gpu.mode == Some(mode)) {
        let of_others = |holder: &&Holder| match (&holder.pod, operands) {
            (Some(pod), Some(operands)) => !operands.contains(pod),
            // By name it is a pod that has been given something of ours, and so no operand.
            (Some(pod), None) => pod.contains('/'),
            (None, _) => true,
        };
        found.extend(gpu.all_holders().filter(of_others).map(|holder| in_use(gpu, holder, NEW_DRIVER, users)));
    }
    let ours = |uid: &String| operands.is_some_and(|operands| operands.contains(uid));
    let claimants = users.claims.iter().filter(|claimant| !ours(&claimant.uid));
    found.extend(claimants.map(|claimant| claimed(claimant, NEW_DRIVER)));
    found
}

/// `next`: what begins by itself afterwards.
fn in_use(gpu: &GPUStatus, holder: &Holder, next: &str, users: &Users) -> InUse {
    let held = match (holder.pid, &holder.pod) {
        // The kubelet's word: nobody has opened it yet.
        (0, Some(pod)) => format!("allocated to pod {pod}"),
        (pid, Some(pod)) => format!("held by {} (pid {pid}, pod {pod}) through {}", holder.command, holder.path),
        (pid, None) => format!("held by {} (pid {pid}) through {}", holder.command, holder.path),
    };
    let (who, held) = match (users.vm(&gpu.address), holder.pod.as_deref().and_then(|pod| users.name(pod))) {
        (Some(vm), _) => (Who::Vm(vm.to_owned()), format!("in use by VM {vm}, {held}")),
        (None, Some(pod)) => (Who::Pod(pod.to_owned()), held),
        (None, None) => (Who::Process, held),
    };
    InUse { who, said: format!("GPU {} is {held}: {next} begins by itself once that has ended", gpu.address) }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUUser, Obstacle};

    use super::*;

    fn preflight(
        agent: &AgentStatus,
        desired: WorkloadMode,
        operands: Option<&BTreeSet<String>>,
        users: &Users,
    ) -> Preflight {
        findings(agent, desired, operands, users).verdict()
    }

    fn agent() -> AgentStatus {
        AgentStatus {
            gpus: vec![GPUStatus {
                address: "0000:01:00.0".to_owned(),
                mode: Some(WorkloadMode::Container),
                ..GPUStatus::default()
            }],
            ..AgentStatus::default()
        }
    }

    fn held_by(pod: Option<&str>) -> AgentStatus {
        let mut agent = agent();
        agent.gpus[0].holders = vec![Holder {
            pid: 4711,
            command: "qemu".to_owned(),
            path: "/dev/nvidia0".to_owned(),
            pod: pod.map(str::to_owned),
            vm: None,
        }];
        agent
    }

    const TO: WorkloadMode = WorkloadMode::VmPassthrough;

    fn blocked(preflight: Preflight) -> Blocked {
        match preflight {
            Preflight::Blocked(blocked) => blocked,
            other @ (Preflight::Clear | Preflight::NeedsPods) => panic!("not blocked: {other:?}"),
        }
    }

    #[test]
    fn an_idle_gpu_is_clear_without_looking_at_pods() {
        assert_eq!(preflight(&agent(), TO, None, &Users::default()), Preflight::Clear);
    }

    #[test]
    fn an_obstacle_blocks_with_its_own_words() {
        let mut agent = agent();
        let obstacle = Obstacle { mode: TO, reason: "IommuOff".to_owned(), message: "set intel_iommu=on".to_owned() };
        agent.gpus[0].obstacles = vec![obstacle];
        assert_eq!(blocked(preflight(&agent, TO, None, &Users::default())).reason, "IommuOff");
        assert_eq!(
            preflight(&agent, WorkloadMode::VmVgpu, None, &Users::default()),
            Preflight::Clear,
            "another mode is not concerned"
        );
    }

    #[test]
    fn a_process_without_a_pod_blocks_and_is_named() {
        let message = blocked(preflight(&held_by(None), TO, None, &Users::default())).message;
        for part in ["0000:01:00.0", "4711", "qemu", "/dev/nvidia0"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_pod_blocks_unless_it_is_an_operand_of_ours() {
        let agent = held_by(Some("abc"));
        assert_eq!(preflight(&agent, TO, None, &Users::default()), Preflight::NeedsPods);
        assert_eq!(preflight(&agent, TO, Some(&["abc".to_owned()].into()), &Users::default()), Preflight::Clear);
        assert_eq!(
            blocked(preflight(&agent, TO, Some(&["def".to_owned()].into()), &Users::default())).reason,
            "GPUInUse"
        );
    }

    #[test]
    fn a_vm_is_named_where_it_is_known() {
        let user = GPUUser {
            pod: "vms/virt-launcher-a-x".to_owned(),
            vmi: Some("vms/a".to_owned()),
            gpus: vec!["0000:01:00.0".to_owned()],
        };
        let users = Users { list: vec![user], ..Users::default() };
        let message = blocked(preflight(&held_by(None), TO, None, &users)).message;
        assert!(message.contains("in use by VM vms/a, held by qemu (pid 4711)"), "{message}");
    }

    #[test]
    fn a_pod_with_a_claim_blocks_and_is_named_with_it() {
        let claimant = Claimant {
            pod: "ml/train".to_owned(),
            uid: "u-1".to_owned(),
            vmi: None,
            what: "device gpu-0 of ResourceClaim ml/one-gpu".to_owned(),
        };
        let users = Users { claims: vec![claimant.clone()], ..Users::default() };
        let found = findings(&agent(), TO, None, &users).users;
        assert_eq!(found[0].who, Who::Pod("ml/train".to_owned()));
        assert!(found[0].said.contains("gpu-0 of ResourceClaim ml/one-gpu is allocated to pod ml/train"));
        assert_eq!(preflight(&agent(), TO, Some(&["u-1".to_owned()].into()), &users), Preflight::Clear, "ours");
        let users = Users { claims: vec![Claimant { vmi: Some("vms/a".to_owned()), ..claimant }], ..Users::default() };
        assert_eq!(findings(&agent(), TO, None, &users).users[0].who, Who::Vm("vms/a".to_owned()));
        let mut there = agent();
        there.gpus[0].mode = Some(TO);
        assert_eq!(preflight(&there, TO, None, &users), Preflight::Clear);
    }

    #[test]
    fn a_held_gpu_that_is_already_there_does_not_block() {
        let mut agent = held_by(None);
        agent.gpus[0].mode = Some(TO);
        assert_eq!(preflight(&agent, TO, None, &Users::default()), Preflight::Clear);
    }
}
