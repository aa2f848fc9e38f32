//! `kubectl gpuvirt status --watch`: the screen, redrawn by the API server's own events.

use std::{
    fmt::Debug,
    io::{self, IsTerminal, Write},
    time::Duration,
};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUTransition, GPUVirtConfig},
};
use futures::{
    StreamExt,
    stream::{BoxStream, select_all},
};
use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kube::{
    Api, Client, Resource,
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt,
        reflector::{Store, store},
        watcher::{self, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

use super::{
    fleet::{CONFIGS, Fleet, GPU_NODES, POLICIES, TRANSITIONS},
    report::{StatusReport, report},
    status::{Error, text},
};
use crate::terminal::{FAINT, WARN, paint, print};

/// Events that come together are drawn together.
const TOGETHER: Duration = Duration::from_millis(100);

type Guarded<K> = DeserializeGuard<K>;
/// A kind has changed, or why its watch has not told anything.
type News = (&'static str, Result<(), String>);

struct World {
    gpu_nodes: Store<Guarded<GPUNode>>,
    transitions: Store<Guarded<GPUTransition>>,
    policies: Store<Guarded<ClusterPolicy>>,
    configs: Store<Guarded<GPUVirtConfig>>,
    nodes: Store<Node>,
    /// Read once: it changes with every renewal.
    silence: Option<String>,
}

fn follow<K>(client: &Client, what: &'static str, config: watcher::Config) -> (Store<K>, BoxStream<'static, News>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (reader, writer) = store::<K>();
    let events = watcher(Api::all(client.clone()), config).default_backoff().reflect(writer);
    let news = events.map(move |event| (what, event.map(drop).map_err(|error| crate::chain(&error))));
    (reader, news.boxed())
}

impl World {
    /// The first answer comes from a plain look, so that what is forbidden is told at once.
    async fn follow(client: &Client) -> Result<(Self, BoxStream<'static, News>), Error> {
        let silence = Fleet::read(client).await?.silence;
        let all = watcher::Config::default;
        let (gpu_nodes, of_gpu_nodes) = follow(client, GPU_NODES, all());
        let (transitions, of_transitions) = follow(client, TRANSITIONS, all());
        let (policies, of_policies) = follow(client, POLICIES, all());
        let (configs, of_configs) = follow(client, CONFIGS, all());
        let present = all().labels(&format!("{}=true", labels::GPU_PRESENT));
        let (nodes, of_nodes) = follow(client, "nodes", present);
        let news = select_all([of_gpu_nodes, of_transitions, of_policies, of_configs, of_nodes]).boxed();
        Ok((Self { gpu_nodes, transitions, policies, configs, nodes, silence }, news))
    }

    fn report(&self) -> StatusReport {
        let mut fleet = Fleet { silence: self.silence.clone(), ..Fleet::default() };
        fleet.gpu_nodes = fleet.decoded(all(&self.gpu_nodes));
        fleet.transitions = fleet.decoded(all(&self.transitions));
        fleet.policies = fleet.decoded(all(&self.policies));
        fleet.config = fleet.decoded(all(&self.configs)).pop();
        fleet.nodes = all(&self.nodes);
        report(&fleet.sorted())
    }
}

fn all<K: Resource<DynamicType = ()> + Clone + 'static>(store: &Store<K>) -> Vec<K> {
    store.state().iter().map(|object| K::clone(object)).collect()
}

/// Until it is interrupted.
pub async fn run(client: &Client) -> Result<(), Error> {
    let (world, mut news) = World::follow(client).await?;
    let mut view = View::open()?;
    let mut trouble: Option<News> = None;
    let mut due: Option<Instant> = None;
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        tokio::select! {
            _ = &mut interrupted => return Ok(()),
            told = news.next() => match told {
                None => return Ok(()),
                Some((what, Err(why))) => {
                    trouble = Some((what, Err(why)));
                    due = due.or_else(|| Some(Instant::now() + TOGETHER));
                }
                Some((what, Ok(()))) => {
                    trouble = trouble.filter(|(silent, _)| *silent != what);
                    due = due.or_else(|| Some(Instant::now() + TOGETHER));
                }
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                due = None;
                view.draw(&world.report(), trouble.as_ref())?;
            }
        }
    }
}

/// Where it is drawn.
enum View {
    /// A screen of its own, which its end gives back.
    Screen,
    /// A pipe or a file: what changed is printed below what was.
    Lines { last: String },
}

const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
/// What an earlier, longer line or screen has left.
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

impl View {
    fn open() -> io::Result<Self> {
        if !io::stdout().is_terminal() {
            return Ok(Self::Lines { last: String::new() });
        }
        control(ENTER)?;
        Ok(Self::Screen)
    }

    fn draw(&mut self, report: &StatusReport, trouble: Option<&News>) -> io::Result<()> {
        let trouble = trouble.and_then(|(what, told)| told.as_ref().err().map(|why| format!("{what}: {why}")));
        match self {
            Self::Screen => {
                let (columns, lines) = terminal_size::terminal_size()
                    .map_or((100, 40), |(width, height)| (usize::from(width.0), usize::from(height.0)));
                let foot = match trouble {
                    None => paint(FAINT, &format!("{:.0} · Ctrl-C ends it", Timestamp::now())),
                    Some(why) => paint(WARN, &format!("not up to date: {why}")),
                };
                let screen = fitted(&text(report, columns), &foot, lines);
                control(HOME)?;
                print(&screen)?;
                control(CLEAR_BELOW)
            }
            Self::Lines { last } => {
                let text = trouble.map_or_else(|| text(report, usize::MAX), |why| format!("not up to date: {why}\n"));
                if *last == text {
                    return Ok(());
                }
                print(&format!("{}{text}\n", paint(FAINT, &format!("{:.0}\n", Timestamp::now()))))?;
                *last = text;
                Ok(())
            }
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        match self {
            // A terminal that has gone needs nothing back.
            Self::Screen => drop(control(LEAVE)),
            Self::Lines { .. } => {}
        }
    }
}

/// Past `anstream`, which takes these for colours.
fn control(code: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(code.as_bytes())?;
    out.flush()
}

/// As many lines as the screen has, the last one being the foot.
fn fitted(text: &str, foot: &str, lines: usize) -> String {
    let room = lines.saturating_sub(2);
    let mut shown: Vec<String> = text.lines().map(str::to_owned).collect();
    if shown.len() > room {
        let left = shown.split_off(room.saturating_sub(1)).len();
        shown.push(paint(FAINT, &format!("… {left} more lines: a higher window, or kubectl gpuvirt status")));
    }
    shown.extend([String::new(), foot.to_owned()]);
    // No line break after the last line: it would move the screen.
    shown.join(&format!("{CLEAR_LINE}\n")) + CLEAR_LINE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted_and_the_foot_stays() {
        let lines = |text: &str| -> Vec<String> {
            let plain = anstream::adapter::strip_str(text).to_string();
            plain.lines().map(str::to_owned).collect()
        };
        assert_eq!(lines(&fitted("a\nb\n", "foot", 4)), ["a", "b", "", "foot"]);
        let cut = lines(&fitted("a\nb\nc\n", "foot", 4));
        assert_eq!((cut.len(), cut[0].as_str(), cut[3].as_str()), (4, "a", "foot"));
        assert!(cut[1].starts_with("… 2 more lines"), "{cut:?}");
    }
}
