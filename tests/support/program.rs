//! `gpuvirt …` as a process of this test: it does not outlive it, and its log is shown when the test fails.

use std::{
    ffi::OsStr,
    fs::{self, File},
    path::PathBuf,
    process::{Child, ExitStatus},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    cluster::command,
    turn::Turn,
    wait::{self, PATIENCE},
};

const GPUVIRT: &str = env!("CARGO_BIN_EXE_gpuvirt");
/// Of a log that is shown.
const TAIL: usize = 12_000;

pub struct Program {
    name: String,
    log: PathBuf,
    /// `None` once it has been waited for.
    child: Option<Child>,
}

impl Program {
    /// To be called on the test's own thread: the kernel ends the process when that thread ends.
    pub fn start(turn: &Turn, name: &str, args: &[&str], environment: &[(&str, &OsStr)]) -> Self {
        let log = turn.dir.path().join(name).with_extension("log");
        let file = File::options().create(true).append(true).open(&log).expect("a log should be creatable");
        let arguments = ["--pdeathsig", "KILL", "--", GPUVIRT].iter().chain(args);
        let child = command("setpriv", arguments)
            .envs(environment.iter().copied())
            .stdout(file.try_clone().expect("a descriptor should be duplicable"))
            .stderr(file)
            .spawn();
        let child = child.expect("gpuvirt should be startable");
        Self { name: name.to_owned(), log, child: Some(child) }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the process should not have been waited for").id()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("the process should not have been waited for");
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a pid should be positive");
        kill_process(pid, signal).expect("a child should take a signal");
    }

    /// As a crash: no goodbye.
    pub async fn kill(mut self) {
        self.signal(Signal::KILL);
        self.ended().await;
    }

    /// As the kubelet ends a pod.
    pub async fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended().await
    }

    /// Waits for its end: how it ended.
    pub async fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the process should not have been waited for");
        let pid = child.id();
        match timeout(PATIENCE, spawn_blocking(move || child.wait())).await {
            Ok(Ok(Ok(status))) => status,
            Ok(other) => panic!("{} (pid {pid}) cannot be waited for: {other:?}", self.name),
            Err(_elapsed) => {
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                let _ = kill_process(pid.expect("a pid should be positive"), Signal::KILL);
                panic!("{} has not ended within {PATIENCE:?}", self.name)
            }
        }
    }

    /// Whether it still runs.
    pub fn lives(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// For what only the log tells.
    pub async fn says(&self, text: &str) {
        wait::eventually(&format!("{} says {text:?}", self.name), async || self.log().contains(text).then_some(()))
            .await;
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let from = log.char_indices().map(|(at, _)| at).find(|at| log.len() - at <= TAIL).unwrap_or_default();
            eprintln!("── log of {}:\n{}──", self.name, &log[from..]);
        }
    }
}
