//! A node's driver, by its pods and their sets. Pure.

use std::{collections::BTreeMap, sync::Arc};

use crds::labels;
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, DaemonSet},
    core::v1::{Container, Pod, PodSpec},
};
use kube::ResourceExt;

use crate::operator::{
    pod::{controller, ready},
    policy::DRIVERS,
};

/// By which an image knows that it has loaded this very driver before, with the same settings.
const DIGEST: &str = "DRIVER_CONFIG_DIGEST";
/// Of a driver's container: then it will not come up by itself (gpu-operator 26.7).
const RESTARTS: i32 = 10;

/// One revision of a set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revision {
    /// The set's name.
    pub set: String,
    pub hash: String,
    /// Of the driver's container.
    pub image: String,
    pub digest: Option<String>,
}

/// What is known of a node's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeDriver {
    /// None of ours is for this node.
    None,
    /// It has not been looked at yet.
    Unknown,
    /// All pods of all sets are the newest ones, and ready.
    Settled {
        set: Set,
    },
    Seen(Box<Seen>),
}

/// A set that brings a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Set {
    pub name: String,
    /// The `NVIDIADriver` that asked for it.
    pub owner: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub set: Set,
    pub newest: Revision,
    /// A pod that is to go.
    pub old: Option<Old>,
    /// What has become of the newest one.
    pub state: State,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Old {
    pub pod: String,
    pub uid: Option<String>,
    pub image: String,
    /// It has been told to go.
    pub ending: bool,
    /// The newest pod has the same driver with the same settings: it stays loaded, under whoever uses it.
    pub same_driver: bool,
}

/// Of the newest pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Missing,
    Starting {
        pod: String,
    },
    /// It does not come up.
    Broken {
        pod: String,
        why: String,
    },
    Ready {
        pod: String,
        uid: Option<String>,
    },
}

impl NodeDriver {
    pub fn set(&self) -> Option<&Set> {
        match self {
            Self::None | Self::Unknown => None,
            Self::Settled { set } => Some(set),
            Self::Seen(seen) => Some(&seen.set),
        }
    }
}

pub fn is_driver(set: &DaemonSet) -> bool {
    let component = set.labels().get(labels::APP_COMPONENT);
    set.metadata.deletion_timestamp.is_none() && component.is_some_and(|c| DRIVERS.contains(&c.as_str()))
}

pub fn set(set: &DaemonSet) -> Set {
    Set { name: set.name_any(), owner: set.labels().get(labels::NVIDIA_DRIVER).cloned() }
}

/// All of its pods are the newest ones, and ready.
pub fn settled(set: &DaemonSet) -> bool {
    let Some(status) = &set.status else { return false };
    status.observed_generation >= set.metadata.generation
        && status.updated_number_scheduled.unwrap_or(0) == status.desired_number_scheduled
        && status.number_ready == status.desired_number_scheduled
}

/// Whether its pods go to a node with these labels.
pub fn selects(set: &DaemonSet, node: &BTreeMap<String, String>) -> bool {
    let selector = template(set).and_then(|pod| pod.node_selector.as_ref());
    selector.is_some_and(|selector| selector.iter().all(|(key, value)| node.get(key) == Some(value)))
}

fn template(set: &DaemonSet) -> Option<&PodSpec> {
    set.spec.as_ref()?.template.spec.as_ref()
}

/// The set's controller counts its revisions.
pub fn newest(of: &DaemonSet, revisions: &[ControllerRevision]) -> Option<Revision> {
    let own = revisions
        .iter()
        .filter(|revision| revision.owner_references().iter().any(|o| Some(&o.uid) == of.metadata.uid.as_ref()));
    let newest = own.max_by_key(|revision| revision.revision)?;
    let hash = newest.labels().get(labels::CONTROLLER_REVISION_HASH)?.clone();
    let main = template(of)?.containers.first()?;
    Some(Revision { set: of.name_any(), hash, image: main.image.clone().unwrap_or_default(), digest: digest(main) })
}

fn digest(container: &Container) -> Option<String> {
    container.env.iter().flatten().find(|variable| variable.name == DIGEST)?.value.clone()
}

