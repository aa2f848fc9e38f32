//! Reads that may not come back.
//!
//! An attribute can wait for the device's lock, which a hanging `unbind` holds for good, or for a driver that waits for a
//! device that is gone. A thread that waits there can be left behind; the caller could not.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that read for a host. One is enough while all reads come back; one more stays behind for each subject whose
/// read does not, and that subject is not asked again before it does.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Takes its next job; ends when this is dropped.
    idle: Option<Sender<Job>>,
    jobs: u64,
    /// Jobs that were given up, with what they are about.
    late: BTreeMap<u64, PathBuf>,
}

impl Readers {
    /// Runs `read` on another thread, for at most `deadline`.
    ///
    /// # Errors
    /// `TimedOut` when it has not come back by then, or an earlier one about the same still has not.
    pub fn run<T: Send + 'static>(
        self: &Arc<Self>,
        about: &Path,
        deadline: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", deadline.as_secs_f32()));
        let (job, idle) = {
            let mut state = self.state();
            if state.late.values().any(|other| other == about) {
                return Err(late());
            }
            state.jobs += 1;
            (state.jobs, state.idle.take())
        };
        let worker = match idle {
            Some(worker) => worker,
            None => start()?,
        };
        let (answer, received) = mpsc::sync_channel(1);
        let readers = Arc::clone(self);
        let work = move || {
            // Before the lock is taken: whoever gives up looks for it once more under the lock.
            let _ = answer.send(read());
            readers.state().late.remove(&job);
        };
        worker.send(Box::new(work)).map_err(|_| io::Error::other("the reading thread has ended"))?;
        let result = received.recv_timeout(deadline);
        let mut state = self.state();
        let Some(value) = result.ok().or_else(|| received.try_recv().ok()) else {
            state.late.insert(job, about.to_owned());
            return Err(late());
        };
        state.idle.get_or_insert(worker);
        Ok(value)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start() -> io::Result<Sender<Job>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    thread::Builder::new().name("vfio-read".to_owned()).spawn(move || jobs.into_iter().for_each(|job| job()))?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const PATIENT: Duration = Duration::from_secs(60);

    /// Reads something that comes when the other end says so.
    fn stuck(readers: &Arc<Readers>, about: &str) -> (Sender<()>, Receiver<()>) {
        let (release, gate) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel();
        let read = move || {
            let _ = gate.recv();
            let _ = ended.send(());
        };
        let error = readers.run(Path::new(about), SOON, read).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        (release, end)
    }

    #[test]
    fn a_late_read_is_not_piled_up_and_keeps_nobody_else_waiting() {
        let readers = Arc::new(Readers::default());
        let (release, end) = stuck(&readers, "/late");
        let again = readers.run(Path::new("/late"), PATIENT, || panic!("it is not asked again"));
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(readers.run(Path::new("/other"), PATIENT, || 7).unwrap(), 7);
        release.send(()).unwrap();
        end.recv().unwrap();
        // The thread says that it has ended before it has done so for the books.
        while readers.state().late.values().any(|path| path == Path::new("/late")) {
            thread::yield_now();
        }
        assert_eq!(readers.run(Path::new("/late"), PATIENT, || 8).unwrap(), 8);
    }

    #[test]
    fn two_at_once_about_one_thing_are_both_answered() {
        let readers = Arc::new(Readers::default());
        let (inner, path) = (Arc::clone(&readers), Path::new("/one"));
        let both = readers.run(path, PATIENT, move || inner.run(path, PATIENT, || thread::current().id()));
        assert!(both.unwrap().is_ok());
    }

    #[test]
    fn reads_that_come_back_share_one_thread() {
        let readers = Arc::new(Readers::default());
        let ask = || readers.run(Path::new("/x"), PATIENT, || thread::current().id()).unwrap();
        assert_eq!(ask(), ask());
    }
}
