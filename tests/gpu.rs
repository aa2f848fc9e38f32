//! The checks of a container node for real, where this machine has a GPU and its driver; aloud nothing where it has none.
//!
//! `make test-gpu`

#![allow(clippy::disallowed_methods, reason = "the program is started as an init container would be")]
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

use std::{
    path::Path,
    process::{Command, Output},
};

/// A folder for verdicts, where there is something to judge.
fn with_gpu(name: &str) -> Option<tempfile::TempDir> {
    if !Path::new("/proc/driver/nvidia/version").exists() {
        eprintln!("SKIPPED {name}: no NVIDIA driver is loaded on this machine");
        return None;
    }
    Some(tempfile::tempdir().expect("tempdir"))
}

fn check(validations: &Path, check: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpuvirt"));
    command.arg("validate").args(check).arg("--validations").arg(validations);
    command.output().expect("the program should start")
}

fn passed(validations: &Path, file: &str, output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(validations.join(file).exists(), "{file}");
}

#[test]
fn the_driver_of_this_machine_passes_its_check() {
    let Some(dir) = with_gpu("driver") else { return };
    // Where the driver's programs are mounted in, as in a container, there is no nvidia-smi of the host's own: then this
    // machine plays the driver pod.
    std::fs::write(dir.path().join(".driver-ctr-ready"), "").expect("a file");
    let arguments =
        ["driver", "--host-root=/", "--install-dir=/", "--timeout=60s", "--disable-dev-char-symlink-creation=true"];
    passed(dir.path(), "driver-ready", &check(dir.path(), &arguments));
}

#[test]
fn nvml_of_this_machine_answers() {
    let Some(dir) = with_gpu("toolkit") else { return };
    passed(dir.path(), "toolkit-ready", &check(dir.path(), &["toolkit"]));
}

#[test]
fn every_gpu_of_this_machine_computes_rightly() {
    let Some(dir) = with_gpu("cuda") else { return };
    passed(dir.path(), "cuda-ready", &check(dir.path(), &["cuda"]));
}
