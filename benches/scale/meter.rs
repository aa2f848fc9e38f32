//! What a phase costs the operator: time, requests, bytes, processor, memory.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::wire::Bytes;

/// `USER_HZ`, on every architecture.
const TICKS: f64 = 100.0;

/// One line of the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cost {
    pub phase: String,
    pub seconds: f64,
    /// The operator's requests by verb and what they are for, as `patch nodes` and `patch gpunodes/status`.
    pub requests: BTreeMap<String, u64>,
    pub sent_bytes: u64,
    pub received_bytes: u64,
    pub cpu_seconds: f64,
    pub rss_kib: u64,
    /// Highest in this phase.
    pub peak_kib: u64,
}

/// Reads the operator's counters.
pub struct Meter {
    pub pid: u32,
    audit: PathBuf,
    bytes: Arc<Bytes>,
}

/// The counters as a phase begins.
struct Start {
    at: Instant,
    audit: u64,
    bytes: (u64, u64),
    cpu: f64,
}

/// The part of an audit event that is looked at.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Audited {
    stage: String,
    verb: String,
    object_ref: Option<Object>,
}

#[derive(Deserialize)]
struct Object {
    resource: String,
    subresource: Option<String>,
}

impl Meter {
    pub fn new(pid: u32, audit: PathBuf, bytes: Arc<Bytes>) -> Self {
        Self { pid, audit, bytes }
    }

    /// What the phase took of the operator.
    pub async fn phase(&self, name: &str, run: impl AsyncFnOnce()) -> Cost {
        // The high-water mark begins anew (proc(5), clear_refs).
        fs::write(format!("/proc/{}/clear_refs", self.pid), "5").expect("the operator should run");
        let start = self.start();
        run().await;
        self.cost(name, &start, start.at.elapsed())
    }

    fn start(&self) -> Start {
        let audit = fs::metadata(&self.audit).map_or(0, |file| file.len());
        Start { at: Instant::now(), audit, bytes: self.bytes.now(), cpu: self.cpu() }
    }

    fn cost(&self, name: &str, start: &Start, took: Duration) -> Cost {
        let (sent, received) = self.bytes.now();
        Cost {
            phase: name.to_owned(),
            seconds: took.as_secs_f64(),
            requests: self.requests(start.audit),
            sent_bytes: sent - start.bytes.0,
            received_bytes: received - start.bytes.1,
            cpu_seconds: self.cpu() - start.cpu,
            rss_kib: self.memory("VmRSS:"),
            peak_kib: self.memory("VmHWM:"),
        }
    }

    /// Whole lines of the log since the offset. A watch counts when it begins, everything else when it is answered.
    fn requests(&self, since: u64) -> BTreeMap<String, u64> {
        let mut text = String::new();
        let mut file = File::open(&self.audit).expect("the API server should log");
        file.seek(SeekFrom::Start(since))
            .and_then(|_| file.read_to_string(&mut text))
            .expect("the log should be readable");
        let mut counts = BTreeMap::new();
        for event in text.lines().filter_map(|line| serde_json::from_str::<Audited>(line).ok()) {
            if event.stage != if event.verb == "watch" { "ResponseStarted" } else { "ResponseComplete" } {
                continue;
            }
            let object = match event.object_ref {
                Some(Object { resource, subresource: Some(part) }) => format!("{resource}/{part}"),
                Some(Object { resource, subresource: None }) => resource,
                None => "other".to_owned(),
            };
            *counts.entry(format!("{} {object}", event.verb)).or_default() += 1;
        }
        counts
    }

    fn cpu(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).expect("the operator should run");
        let (_, after) = stat.rsplit_once(')').expect("a command's name should end");
        // utime and stime are the 14th and 15th of proc_pid_stat(5); the second is the command.
        let ticks = after.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok());
        ticks.sum::<f64>() / TICKS
    }

    fn memory(&self, line: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).expect("the operator should run");
        let line = status.lines().find_map(|text| text.strip_prefix(line)).expect("the kernel should tell of memory");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}
