//! `kubectl gpuvirt doctor`: whether a cluster and its KubeVirt are fit for GPUs, also before gpuvirt is installed.
//!
//! `facts` reads, the checks think. What cannot be read is a check that was not made, and says so.

mod cluster;
mod facts;
mod kubevirt;
mod nodes;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use anstyle::Style;
use serde::Serialize;

pub use self::facts::Facts;
use super::{Target, status::Error};
use crate::{
    answer::Output,
    terminal::{BAD, FAINT, GOOD, STRONG, WARN, paint, wrapped},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub errors: usize,
    pub warnings: usize,
    pub checks: Vec<Check>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// Stays the same from version to version.
    pub check: &'static str,
    #[serde(flatten)]
    pub verdict: Verdict,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Verdict {
    /// With what was seen.
    Passed {
        evidence: String,
    },
    Found {
        findings: Vec<Finding>,
    },
    /// It could not be made, or there is nothing to check.
    Skipped {
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    pub severity: Severity,
    /// As in `node gpu-1`.
    pub object: String,
    /// What was seen there.
    pub evidence: String,
    /// What to do.
    pub fix: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Severity {
    /// GPUs will not work like this.
    Error,
    /// They work, and something will go wrong, or wait.
    Warning,
    /// It could be better.
    Advice,
}

impl Finding {
    fn new(severity: Severity, object: impl Into<String>, evidence: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity, object: object.into(), evidence: evidence.into(), fix: fix.into() }
    }
}

impl Verdict {
    fn passed(evidence: impl Into<String>) -> Self {
        Self::Passed { evidence: evidence.into() }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self::Skipped { why: why.into() }
    }

    /// Passed with this evidence if nothing was found.
    fn of(mut findings: Vec<Finding>, evidence: impl Into<String>) -> Self {
        findings.sort_by_key(|finding| finding.severity);
        if findings.is_empty() { Self::passed(evidence) } else { Self::Found { findings } }
    }

    fn one(finding: Finding) -> Self {
        Self::Found { findings: vec![finding] }
    }

    fn findings(&self) -> &[Finding] {
        match self {
            Self::Found { findings } => findings,
            Self::Passed { .. } | Self::Skipped { .. } => &[],
        }
    }
}

type Test = fn(&Facts) -> Verdict;

/// In the order in which one would look: what everything else needs comes first.
const CHECKS: [(&str, Test); 21] = [
    ("kubernetes", cluster::kubernetes),
    ("installation", cluster::installation),
    ("operator", cluster::operator),
    ("cluster-policy", cluster::policy),
    ("sandbox-workloads", cluster::sandbox_workloads),
    ("pod-security", cluster::pod_security),
    ("feature-discovery", cluster::feature_discovery),
    ("nvidia-operator", cluster::nvidia_operator),
    ("device-plugins", cluster::device_plugins),
    ("kubevirt", kubevirt::version),
    ("kubevirt-permitted", kubevirt::permitted),
    ("kubevirt-mediated", kubevirt::mediated),
    ("kubevirt-gates", kubevirt::gates),
    ("eviction-strategy", kubevirt::eviction),
    ("vm-memory", kubevirt::memory),
    ("iommu", nodes::iommu),
    ("iommu-groups", nodes::groups),
    ("kernel-modules", nodes::modules),
    ("gpu-health", nodes::health),
    ("nodes", nodes::ready),
    ("advertised", nodes::advertised),
];

pub fn report(facts: &Facts) -> Report {
    let checks: Vec<Check> = CHECKS.iter().map(|(check, test)| Check { check, verdict: test(facts) }).collect();
    let count = |severity: Severity| {
        let all = checks.iter().flat_map(|check| check.verdict.findings());
        all.filter(|finding| finding.severity == severity).count()
    };
    Report { errors: count(Severity::Error), warnings: count(Severity::Warning), checks }
}

/// Whether nothing is wrong. Warnings and advice do not count.
pub async fn run(target: &Target, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    let report = report(&Facts::read(&client).await);
    output.print(&report, text)?;
    Ok(report.errors == 0)
}

const NAME: usize = 20;
const WORDS: usize = 92;

pub fn text(report: &Report) -> String {
    let mut text = String::new();
    for Check { check, verdict } in &report.checks {
        match verdict {
            Verdict::Passed { evidence } => line(&mut text, check, GOOD, "ok", evidence),
            Verdict::Skipped { why } => line(&mut text, check, FAINT, "skipped", why),
            Verdict::Found { findings } => {
                for finding in findings {
                    let (style, word) = match finding.severity {
                        Severity::Error => (BAD.bold(), "ERROR"),
                        Severity::Warning => (WARN, "warning"),
                        Severity::Advice => (STRONG, "advice"),
                    };
                    line(&mut text, check, style, word, &format!("{}: {}", finding.object, finding.evidence));
                    let fix = wrapped(&finding.fix, NAME + 9, WORDS);
                    let _ = writeln!(text, "{}{} {}", " ".repeat(NAME + 9), paint(GOOD, "→"), fix.trim_start());
                }
            }
        }
    }
    let passed = report.checks.iter().filter(|check| matches!(check.verdict, Verdict::Passed { .. })).count();
    let skipped = report.checks.iter().filter(|check| matches!(check.verdict, Verdict::Skipped { .. })).count();
    let errors = paint(if report.errors == 0 { GOOD } else { BAD.bold() }, &counted(report.errors, "error"));
    let warnings = counted(report.warnings, "warning");
    let _ = writeln!(text, "\n{errors}, {warnings}; {passed} of {} checks passed, {skipped} skipped", CHECKS.len());
    text
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn line(text: &mut String, check: &str, style: Style, word: &str, said: &str) {
    let said = wrapped(said, NAME + 9, WORDS);
    let _ = writeln!(text, "{check:<NAME$}{} {}", paint(style, &format!("{word:<8}")), said.trim_start());
}
