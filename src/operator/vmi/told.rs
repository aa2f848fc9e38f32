//! What has been said of whom, so that it is not said each minute. Pure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::explain::{Explanation, Reason};

/// The same reason in other words (another VM has the GPU by now) is news only after this.
const QUIET: Duration = Duration::from_secs(600);

/// By UID.
#[derive(Debug, Default)]
pub struct Told(HashMap<String, Said>);

#[derive(Debug)]
struct Said {
    reason: Reason,
    message: String,
    at: Instant,
}

impl Told {
    /// Whether it is to be said now; then it counts as said.
    pub fn is_news(&mut self, uid: &str, explanation: &Explanation, now: Instant) -> bool {
        let Explanation { reason, message, .. } = explanation;
        if let Some(said) = self.0.get(uid)
            && said.reason == *reason
            && (said.message == *message || now.duration_since(said.at) < QUIET)
        {
            return false;
        }
        self.0.insert(uid.to_owned(), Said { reason: *reason, message: message.clone(), at: now });
        true
    }

    /// It runs, or it has gone: the same trouble later is news.
    pub fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explanation(reason: Reason, message: &str) -> Explanation {
        Explanation {
            vmi: "vms/a".to_owned(),
            reason,
            message: message.to_owned(),
            requests: Vec::new(),
            blocks_drain: None,
        }
    }

    #[test]
    fn the_same_reason_is_not_repeated_and_another_one_is_told_at_once() {
        let mut told = Told::default();
        let now = Instant::now();
        assert!(told.is_news("1", &explanation(Reason::GPUInUse, "by a"), now));
        assert!(!told.is_news("1", &explanation(Reason::GPUInUse, "by a"), now + QUIET * 2));
        assert!(!told.is_news("1", &explanation(Reason::GPUInUse, "by b"), now + QUIET / 2));
        assert!(told.is_news("1", &explanation(Reason::NodeInTransition, "it changes"), now + QUIET / 2));
        assert!(told.is_news("2", &explanation(Reason::GPUInUse, "by a"), now), "another instance");
    }

    #[test]
    fn other_words_are_told_after_a_while_and_the_same_ones_after_it_ran() {
        let mut told = Told::default();
        let now = Instant::now();
        assert!(told.is_news("1", &explanation(Reason::GPUInUse, "by a"), now));
        assert!(told.is_news("1", &explanation(Reason::GPUInUse, "by b"), now + QUIET));
        told.forget("1");
        assert!(told.is_news("1", &explanation(Reason::GPUInUse, "by b"), now + QUIET));
    }
}