/// What is kept of a watched pod.
pub fn slim(pod: &mut Pod) {
    pod.metadata.annotations = None;
    if let Some(spec) = pod.spec.take() {
        let main = spec.containers.into_iter().next().map(|container| Container {
            name: container.name,
            image: container.image,
            env: container.env.map(|env| env.into_iter().filter(|v| v.name == DIGEST).collect()),
            ..Container::default()
        });
        let containers = main.into_iter().collect();
        pod.spec = Some(PodSpec { node_name: spec.node_name, containers, ..PodSpec::default() });
    }
}

pub fn is_of(pod: &Pod, set: &str, hash: &str) -> bool {
    controller(pod).is_some_and(|owner| owner.name == set)
        && pod.labels().get(labels::CONTROLLER_REVISION_HASH).is_some_and(|value| value == hash)
}

/// `pods`: of the node.
pub fn of_node(own: &DaemonSet, newest: &Revision, live: &[Arc<DaemonSet>], pods: &[Arc<Pod>]) -> Seen {
    let mut seen = Seen { set: set(own), newest: newest.clone(), ..Seen::default() };
    for pod in pods {
        let controller = controller(pod);
        if is_of(pod, &newest.set, &newest.hash) && pod.metadata.deletion_timestamp.is_none() {
            seen.state = state(pod);
            continue;
        }
        // Pods of another set are its controller's; one without a set has nobody who would renew it.
        let others =
            controller.is_some_and(|owner| live.iter().any(|set| set.metadata.uid.as_ref() == Some(&owner.uid)));
        if others && controller.is_some_and(|owner| owner.name != own.name_any()) {
            continue;
        }
        let main = pod.spec.as_ref().and_then(|spec| spec.containers.first());
        let digest = main.and_then(digest);
        seen.old = Some(Old {
            pod: pod.name_any(),
            uid: pod.uid(),
            image: main.and_then(|main| main.image.clone()).unwrap_or_default(),
            ending: pod.metadata.deletion_timestamp.is_some(),
            same_driver: digest.is_some() && digest == newest.digest,
        });
    }
    seen
}

/// Nodes whose pod is not the newest of its set, and those of no set at all.
pub fn outdated(
    live: &[Arc<DaemonSet>],
    newest: impl Fn(&str) -> Option<String>,
    pods: &[Arc<Pod>],
) -> Vec<(String, Set)> {
    let of_pod = |pod: &Arc<Pod>| {
        let node = pod.spec.as_ref()?.node_name.clone()?;
        let own =
            controller(pod).and_then(|owner| live.iter().find(|set| set.metadata.uid.as_ref() == Some(&owner.uid)));
        let Some(own) = own else { return Some((node, Set::default())) };
        let hash = newest(&own.name_any())?;
        (pod.labels().get(labels::CONTROLLER_REVISION_HASH) != Some(&hash)).then(|| (node, set(own)))
    };
    pods.iter().filter_map(of_pod).collect()
}

