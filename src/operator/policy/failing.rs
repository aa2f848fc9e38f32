//! Why pods of an operand are not ready: the one that says most, in the words of its kubelet. Pure.

use std::sync::Arc;

use crds::v1alpha1::FailingPod;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use kube::ResourceExt;

use crate::operator::pod::ready;

/// Of an image's or a program's own words, in characters: the end says why.
const WORDS: usize = 400;
/// The kubelet's reasons while nothing is wrong yet.
const ON_ITS_WAY: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// The worse, the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// It does not help to wait.
    Broken,
    /// No node takes it.
    Unplaced,
    /// It is on its way, or waits for another.
    Waiting,
}

/// What is kept of a watched pod. Of one that is ready nothing but its name.
pub fn slim(pod: &mut Pod) {
    let node = node(pod);
    let status = pod.status.take().filter(|_| !ready(pod)).unwrap_or_default();
    pod.metadata.annotations = None;
    pod.metadata.labels = None;
    pod.metadata.owner_references = None;
    let spec = k8s_openapi::api::core::v1::PodSpec { node_name: Some(node), ..Default::default() };
    pod.spec = Some(spec);
    pod.status = Some(PodStatus {
        phase: status.phase,
        reason: status.reason,
        message: status.message,
        conditions: status.conditions,
        init_container_statuses: status.init_container_statuses,
        container_statuses: status.container_statuses,
        ..PodStatus::default()
    });
}

/// The first by rank, node and name.
pub fn worst(pods: &[Arc<Pod>]) -> Option<(Rank, FailingPod)> {
    let mut failing: Vec<_> = pods.iter().filter_map(|pod| failing(pod)).collect();
    failing.sort_by(|(a, one), (b, other)| (a, &one.node, &one.pod).cmp(&(b, &other.node, &other.pod)));
    failing.into_iter().next()
}

fn failing(pod: &Pod) -> Option<(Rank, FailingPod)> {
    let status = pod.status.as_ref()?;
    // A slim pod without a phase was ready.
    if pod.metadata.deletion_timestamp.is_some() || ready(pod) || status.phase.is_none() {
        return None;
    }
    let about = |container: Option<&ContainerStatus>, reason: String, message: String| FailingPod {
        node: node(pod),
        pod: pod.name_any(),
        container: container.map(|container| container.name.clone()).unwrap_or_default(),
        image: container.map(|container| container.image.clone()).unwrap_or_default(),
        reason,
        message,
    };
    if status.phase.as_deref() == Some("Failed") {
        let reason = status.reason.clone().unwrap_or_else(|| "Failed".to_owned());
        return Some((Rank::Broken, about(None, reason, status.message.clone().unwrap_or_default())));
    }
    let unplaced = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(condition) = unplaced {
        let reason = condition.reason.clone().unwrap_or_else(|| "Unschedulable".to_owned());
        return Some((Rank::Unplaced, about(None, reason, condition.message.clone().unwrap_or_default())));
    }
    let told = containers(status).into_iter().filter_map(|(container, initial)| {
        let (rank, reason, message) = trouble(container, initial)?;
        Some((rank, container, reason, message))
    });
    // Init containers come first and run one by one: of several that wait, the one that runs says what for.
    let (rank, container, reason, message) =
        told.min_by_key(|(rank, container, ..)| (*rank, container.state.as_ref().is_none_or(|s| s.running.is_none())))?;
    Some((rank, about(Some(container), reason, message)))
}

/// And whether it is an init container. Those that have done their work say nothing.
fn containers(status: &PodStatus) -> Vec<(&ContainerStatus, bool)> {
    let initialised = status.conditions.iter().flatten().any(|c| c.type_ == "Initialized" && c.status == "True");
    let initial = status.init_container_statuses.iter().flatten().filter(|_| !initialised);
    initial.map(|c| (c, true)).chain(status.container_statuses.iter().flatten().map(|c| (c, false))).collect()
}

fn trouble(container: &ContainerStatus, initial: bool) -> Option<(Rank, String, String)> {
    let state = container.state.as_ref()?;
    let last = container.last_state.as_ref().and_then(|state| state.terminated.as_ref()).map(ended);
    match state {
        ContainerState { waiting: Some(waiting), .. } => {
            let reason = waiting.reason.clone().unwrap_or_else(|| "Waiting".to_owned());
            let rank = if ON_ITS_WAY.contains(&reason.as_str()) { Rank::Waiting } else { Rank::Broken };
            // Of a loop of crashes the kubelet says only how long it will wait.
            let message = last.or_else(|| waiting.message.as_deref().map(words)).unwrap_or_default();
            Some((rank, reason, message))
        }
        ContainerState { terminated: Some(done), .. } if initial && done.exit_code == 0 => None,
        ContainerState { terminated: Some(done), .. } => {
            Some((Rank::Broken, done.reason.clone().unwrap_or_else(|| "Error".to_owned()), ended(done)))
        }
        ContainerState { running: Some(_), .. } if container.ready => None,
        ContainerState { running: Some(_), .. } => {
            let rank = if last.is_some() { Rank::Broken } else { Rank::Waiting };
            let before = last.map(|last| format!(", the last time with {last}")).unwrap_or_default();
            let message = match initial {
                true => format!("it has not passed yet{before}"),
                false => format!("it runs and is not ready yet{before}"),
            };
            Some((rank, "NotReady".to_owned(), message))
        }
        ContainerState { .. } => None,
    }
}

