//! Events on the objects that people look at.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

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

#[derive(Clone)]
pub struct Events(Recorder);

impl Events {
    pub fn new(client: Client, controller: &str, instance: &str) -> Self {
        Self(Recorder::new(client, Reporter { controller: controller.to_owned(), instance: Some(instance.to_owned()) }))
    }

    /// Publishes; an event that cannot be written is logged, since it must not stop the work that it tells about.
    pub async fn publish(&self, notice: &Notice, about: &ObjectReference) {
        let mut note = notice.note.clone();
        while note.len() > NOTE_LIMIT {
            note.pop();
        }
        let event = Event {
            type_: match notice.kind {
                NoticeKind::Normal => EventType::Normal,
                NoticeKind::Warning => EventType::Warning,
            },
            reason: notice.reason.to_owned(),
            note: Some(note),
            action: notice.action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, about).await {
            tracing::warn!(%error, reason = notice.reason, about = about.name.as_deref(), "event not written");
        }
    }
}
