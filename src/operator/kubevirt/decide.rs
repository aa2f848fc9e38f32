//! What to write into `permittedHostDevices`, and what to say of it. Pure.

use std::collections::BTreeSet;

use crds::{conditions::Verdict, labels, v1alpha1::KubeVirtMode};
use serde_json::{Value, json};

use super::{
    WIRED,
    dialect::{Kind, List, Place},
    offers::Offers,
    permitted::{Device, Entry, Permitted},
    users::Use,
};

pub struct Decision {
    pub change: Option<Change>,
    pub verdict: Verdict,
}

/// One write. The patch is a merge patch of the object.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub permitted: Vec<Device>,
    pub withdrawn: Vec<Device>,
    pub patch: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub reason: &'static str,
    pub message: String,
}

/// Reason while machines would lose a device by the first entry.
pub const WOULD_BREAK: &str = "PermittingWouldBreakVMs";

/// Whether [`serve`] has to know which devices virtual machines use.
pub fn asks_for_users(permitted: &Permitted, offers: &Offers) -> bool {
    permitted.unset && !offers.offered.is_empty()
}

/// `users` counts only where [`asks_for_users`] says so.
pub fn serve(permitted: &Permitted, offers: &Offers, users: &[Use], mode: KubeVirtMode) -> Decision {
    let gone: Vec<Device> = ours(permitted).filter(|device| !stays(device, offers)).collect();
    let mut list = without(&permitted.entries, &gone);
    let mut marks: BTreeSet<Device> = ours(permitted).filter(|device| stays(device, offers)).collect();
    let mut problems = Vec::new();
    let mut added = Vec::new();
    for device in wanted(permitted, offers, users) {
        match verdict_of(&device, permitted, &list, &marks) {
            Entering::Enter => {
                list.push(made(&device, &permitted.place));
                marks.insert(device.clone());
                added.push(device);
            }
            Entering::Done => {}
            Entering::Refused(problem) => problems.push(problem),
        }
    }
    // The first entry makes KubeVirt refuse every device that has none.
    let broken: Vec<&Use> = match permitted.unset && !added.is_empty() {
        true => users.iter().filter(|user| added.iter().all(|device| device.resource != user.device)).collect(),
        false => Vec::new(),
    };
    if !broken.is_empty() {
        problems.insert(0, would_break(&broken, &permitted.place));
        added.clear();
        marks.clear();
        list.clear();
    }
    problems.extend(permitted.misplaced.iter().map(|misplaced| Problem {
        reason: "Misplaced",
        message: format!(
            "{} has {}, which nobody reads there: move it to {}",
            permitted.place, misplaced.at, misplaced.belongs
        ),
    }));
    let writes = match mode {
        KubeVirtMode::Manage => true,
        KubeVirtMode::Report | KubeVirtMode::Off => false,
    };
    if !writes {
        problems.extend(added.iter().map(|device| to_add(device, &permitted.place)));
    }
    let change = change(permitted, &list, &marks, added, gone).filter(|_| writes);
    Decision { verdict: verdict(&problems, permitted, offers), change }
}

/// Takes every entry of ours away.
pub fn withdraw(permitted: &Permitted) -> Decision {
    let gone: Vec<Device> = ours(permitted).collect();
    let change = change(permitted, &without(&permitted.entries, &gone), &BTreeSet::new(), Vec::new(), gone);
    Decision { verdict: Verdict::yes(WIRED, "Withdrawn", format!("{} has no entry of ours", permitted.place)), change }
}

/// Marked, and still as we wrote it: what somebody has changed since is theirs.
fn ours(permitted: &Permitted) -> impl Iterator<Item = Device> {
    let untouched = |device: &&Device| {
        let entry = device.entry(permitted.place.dialect);
        permitted.entries.iter().any(|live| live.device == **device && live.raw == entry)
    };
    permitted.marks.iter().filter(untouched).cloned()
}

