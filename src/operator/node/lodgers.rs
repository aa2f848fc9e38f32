//! All pods of a node whose driver is to be renewed: who uses the driver by what it has asked for, and who may be evicted.

use std::{collections::BTreeMap, sync::Arc};

use crds::labels;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus, Volume};
use kube::{
    Client, ResourceExt,
    core::{Selector, SelectorExt},
    runtime::watcher,
};

use crate::operator::{
    pod::{controller, gpus_asked, instance},
    pod_watches::PodWatches,
    transition::{Affected, Upgrade},
    world::{NodeWork, Wake},
};

/// On pods that the kubelet has from a file of its own.
const MIRROR: &str = "kubernetes.io/config.mirror";

pub struct Lodgers {
    watches: PodWatches,
    wake: Wake,
}

/// A pod that has not ended, and is no operand of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lodger {
    /// `namespace/name`.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    /// `namespace/name` of the virtual machine instance that it runs.
    pub vmi: Option<String>,
    /// It has asked for a GPU, or a part of one.
    pub uses_gpu: bool,
    pub stays: Stays,
    pub bare: bool,
    pub empty_dirs: bool,
}

/// Why an eviction would be in vain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stays {
    #[default]
    No,
    /// Its DaemonSet makes it again, on a closed node too.
    DaemonSet(String),
    Mirror,
}

impl Lodgers {
    pub fn new(client: Client, wake: Wake) -> Self {
        Self { watches: PodWatches::everywhere(client, slim), wake }
    }

    /// If they are watched and have been listed.
    pub fn get(&self, node: &str) -> Option<Vec<Lodger>> {
        Some(self.watches.get(node)?.iter().filter_map(lodger).collect())
    }

    pub fn watch(&self, node: &str) {
        let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let (wake, name) = (self.wake.clone(), node.to_owned());
        self.watches.watch(node, config, move |_| wake.node(NodeWork::One(name.clone())));
    }

    pub fn forget(&self, node: &str) {
        self.watches.forget(node);
    }
}

/// What is kept of a watched pod.
fn slim(pod: &mut Pod) {
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|key, _| key == MIRROR);
    }
    let spec = pod.spec.take().unwrap_or_default();
    let resources = |container: Container| Container { resources: container.resources, ..Container::default() };
    let emptied = |volume: &Volume| volume.empty_dir.is_some();
    pod.spec = Some(PodSpec {
        containers: spec.containers.into_iter().map(resources).collect(),
        init_containers: spec.init_containers.map(|all| all.into_iter().map(resources).collect()),
        volumes: spec.volumes.map(|all| all.into_iter().filter(emptied).collect()),
        ..PodSpec::default()
    });
    pod.status = pod.status.take().map(|status| PodStatus { phase: status.phase, ..PodStatus::default() });
}

fn lodger(pod: &Arc<Pod>) -> Option<Lodger> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let own = pod.labels().contains_key(labels::POLICY);
    if own || matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let vmi = instance(pod.as_ref());
    let controller = controller(pod);
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let stays = match controller.filter(|owner| owner.kind == "DaemonSet") {
        Some(owner) => Stays::DaemonSet(owner.name.clone()),
        None if pod.annotations().contains_key(MIRROR) => Stays::Mirror,
        None => Stays::No,
    };
    Some(Lodger {
        name: format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
        labels: pod.labels().clone(),
        uses_gpu: gpus_asked(pod).is_some(),
        stays,
        bare: controller.is_none(),
        // A launcher's are its own.
        empty_dirs: vmi.is_none() && volumes.is_some_and(|volumes| !volumes.is_empty()),
        vmi,
    })
}

impl Lodger {
    /// Why it is not asked to leave.
    fn refusal(&self, upgrade: &Upgrade) -> Option<String> {
        let Self { name, .. } = self;
        match &self.stays {
            Stays::DaemonSet(set) => {
                return Some(format!(
                    "pod {name} uses a GPU and DaemonSet {set} would make it again: keep that off the node"
                ));
            }
            Stays::Mirror => return Some(format!("pod {name} uses a GPU and is the kubelet's own: remove its file")),
            Stays::No => {}
        }
        if self.bare && !upgrade.bare {
            return Some(format!(
                "pod {name} has no controller that would make it again: end it, or set podDeletion.force in upgradePolicy"
            ));
        }
        (self.empty_dirs && !upgrade.empty_dirs).then(|| {
            format!("pod {name} has an emptyDir that it would lose: end it, or set podDeletion.deleteEmptyDir in upgradePolicy")
        })
    }

    fn is(&self, selector: &Selector) -> bool {
        selector.matches(&self.labels)
    }
}

/// Adds the users by request to those that the agent sees, and sorts out who may not be evicted.
pub fn users(mut seen: Affected, lodgers: &[Lodger], upgrade: &Upgrade) -> Affected {
    let known = |seen: &Affected, lodger: &Lodger| seen.pods.contains(&lodger.name);
    for lodger in lodgers.iter().filter(|lodger| lodger.uses_gpu || known(&seen, lodger)).cloned().collect::<Vec<_>>() {
        seen.pods.retain(|pod| *pod != lodger.name);
        add(&mut seen, &lodger, upgrade);
    }
    // Of all of them it is the one that no eviction helps with.
    if let Some(stays) = seen.others.first() {
        seen.said.clone_from(stays);
    }
    seen
}

