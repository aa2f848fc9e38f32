//! Which agents are renewed now. Pure.
//!
//! One first, alone; then several at a time, while those that came are ready. None whose node is in the middle of a change,
//! and none any more once so many new ones are broken. Pods say how far it is, so nothing is remembered.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crds::conditions::Verdict;
use k8s_openapi::{
    api::core::v1::Pod,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

use crate::operator::{
    drivers::is_of,
    pod::ready,
    policy::{Rank, worst},
    transition::rules::{Limits, Share},
};

/// Condition: every agent is of the newest revision.
pub const AGENTS_CURRENT: &str = "AgentsCurrent";
/// An agent's restart takes no node out of service; still not all are to be away at once.
const AT_ONCE: Share = Share::Percent(10);
/// A pod that should have gone so long ago is on a node that is down, and keeps nobody waiting.
const GONE: SignedDuration = SignedDuration::from_mins(2);
/// So many nodes are named.
const NAMED: usize = 10;

/// What there is to go by.
pub struct Seen<'a> {
    pub now: Timestamp,
    pub pods: &'a [Arc<Pod>],
    /// Of the agents' DaemonSet.
    pub set: &'a str,
    /// `controller-revision-hash` of the newest revision.
    pub newest: &'a str,
    /// Nodes that are to have an agent.
    pub desired: usize,
    /// Nodes on their way from a mode or a driver to another.
    pub changing: &'a BTreeSet<String>,
    pub limits: Limits,
    /// So many broken ones, and no further one is renewed.
    pub halt_after: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Pods to delete: name and UID.
    pub renew: Vec<(String, Option<String>)>,
    pub verdict: Verdict,
    /// One is ending: look again though nothing is heard of it.
    pub again: bool,
}

pub fn current() -> Verdict {
    Verdict::yes(AGENTS_CURRENT, "AllCurrent", "every node has the newest agent")
}

pub fn decide(seen: &Seen<'_>) -> Decision {
    let ending = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    let is_new = |pod: &Pod| is_of(pod, seen.set, seen.newest);
    let (new, old): (Vec<_>, Vec<_>) =
        seen.pods.iter().filter(|pod| !ending(pod)).cloned().partition(|pod| is_new(pod));
    let proven = new.iter().any(|pod| ready(pod));
    let unready: Vec<Arc<Pod>> = new.into_iter().filter(|pod| !ready(pod)).collect();
    let lost = |pod: &&Arc<Pod>| pod.metadata.deletion_timestamp.as_ref().is_some_and(|at| at.0 + GONE < seen.now);
    let leaving = seen.pods.iter().filter(|pod| ending(pod)).count();
    let gone = seen.pods.iter().filter(lost).count();
    let there: BTreeSet<&str> = seen.pods.iter().map(|pod| node(pod)).collect();
    let away = unready.len() + (leaving - gone) + seen.desired.saturating_sub(there.len());

    let broken = failed(&unready);
    let halted = broken.len() >= seen.halt_after;
    let most = AT_ONCE.of(seen.desired).min(seen.limits.unavailable.of(seen.desired)).max(1);
    let places = if halted { 0 } else { (if proven { most } else { 1 }).saturating_sub(away) };
    let (busy, mut free): (Vec<_>, Vec<_>) = old.into_iter().partition(|pod| seen.changing.contains(node(pod)));
    // One that does not work proves nothing, and may be on a node that is down.
    free.sort_by_key(|pod| (!ready(pod), node(pod).to_owned()));
    let waits: Vec<&str> = busy.iter().map(|pod| node(pod)).collect();
    let left = busy.len() + free.len();
    let renew = free.iter().take(places).map(|pod| (pod.name_any(), pod.uid())).collect();
    Decision { renew, verdict: verdict(&broken, halted, left, away, &waits), again: leaving > gone }
}

/// By node, why its new agent does not come up.
fn failed(unready: &[Arc<Pod>]) -> BTreeMap<String, String> {
    let why = |pod: &Arc<Pod>| {
        let (rank, failing) = worst(std::slice::from_ref(pod))?;
        let message = if failing.message.is_empty() { String::new() } else { format!(": {}", failing.message) };
        (rank == Rank::Broken).then(|| (failing.node, format!("pod {}: {}{message}", failing.pod, failing.reason)))
    };
    unready.iter().filter_map(why).collect()
}

fn verdict(broken: &BTreeMap<String, String>, halted: bool, left: usize, away: usize, waits: &[&str]) -> Verdict {
    if let Some((node, why)) = broken.iter().next() {
        let others = if broken.len() > 1 { format!(" (and on {} more)", broken.len() - 1) } else { String::new() };
        let (reason, then) = match halted {
            true => (
                "RolloutHalted",
                format!("{left} node(s) keep the agent that they have, and none is renewed before it does"),
            ),
            false => ("RollingOut", format!("{left} node(s) have an older agent")),
        };
        let message = format!("the new agent does not come up on node {node}{others}: {why}; {then}");
        return Verdict::no(AGENTS_CURRENT, reason, message);
    }
    if left == 0 && away == 0 {
        return current();
    }
    let busy = match waits {
        [] => String::new(),
        _ => {
            format!("; once their change is over: {}", waits.iter().take(NAMED).copied().collect::<Vec<_>>().join(", "))
        }
    };
    let message = format!("{left} node(s) have an older agent, and {away} are between two{busy}");
    Verdict::no(AGENTS_CURRENT, "RollingOut", message)
}

fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crds::labels;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::{Value, json};

    use super::*;

    const NOW: i64 = 1_000_000;

    fn pod(node: &str, hash: &str, status: &Value) -> Pod {
        let owner =
            json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "uid": "1", "controller": true});
        let metadata = json!({
            "name": format!("agent-{node}"), "uid": node, "ownerReferences": [owner],
            "labels": {labels::CONTROLLER_REVISION_HASH: hash},
        });
        serde_json::from_value(
            json!({"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": status}),
        )
        .expect("a Pod")
    }

    fn up() -> Value {
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]})
    }

    fn crashing() -> Value {
        let state = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        json!({"phase": "Running", "containerStatuses": [{
            "name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 3, "state": state,
        }]})
    }

    /// Ready agents, the first of them renewed.
    fn fleet(size: usize, renewed: usize) -> Vec<Pod> {
        (0..size).map(|n| pod(&format!("n{n:03}"), if n < renewed { "new" } else { "old" }, &up())).collect()
    }

    fn decided(pods: Vec<Pod>, changing: &[&str], halt_after: usize) -> Decision {
        let desired = pods.len();
        let pods: Vec<Arc<Pod>> = pods.into_iter().map(Arc::new).collect();
        decide(&Seen {
            now: Timestamp::from_second(NOW).expect("a time"),
            pods: &pods,
            set: "agent",
            newest: "new",
            desired,
            changing: &changing.iter().map(|node| (*node).to_owned()).collect(),
            limits: Limits { parallel: Share::Count(1), unavailable: Share::Percent(25) },
            halt_after,
        })
    }

    fn ending(mut pod: Pod, since: i64) -> Pod {
        pod.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(NOW - since).expect("a time")));
        pod
    }

    #[test]
    fn the_first_agent_is_renewed_alone_and_the_others_a_tenth_at_a_time() {
        assert_eq!(decided(fleet(50, 0), &[], 1).renew.len(), 1);
        assert_eq!(decided(fleet(50, 1), &[], 1).renew.len(), 5);
        let last = decided(fleet(50, 49), &[], 1);
        assert_eq!((last.renew.len(), last.verdict.reason), (1, "RollingOut"));
        let done = decided(fleet(50, 50), &[], 1);
        assert_eq!((done.renew.len(), done.verdict), (0, current()));
    }

    #[test]
    fn those_that_are_between_two_agents_take_places() {
        let mut pods = fleet(50, 1);
        pods[10] = ending(pods[10].clone(), 0);
        pods[11] = pod("n011", "new", &json!({"phase": "Pending"}));
        let decision = decided(pods, &[], 1);
        assert_eq!((decision.renew.len(), decision.again), (3, true));
        let mut pods = fleet(50, 0);
        pods[10] = pod("n010", "new", &json!({"phase": "Pending"}));
        assert_eq!(decided(pods, &[], 1).renew, [], "the first is on its way");
    }

    #[test]
    fn a_pod_that_a_dead_node_keeps_makes_nobody_wait() {
        let mut pods = fleet(5, 0);
        pods[0] = ending(pods[0].clone(), 600);
        assert_eq!(decided(pods, &[], 1).renew.len(), 1);
    }

    #[test]
    fn a_new_agent_that_does_not_come_up_halts_all_and_is_named() {
        let mut pods = fleet(50, 1);
        pods[1] = pod("n001", "new", &crashing());
        let decision = decided(pods.clone(), &[], 1);
        assert_eq!((decision.renew.len(), decision.verdict.reason), (0, "RolloutHalted"));
        for part in ["node n001", "CrashLoopBackOff", "48 node(s) keep"] {
            assert!(decision.verdict.message.contains(part), "{part}: {}", decision.verdict.message);
        }
        assert_eq!(decided(pods, &[], 2).renew.len(), 4, "as the budget says");
    }

    #[test]
    fn an_old_agent_that_is_broken_halts_nothing_and_is_no_proof() {
        let mut pods = fleet(5, 0);
        pods[0] = pod("n000", "old", &crashing());
        assert_eq!(decided(pods, &[], 1).renew[0].0, "agent-n001");
    }

    #[test]
    fn a_node_in_the_middle_of_a_change_keeps_its_agent_until_that_is_over() {
        let decision = decided(fleet(2, 1), &["n001"], 1);
        assert_eq!((decision.renew.len(), decision.verdict.reason), (0, "RollingOut"));
        assert!(decision.verdict.message.contains("n001"), "{}", decision.verdict.message);
        assert_eq!(decided(fleet(2, 1), &["n000"], 1).renew.len(), 1);
    }
}