/// An entry stays until the GPUNodes prove that nobody can offer it any more, or that it has another name by now.
fn stays(device: &Device, offers: &Offers) -> bool {
    let renamed = offers.offered.iter().any(|other| other.selector == device.selector);
    let possible = offers.known.contains(device) || (offers.could_have(&device.selector) && !renamed);
    offers.offered.contains(device) || !offers.complete || possible
}

fn wanted(permitted: &Permitted, offers: &Offers, users: &[Use]) -> BTreeSet<Device> {
    let mut wanted = offers.offered.clone();
    if asks_for_users(permitted, offers) {
        let used = offers.known.iter().filter(|device| users.iter().any(|user| user.device == device.resource));
        wanted.extend(used.cloned());
    }
    wanted
}

/// The last one of equals is ours: entries are appended.
fn without(entries: &[Entry], gone: &[Device]) -> Vec<Entry> {
    let mut left = entries.to_vec();
    for device in gone {
        if let Some(at) = left.iter().rposition(|entry| entry.device == *device) {
            left.remove(at);
        }
    }
    left
}

fn made(device: &Device, place: &Place) -> Entry {
    Entry { device: device.clone(), external: true, disabled: false, raw: device.entry(place.dialect) }
}

enum Entering {
    Enter,
    /// It is permitted already, by whoever.
    Done,
    Refused(Problem),
}

fn verdict_of(device: &Device, permitted: &Permitted, list: &[Entry], marks: &BTreeSet<Device>) -> Entering {
    let place = &permitted.place;
    let Device { selector, resource } = device;
    let refused = |reason, message| Entering::Refused(Problem { reason, message });
    if reserved(resource) {
        let message = format!(
            "{resource} is a name of container GPUs: give {selector} another one in GPUVirtConfig spec.resourceAliases"
        );
        return refused("ReservedName", message);
    }
    let internal = list.iter().filter(|entry| !entry.external && !entry.disabled && entry.device.resource == *resource);
    let internal = internal.map(|entry| (place.list(entry.device.selector.list), &entry.raw));
    let siblings = permitted.others.iter().filter(|other| !other.external && other.resource == *resource);
    let siblings = siblings.map(|other| (format!("{}.{}", place.dialect.path().join("."), other.list), &other.raw));
    if let Some((at, entry)) = internal.chain(siblings).next() {
        let message = format!(
            "{place} has {entry} in {at} without externalResourceProvider, so KubeVirt's own device plugin registers {resource} as well: add externalResourceProvider: true to it"
        );
        return refused("MissingExternalResourceProvider", message);
    }
    let same: Vec<&Entry> = list.iter().filter(|entry| entry.device.selector == *selector).collect();
    if same.iter().any(|entry| entry.device == *device && entry.counts()) {
        return Entering::Done;
    }
    if let Some(entry) = same.iter().find(|entry| entry.disabled) {
        let message = format!(
            "{place} has {} in {}, switched off: remove disabled from it to permit {resource}",
            entry.raw,
            place.list(selector.list)
        );
        return refused("EntryDisabled", message);
    }
    let (own, foreign): (Vec<&Entry>, Vec<&Entry>) = same.into_iter().partition(|entry| marks.contains(&entry.device));
    if let Some(entry) = foreign.first() {
        let message = format!(
            "{place} has {} in {}, and nodes offer {selector} as {resource}: change its resourceName to {resource} with externalResourceProvider: true, or give {selector} the other name in GPUVirtConfig spec.resourceAliases",
            entry.raw,
            place.list(selector.list)
        );
        return refused("SelectorHasAnotherName", message);
    }
    match (own.first(), place.dialect.kind()) {
        (Some(entry), Kind::HyperConverged) => refused(
            "NotExpressible",
            format!(
                "nodes offer {selector} as {} and as {resource}, and {place} can have one entry for {selector}: give it one name in GPUVirtConfig spec.resourceAliases",
                entry.device.resource
            ),
        ),
        (None, Kind::HyperConverged) | (_, Kind::KubeVirt) => Entering::Enter,
    }
}

