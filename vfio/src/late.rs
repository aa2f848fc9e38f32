//! Reads that may not come back.
//!
//! An attribute can wait for the device's lock, which a hanging `unbind` holds for good, or for a driver that waits for a
//! device that is gone. A thread that waits there can be left behind; the caller could not.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

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

/// One list, read by one thread, and by another one that goes on where the first seems to be stuck.
struct List<I, F> {
    number: usize,
    subjects: Vec<(PathBuf, I)>,
    read: F,
    next: AtomicUsize,
}

/// What a thread tells of a place in its list.
enum Told<T> {
    Begun,
    /// Nothing: it is still out since an earlier list.
    Read(Option<T>),
}

type Message<T> = (usize, Told<T>);

/// A read that takes longer than this part of its deadline gets company: devices that hang do so at the same time, and are
/// waited for at the same time. One that is only slow costs a thread for a moment.
const COMPANY: u32 = 40;

/// What a list has come to.
struct Progress<T> {
    results: Vec<Option<io::Result<T>>>,
    open: usize,
    /// Since when each read that has not come back is out.
    out: BTreeMap<usize, Instant>,
}

impl<T> Progress<T> {
    fn note(&mut self, (place, told): Message<T>, late: impl Fn() -> io::Error) {
        match told {
            Told::Begun if self.results[place].is_none() => drop(self.out.insert(place, Instant::now())),
            Told::Begun => {}
            Told::Read(value) => self.settle(place, value.ok_or_else(late)),
        }
    }

    fn settle(&mut self, place: usize, result: io::Result<T>) {
        self.out.remove(&place);
        self.open -= usize::from(self.results[place].is_none());
        self.results[place] = Some(result);
    }

    fn older_than(&self, age: Duration) -> Vec<usize> {
        self.out.iter().filter(|(_, since)| since.elapsed() >= age).map(|(place, _)| *place).collect()
    }
}

impl Late {
    /// Reads a list of subjects on other threads, one after the other as long as they answer at once. Each may take
    /// `deadline`, and however many do not come back, all of them together take little more.
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
        let results: Vec<Option<io::Result<T>>> = subjects.iter().map(|_| None).collect();
        let mut progress = Progress { open: results.len(), results, out: BTreeMap::new() };
        let number = {
            let mut state = self.state();
            state.lists += 1;
            state.lists
        };
        let list = Arc::new(List { number, subjects, read, next: AtomicUsize::new(0) });
        let (teller, told) = mpsc::channel();
        let mut started = if progress.open == 0 { Ok(()) } else { self.start(&list, &teller) };
        let mut latest = Instant::now();
        while progress.open > 0 && started.is_ok() {
            // All that are out seem to be stuck, and nobody goes on with the rest.
            let rest = list.next.load(Ordering::SeqCst) < list.subjects.len();
            let stuck = progress.older_than(deadline / COMPANY).len() == progress.out.len();
            if rest && stuck && latest.elapsed() >= deadline / COMPANY {
                started = self.start(&list, &teller);
                latest = Instant::now();
            }
            if let Ok(message) = told.recv_timeout(deadline / COMPANY) {
                progress.note(message, late);
                continue;
            }
            let mut state = self.state();
            // What came while the lock was waited for is in time.
            while let Ok(message) = told.try_recv() {
                progress.note(message, late);
            }
            for place in progress.older_than(deadline) {
                state.subjects.insert((number, place), list.subjects[place].0.clone());
                progress.settle(place, Err(late()));
            }
        }
        let ended =
            || started.as_ref().err().map_or_else(late, |error| io::Error::new(error.kind(), error.to_string()));
        progress.results.into_iter().map(|slot| slot.unwrap_or_else(|| Err(ended()))).collect()
    }

    /// Starts a thread that takes subjects of the list until there is none left.
    fn start<I, T, F>(self: &Arc<Self>, list: &Arc<List<I, F>>, teller: &Sender<Message<T>>) -> io::Result<()>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
        F: Fn(&I) -> T + Send + Sync + 'static,
    {
        let (late, list, teller) = (Arc::clone(self), Arc::clone(list), teller.clone());
        let work = move || loop {
            let place = list.next.fetch_add(1, Ordering::SeqCst);
            let Some((about, subject)) = list.subjects.get(place) else { return };
            let _ = teller.send((place, Told::Begun));
            let value = (!late.has(about)).then(|| (list.read)(subject));
            // Before the lock is taken: who gives up looks for it once more under the lock. It may have ended, too.
            let _ = teller.send((place, Told::Read(value)));
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
    fn reads_that_hang_at_once_are_waited_for_at_once() {
        const DEADLINE: Duration = Duration::from_secs(1);
        let (_release, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let hangs = move |name: &String| {
            if name.starts_with("hangs") {
                let _ = gate.lock().unwrap().recv();
            }
            name.clone()
        };
        let names = ["a", "hangs1", "hangs2", "b", "hangs3", "hangs4", "c"];
        let began = Instant::now();
        let answers = Arc::new(Late::default()).each(DEADLINE, list(&names), hangs);
        let took = began.elapsed();
        assert!(took < DEADLINE * 2, "{took:?}");
        for (name, answer) in names.iter().zip(kinds(answers)) {
            let expected =
                if name.starts_with("hangs") { Err(io::ErrorKind::TimedOut) } else { Ok((*name).to_owned()) };
            assert_eq!(answer, expected);
        }
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
