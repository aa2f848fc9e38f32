//! Changing a host: one value to one file, one module, each in a child with a deadline.
//!
//! `unbind` of a device that is in use sleeps in the kernel until its user is gone, and a signal makes the writer an
//! unkillable process. So this process never writes: a child `<helper> kernel-write <root>` does, and is left behind when
//! it does not answer in time. It says first who it is (`pid <as the host counts> <start time>`), then reads requests from
//! its input (three fields, each ended by NUL) and answers each with a line: `done`, `errno <n>` or `failed <why>`.

#![allow(clippy::disallowed_methods, reason = "this file is the door that the lint points to")]

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::host::{self, Host, Root};
use crate::journal;
use crate::module::{self, ModuleError};

/// The command of the helper executable.
pub const COMMAND: &str = "kernel-write";
const WRITE: &str = "write";
const LOAD: &str = "load";

/// Below these the child writes; whatever asks for something else is a mistake.
const WRITABLE: [&str; 3] = ["/sys/bus/pci/devices", "/sys/bus/pci/drivers", "/sys/bus/mdev/devices"];
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// Exit codes of the child beside 0.
const USAGE: i32 = 2;
const FAILED: i32 = 1;

/// A host that can be changed. Paths are absolute as the host sees them.
pub trait Kernel {
    /// Writes one value to one file of `/sys/bus/pci` or `/sys/bus/mdev`.
    fn write(&mut self, path: &Path, value: &str) -> Result<(), KernelError>;
    /// Loads a module with what it needs; one that is loaded or built in is fine.
    fn load_module(&mut self, name: &str) -> Result<(), KernelError>;
    /// Pid (as the host counts) and start time of the process that will write, where that is not this one: known before a
    /// write that may never come back is begun.
    fn writer(&mut self) -> Result<Option<(i32, u64)>, KernelError> {
        Ok(None)
    }
    /// Said when no write follows for now: what was kept ready for it may go.
    fn rest(&mut self) {}
}

/// Why the host was not changed.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel's answer to a write, as `errno(3)`.
    #[error("{path}: {}", Errno::from_raw(*errno).desc(), path = path.display())]
    Refused { path: PathBuf, errno: i32 },
    /// No answer within the deadline. `pid` and `start_time` (clock ticks since boot) tell the process that waits, for
    /// [`Journal::pending`](crate::Journal::pending); `wait_channel` is the kernel function that it sleeps in.
    #[error(
        "{path}: the write has not come back after {} s: pid {pid} waits in {wait_channel}; the device is in use, and stays \
         as it is until its user lets go",
        after.as_secs_f32(), path = path.display()
    )]
    Hung { path: PathBuf, pid: i32, start_time: u64, wait_channel: String, after: Duration },
    /// A module is not loaded; see [`ModuleError`].
    #[error("module {name}: {reason}")]
    Module { name: String, reason: String },
    /// The child could not be started, or ended without an answer.
    #[error("{helper} {COMMAND}: {reason}", helper = helper.display())]
    Child { helper: PathBuf, reason: String },
}

impl KernelError {
    /// The kernel's answer, where it gave one.
    pub(crate) fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(Errno::from_raw(*errno)),
            Self::Hung { .. } | Self::Module { .. } | Self::Child { .. } => None,
        }
    }
}

/// The kernel of the host below a root directory.
///
/// The child starts with the first write, serves all that follow, also those of further plans, and ends with
/// [`rest`](Kernel::rest), or with this.
pub struct LinuxKernel {
    host_root: PathBuf,
    helper: PathBuf,
    deadline: Duration,
    worker: Option<Worker>,
    /// Children that were left behind; asked, never waited for, so that they do not stay as zombies when they do end.
    abandoned: Vec<Child>,
}

/// A child that waits for a request.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    /// Output that is not a whole line yet.
    said: Vec<u8>,
    /// Pid and start time as it told them.
    identity: Option<(i32, u64)>,
}

impl LinuxKernel {
    /// `helper` is run as `<helper> kernel-write <root>` and must hand its further arguments to [`child_main`].
    /// `deadline` is the time for one write, or for loading one module with what it needs.
    pub fn new(host_root: PathBuf, helper: PathBuf, deadline: Duration) -> Self {
        Self { host_root, helper, deadline, worker: None, abandoned: Vec::new() }
    }

    fn broken(&self, reason: impl Into<String>) -> KernelError {
        KernelError::Child { helper: self.helper.clone(), reason: reason.into() }
    }

