//! New agents, node by node. Their DaemonSet is `OnDelete`: its controller knows nothing of nodes that are changing.
//!
//! An agent's restart changes nothing on its host, so it needs no drain, no cordon and nobody's approval; but it does not
//! begin while the agent is asked to change its node, one goes first, and broken ones halt the others.

mod decide;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use crds::{
    conditions::Verdict,
    v1alpha1::{CONFIG_NAME, GPUVirtConfigSpec, TransitionStage},
};
use k8s_openapi::{
    api::{
        apps::v1::{ControllerRevision, DaemonSet},
        core::v1::{Pod, PodSpec, PodStatus},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{DeleteParams, Preconditions},
    runtime::{reflector::ObjectRef, watcher},
};
use tokio::{sync::Notify, time::sleep};

use self::decide::{Decision, Seen, current, decide};
use super::{
    drivers::{Revision, newest_of, settled},
    pod_watches::PodWatches,
    policy::AGENT,
    selector,
    transition::rules::Rules,
    world::{Wake, World},
};
use crate::cluster::gone;

const RETRY: Duration = Duration::from_secs(5);
/// While a pod ends: of one on a node that is down nothing is heard.
const ENDING: Duration = Duration::from_secs(30);

pub struct Agents {
    api: Api<Pod>,
    revisions: Api<ControllerRevision>,
    namespace: String,
    world: World,
    pods: PodWatches,
    due: Arc<Notify>,
    wake: Wake,
    verdict: Mutex<Verdict>,
}

impl Agents {
    pub fn new(client: &Client, namespace: &str, world: &World, wake: &Wake) -> Self {
        Self {
            api: Api::namespaced(client.clone(), namespace),
            revisions: Api::namespaced(client.clone(), namespace),
            namespace: namespace.to_owned(),
            world: world.clone(),
            pods: PodWatches::new(client.clone(), namespace, slim),
            due: wake.agents.clone(),
            wake: wake.clone(),
            verdict: Mutex::new(current()),
        }
    }

    /// Runs for as long as the process does.
    pub async fn run(&self) {
        let mut newest = None;
        let mut again = None;
        loop {
            match again {
                None => self.due.notified().await,
                Some(after) => tokio::select! { () = self.due.notified() => {} () = sleep(after) => {} },
            }
            again = match self.look(&mut newest).await {
                Ok(again) => again,
                Err(error) => {
                    tracing::warn!(%error, "agents cannot be renewed, trying again");
                    Some(RETRY)
                }
            };
        }
    }

    /// Whether all nodes have their newest agent, and if not, why.
    pub fn verdict(&self) -> Verdict {
        self.verdict.lock().expect("verdict lock should not be poisoned").clone()
    }

    /// When to look again if nothing is heard. `known`: the newest revision, of which generation of the set.
    async fn look(&self, known: &mut Option<(Option<i64>, Revision)>) -> Result<Option<Duration>, kube::Error> {
        let set = self.world.daemon_sets.get(&ObjectRef::new(AGENT).within(&self.namespace));
        let Some(set) = set.filter(|set| set.metadata.deletion_timestamp.is_none() && !settled(set)) else {
            self.pods.forget(AGENT);
            self.say(current());
            return Ok(None);
        };
        self.watch(&set);
        let status = set.status.clone().unwrap_or_default();
        // What the controller has not seen has no revision yet; its status comes, and wakes us.
        if status.observed_generation < set.metadata.generation {
            return Ok(None);
        }
        let same = known.as_ref().is_some_and(|(generation, _)| *generation == set.metadata.generation);
        if !same {
            *known = newest_of(&self.revisions, &set).await?.map(|newest| (set.metadata.generation, newest));
        }
        let (Some((_, newest)), Some(pods)) = (&*known, self.pods.get(AGENT)) else { return Ok(None) };
        let config = self.config();
        let Decision { renew, verdict, again } = decide(&Seen {
            now: Timestamp::now(),
            pods: &pods,
            set: AGENT,
            newest: &newest.hash,
            desired: usize::try_from(status.desired_number_scheduled).unwrap_or_default(),
            changing: &self.changing(),
            limits: Rules::new(config.evict, &config.budget).unwrap_or_default().limits,
            halt_after: usize::try_from(config.budget.halt_after_failures).unwrap_or(1).max(1),
        });
        self.say(verdict);
        for (pod, uid) in renew {
            let same = Preconditions { uid, resource_version: None };
            match self.api.delete(&pod, &DeleteParams::default().preconditions(same)).await {
                Ok(_) => tracing::info!(pod, "agent is renewed"),
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(again.then_some(ENDING))
    }

    fn watch(&self, set: &DaemonSet) {
        let due = self.due.clone();
        self.pods.watch(AGENT, watcher::Config::default().labels(&selector::of_set(set)), move |_| due.notify_one());
    }

    /// Nodes whose agent is asked to change them, or is about to be.
    fn changing(&self) -> BTreeSet<String> {
        let objects = self.world.transitions.state();
        let changes = objects.iter().filter_map(|object| object.0.as_ref().ok());
        let passes = |phase: crds::v1alpha1::TransitionPhase| phase.stage() == TransitionStage::Passage;
        changes
            .filter(|object| object.status.as_ref().is_some_and(|status| passes(status.phase)))
            .map(|object| object.spec.node.clone())
            .collect()
    }

    /// Of one that does not decode the defaults count.
    fn config(&self) -> GPUVirtConfigSpec {
        let config = self.world.configs.get(&ObjectRef::new(CONFIG_NAME));
        config.and_then(|config| Some(config.0.as_ref().ok()?.spec.clone())).unwrap_or_default()
    }

    fn say(&self, verdict: Verdict) {
        let mut said = self.verdict.lock().expect("verdict lock should not be poisoned");
        if *said != verdict {
            *said = verdict;
            self.wake.policy.notify_one();
        }
    }
}

/// What is kept of a watched pod.
fn slim(pod: &mut Pod) {
    pod.metadata.annotations = None;
    pod.spec = pod.spec.take().map(|spec| PodSpec { node_name: spec.node_name, ..PodSpec::default() });
    pod.status = pod.status.take().map(|status| PodStatus {
        phase: status.phase,
        reason: status.reason,
        message: status.message,
        conditions: status.conditions,
        container_statuses: status.container_statuses,
        ..PodStatus::default()
    });
}