fn state(pod: &Pod) -> State {
    let name = pod.name_any();
    if ready(pod) {
        return State::Ready { pod: name, uid: pod.uid() };
    }
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    match containers.max_by_key(|container| container.restart_count).filter(|c| c.restart_count > RESTARTS) {
        Some(container) => {
            let why =
                format!("container {} of {name} has been restarted {} times", container.name, container.restart_count);
            State::Broken { pod: name, why }
        }
        None => State::Starting { pod: name },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn own() -> DaemonSet {
        let set = json!({
            "metadata": {"name": "driver", "uid": "u1", "generation": 2, "labels": {"app.kubernetes.io/component": "nvidia-driver"}},
            "spec": {
                "selector": {"matchLabels": {"app": "driver"}},
                "template": {"spec": {
                    "nodeSelector": {"gate": "true"},
                    "containers": [{"name": "c", "image": "driver:2", "env": [{"name": DIGEST, "value": "d2"}]}],
                }},
            },
        });
        serde_json::from_value(set).expect("a DaemonSet")
    }

    fn pod(hash: &str, owner: &Value, status: &Value) -> Arc<Pod> {
        let pod = json!({
            "metadata": {"name": format!("p-{hash}"), "uid": hash, "labels": {labels::CONTROLLER_REVISION_HASH: hash}, "ownerReferences": [owner]},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "driver:1", "env": [{"name": DIGEST, "value": "d1"}]}]},
            "status": status,
        });
        Arc::new(serde_json::from_value(pod).expect("a Pod"))
    }

    fn of_set() -> Value {
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "driver", "uid": "u1", "controller": true})
    }

    fn ready() -> Value {
        json!({"conditions": [{"type": "Ready", "status": "True"}]})
    }

    fn revision() -> Revision {
        Revision {
            set: "driver".to_owned(),
            hash: "b".to_owned(),
            image: "driver:2".to_owned(),
            digest: Some("d2".to_owned()),
        }
    }

    fn seen(pods: &[Arc<Pod>]) -> Seen {
        of_node(&own(), &revision(), &[Arc::new(own())], pods)
    }

    #[test]
    fn the_newest_revision_is_that_with_the_highest_count_among_the_sets_own() {
        let revision = |name: &str, uid: &str, count: i64| {
            let owner =
                json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "driver", "uid": uid, "controller": true});
            let revision = json!({"metadata": {"name": name, "labels": {labels::CONTROLLER_REVISION_HASH: name}, "ownerReferences": [owner]}, "revision": count});
            serde_json::from_value::<ControllerRevision>(revision).expect("a ControllerRevision")
        };
        let all = [revision("a", "u1", 1), revision("b", "u1", 3), revision("c", "u1", 2), revision("d", "u2", 9)];
        let found = newest(&own(), &all).expect("one");
        assert_eq!((found.hash.as_str(), found.image.as_str(), found.digest.as_deref()), ("b", "driver:2", Some("d2")));
    }

    #[test]
    fn a_pod_of_an_older_revision_is_to_go_and_so_is_one_that_has_lost_its_set() {
        let old = seen(&[pod("a", &of_set(), &ready())]).old.expect("an old pod");
        assert_eq!((old.pod.as_str(), old.image.as_str(), old.same_driver), ("p-a", "driver:1", false));
        let lost =
            json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "gone", "uid": "u9", "controller": true});
        assert!(seen(&[pod("b", &lost, &ready())]).old.is_some());
    }

    #[test]
    fn the_newest_pod_is_ready_or_on_its_way_or_broken() {
        let of = |status: &Value| seen(&[pod("b", &of_set(), status)]);
        assert!(matches!(of(&ready()).state, State::Ready { .. }));
        assert!(of(&ready()).old.is_none());
        let crashes = |times: i32| json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": times}]});
        assert!(matches!(of(&crashes(10)).state, State::Starting { .. }));
        assert!(matches!(of(&crashes(11)).state, State::Broken { .. }));
        assert_eq!(seen(&[]).state, State::Missing);
    }

    #[test]
    fn a_pod_with_the_same_digest_has_the_same_driver() {
        let newest = Revision { digest: Some("d1".to_owned()), ..revision() };
        let seen = of_node(&own(), &newest, &[Arc::new(own())], &[pod("a", &of_set(), &ready())]);
        assert!(seen.old.expect("an old pod").same_driver);
    }

    #[test]
    fn a_set_is_settled_when_its_controller_has_seen_it_and_all_are_new_and_ready() {
        let with = |status: Value| {
            let mut set = own();
            set.status = serde_json::from_value(status).expect("a status");
            settled(&set)
        };
        let base = json!({"currentNumberScheduled": 2, "desiredNumberScheduled": 2, "numberMisscheduled": 0, "numberReady": 2, "updatedNumberScheduled": 2, "observedGeneration": 2});
        assert!(with(base.clone()));
        for (field, value) in [("numberReady", 1), ("updatedNumberScheduled", 1), ("observedGeneration", 1)] {
            let mut other = base.clone();
            other[field] = json!(value);
            assert!(!with(other), "{field}");
        }
    }

    #[test]
    fn nodes_behind_are_named_with_whose_driver_they_have() {
        let behind = outdated(&[Arc::new(own())], |_| Some("b".to_owned()), &[pod("a", &of_set(), &ready())]);
        assert_eq!(behind, [("n1".to_owned(), Set { name: "driver".to_owned(), owner: None })]);
        assert!(outdated(&[Arc::new(own())], |_| Some("a".to_owned()), &[pod("a", &of_set(), &ready())]).is_empty());
    }
}