    fn spawn(&self) -> Result<Worker, KernelError> {
        let mut child = Command::new(&self.helper)
            .arg(COMMAND)
            .arg(&self.host_root)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| self.broken(error.to_string()))?;
        let input = child.stdin.take().expect("a piped child should have an input");
        let output = child.stdout.take().expect("a piped child should have an output");
        Ok(Worker { child, input, output, said: Vec::new(), identity: None })
    }

    fn ask(&mut self, target: &Path, request: [&OsStr; 3]) -> Result<Answer, KernelError> {
        self.abandoned.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => self.spawn()?,
        };
        let deadline = Instant::now() + self.deadline;
        let request: Vec<u8> =
            request.iter().flat_map(|field| field.as_encoded_bytes().iter().chain(&[0])).copied().collect();
        // A child that has ended does not take it; why, its end says.
        let _ = worker.input.write_all(&request);
        loop {
            match worker.next_line(deadline) {
                Ok(Line::Text(line)) => {
                    if let Some(answer) = Answer::parse(&line) {
                        self.worker = Some(worker);
                        return Ok(answer);
                    }
                    worker.identity = parse_pid(&line).or(worker.identity);
                }
                Ok(Line::End) => {
                    let status = worker.child.wait().map_err(|error| self.broken(error.to_string()))?;
                    return Err(self.broken(format!("no answer, {status}")));
                }
                Ok(Line::Late) => {
                    let (pid, start_time) = worker.identity.unwrap_or_else(|| process(worker.child.id()));
                    let wait_channel = wait_channel(worker.child.id());
                    self.abandoned.push(worker.child);
                    let (path, after) = (target.to_owned(), self.deadline);
                    return Err(KernelError::Hung { path, pid, start_time, wait_channel, after });
                }
                Err(error) => return Err(self.broken(error.to_string())),
            }
        }
    }
}

impl Drop for LinuxKernel {
    fn drop(&mut self) {
        self.rest();
    }
}

enum Line {
    Text(String),
    End,
    Late,
}

impl Worker {
    fn next_line(&mut self, deadline: Instant) -> io::Result<Line> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(end) = self.said.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.said.drain(..=end).collect();
                return Ok(Line::Text(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up: a poll of 0 ms before the deadline would spin.
            let timeout =
                PollTimeout::try_from(left.as_millis() + u128::from(!left.is_zero())).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) => return Ok(Line::Late),
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
                Ok(_) => {}
            }
            match self.output.read(&mut buffer)? {
                0 => return Ok(Line::End),
                count => self.said.extend_from_slice(&buffer[..count]),
            }
        }
    }
}

impl Kernel for LinuxKernel {
    fn writer(&mut self) -> Result<Option<(i32, u64)>, KernelError> {
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => self.spawn()?,
        };
        let deadline = Instant::now() + self.deadline;
        while worker.identity.is_none() {
            match worker.next_line(deadline).map_err(|error| self.broken(error.to_string()))? {
                Line::Text(line) => match Answer::parse(&line) {
                    Some(Answer::Failed(reason)) => return Err(self.broken(reason)),
                    Some(Answer::Done | Answer::Errno(_)) | None => worker.identity = parse_pid(&line),
                },
                Line::End => {
                    let status = worker.child.wait().map_err(|error| self.broken(error.to_string()))?;
                    return Err(self.broken(format!("no answer, {status}")));
                }
                Line::Late => worker.identity = Some(process(worker.child.id())),
            }
        }
        let identity = worker.identity;
        self.worker = Some(worker);
        Ok(identity)
    }

    fn rest(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            // It waits for a request and is in no write, so it ends at once.
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }

    fn write(&mut self, path: &Path, value: &str) -> Result<(), KernelError> {
        match self.ask(path, [WRITE.as_ref(), path.as_os_str(), value.as_ref()])? {
            Answer::Done => Ok(()),
            Answer::Errno(errno) => Err(KernelError::Refused { path: path.to_owned(), errno }),
            Answer::Failed(reason) => Err(self.broken(reason)),
        }
    }

    fn load_module(&mut self, name: &str) -> Result<(), KernelError> {
        let failed = |reason: String| KernelError::Module { name: name.to_owned(), reason };
        match self.ask(Path::new(name), [LOAD.as_ref(), name.as_ref(), "".as_ref()]) {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Errno(errno)) => Err(failed(Errno::from_raw(errno).desc().to_owned())),
            Ok(Answer::Failed(reason)) => Err(failed(reason)),
            // No device waits for it: there is nothing to keep away from.
            Err(KernelError::Hung { pid, wait_channel, after, .. }) => {
                let after = after.as_secs_f32();
                Err(failed(format!("loading has not come back after {after} s: pid {pid} waits in {wait_channel}")))
            }
            Err(error @ (KernelError::Refused { .. } | KernelError::Module { .. } | KernelError::Child { .. })) => {
                Err(error)
            }
        }
    }
}

