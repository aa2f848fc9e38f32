//! The `MachineConfig` of `OpenShift` (`machineconfiguration.openshift.io/v1`, Ignition 3.2) for machines that are all alike.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use super::{KernelArgument, files::BootFile};

/// What stays readable in a data URL (RFC 3986, unreserved and some of the reserved).
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b',')
    .remove(b'=')
    .remove(b'+');

/// For the pool `worker`. `CoreOS` keeps its own initramfs, so what only that needs is left out.
pub fn object(files: &[BootFile], arguments: &[KernelArgument]) -> Value {
    let files = files.iter().filter(|file| !file.initramfs).map(|file| {
        let contents = utf8_percent_encode(&file.contents, ENCODED);
        json!({
            "path": file.path,
            "mode": file.mode,
            "overwrite": true,
            "contents": {"source": format!("data:,{contents}")},
        })
    });
    let arguments: Vec<&str> = arguments.iter().map(|argument| argument.argument.as_str()).collect();
    json!({
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {
            "name": "99-worker-gpuvirt-vfio",
            "labels": {"machineconfiguration.openshift.io/role": "worker"},
        },
        "spec": {
            "config": {"ignition": {"version": "3.2.0"}, "storage": {"files": files.collect::<Vec<_>>()}},
            "kernelArguments": arguments,
        },
    })
}
