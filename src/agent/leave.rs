//! What goes with the agent when its node has been torn down: its own files, so that nothing of gpuvirt is left on the host.
//!
//! Any other end of the agent changes nothing: the next one goes on from these files.

use std::{fs, io, path::Path};

use crds::v1alpha1::TORN_DOWN;

use super::{Known, checks, desired::Desired, vfio_manager::VfioManager};
use crate::validator::Check;

/// Made by the agent and the checks; gone if nobody else has anything in them.
const DIRECTORIES: [&str; 4] = ["run/gpuvirt", "var/lib/gpuvirt", "run/nvidia/validations", "run/nvidia"];

/// The operator's word that operands have left and GPUs are released.
fn torn_down(known: &Known) -> bool {
    let gpu_node = known.as_ref().and_then(Option::as_ref);
    let operator = gpu_node.and_then(|node| node.status.as_ref()).and_then(|status| status.operator.as_ref());
    operator.is_some_and(|operator| operator.reason == TORN_DOWN)
}

pub fn tell(known: &Known) {
    if torn_down(known) {
        tracing::info!("the operator has left this node: the end of this agent is for good");
    }
}

pub fn at_the_end(known: &Known, host_root: &Path, manager: Option<&mut VfioManager>, desired: &Desired) {
    if torn_down(known) {
        host(host_root, manager, desired);
    }
}

/// A journal that has something to undo stays, and is said.
fn host(host_root: &Path, manager: Option<&mut VfioManager>, desired: &Desired) {
    match manager.map(VfioManager::leave) {
        Some(Ok(true)) => {}
        Some(Ok(false)) | None => tracing::warn!("the journal stays: there is something to undo that it knows"),
        Some(Err(error)) => tracing::warn!(error = crate::chain(&error), "the journal stays"),
    }
    if let Err(error) = desired.remove() {
        tracing::warn!(%error, "the last order stays");
    }
    let directory = host_root.join(checks::DIRECTORY);
    let of_chain = Check::ALL.into_iter().flat_map(|check| [check.file(), check.failure()]);
    for file in of_chain.chain(checks::FILES) {
        said(&directory.join(file), fs::remove_file(directory.join(file)));
    }
    for directory in DIRECTORIES.map(|directory| host_root.join(directory)) {
        match fs::remove_dir(&directory) {
            // Somebody else's files are in it.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            done => said(&directory, done),
        }
    }
    tracing::info!("the node has been torn down: nothing of gpuvirt is left on this host");
}

fn said(path: &Path, done: io::Result<()>) {
    if let Err(error) = done
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "stays on the host");
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUNode, GPUNodeSpec};

    use super::*;

    #[test]
    fn only_the_operators_word_is_an_end_for_good() {
        let mut node = GPUNode::new("n1", GPUNodeSpec::default());
        assert!(!torn_down(&None) && !torn_down(&Some(None)) && !torn_down(&Some(Some(node.clone()))));
        let status = |reason: &str| serde_json::from_value(serde_json::json!({"operator": {"reason": reason}}));
        node.status = Some(status("Serving").expect("a status"));
        assert!(!torn_down(&Some(Some(node.clone()))));
        node.status = Some(status(TORN_DOWN).expect("a status"));
        assert!(torn_down(&Some(Some(node))));
    }

    #[test]
    fn files_of_ours_go_and_those_of_others_stay_with_their_directory() {
        let host = tempfile::tempdir().expect("tempdir");
        let validations = host.path().join("run/nvidia/validations");
        let mut desired = Desired::below(host.path());
        desired.keep(&GPUNodeSpec::default()).expect("kept");
        fs::create_dir_all(&validations).expect("dir");
        for file in ["driver-ready", "vgpu-devices-ready", "somebodys"] {
            fs::write(validations.join(file), "").expect("file");
        }
        super::host(host.path(), None, &desired);
        let left: Vec<_> = fs::read_dir(&validations).expect("dir").map(|e| e.expect("entry").file_name()).collect();
        assert_eq!(left, ["somebodys"]);
        assert!(!host.path().join("var/lib/gpuvirt").exists());
        fs::remove_file(validations.join("somebodys")).expect("file");
        super::host(host.path(), None, &desired);
        assert!(!host.path().join("run/nvidia").exists());
    }
}
