//! `kubectl gpuvirt must-gather`: one archive for a report on a fault.
//!
//! ```text
//! API server ─▶ objects, logs, events ─┐
//! agents' pods ─▶ `gpuvirt gather` ────┼─▶ redact ─▶ archive
//! our own view ─▶ status, doctor ──────┘
//! ```
//!
//! Everything that goes in passes [`redact`]. What could not be read is a line in the archive, not the end.

mod archive;
mod hosts;
mod objects;
mod redact;
#[cfg(test)]
mod tests;

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, BufWriter, Write},
    path::PathBuf,
};

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use self::{archive::Archive, redact::Redactor};
use super::{Target, TargetError, doctor, fleet::Fleet, report::report, status};
use crate::answer::{self, Output};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("{file} cannot be written: name another one with --dest")]
    File { file: PathBuf, source: io::Error },
    #[error(transparent)]
    Form(#[from] answer::Error),
}

/// What is to be gathered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Unset: a name with the time, here.
    pub dest: Option<PathBuf>,
    /// Whose hosts and agents; empty: all.
    pub nodes: Vec<String>,
    /// Whether agents are asked.
    pub hosts: bool,
    /// Of gpuvirt. Unset: as its policy says.
    pub namespace: Option<String>,
}

impl Wish {
    fn wants(&self, node: &str) -> bool {
        self.nodes.is_empty() || self.nodes.iter().any(|name| name == node)
    }
}

/// What was gathered.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gathered {
    file: PathBuf,
    files: usize,
    bytes: u64,
    /// What could not be read, and why.
    missing: Vec<String>,
}

const README: &str = "\
What kubectl gpuvirt must-gather has written, for a report on a fault.

status.txt, doctor.txt   what kubectl gpuvirt status and doctor say
objects/                 our objects, and KubeVirt's, as they are in the cluster
kubevirt/                what gpuvirt would change in KubeVirt's configuration
nodes/NODE/              the Node; host.json: GPUs, groups, drivers, kernel log as its agent sees them; advertised.yaml:
                         what is offered, and what the kubelet has
namespace/               workloads, pods, events of gpuvirt's namespace, and logs of its pods
missing.txt              what could not be read, and why

Objects of kind Secret are never read. Passwords, tokens, keys, mail addresses and users in URLs are <redacted>; an address of
the network is <ip-N>, the same N everywhere; of users of GPUs there are namespaces and names, and nothing that is in them.
Names of nodes, namespaces, pods and VMs are there: read it before you hand it on.
";

/// Collects files; what cannot be had is noted.
pub(super) struct Sink<W: Write> {
    archive: Archive<W>,
    redactor: Redactor,
    missing: Vec<String>,
}

impl<W: Write> Sink<W> {
    fn new(out: W, root: &str, time: i64) -> Self {
        Self { archive: Archive::new(out, root, time), redactor: Redactor::default(), missing: Vec::new() }
    }

    fn text(&mut self, path: &str, text: &str) -> io::Result<()> {
        let text = self.redactor.text(text);
        self.archive.add(path, &text)
    }

    fn object(&mut self, path: &str, object: &impl Serialize) -> io::Result<()> {
        let mut value = serde_json::to_value(object).unwrap_or_else(|error| Value::String(error.to_string()));
        self.redactor.object(&mut value);
        match answer::yaml(&value) {
            Ok(yaml) => self.archive.add(path, &yaml),
            Err(error) => {
                self.missing(path, &crate::chain(&error));
                Ok(())
            }
        }
    }

    fn missing(&mut self, what: &str, why: &str) {
        let line = self.redactor.text(&format!("{what}: {why}"));
        self.missing.push(line);
    }
}

pub async fn run(target: &Target, wish: Wish, output: Output) -> Result<(), Error> {
    let (client, _) = target.connect().await?;
    let now = Timestamp::now();
    let root = format!("gpuvirt-must-gather-{}", now.strftime("%Y%m%d-%H%M%S"));
    let file = wish.dest.clone().unwrap_or_else(|| PathBuf::from(format!("{root}.tar.gz")));
    let failed = |source| Error::File { file: file.clone(), source };
    let out = BufWriter::new(private(&file).map_err(failed)?);
    let mut sink = Sink::new(out, &root, now.as_second());
    let gathered = fill(&client, &wish, &mut sink).await;
    let files = gathered.and_then(|()| {
        let missing = sink.missing.join("\n");
        sink.archive.add("missing.txt", &missing)?;
        Ok(sink.archive.files)
    });
    let files = files.map_err(failed)?;
    let Sink { archive, missing, .. } = sink;
    archive.finish().and_then(|mut out| out.flush()).map_err(failed)?;
    let bytes = std::fs::metadata(&file).map_err(failed)?.len();
    let gathered = Gathered { file: file.clone(), files, bytes, missing };
    Ok(output.print(&gathered, text)?)
}

/// Readable by its owner alone, where files know such a thing. One that is there already stays.
fn private(path: &PathBuf) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

async fn fill<W: Write>(client: &kube::Client, wish: &Wish, sink: &mut Sink<W>) -> io::Result<()> {
    sink.archive.add("README.txt", README)?;
    sink.text("version.txt", &format!("kubectl gpuvirt {}\n", env!("CARGO_PKG_VERSION")))?;
    let fleet = match Fleet::read(client).await {
        Ok(fleet) => {
            let report = report(&fleet);
            sink.text("status.txt", &plain(&status::text(&report, 120)))?;
            sink.object("status.yaml", &report)?;
            fleet
        }
        Err(error) => {
            sink.missing("status.txt", &crate::chain(&error));
            Fleet::default()
        }
    };
    let facts = doctor::Facts::read(client).await;
    sink.text("doctor.txt", &plain(&doctor::text(&doctor::report(&facts))))?;
    if let Ok(version) = &facts.kubernetes {
        sink.object("kubernetes.yaml", version)?;
    }
    let namespace = wish.namespace.clone().unwrap_or_else(|| fleet.namespace());
    objects::ours(client, sink).await?;
    objects::kubevirt(client, &fleet, sink).await?;
    objects::nodes(&fleet, &facts, wish, sink)?;
    let agents = objects::namespace(client, &namespace, wish, sink).await?;
    if wish.hosts {
        hosts::ask(client, &namespace, agents, sink).await?;
    }
    Ok(())
}

fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

fn text(gathered: &Gathered) -> String {
    let Gathered { file, files, bytes, missing } = gathered;
    let mut text = format!("{}: {files} files, {} KiB\n", file.display(), bytes.div_ceil(1024));
    if !missing.is_empty() {
        let _ = writeln!(text, "{} things could not be read; missing.txt in it says which and why", missing.len());
    }
    text.push_str(
        "Secrets and addresses are taken out; names of nodes, pods and VMs are in it. Read it before you hand it on.\n",
    );
    text
}