fn add(to: &mut Affected, lodger: &Lodger, upgrade: &Upgrade) {
    let (list, entry, said) = match (&lodger.vmi, lodger.refusal(upgrade)) {
        (Some(vmi), _) => (
            &mut to.vms,
            vmi.clone(),
            format!("VM {vmi} has a GPU of this node: its driver is renewed once it has ended"),
        ),
        (None, Some(refusal)) => (&mut to.others, refusal.clone(), refusal),
        (None, None) => (&mut to.pods, lodger.name.clone(), format!("pod {} has a GPU of this node", lodger.name)),
    };
    if !list.contains(&entry) {
        list.push(entry);
    }
    if to.said.is_empty() {
        to.said = said;
    }
}

/// Beside the users all that leave when the node is drained. A VM without a GPU is in no driver's way.
pub fn drained(users: &Affected, lodgers: &[Lodger], upgrade: &Upgrade) -> Affected {
    let mut all = users.clone();
    let leaves = |lodger: &&Lodger| {
        let skipped = lodger.labels.get(labels::UPGRADE_DRAIN_SKIP).is_some_and(|value| value == "true");
        let selected = upgrade.drained.as_ref().is_none_or(|selector| lodger.is(selector));
        lodger.stays == Stays::No && lodger.vmi.is_none() && !lodger.uses_gpu && selected && !skipped
    };
    for lodger in lodgers.iter().filter(leaves) {
        add(&mut all, lodger, upgrade);
    }
    all
}

/// Those that come to their own end first.
pub fn awaited(lodgers: &[Lodger], upgrade: &Upgrade) -> Vec<String> {
    let Some(selector) = &upgrade.awaited else { return Vec::new() };
    lodgers.iter().filter(|lodger| lodger.is(selector)).map(|lodger| lodger.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, more: &Value) -> Arc<Pod> {
        let mut pod = json!({
            "metadata": {
                "namespace": "ml", "name": name, "labels": {"app": name},
                "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "1", "controller": true}],
            },
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        });
        merge(&mut pod, more);
        let mut pod: Pod = serde_json::from_value(pod).expect("a Pod");
        slim(&mut pod);
        Arc::new(pod)
    }

    fn merge(into: &mut Value, more: &Value) {
        match more.as_object().filter(|_| into.is_object()) {
            Some(fields) => {
                for (key, value) in fields {
                    merge(&mut into[key.as_str()], value);
                }
            }
            None => *into = more.clone(),
        }
    }

    fn of(pods: &[Arc<Pod>], upgrade: &Upgrade) -> Affected {
        let lodgers: Vec<Lodger> = pods.iter().filter_map(lodger).collect();
        users(Affected::default(), &lodgers, upgrade)
    }

    fn without_owner() -> Value {
        json!({"metadata": {"ownerReferences": null}})
    }

    #[test]
    fn a_pod_is_a_user_by_what_it_asks_for_until_it_has_ended() {
        assert_eq!(of(&[pod("a", &json!({}))], &Upgrade::default()).pods, ["ml/a"]);
        let others = [
            json!({"spec": {"containers": [{"name": "c"}]}}),
            json!({"status": {"phase": "Succeeded"}}),
            json!({"metadata": {"labels": {labels::POLICY: "p"}}}),
        ];
        for other in &others {
            assert!(of(&[pod("a", other)], &Upgrade::default()).is_empty(), "{other}");
        }
    }

    #[test]
    fn a_launcher_is_its_vm_and_is_never_evicted_as_a_pod() {
        let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "1", "controller": true});
        let launcher = pod("virt-launcher-a", &json!({"metadata": {"ownerReferences": [owner]}}));
        let affected = of(std::slice::from_ref(&launcher), &Upgrade::default());
        assert_eq!((affected.vms, affected.pods.len(), affected.others.len()), (vec!["ml/a".to_owned()], 0, 0));
        let by_agent = Affected { pods: vec!["ml/virt-launcher-a".to_owned()], ..Affected::default() };
        let lodgers: Vec<Lodger> = [launcher].iter().filter_map(lodger).collect();
        assert!(users(by_agent, &lodgers, &Upgrade::default()).pods.is_empty());
    }

    #[test]
    fn what_would_be_lost_or_come_back_is_not_evicted_and_says_so() {
        let empty = json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}});
        let daemon = json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "1", "controller": true}]}});
        let all = Upgrade { bare: true, empty_dirs: true, ..Upgrade::default() };
        for (more, says, forced) in [
            (without_owner(), "podDeletion.force", true),
            (empty, "podDeletion.deleteEmptyDir", true),
            (daemon, "DaemonSet d", false),
        ] {
            let affected = of(&[pod("a", &more)], &Upgrade::default());
            assert!(affected.pods.is_empty() && affected.others[0].contains(says), "{affected:?}");
            assert_eq!(of(&[pod("a", &more)], &all).pods.len(), usize::from(forced), "{says}");
        }
    }

    #[test]
    fn a_drain_takes_all_others_but_those_that_are_spared() {
        let plain = json!({"spec": {"containers": [{"name": "c"}]}});
        let spared = json!({"metadata": {"labels": {labels::UPGRADE_DRAIN_SKIP: "true"}}, "spec": {"containers": [{"name": "c"}]}});
        let pods = [pod("a", &plain), pod("b", &plain), pod("c", &spared)];
        let lodgers: Vec<Lodger> = pods.iter().filter_map(lodger).collect();
        let upgrade = Upgrade { drained: crate::operator::selector::parse("app!=b").unwrap(), ..Upgrade::default() };
        assert_eq!(drained(&Affected::default(), &lodgers, &upgrade).pods, ["ml/a"]);
        let upgrade = Upgrade { awaited: crate::operator::selector::parse("app=b").unwrap(), ..Upgrade::default() };
        assert_eq!(awaited(&lodgers, &upgrade), ["ml/b"]);
    }
}