fn ended(done: &ContainerStateTerminated) -> String {
    let said = done.message.as_deref().map(words).filter(|said| !said.is_empty());
    match said {
        Some(said) => format!("exit code {}: {said}", done.exit_code),
        None => format!("exit code {}", done.exit_code),
    }
}

/// The end of what was said, in one line.
fn words(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().rev().nth(WORDS - 1) {
        Some((cut, _)) if cut > 0 => format!("…{}", &line[cut..]),
        Some(_) | None => line,
    }
}

/// Where it is, or where its DaemonSet's controller wants it.
fn node(pod: &Pod) -> String {
    let Some(spec) = pod.spec.as_ref() else { return String::new() };
    if let Some(node) = &spec.node_name {
        return node.clone();
    }
    let required = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required = required.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    let fields =
        required.into_iter().flat_map(|r| &r.node_selector_terms).flat_map(|t| t.match_fields.iter().flatten());
    fields.filter(|f| f.key == "metadata.name").find_map(|f| f.values.as_ref()?.first().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(node: &str, status: &Value) -> Arc<Pod> {
        let pod = json!({
            "metadata": {"name": format!("operand-{node}")}, "spec": {"nodeName": node, "containers": []}, "status": status,
        });
        let mut pod = serde_json::from_value(pod).expect("a Pod");
        slim(&mut pod);
        Arc::new(pod)
    }

    fn container(name: &str, state: &Value, last: &Value) -> Value {
        json!({
            "name": name, "image": format!("registry/{name}:1"), "imageID": "", "ready": false, "restartCount": 0,
            "state": state, "lastState": last,
        })
    }

    fn pending(init: &[Value], main: &[Value]) -> Value {
        json!({"phase": "Pending", "initContainerStatuses": init, "containerStatuses": main})
    }

    fn waiting(reason: &str) -> Value {
        json!({"waiting": {"reason": reason, "message": "back-off 5m0s restarting failed container"}})
    }

    #[test]
    fn a_crashing_container_is_named_with_what_it_said_last() {
        let last = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "first line\nnvidia is in use by pid 7\n"}});
        let main = container("driver", &waiting("CrashLoopBackOff"), &last);
        let (rank, failing) = worst(&[pod("n1", &pending(&[], &[main]))]).expect("it fails");
        assert_eq!(rank, Rank::Broken);
        assert_eq!((failing.node.as_str(), failing.container.as_str()), ("n1", "driver"));
        assert_eq!(failing.reason, "CrashLoopBackOff");
        assert_eq!(failing.message, "exit code 1: first line nvidia is in use by pid 7");
        assert_eq!(failing.image, "registry/driver:1");
    }

    #[test]
    fn a_pod_that_cannot_get_its_image_comes_before_one_that_waits() {
        let waits = pending(
            &[
                container("driver-validation", &json!({"terminated": {"exitCode": 0}}), &json!({})),
                container("toolkit-validation", &json!({"running": {}}), &json!({})),
                container("later", &waiting("PodInitializing"), &json!({})),
            ],
            &[container("main", &waiting("PodInitializing"), &json!({}))],
        );
        let (rank, failing) = worst(&[pod("a", &waits)]).expect("not ready");
        assert_eq!(
            (rank, failing.container.as_str(), failing.reason.as_str()),
            (Rank::Waiting, "toolkit-validation", "NotReady")
        );
        let broken = pending(&[], &[container("main", &waiting("ImagePullBackOff"), &json!({}))]);
        let (rank, failing) = worst(&[pod("a", &waits), pod("z", &broken)]).expect("not ready");
        assert_eq!((rank, failing.node.as_str(), failing.reason.as_str()), (Rank::Broken, "z", "ImagePullBackOff"));
    }

    #[test]
    fn a_pod_that_no_node_takes_is_named_with_the_node_that_it_is_for() {
        let pod = json!({
            "metadata": {"name": "operand-x"},
            "spec": {"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n9"]}]}],
            }}}},
            "status": {"phase": "Pending", "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient memory"},
            ]},
        });
        let mut pod: Pod = serde_json::from_value(pod).expect("a Pod");
        slim(&mut pod);
        let (rank, failing) = worst(&[Arc::new(pod)]).expect("it is not placed");
        assert_eq!(
            (rank, failing.node.as_str(), failing.message.as_str()),
            (Rank::Unplaced, "n9", "Insufficient memory")
        );
    }

    #[test]
    fn a_ready_pod_says_nothing() {
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        assert_eq!(worst(&[pod("n1", &ready)]), None);
    }

    #[test]
    fn long_words_are_cut_to_their_end() {
        let cut = words(&format!("{} the reason", "x".repeat(2 * WORDS)));
        assert!(cut.starts_with('…') && cut.ends_with("the reason"));
        assert_eq!(cut.chars().count(), WORDS + 1);
    }
}
