//! Events (events.k8s.io/v1) on the objects that people look at.
//!
//! The same event again is one object whose series counts, written now and then; another note is another event. `kube`'s own
//! recorder takes the note of the first for all that have its reason, so that a second GPU's would not be told.

mod book;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
    core::ObjectMeta,
};
use serde_json::json;
use tokio::time::sleep;

use self::book::{Book, Entry, Subject, What};

/// What happened, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub kind: NoticeKind,
    /// One CamelCase word: why.
    pub reason: &'static str,
    /// One CamelCase word: what was being done.
    pub action: &'static str,
    /// Device, holder, next step.
    pub note: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    Normal,
    Warning,
}

impl Notice {
    pub fn warning(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self { kind: NoticeKind::Warning, reason, action, note: note.into() }
    }

    pub fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self { kind: NoticeKind::Normal, reason, action, note: note.into() }
    }
}

/// The API server refuses longer notes.
const NOTE_LIMIT: usize = 1024;
/// Of the object's name in the event's own, so that it stays one.
const NAME_LIMIT: usize = 200;
/// Repetitions are counted this long before their number is written.
const COUNTING: Duration = Duration::from_secs(5);
/// Of objects that are in no namespace, as `kubectl describe` looks for them.
const NAMESPACE: &str = "default";

#[derive(Clone)]
pub struct Events {
    client: Client,
    controller: String,
    instance: String,
    book: Arc<Mutex<Book>>,
}

impl Events {
    pub fn new(client: Client, controller: &str, instance: &str) -> Self {
        Self { client, controller: controller.to_owned(), instance: instance.to_owned(), book: Arc::default() }
    }

    /// Publishes; an event that cannot be written is logged, since it must not stop the work that it tells about.
    pub async fn publish(&self, notice: &Notice, about: &ObjectReference) {
        let mut note = notice.note.clone();
        while note.len() > NOTE_LIMIT {
            note.pop();
        }
        let subject = Subject {
            namespace: about.namespace.clone().unwrap_or_else(|| NAMESPACE.to_owned()),
            kind: about.kind.clone().unwrap_or_default(),
            name: about.name.clone().unwrap_or_default(),
            uid: about.uid.clone().unwrap_or_default(),
        };
        let entry = Entry { subject, reason: notice.reason, action: notice.action, note };
        let what = self.book().note(&entry, Instant::now(), Timestamp::now());
        match what {
            What::New { name } => self.create(notice, about, entry, name).await,
            What::Again => {
                let events = self.clone();
                tokio::spawn(async move { events.count(entry).await });
            }
            What::Counted => {}
            What::TooMany => {
                tracing::warn!(
                    reason = notice.reason,
                    about = about.name,
                    note = entry.note,
                    "too many events on this object: not written"
                );
            }
        }
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().expect("event lock should not be poisoned")
    }

    fn api(&self, entry: &Entry) -> Api<Event> {
        Api::namespaced(self.client.clone(), &entry.subject.namespace)
    }

    async fn create(&self, notice: &Notice, about: &ObjectReference, entry: Entry, name: String) {
        let kind = match notice.kind {
            NoticeKind::Normal => "Normal",
            NoticeKind::Warning => "Warning",
        };
        let event = Event {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(entry.subject.namespace.clone()),
                ..ObjectMeta::default()
            },
            type_: Some(kind.to_owned()),
            reason: Some(notice.reason.to_owned()),
            action: Some(notice.action.to_owned()),
            note: Some(entry.note.clone()),
            regarding: Some(about.clone()),
            event_time: Some(MicroTime(Timestamp::now())),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            ..Event::default()
        };
        if let Err(error) = self.api(&entry).create(&PostParams::default(), &event).await {
            self.book().forget(&entry);
            tracing::warn!(%error, reason = notice.reason, about = about.name, "event not written");
        }
    }

    /// Writes how often it has been, once more of them may have come.
    async fn count(&self, entry: Entry) {
        sleep(COUNTING).await;
        let Some((name, count, last)) = self.book().counted(&entry) else { return };
        let series = EventSeries { count, last_observed_time: MicroTime(last) };
        let patch = json!({"series": series});
        if let Err(error) = self.api(&entry).patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            // Gone, most likely: the next one is a new event.
            self.book().forget(&entry);
            tracing::debug!(%error, reason = entry.reason, "repetitions of an event not written");
        }
    }
}
