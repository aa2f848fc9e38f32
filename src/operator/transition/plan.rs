//! What a change would do to a node and to whom, in sentences, and the hash that an approval is bound to.

use std::fmt::Write as _;

use crds::{WorkloadMode, v1alpha1::DriverRenewal};
use sha2::{Digest, Sha256};

/// Who has GPUs that a change needs; operands of ours are not among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Affected {
    /// `namespace/name`, without the launchers of VMs.
    pub pods: Vec<String>,
    /// `namespace/name`.
    pub vms: Vec<String>,
    /// What is neither, a sentence each: nothing but its own end helps.
    pub others: Vec<String>,
    /// Of one of them: device, holder, next step.
    pub said: String,
}

impl Affected {
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.vms.is_empty() && self.others.is_empty()
    }

    /// For a message.
    pub fn names(&self) -> String {
        let pods = self.pods.iter().map(|pod| format!("pod {pod}"));
        let vms = self.vms.iter().map(|vm| format!("VM {vm}"));
        pods.chain(vms).chain(self.others.iter().cloned()).collect::<Vec<_>>().join(", ")
    }
}

/// What is going to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    pub node: &'a str,
    pub from: WorkloadMode,
    pub to: WorkloadMode,
    /// The driver, where that changes and the mode does not.
    pub driver: Option<&'a DriverRenewal>,
    /// PCI addresses of the GPUs that are not in the new mode, or have the driver.
    pub gpus: Vec<&'a str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<String>,
    /// Lower-case hex, of node, target, devices and affected pods and VMs.
    pub hash: String,
}

pub fn plan(change: &Change<'_>, affected: &Affected, cordon: bool) -> Plan {
    let Change { node, from, to, driver, gpus } = change;
    let mut steps = Vec::new();
    if cordon {
        steps.push(format!("cordon node {node}"));
        steps.extend(affected.pods.iter().map(|pod| format!("evict pod {pod}")));
        steps.extend(affected.vms.iter().map(|vm| format!("stop VM {vm}")));
    }
    match driver {
        None => {
            steps.push(format!("withdraw what {from} advertises to the kubelet, and its operands"));
            steps.extend(gpus.iter().map(|gpu| format!("bring GPU {gpu} into {to}")));
            steps.push(format!("deploy the operands of {to} and advertise its resources"));
        }
        Some(DriverRenewal { daemon_set, to, same_driver: true, .. }) => {
            steps.push(format!("renew the pod of {daemon_set}, of {to}: the driver itself stays loaded"));
        }
        Some(DriverRenewal { daemon_set, from, to, .. }) => {
            steps.push(format!("pause the operands that use the driver of GPUs {}", gpus.join(", ")));
            steps.push(format!("renew the pod of {daemon_set}: from {from} to {to}"));
            steps.push("bring the operands back and check the node".to_owned());
        }
    }
    if cordon {
        steps.push(format!("uncordon node {node}"));
    }
    Plan { hash: hash(change, affected), steps }
}

/// A field a line, so that no two plans read the same.
fn hash(change: &Change<'_>, affected: &Affected) -> String {
    let Change { node, from, to, driver, gpus } = change;
    let mut text = format!("node {node}\nfrom {from}\nto {to}\n");
    if let Some(DriverRenewal { daemon_set, revision, .. }) = driver {
        let _ = writeln!(text, "driver {daemon_set} {revision}");
    }
    let sorted = |list: &[String]| {
        let mut list: Vec<String> = list.to_vec();
        list.sort_unstable();
        list
    };
    let gpus: Vec<String> = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
    for (what, list) in [("gpu", gpus), ("pod", affected.pods.clone()), ("vm", affected.vms.clone())] {
        for name in sorted(&list) {
            let _ = writeln!(text, "{what} {name}");
        }
    }
    Sha256::digest(text).iter().take(8).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change() -> Change<'static> {
        Change {
            node: "n1",
            from: WorkloadMode::Container,
            to: WorkloadMode::VmPassthrough,
            driver: None,
            gpus: vec!["0000:18:00.0", "0000:19:00.0"],
        }
    }

    fn driver() -> DriverRenewal {
        DriverRenewal {
            daemon_set: "nvidia-driver-daemonset".to_owned(),
            from: "driver:1".to_owned(),
            to: "driver:2".to_owned(),
            revision: "b".to_owned(),
            same_driver: false,
        }
    }

    #[test]
    fn a_driver_is_renewed_between_the_going_and_the_coming_of_what_uses_it() {
        let change = Change { driver: Some(&driver()), gpus: vec!["0000:18:00.0"], ..change() };
        let expected = [
            "cordon node n1",
            "evict pod ml/a",
            "evict pod ml/b",
            "stop VM vms/a",
            "pause the operands that use the driver of GPUs 0000:18:00.0",
            "renew the pod of nvidia-driver-daemonset: from driver:1 to driver:2",
            "bring the operands back and check the node",
            "uncordon node n1",
        ];
        assert_eq!(plan(&change, &users(), true).steps, expected);
    }

    fn users() -> Affected {
        Affected {
            pods: vec!["ml/a".to_owned(), "ml/b".to_owned()],
            vms: vec!["vms/a".to_owned()],
            ..Affected::default()
        }
    }

    #[test]
    fn a_plan_reads_in_the_order_in_which_it_is_done() {
        let steps = plan(&change(), &users(), true).steps;
        let expected = [
            "cordon node n1",
            "evict pod ml/a",
            "evict pod ml/b",
            "stop VM vms/a",
            "withdraw what container advertises to the kubelet, and its operands",
            "bring GPU 0000:18:00.0 into vm-passthrough",
            "bring GPU 0000:19:00.0 into vm-passthrough",
            "deploy the operands of vm-passthrough and advertise its resources",
            "uncordon node n1",
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn the_hash_is_of_node_target_devices_and_users_and_of_nothing_else() {
        let known = plan(&change(), &users(), true).hash;
        assert_eq!(known.len(), 16);
        let mut turned = users();
        turned.pods.reverse();
        assert_eq!(plan(&change(), &turned, true).hash, known, "the order in which they were seen");
        turned.others.push("nvtop (pid 7)".to_owned());
        assert_eq!(plan(&change(), &turned, true).hash, known, "what blocks either way");

        let mut fewer = users();
        fewer.vms.clear();
        let as_pod = Affected { pods: vec!["ml/a".to_owned(), "ml/b".to_owned(), "vms/a".to_owned()], ..fewer.clone() };
        let others = [
            plan(&Change { node: "n2", ..change() }, &users(), true),
            plan(&Change { to: WorkloadMode::VmVgpu, ..change() }, &users(), true),
            plan(&Change { gpus: vec!["0000:18:00.0"], ..change() }, &users(), true),
            plan(&Change { driver: Some(&driver()), ..change() }, &users(), true),
            plan(
                &Change { driver: Some(&DriverRenewal { revision: "c".to_owned(), ..driver() }), ..change() },
                &users(),
                true,
            ),
            plan(&change(), &fewer, true),
            plan(&change(), &as_pod, true),
        ];
        for other in others {
            assert_ne!(other.hash, known, "{:?}", other.steps);
        }
    }
}
