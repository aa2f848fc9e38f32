//! What was written last, for as long as the watch has not brought it: a look that came in between would begin a change
//! twice, take a step of it back, or write the same again.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use kube::{Resource, ResourceExt};

/// A watch that is later than this has lost the object, or somebody deleted it.
const LATE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Latest<K>(Mutex<HashMap<String, Act<K>>>);

impl<K> Default for Latest<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

#[derive(Debug)]
enum Act<K> {
    Written(Box<K>, Instant),
    Deleted { uid: Option<String> },
}

impl<K: Resource + Clone> Latest<K> {
    /// The newer of what the watch has brought, which is only lent, and what was written.
    pub fn of<'a>(&self, name: &str, watched: Option<&'a K>) -> Option<Cow<'a, K>> {
        let mut acts = self.0.lock().expect("latest lock should not be poisoned");
        let newest = match (acts.get(name), watched) {
            (Some(Act::Written(written, _)), Some(watched)) if !is_newer(watched, written) => {
                return Some(Cow::Owned((**written).clone()));
            }
            (Some(Act::Written(written, at)), None) if at.elapsed() < LATE => {
                return Some(Cow::Owned((**written).clone()));
            }
            (Some(Act::Deleted { uid }), Some(watched)) if watched.meta().uid == *uid => return None,
            (Some(Act::Written(..) | Act::Deleted { .. }) | None, watched) => watched.map(Cow::Borrowed),
        };
        acts.remove(name);
        newest
    }

    pub fn written(&self, mut object: K) {
        object.meta_mut().managed_fields = None;
        let mut acts = self.0.lock().expect("latest lock should not be poisoned");
        acts.insert(object.name_any(), Act::Written(Box::new(object), Instant::now()));
    }

    pub fn deleted(&self, object: &K) {
        let mut acts = self.0.lock().expect("latest lock should not be poisoned");
        acts.insert(object.name_any(), Act::Deleted { uid: object.uid() });
    }

    /// The API server has another one: the watch brings it.
    pub fn forget(&self, name: &str) {
        self.0.lock().expect("latest lock should not be poisoned").remove(name);
    }
}

/// Resource versions of one object grow (KEP-5504). One that does not read as a number is the watch's to tell.
fn is_newer<K: Resource>(watched: &K, written: &K) -> bool {
    let version = |object: &K| object.resource_version()?.parse::<u64>().ok();
    match (version(watched), version(written)) {
        (Some(watched), Some(written)) => watched > written,
        (None, _) | (_, None) => true,
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUTransition, GPUTransitionSpec};

    use super::*;

    fn object(uid: &str, version: &str) -> GPUTransition {
        let mut object = GPUTransition::new("n1", GPUTransitionSpec::default());
        object.metadata.uid = Some(uid.to_owned());
        object.metadata.resource_version = Some(version.to_owned());
        object
    }

    #[test]
    fn what_was_written_counts_until_the_watch_brings_something_newer() {
        let latest = Latest::default();
        let of = |watched: Option<&GPUTransition>| latest.of("n1", watched).map(Cow::into_owned);
        latest.written(object("a", "100"));
        assert_eq!(of(None), Some(object("a", "100")), "not seen yet");
        assert_eq!(of(Some(&object("a", "99"))), Some(object("a", "100")), "an older one is seen");
        assert_eq!(of(Some(&object("a", "101"))), Some(object("a", "101")), "somebody wrote since");
        assert_eq!(of(Some(&object("a", "9"))), Some(object("a", "9")), "and then the watch is the word");
    }

    #[test]
    fn a_deleted_one_stays_deleted_while_the_watch_still_shows_it() {
        let latest = Latest::default();
        let of = |watched: Option<&GPUTransition>| latest.of("n1", watched).map(Cow::into_owned);
        latest.deleted(&object("a", "100"));
        assert_eq!(of(Some(&object("a", "100"))), None);
        assert_eq!(of(Some(&object("b", "103"))), Some(object("b", "103")), "another one of that name");
    }
}