/// What the child says last.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Done,
    Errno(i32),
    Failed(String),
}

impl Answer {
    fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("done", "") => Some(Self::Done),
            ("errno", number) => number.parse().ok().map(Self::Errno),
            ("failed", reason) => Some(Self::Failed(reason.to_owned())),
            (_, _) => None,
        }
    }
}

fn parse_pid(line: &str) -> Option<(i32, u64)> {
    let (pid, start_time) = line.strip_prefix("pid ")?.split_once(' ')?;
    Some((pid.parse().ok()?, start_time.parse().ok()?))
}

/// Pid and start time of a child as this process's own `/proc` has them.
fn process(pid: u32) -> (i32, u64) {
    let stat = own_proc(pid, "stat").unwrap_or_default();
    let start_time = journal::parse_stat(&stat).map_or(0, |(_, start_time)| start_time);
    (i32::try_from(pid).unwrap_or(i32::MAX), start_time)
}

/// The kernel function that the child sleeps in; needs `CAP_SYS_PTRACE` and a kernel that tells.
fn wait_channel(pid: u32) -> String {
    let name = own_proc(pid, "wchan").unwrap_or_default();
    if name.is_empty() || name == "0" { "an unknown place of the kernel".to_owned() } else { name }
}

fn own_proc(pid: u32, file: &str) -> io::Result<String> {
    host::text(&Root::new("/")?, &PathBuf::from(format!("/proc/{pid}/{file}")))
}

/// The child's side: what the hidden command `kernel-write` runs with its one further argument, the host's root.
/// Returns the exit code, at the end of its input.
pub fn child_main(args: impl IntoIterator<Item = OsString>) -> i32 {
    let mut args = args.into_iter();
    let (Some(root), None) = (args.next(), args.next()) else {
        say("failed usage: kernel-write ROOT, requests on standard input");
        return USAGE;
    };
    let root = match Root::new(root) {
        Ok(root) => root,
        Err(error) => {
            say(&format!("failed {error}"));
            return FAILED;
        }
    };
    say(&introduce(&root));
    let mut input = io::stdin().lock();
    while let Some([verb, target, value]) = request(&mut input) {
        let answer = match verb.as_slice() {
            verb if verb == WRITE.as_bytes() => write_now(&root, Path::new(OsStr::from_bytes(&target)), &value),
            verb if verb == LOAD.as_bytes() => load_now(&root, &String::from_utf8_lossy(&target)),
            verb => Answer::Failed(format!("`{}` is not a request", String::from_utf8_lossy(verb))),
        };
        match answer {
            Answer::Done => say("done"),
            Answer::Errno(number) => say(&format!("errno {number}")),
            Answer::Failed(reason) => say(&format!("failed {}", reason.replace('\n', " "))),
        }
    }
    0
}

/// Three fields; `None` at the end of the input, also in the middle of a request.
fn request(input: &mut impl BufRead) -> Option<[Vec<u8>; 3]> {
    let mut field = || {
        let mut bytes = Vec::new();
        input.read_until(0, &mut bytes).ok()?;
        (bytes.pop()? == 0).then_some(bytes)
    };
    Some([field()?, field()?, field()?])
}

/// Standard output is the wire to the parent. It may be gone, which changes nothing.
fn say(line: &str) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

/// The host's `/proc` counts processes as the host does, also where this one has a pid namespace of its own.
fn introduce(root: &Root) -> String {
    let own = std::process::id();
    let pid = root.link(Path::new("/proc/self")).ok().and_then(|link| link.to_str()?.parse::<u32>().ok());
    let (_, start_time) = process(own);
    format!("pid {} {start_time}", pid.unwrap_or(own))
}

fn write_now(root: &Root, path: &Path, value: &[u8]) -> Answer {
    if path != Path::new(PROBE) && !WRITABLE.iter().any(|dir| path.starts_with(dir)) {
        return Answer::Failed(format!("{} is not a file that is written to here", path.display()));
    }
    let result = root.open(path, OFlag::O_WRONLY).and_then(|fd| File::from(fd).write_all(value));
    match result {
        Ok(()) => Answer::Done,
        Err(error) => error.raw_os_error().map_or_else(|| Answer::Failed(error.to_string()), Answer::Errno),
    }
}

fn load_now(root: &Root, name: &str) -> Answer {
    match module::load(root, name) {
        Ok(()) => Answer::Done,
        Err(
            error @ (ModuleError::Unknown { .. }
            | ModuleError::Forbidden { .. }
            | ModuleError::Read { .. }
            | ModuleError::Refused { .. }),
        ) => Answer::Failed(error.to_string()),
    }
}
