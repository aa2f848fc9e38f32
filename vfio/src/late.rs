//! Reads that may not come back.
//!
//! An attribute can wait for the device's lock, which a hanging `unbind` holds for good, or for a driver that waits for a
//! device that is gone. A thread that waits there can be left behind; the caller could not.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Subjects whose read has not come back, over all lists that were read of one host. A thread stays behind with each, and
/// it is not asked again before that.
#[derive(Debug, Default)]
pub(crate) struct Late {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lists: usize,
    /// Number of a list and place in it.
    subjects: BTreeMap<(usize, usize), PathBuf>,
}

/// One list, read by one thread, and by another one that goes on where the first is stuck.
struct List<I, F> {
    number: usize,
    subjects: Vec<(PathBuf, I)>,
    read: F,
    next: AtomicUsize,
}

impl Late {
    /// Reads a list of subjects one after the other on another thread. Each may take `deadline`.
    ///
    /// # Errors
    /// `TimedOut` for a subject whose read has not come back by then, or is still out since an earlier list; any other where
    /// no thread can be had.
    pub fn each<I, T, F>(
        self: &Arc<Self>,
        deadline: Duration,
        subjects: Vec<(PathBuf, I)>,
        read: F,
    ) -> Vec<io::Result<T>>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
        F: Fn(&I) -> T + Send + Sync + 'static,
    {
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", deadline.as_secs_f32()));
        let mut results: Vec<Option<io::Result<T>>> = subjects.iter().map(|_| None).collect();
        let number = {
            let mut state = self.state();
            state.lists += 1;
            state.lists
        };
        let list = Arc::new(List { number, subjects, read, next: AtomicUsize::new(0) });
        let (answer, answers) = mpsc::channel();
        let mut open = results.len();
        let mut started = if open == 0 { Ok(()) } else { self.start(&list, &answer) };
        while open > 0 && started.is_ok() {
            let mut note = |(place, value): (usize, Option<T>)| {
                let slot: &mut Option<io::Result<T>> = &mut results[place];
                open -= usize::from(slot.is_none());
                *slot = Some(value.ok_or_else(late));
            };
            match answers.recv_timeout(deadline) {
                Ok(answer) => note(answer),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let mut state = self.state();
                    // One that came while the lock was waited for is in time.
                    if let Ok(answer) = answers.try_recv() {
                        note(answer);
                        continue;
                    }
                    let begun = list.next.load(Ordering::SeqCst).min(results.len());
                    for (place, slot) in results[..begun].iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
                        state.subjects.insert((number, place), list.subjects[place].0.clone());
                        *slot = Some(Err(late()));
                        open -= 1;
                    }
                    drop(state);
                    if open > 0 {
                        started = self.start(&list, &answer);
                    }
                }
            }
        }
        let ended =
            || started.as_ref().err().map_or_else(late, |error| io::Error::new(error.kind(), error.to_string()));
        results.into_iter().map(|slot| slot.unwrap_or_else(|| Err(ended()))).collect()
    }

    /// Starts a thread that takes subjects of the list until there is none left.
    fn start<I, T, F>(self: &Arc<Self>, list: &Arc<List<I, F>>, answer: &Sender<(usize, Option<T>)>) -> io::Result<()>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
        F: Fn(&I) -> T + Send + Sync + 'static,
    {
        let (late, list, answer) = (Arc::clone(self), Arc::clone(list), answer.clone());
        let work = move || loop {
            let place = list.next.fetch_add(1, Ordering::SeqCst);
            let Some((about, subject)) = list.subjects.get(place) else { return };
            let value = (!late.has(about)).then(|| (list.read)(subject));
            // Before the lock is taken: who gives up looks for it once more under the lock. It may have ended, too.
            let _ = answer.send((place, value));
            late.state().subjects.remove(&(list.number, place));
        };
        thread::Builder::new().name("vfio-read".to_owned()).spawn(work).map(drop)
    }

    fn has(&self, about: &Path) -> bool {
        self.state().subjects.values().any(|late| late == about)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const PATIENT: Duration = Duration::from_secs(60);

    fn list(names: &[&str]) -> Vec<(PathBuf, String)> {
        names.iter().map(|name| (PathBuf::from(name), (*name).to_owned())).collect()
    }

    fn kinds<T>(results: Vec<io::Result<T>>) -> Vec<Result<T, io::ErrorKind>> {
        results.into_iter().map(|result| result.map_err(|error| error.kind())).collect()
    }

    #[test]
    fn a_late_read_keeps_nobody_else_waiting_and_is_not_asked_again_before_it_ends() {
        let late = Arc::new(Late::default());
        let (release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let read = move |name: &String| {
            if name == "b" {
                let _ = gate.lock().unwrap().recv();
            }
            name.clone()
        };
        let names = ["a", "b", "c"];
        let expected = [Ok("a".to_owned()), Err(io::ErrorKind::TimedOut), Ok("c".to_owned())];
        assert_eq!(kinds(late.each(SOON, list(&names), read)), expected);
        let quick = |name: &String| if name == "b" { panic!("it is still out") } else { name.clone() };
        assert_eq!(kinds(late.each(PATIENT, list(&names), quick)), expected);
        assert_eq!(late.state().subjects.len(), 1, "one thread waits, however often it is asked");
        release.send(()).unwrap();
        while late.has(Path::new("b")) {
            thread::yield_now();
        }
        let all = names.map(|name| Ok(name.to_owned()));
        assert_eq!(kinds(late.each(PATIENT, list(&names), String::clone)), all);
    }

    #[test]
    fn two_at_once_about_one_thing_are_both_answered() {
        let late = Arc::new(Late::default());
        let inner = Arc::clone(&late);
        let both = late.each(PATIENT, list(&["a"]), move |_| kinds(inner.each(PATIENT, list(&["a"]), String::clone)));
        assert_eq!(kinds(both), [Ok(vec![Ok("a".to_owned())])]);
    }

    #[test]
    fn an_empty_list_is_done() {
        assert!(Arc::new(Late::default()).each(SOON, list(&[]), String::clone).is_empty());
    }
}
