//! The pages under docs/: what they show is so, what is made from code is current, and the troubleshooting page knows every
//! reason that a person can meet.
//!
//! Reasons are CamelCase words in the code. So each such word is on the page, or in the list of words that are something else;
//! a new one that is in neither fails here.

#[path = "docs/blocks.rs"]
mod blocks;
#[path = "docs/reference.rs"]
mod reference;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

const PAGE: &str = "docs/troubleshooting.md";

/// Kinds, fields of the Kubernetes API, words of other programs, columns of `kubectl get`, names in derives.
const NO_REASONS: &[&str] = &[
    "Age",
    "Agent",
    "Bearer",
    "Certificates",
    "D3hot",
    "Normal",
    "Operator",
    "Warning",
    "VMs",
    "ResourceClaim",
    "Peer",
    "DaemonSet",
    "Census",
    "Bidirectional",
    "Cluster",
    "ClusterFirstWithHostNet",
    "ClusterPolicy",
    "ClusterPolicyStatus",
    "ClusterVersion",
    "Completed",
    "D3cold",
    "Default",
    "Deployed",
    "Directory",
    "DirectoryOrCreate",
    "DisableMDEVConfiguration",
    "Driver",
    "Established",
    "Exists",
    "ExplainGPU",
    "FallbackToLogsOnError",
    "False",
    "File",
    "Free",
    "From",
    "GPUsHealthy",
    "GPUNode",
    "GPUNodeStatus",
    "GPUTransition",
    "GPUTransitionStatus",
    "GPUVirtConfig",
    "GPUVirtConfigStatus",
    "GPUs",
    "GenuineIntel",
    "Helm",
    "HostDevices",
    "HostToContainer",
    "HyperConverged",
    "IfNotPresent",
    "ImageStream",
    "In",
    "KubeVirt",
    "Kubernetes",
    "LiveMigrate",
    "Logs",
    "MachineConfig",
    "Manage",
    "Message",
    "Mode",
    "NVIDIADriver",
    "NVIDIADriverStatus",
    "Never",
    "NoSchedule",
    "Node",
    "NotIn",
    "NotValidated",
    "OnDelete",
    "PartialEq",
    "Phase",
    "Pod",
    "PodsAndVMs",
    "Proxy",
    "Reason",
    "Reconcile",
    "RollingUpdate",
    "Running",
    "Scheduled",
    "Secret",
    "Self",
    "ServiceMonitor",
    "SoleManager",
    "Status",
    "Succeeded",
    "Synchronized",
    "To",
    "True",
    "Validated",
    "VirtualMachine",
    "VirtualMachineInstance",
    "WorkloadMode",
    "Xorg",
    "Xwayland",
];

/// Where reasons come from. What builds operands speaks Kubernetes' words, and the fields of their pods are no reasons; nor
/// are the headings of a plan.
const ROOMS: &[&str] = &["src", "vfio/src", "crds/src"];
const OTHER_WORDS: &[&str] =
    &["src/operator/policy/build", "src/takeover", "src/agent/device_plugin/proto", "vfio/src/testing"];

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
        let path = entry.expect("a folder entry should be readable").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let other = OTHER_WORDS.iter().any(|other| path.starts_with(other));
        match path.is_dir() {
            true if name != "tests" && !other => files(&path, found),
            false if path.extension().is_some_and(|end| end == "rs") && !name.ends_with("tests.rs") && !other => {
                found.push(path);
            }
            true | false => {}
        }
    }
}

fn camel_case(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_alphanumeric())
        && word.contains(|c: char| c.is_ascii_lowercase())
}

/// Word → the first place that says it.
fn words() -> BTreeMap<String, String> {
    let mut sources = Vec::new();
    for room in ROOMS {
        files(Path::new(room), &mut sources);
    }
    let mut words = BTreeMap::new();
    for path in sources {
        let text = fs::read_to_string(&path).expect("a source file should be readable");
        let code = text.lines().take_while(|line| !line.starts_with("mod tests {")).enumerate();
        for (number, line) in code {
            let line = line.split("//").next().unwrap_or_default();
            // Every second piece is inside quotes.
            for word in line.split('"').skip(1).step_by(2).filter(|word| camel_case(word)) {
                let place = || format!("{}:{}", path.display(), number + 1);
                words.entry(word.to_owned()).or_insert_with(place);
            }
        }
    }
    words
}

#[test]
fn every_reason_has_an_entry_on_the_troubleshooting_page() {
    let page = fs::read_to_string(PAGE).expect("the page");
    let words = words();
    assert!(words.contains_key("IommuOff") && words.contains_key("GPUNameUnknown"), "reasons are found: {words:?}");
    let bare: Vec<String> = words
        .iter()
        .filter(|(word, _)| !page.contains(&format!("`{word}`")) && !NO_REASONS.contains(&word.as_str()))
        .map(|(word, place)| format!("{word} ({place})"))
        .collect();
    assert!(
        bare.is_empty(),
        "tell in {PAGE} what these mean and what to do, or list them as no reasons here: {bare:#?}"
    );
}

#[test]
fn the_reference_is_what_the_types_say() {
    let stale: Vec<_> = reference::pages()
        .into_iter()
        .filter(|(path, text)| fs::read_to_string(path).unwrap_or_default() != *text)
        .map(|(path, _)| path)
        .collect();
    assert!(stale.is_empty(), "run `make generate`: {stale:?}");
}

#[test]
fn a_cluster_would_take_the_yaml_of_every_page() {
    let all: Vec<(Vec<String>, usize)> = blocks::pages().iter().map(|page| blocks::wrong_yaml(page)).collect();
    let wrong: Vec<String> = all.iter().flat_map(|(wrong, _)| wrong.clone()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let ours: usize = all.iter().map(|(_, ours)| ours).sum();
    assert!(ours >= 5, "objects of ours are found and checked: {ours}");
}

#[test]
fn every_link_leads_somewhere() {
    let pages = blocks::pages();
    let dead: Vec<String> = pages.iter().flat_map(|page| blocks::dead_links(page)).collect();
    assert!(dead.is_empty(), "{dead:#?}");
    let index = fs::read_to_string("docs/README.md").expect("the index");
    let unlisted: Vec<_> = pages
        .iter()
        .filter_map(|page| page.strip_prefix("docs").ok())
        .filter(|page| *page != Path::new("README.md") && !page.starts_with("runbooks"))
        .filter(|page| !index.contains(&page.display().to_string()))
        .collect();
    assert!(unlisted.is_empty(), "docs/README.md does not name {unlisted:?}");
}
