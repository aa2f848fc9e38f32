//! The walls of the house: which text a room's files may not contain, and why.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// (room, what must not be named there, why)
const WALLS: &[(&str, &[&str], &str)] = &[
    (
        "src/operator",
        &["vfio::", "nvml", "tonic", "crate::agent"],
        "the cluster room talks to the API server only: what happens on a host is asked of the agent through GPUNode",
    ),
    (
        "src/agent",
        &["crate::operator", "Api<Node>", "Api<Pod>", "Api<ConfigMap>"],
        "the agent reads nothing but its own GPUNode: all that it needs arrives resolved in its spec",
    ),
    (
        "src/agent/device_plugin",
        &["vfio::", "kube::", "crate::"],
        "the device plugin speaks with the kubelet only; the agent translates for it",
    ),
    (
        "src/cluster_command",
        &["vfio::", "crate::agent", "tonic", ".create(", ".delete("],
        "a person's questions are asked of the API server, and change nothing",
    ),
    (
        "src/kubectl",
        &["vfio::", "nix::", "crate::agent", "crate::cli", "crate::host_command"],
        "kubectl-gpuvirt also builds where there is no Linux",
    ),
    (
        "src/validator",
        &["crate::operator", "crate::agent", "vfio::testing"],
        "an init container sees its node and writes its verdict, and decides nothing for others",
    ),
    ("src/cluster", &["crate::operator", "crate::agent", "vfio::"], "the adapter over kube knows no room above it"),
    ("vfio/src", &["kube::", "tokio::", "crds::"], "the host library knows no cluster and no async runtime"),
    ("crds/src", &["tokio", "kube::Client", "kube::Api", "kube::runtime"], "the contract is values"),
];

/// (what is named, the only file that may, with the folder of its name, why)
const ONE_DOOR: &[(&str, &str, &str)] = &[
    (
        "nvml_wrapper",
        "src/nvml.rs",
        "NVML keeps device files open and may hang: a child process has it, and nobody else",
    ),
    ("events::v1", "src/cluster/events.rs", "events are counted and kept from flooding in one place"),
    ("events::Recorder", "src/cluster/events.rs", "events are counted and kept from flooding in one place"),
    ("env::var", "src/cli.rs", "one file reads the environment"),
];

/// What the host library may not need, also not through others.
const TOO_HEAVY: &[&str] =
    &["kube", "kube-core", "kube-client", "k8s-openapi", "tokio", "hyper", "crds", "nvml-wrapper"];

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
        let path = entry.expect("a folder entry should be readable").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Lines of code: comments may name what the code may not, and so may tests.
fn code(path: &Path) -> Vec<(usize, String)> {
    let text = fs::read_to_string(path).expect("a source file should be readable");
    text.lines()
        .enumerate()
        .take_while(|(_, line)| !line.starts_with("mod tests {"))
        .map(|(number, line)| (number + 1, line.split("//").next().unwrap_or_default().to_owned()))
        .collect()
}

fn offences(files: &[PathBuf], forbidden: &str, why: &str) -> Vec<String> {
    let mut offences = Vec::new();
    for file in files {
        for (number, line) in code(file) {
            if line.contains(forbidden) {
                offences.push(format!("{}:{number}: {forbidden}: {why}", file.display()));
            }
        }
    }
    offences
}

#[test]
fn no_room_reaches_through_a_wall() {
    let mut found = Vec::new();
    for (room, forbidden, why) in WALLS {
        let files: Vec<_> =
            rust_files(Path::new(room)).into_iter().filter(|file| !file.to_string_lossy().contains("/tests")).collect();
        assert!(!files.is_empty(), "{room} has no code: the wall around it is out of date");
        for text in *forbidden {
            found.extend(offences(&files, text, why));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_persons_commands_write_nothing_but_an_approval() {
    let mut files = rust_files(Path::new("src/cluster_command"));
    files.retain(|file| file != Path::new("src/cluster_command/approve.rs"));
    let found = offences(&files, "Patch::", "only an approval is written");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_border_has_one_door() {
    let mut found = Vec::new();
    for (text, door, why) in ONE_DOOR {
        let mut files = rust_files(Path::new("src"));
        let rooms = Path::new(door).with_extension("");
        files.retain(|file| file != Path::new(door) && !file.starts_with(&rooms));
        found.extend(offences(&files, text, why));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Package → what it needs, by the lock file; what only its tests need is among it.
fn needs() -> BTreeMap<String, BTreeSet<String>> {
    let lock = fs::read_to_string("Cargo.lock").expect("the lock file should be readable");
    let mut needs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let name = package.lines().find_map(|line| line.strip_prefix("name = "));
        let name = name.expect("a package should have a name").trim_matches('"');
        let list = package.split_once("dependencies = [").map_or("", |(_, list)| list);
        // One of several versions is followed by its number. Both are taken for one.
        let names = list.lines().filter_map(|line| line.trim().strip_prefix('"')?.split(['"', ' ']).next());
        needs.entry(name.to_owned()).or_default().extend(names.map(str::to_owned));
    }
    needs
}

#[test]
fn the_host_library_stays_light() {
    let needs = needs();
    let (mut todo, mut all) = (vec!["vfio"], BTreeSet::new());
    while let Some(name) = todo.pop() {
        if all.insert(name) {
            todo.extend(needs[name].iter().map(String::as_str));
        }
    }
    assert!(all.contains("serde_core"), "what is needed through others is found: {all:?}");
    let found: Vec<_> = TOO_HEAVY.iter().filter(|name| all.contains(**name)).collect();
    assert!(found.is_empty(), "vfio needs {found:?}: `cargo tree -p vfio -i NAME` says through whom");
}

#[test]
fn files_stay_short_enough_to_hold_in_mind() {
    const MOST: usize = 450;
    let mut long = Vec::new();
    for room in ["src", "vfio/src", "crds/src"] {
        for file in rust_files(Path::new(room)) {
            let generated = file.components().any(|part| part.as_os_str() == "proto");
            let lines = fs::read_to_string(&file).expect("a source file should be readable").lines().count();
            if lines > MOST && !generated {
                long.push(format!("{}: {lines} lines: what second thing lives there?", file.display()));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}