/// Names of the container stack's resources.
fn reserved(resource: &str) -> bool {
    let name = resource.split_once('/').map_or(resource, |(_, name)| name);
    name == "gpu" || name.starts_with("mig-") || resource.ends_with(".shared")
}

fn would_break(broken: &[&Use], place: &Place) -> Problem {
    let named: Vec<String> = broken.iter().map(|user| format!("{} uses {}", user.by, user.device)).collect();
    let devices: BTreeSet<&str> = broken.iter().map(|user| user.device.as_str()).collect();
    let devices: Vec<&str> = devices.into_iter().collect();
    let field = place.dialect.path().join(".");
    Problem {
        reason: WOULD_BREAK,
        message: format!(
            "{field} of {place} is unset, so every device passes; the first entry would make KubeVirt refuse what has none: {}. Permit {} there by hand, and ours follow",
            named.join(", "),
            devices.join(", ")
        ),
    }
}

fn to_add(device: &Device, place: &Place) -> Problem {
    let entry = device.entry(place.dialect);
    Problem {
        reason: "NotPermitted",
        message: format!(
            "{place} does not permit {}: add {entry} to {}",
            device.resource,
            place.list(device.selector.list)
        ),
    }
}

fn verdict(problems: &[Problem], permitted: &Permitted, offers: &Offers) -> Verdict {
    let place = &permitted.place;
    match problems {
        [] if offers.offered.is_empty() => {
            Verdict::yes(WIRED, "NothingToPermit", format!("no node offers a GPU to VMs; {place} is watched"))
        }
        [] => {
            let resources: BTreeSet<&str> = offers.offered.iter().map(|device| device.resource.as_str()).collect();
            let resources: Vec<&str> = resources.into_iter().collect();
            Verdict::yes(WIRED, "Permitted", format!("{place} permits {}", resources.join(", ")))
        }
        [first, ..] => {
            let all: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
            Verdict::no(WIRED, first.reason, all.join("; "))
        }
    }
}

fn change(
    permitted: &Permitted,
    list: &[Entry],
    marks: &BTreeSet<Device>,
    added: Vec<Device>,
    gone: Vec<Device>,
) -> Option<Change> {
    let was_unset = !marks.is_empty() && (permitted.was_unset || permitted.unset);
    let same_list = list == permitted.entries;
    if same_list && *marks == permitted.marks && was_unset == permitted.was_unset {
        return None;
    }
    let marks: Vec<String> = marks.iter().map(ToString::to_string).collect();
    let mut patch = json!({"metadata": {"annotations": {
        labels::PERMITTED_HOST_DEVICES: (!marks.is_empty()).then(|| marks.join(",")),
        labels::PERMITTED_WAS_UNSET: was_unset.then_some("true"),
    }}});
    if !same_list {
        let of = |entries: &[Entry], list: List| -> Vec<Value> {
            let of = entries.iter().filter(|entry| entry.device.selector.list == list);
            of.map(|entry| entry.raw.clone()).collect()
        };
        let changed = List::ALL.into_iter().filter(|kind| of(list, *kind) != of(&permitted.entries, *kind));
        let lists = changed.map(|kind| {
            let entries = of(list, kind);
            (kind.key().to_owned(), if entries.is_empty() { Value::Null } else { Value::Array(entries) })
        });
        // Left empty, the field would refuse every device, which nobody has asked for.
        let field = match list.is_empty() && permitted.was_unset && permitted.others.is_empty() {
            true => Value::Null,
            false => Value::Object(lists.collect()),
        };
        let nested = permitted.place.dialect.path().iter().rev().fold(field, |inner, key| json!({*key: inner}));
        patch
            .as_object_mut()
            .expect("a patch should be an object")
            .extend(nested.as_object().cloned().into_iter().flatten());
    }
    Some(Change { permitted: added, withdrawn: gone, patch })
}
