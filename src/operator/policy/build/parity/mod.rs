//! Parity: our operands against the peer's recorded ones, operand by operand and field by field.
//!
//! What differs on purpose is a line in [`intended`] with its reason; a difference without a line fails, and so does a
//! line without a difference.

mod condense;
mod intended;
mod policies;

pub(super) use self::policies::merge;

use std::collections::{BTreeMap, BTreeSet};

use crds::v1alpha1::GPUVirtConfigSpec;
use kube::ResourceExt;
use serde_json::Value;

use self::{
    condense::{Fields, condense, fields},
    intended::{DONE_BY_THE_AGENT, INTENDED, OURS},
};
use super::{build, tests::installation};
use crate::operator::policy::validate::{Facts, tests::of_systems, validate};

fn recorded(file: &str) -> BTreeMap<String, Fields> {
    let path = format!("{}/tests/fixtures/peer-operands/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let operands: BTreeMap<String, Value> = serde_json::from_str(&text).expect("a recording should be JSON");
    operands.iter().map(|(name, operand)| (name.clone(), fields(operand))).collect()
}

fn ours(patch: &Value) -> BTreeMap<String, Fields> {
    let facts = Facts {
        runtimes: ["containerd://2.1.0".to_owned()].into(),
        config_maps: [("time-slicing".to_owned(), ["any".to_owned()].into())].into(),
        service_monitors: true,
        ..of_systems(&["ubuntu24.04"])
    };
    let validated = validate(&policies::policy(patch), &GPUVirtConfigSpec::default(), &facts);
    let operands = build(&validated.settings, &installation());
    operands.daemon_sets.iter().map(|set| (set.name_any(), fields(&condense(set)))).collect()
}

/// `*` stands for any text.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text
            .strip_prefix(head)
            .is_some_and(|rest| (0..=rest.len()).any(|at| rest.is_char_boundary(at) && matches(tail, &rest[at..]))),
    }
}

/// Every field that differs: path, and both values.
fn differences(theirs: &Fields, ours: &Fields) -> Vec<(String, String)> {
    let paths: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    let side = |fields: &Fields, path: &String| fields.get(path).cloned().unwrap_or_else(|| "nothing".to_owned());
    paths
        .into_iter()
        .filter(|path| theirs.get(*path) != ours.get(*path))
        .map(|path| (path.clone(), format!("theirs {}, ours {}", side(theirs, path), side(ours, path))))
        .collect()
}

#[test]
fn our_operands_differ_from_the_peers_only_where_the_table_says_so() {
    let mut used = vec![false; INTENDED.len()];
    let mut unexplained = Vec::new();
    for (file, patch) in policies::patches() {
        let ours = ours(&patch);
        for (operand, theirs) in &recorded(file) {
            let Some(ours) = ours.get(operand) else { continue };
            for (path, values) in differences(theirs, ours) {
                let mut explained = false;
                for (row, used) in INTENDED.iter().zip(&mut used) {
                    if matches(row.operand, operand) && matches(row.path, &path) {
                        explained = true;
                        *used = true;
                    }
                }
                if !explained {
                    unexplained.push(format!("{file} {operand} {path}: {values}"));
                }
            }
        }
    }
    assert!(unexplained.is_empty(), "{} differences are in no row:\n{}", unexplained.len(), unexplained.join("\n"));
    let unused: Vec<_> =
        INTENDED.iter().zip(used).filter(|(_, used)| !used).map(|(row, _)| (row.operand, row.path)).collect();
    assert!(unused.is_empty(), "rows that explain nothing: {unused:#?}");
}

#[test]
fn every_operand_of_the_peer_is_built_or_done_by_the_agent_and_none_is_ours_alone() {
    for (file, patch) in policies::patches() {
        let (theirs, ours) = (recorded(file), ours(&patch));
        for operand in theirs.keys().filter(|operand| !ours.contains_key(*operand)) {
            assert!(
                DONE_BY_THE_AGENT.contains(&operand.as_str()),
                "{file}: {operand} is not built, and no row says so"
            );
        }
        for operand in ours.keys().filter(|operand| !theirs.contains_key(*operand)) {
            assert!(OURS.contains(&operand.as_str()), "{file}: {operand} is ours alone, and no row says so");
        }
    }
}
