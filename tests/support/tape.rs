//! Every state that objects of a kind go through, in the order of writing: resource versions of one etcd count on
//! across kinds.

use std::{
    fmt::Debug,
    sync::{Arc, Mutex},
};

use futures::StreamExt;
use kube::{
    Api, Resource, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::{Background, wait};

#[derive(Clone, Debug)]
pub enum Written<K> {
    Is(K),
    Gone(K),
}

/// With their resource versions.
type States<K> = Vec<(u64, Written<K>)>;

pub struct Tape<K> {
    seen: Arc<Mutex<States<K>>>,
    _task: Background,
}

impl<K> Tape<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Of all that the API shows, from now on.
    pub async fn start(api: Api<K>) -> Self {
        Self::run(api, watcher::Config::default()).await
    }

    /// Of one object: where the host is a node too, nodes that no test has made are written at any time.
    pub async fn of(api: Api<K>, name: &str) -> Self {
        Self::run(api, watcher::Config::default().fields(&format!("metadata.name={name}"))).await
    }

    async fn run(api: Api<K>, config: watcher::Config) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (ready, mut is_ready) = watch::channel(false);
        let tape = seen.clone();
        let task = async move {
            let mut events = watcher(api, config).default_backoff().boxed();
            while let Some(event) = events.next().await {
                // An interrupted watch goes on from where it was.
                let Ok(event) = event else { continue };
                let mut tape = tape.lock().expect("the tape's lock should not be poisoned");
                match event {
                    Event::Apply(object) | Event::InitApply(object) => {
                        tape.push((version(&object), Written::Is(object)));
                    }
                    Event::Delete(object) => tape.push((version(&object), Written::Gone(object))),
                    Event::InitDone => drop(ready.send_replace(true)),
                    Event::Init => {}
                }
            }
        };
        let task = Background(tokio::spawn(task));
        is_ready.wait_for(|ready| *ready).await.expect("a tape should begin");
        Self { seen, _task: task }
    }

    /// When the first state after `since` was written of which this is true. Waits for it: what another watch has shown
    /// already may still be on its way to this one.
    pub async fn first(&self, since: u64, what: &str, is: impl Fn(&Written<K>) -> bool) -> u64 {
        wait::eventually(&format!("on the tape after {since}: {what}"), async || {
            let seen = self.seen.lock().expect("the tape's lock should not be poisoned");
            seen.iter().find(|(at, written)| *at > since && is(written)).map(|(at, _)| *at)
        })
        .await
    }

    /// Whether it was true of any state.
    pub fn ever(&self, since: u64, is: impl Fn(&Written<K>) -> bool) -> bool {
        self.seen.lock().expect("the tape's lock should not be poisoned").iter().any(|(at, w)| *at > since && is(w))
    }
}

pub fn version(object: &impl ResourceExt) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).expect("a resource version should be a number")
}
