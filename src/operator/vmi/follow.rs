//! Follows instances while their kind is served, and posts an event on one that does not run because of a GPU.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, future::BoxFuture, stream::BoxStream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tokio::{
    sync::Notify,
    time::{self, sleep_until},
};

use super::{
    explain::concerns_us,
    instance::{self, Instance, Progress, Vmi},
    instances::Instances,
    look, supply,
    told::Told,
};
use crate::{
    cluster::events::{Events, Notice},
    operator::{
        kubevirt::crd::{Crd, Served},
        world::{NodeWork, Wake, World},
    },
};

/// Changes of one moment are looked at together. A person still has the reason within seconds.
const SETTLE: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_secs(5);

pub struct Explainer {
    client: Client,
    world: World,
    events: Events,
    wake: Wake,
    crd: Crd,
    crd_due: Arc<Notify>,
    instances: Arc<Instances>,
}

/// What the loop remembers.
#[derive(Default)]
struct Book {
    watch: Option<BoxStream<'static, Result<Event<Vmi>, watcher::Error>>>,
    /// Of the list that is on its way.
    listed: BTreeSet<String>,
    due: HashSet<String>,
    look_at: Option<time::Instant>,
    told: Told,
}

impl Explainer {
    /// And the work that its CRD needs.
    pub fn new(
        client: &Client,
        world: &World,
        events: Events,
        wake: &Wake,
        instances: &Arc<Instances>,
    ) -> (Self, BoxFuture<'static, ()>) {
        let crd_due = Arc::new(Notify::new());
        let due = crd_due.clone();
        let (crd, work) = Crd::new(client, instance::CRD, move || due.notify_one());
        let explainer = Self {
            client: client.clone(),
            world: world.clone(),
            events,
            wake: wake.clone(),
            crd,
            crd_due,
            instances: instances.clone(),
        };
        (explainer, work)
    }

    /// Runs for as long as the process does.
    pub async fn run(self) {
        let mut book = Book::default();
        loop {
            let look_at = book.look_at;
            tokio::select! {
                () = self.crd_due.notified() => self.turn(&mut book).await,
                Some(event) = next(&mut book.watch) => match event {
                    Ok(event) => self.take(event, &mut book),
                    Err(error) => tracing::warn!(%error, "watch on virtual machine instances interrupted, trying again"),
                },
                () = self.wake.gpu_nodes.notified() => {
                    for key in self.instances.waiting() {
                        book.mark(key);
                    }
                }
                () = sleep_until(look_at.unwrap_or_else(time::Instant::now)), if look_at.is_some() => {
                    self.look(&mut book).await;
                }
            }
        }
    }

    /// Begins to watch when the kind is served, and ends when it is not.
    async fn turn(&self, book: &mut Book) {
        match self.crd.served().await {
            Ok(Served::NotYet) => {}
            Ok(Served::Absent) => {
                book.watch = None;
                self.instances.keep(&BTreeSet::new());
            }
            Ok(Served::Here(_)) if book.watch.is_some() => {}
            Ok(Served::Here(_)) => {
                let api: Api<Vmi> = Api::all_with(self.client.clone(), &instance::resource());
                book.watch = Some(watcher(api, watcher::Config::default()).default_backoff().boxed());
            }
            Err(error) => {
                tracing::warn!(
                    error = crate::chain(&error),
                    "virtual machine instances are not followed, trying again"
                );
                let due = self.crd_due.clone();
                tokio::spawn(async move {
                    time::sleep(RETRY).await;
                    due.notify_one();
                });
            }
        }
    }

    fn take(&self, event: Event<Vmi>, book: &mut Book) {
        match event {
            Event::Init => book.listed.clear(),
            Event::InitApply(vmi) => {
                book.listed.insert(Instance::of(&vmi).key());
                self.set(&vmi, book);
            }
            Event::InitDone => self.instances.keep(&book.listed),
            Event::Apply(vmi) => self.set(&vmi, book),
            Event::Delete(vmi) => {
                self.instances.remove(&Instance::of(&vmi).key());
                book.told.forget(&vmi.uid().unwrap_or_default());
            }
        }
    }

    fn set(&self, vmi: &Vmi, book: &mut Book) {
        let instance = Instance::of(vmi);
        let key = instance.key();
        let effect = self.instances.set(instance);
        if effect.explain {
            book.mark(key);
        }
        if let Some(node) = effect.node {
            self.wake.node(NodeWork::One(node));
        }
    }

    async fn look(&self, book: &mut Book) {
        book.look_at = None;
        let gpu_nodes: Vec<_> =
            self.world.gpu_nodes.state().iter().filter_map(|guarded| guarded.0.as_ref().ok().cloned()).collect();
        let names = supply::names(&gpu_nodes);
        for key in std::mem::take(&mut book.due) {
            let Some(instance) = self.instances.get(&key).filter(|instance| concerns_us(instance, &names)) else {
                continue;
            };
            match &instance.progress {
                Progress::Refused(_) | Progress::Unschedulable(_) | Progress::Failed => {}
                Progress::Starting => continue,
                Progress::Runs | Progress::Succeeded => {
                    book.told.forget(&instance.uid);
                    continue;
                }
            }
            let policies = self.world.policies.state();
            let conditions = policies.iter().filter_map(|guarded| guarded.0.as_ref().ok()?.status.as_ref());
            let complaint = conditions.into_iter().find_map(|status| look::complaint(&status.conditions));
            match look::explained(&self.client, &instance, &gpu_nodes, complaint).await {
                Ok(explanation) if !explanation.reason.is_about_gpus() => {}
                Ok(explanation) => {
                    if book.told.is_news(&instance.uid, &explanation, Instant::now()) {
                        let reason = explanation.reason.as_str();
                        let notice = Notice::warning(reason, "ExplainGPU", explanation.message);
                        self.events.publish(&notice, &reference(&instance)).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(vmi = key, error = crate::chain(&error), "not explained, trying again");
                    book.due.insert(key);
                    book.look_at = Some(time::Instant::now() + RETRY);
                }
            }
        }
    }
}

impl Book {
    fn mark(&mut self, key: String) {
        self.due.insert(key);
        let soon = time::Instant::now() + SETTLE;
        self.look_at = Some(self.look_at.map_or(soon, |at| at.min(soon)));
    }
}

async fn next(
    watch: &mut Option<BoxStream<'static, Result<Event<Vmi>, watcher::Error>>>,
) -> Option<Result<Event<Vmi>, watcher::Error>> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

fn reference(instance: &Instance) -> ObjectReference {
    ObjectReference {
        api_version: Some("kubevirt.io/v1".to_owned()),
        kind: Some("VirtualMachineInstance".to_owned()),
        namespace: Some(instance.namespace.clone()),
        name: Some(instance.name.clone()),
        uid: Some(instance.uid.clone()),
        ..ObjectReference::default()
    }
}
