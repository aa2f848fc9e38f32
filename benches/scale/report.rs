//! The table of a run, and the comparison with the one that is kept in this repository.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::meter::Cost;

/// A cost may be this many times the kept one: another machine, another hour.
const TOLERANCE: f64 = 1.5;

/// One run: `nodes` nodes of `gpus` GPUs.
#[derive(Debug, Serialize, Deserialize)]
pub struct Run {
    pub nodes: usize,
    pub gpus: u8,
    /// The same number of label patches from a loop that does nothing else: seconds.
    pub floor_seconds: f64,
    pub costs: Vec<Cost>,
}

/// What is kept of a run: wall time as a multiple of the floor, requests per node, memory.
type Kept = BTreeMap<String, BTreeMap<String, f64>>;

impl Run {
    pub fn print(&self) {
        let Self { nodes, gpus, floor_seconds, costs } = self;
        println!("\n{nodes} nodes, {gpus} GPUs each; {nodes} bare label patches: {floor_seconds:.1} s");
        println!(
            "{:<34} {:>8} {:>7} {:>7} {:>9} {:>9} {:>8} {:>8}",
            "phase", "seconds", "x floor", "CPU s", "sent KiB", "recv KiB", "RSS MiB", "peak MiB"
        );
        for cost in costs {
            let (rss, peak) = (mib(cost.rss_kib), mib(cost.peak_kib));
            println!(
                "{:<34} {:>8.2} {:>7.2} {:>7.2} {:>9} {:>9} {rss:>8.1} {peak:>8.1}",
                cost.phase,
                cost.seconds,
                cost.seconds / floor_seconds,
                cost.cpu_seconds,
                cost.sent_bytes >> 10,
                cost.received_bytes >> 10,
            );
            let requests: Vec<String> = cost.requests.iter().map(|(what, count)| format!("{count} {what}")).collect();
            println!("    {}", if requests.is_empty() { "no request".to_owned() } else { requests.join(", ") });
        }
    }

    pub fn write(&self, path: &Path) {
        let text = serde_json::to_string_pretty(self).expect("a run has a JSON form");
        fs::create_dir_all(path.parent().expect("a file lies in a folder"))
            .and_then(|()| fs::write(path, text))
            .expect("the run should be writable");
        println!("written to {}", path.display());
    }

    fn kept(&self) -> BTreeMap<String, f64> {
        let mut kept = BTreeMap::new();
        let nodes = f64::from(u32::try_from(self.nodes).unwrap_or(u32::MAX));
        for cost in &self.costs {
            let requests = f64::from(u32::try_from(cost.requests.values().sum::<u64>()).unwrap_or(u32::MAX));
            for (what, value) in [
                ("times the floor", cost.seconds / self.floor_seconds),
                ("requests per node", requests / nodes),
                ("CPU seconds per floor second", cost.cpu_seconds / self.floor_seconds),
                ("peak MiB", mib(cost.peak_kib)),
            ] {
                kept.insert(format!("{}: {what}", cost.phase), (value * 100.0).round() / 100.0);
            }
        }
        kept
    }

    /// Each figure that is more than it was; with `keep`, this run is what later ones are compared with.
    pub fn compare(&self, baseline: &Path, keep: bool) -> Vec<String> {
        let text = fs::read_to_string(baseline).unwrap_or_else(|_| "{}".to_owned());
        let mut all: Kept = serde_json::from_str(&text).expect("the baseline should be JSON");
        let size = format!("{} nodes", self.nodes);
        let now = self.kept();
        if keep {
            all.insert(size, now);
            let text = serde_json::to_string_pretty(&all).expect("a baseline has a JSON form");
            fs::write(baseline, text + "\n").expect("the baseline should be writable");
            return Vec::new();
        }
        let Some(then) = all.get(&size) else {
            println!("no baseline for {size}: KEEP=1 makes this run it");
            return Vec::new();
        };
        // What is next to nothing may be twice as much.
        let more = |(what, now): (&String, &f64)| {
            let then = then.get(what)?;
            (*now > then * TOLERANCE && now - then > 0.25).then(|| format!("{what}: {now}, was {then}"))
        };
        now.iter().filter_map(more).collect()
    }
}

fn mib(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}
