//! Writes that have not come back.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::host::{self, Host};

/// A write that has not come back: the process sleeps in the kernel and holds the device's lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pending {
    /// As the host counts.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`, clock ticks since boot: tells the process from a later one with the same pid.
    pub start_time: u64,
    /// The file that is written to.
    pub path: PathBuf,
}

/// A zombie has left the kernel: its write has come back.
pub(super) fn alive(host: &impl Host, pending: &Pending) -> bool {
    let stat = PathBuf::from(format!("/proc/{}/stat", pending.pid));
    match host::optional(host::text(host, &stat)) {
        // A start time of 0 was not known: any process with that pid may be it.
        Ok(text) => text.as_deref().and_then(parse_stat).is_some_and(|(state, start_time)| {
            state != 'Z' && (pending.start_time == 0 || start_time == pending.start_time)
        }),
        // Not known: keep away from the device's lock.
        Err(_) => true,
    }
}

/// State and start time (fields 3 and 22) of `/proc/PID/stat`; the name in field 2 may hold anything, also `)`.
pub(crate) fn parse_stat(text: &str) -> Option<(char, u64)> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods, reason = "lays out what is read")]

    use std::fs;

    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_and_from_its_remains() {
        let dir = tempfile::tempdir().unwrap();
        let host = host::Root::new(dir.path()).unwrap();
        let pending = Pending { pid: 42, start_time: 987, path: "/sys/x".into() };
        let stat = |state: char, start: u64| {
            fs::create_dir_all(dir.path().join("proc/42")).unwrap();
            let text = format!("42 (a) b) {state} 1 42 42 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0\n");
            fs::write(dir.path().join("proc/42/stat"), text).unwrap();
        };
        assert!(!alive(&host, &pending), "gone");
        for (state, start, expected) in [('D', 987, true), ('S', 987, true), ('Z', 987, false), ('D', 988, false)] {
            stat(state, start);
            assert_eq!(alive(&host, &pending), expected, "{state} {start}");
        }
    }
}
