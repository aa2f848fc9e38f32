//! The chain of a container node as the init containers run it: this program, on a host in a folder, with stand-ins for
//! NVIDIA's libraries. Each test breaks one link. Needs root (`chroot`) and `cc`.

#![allow(clippy::disallowed_methods, reason = "programs are started on folders that play a host")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_gpuvirt");

/// A host whose own driver works, as the driver check's container sees it.
struct Node {
    dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let node = Self { dir: tempfile::tempdir().expect("tempdir") };
        node.file("host/usr/bin/nvidia-smi", "");
        node.file("host/sys/module/nvidia/refcnt", "0\n");
        for folder in ["host/dev", "char", "driver", "validations"] {
            fs::create_dir_all(node.path(folder)).expect("folder");
        }
        node.library("nvml", &[], "host/usr/lib64/libnvidia-ml.so.1");
        node
    }

    /// The same, with the driver in a pod instead, which is ready.
    fn with_driver_pod(asked: &str) -> Self {
        let node = Self::new();
        fs::remove_file(node.path("host/usr/bin/nvidia-smi")).expect("removable");
        fs::remove_file(node.path("host/usr/lib64/libnvidia-ml.so.1")).expect("removable");
        node.library("nvml", &[], "driver/usr/lib64/libnvidia-ml.so.1");
        node.file("validations/.driver-ctr-ready", asked);
        node
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
        fs::write(path, text).expect("file");
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok()
    }

    fn library(&self, source: &str, macros: &[&str], to: &str) {
        let to = self.path(to);
        fs::create_dir_all(to.parent().expect("a parent")).expect("folder");
        compile(source, macros, &to);
    }

    fn driver(&self) -> Output {
        self.command("driver")
            .arg("--host-root")
            .arg(self.path("host"))
            .arg("--install-dir")
            .arg(self.path("driver"))
            .arg("--dev-char")
            .arg(self.path("char"))
            .arg("--timeout=0s")
            .output()
            .expect("the program should start")
    }

    /// Of a check in a container that has been given the libraries of `injected`.
    fn injected(&self, check: &str) -> Output {
        self.command(check).env("LD_LIBRARY_PATH", self.path("injected")).output().expect("the program should start")
    }

    fn command(&self, check: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["validate", check, "--validations"]).arg(self.path("validations"));
        command
    }
}

fn compile(source: &str, macros: &[&str], to: &Path) {
    let source = format!("{}/tests/chain/{source}.c", env!("CARGO_MANIFEST_DIR"));
    let done = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(to).arg(source).args(macros).output();
    let done = done.expect("cc should be installed");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

fn passed(output: &Output) {
    assert!(output.status.success(), "{}", said(output));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn refused(output: &Output, parts: &[&str]) {
    let said = said(output);
    assert!(!output.status.success(), "passed although: {said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

#[test]
fn a_hosts_own_driver_is_found_and_others_are_told_where_it_is() {
    let node = Node::new();
    passed(&node.driver());
    let told = "IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\nNVIDIA_DEV_ROOT=/\nDEV_ROOT_CTR_PATH=/host\n";
    assert_eq!(node.read("validations/driver-ready").as_deref(), Some(told));
}

#[test]
fn a_driver_pods_driver_is_found_and_devices_are_the_hosts_where_it_has_none() {
    let node = Node::with_driver_pod("GDS_ENABLED: false\n");
    passed(&node.driver());
    let told = "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\n";
    let text = node.read("validations/driver-ready").expect("passed");
    assert_eq!(text, format!("{told}NVIDIA_DEV_ROOT=/\nDEV_ROOT_CTR_PATH=/host\n"));
    fs::create_dir(node.path("driver/dev")).expect("folder");
    passed(&node.driver());
    let text = node.read("validations/driver-ready").expect("passed");
    assert_eq!(text, format!("{told}NVIDIA_DEV_ROOT=/run/nvidia/driver\nDEV_ROOT_CTR_PATH=/driver-root\n"));
}

#[test]
fn a_driver_pod_that_is_not_ready_is_waited_for_and_named() {
    let node = Node::with_driver_pod("");
    fs::remove_file(node.path("validations/.driver-ctr-ready")).expect("removable");
    refused(&node.driver(), &["driver pod of this node is not ready", "kubectl logs ds/nvidia-driver-daemonset"]);
}

#[test]
fn a_module_that_is_not_loaded_is_named_and_an_older_verdict_goes() {
    let node = Node::new();
    passed(&node.driver());
    fs::remove_file(node.path("host/sys/module/nvidia/refcnt")).expect("removable");
    refused(&node.driver(), &["kernel module nvidia is not loaded", "host's own driver"]);
    assert_eq!(node.read("validations/driver-ready"), None);
}

#[test]
fn why_a_check_has_not_passed_lies_beside_the_verdicts_until_it_passes() {
    let node = Node::new();
    node.library("nvml", &["-DINIT=18"], "host/usr/lib64/libnvidia-ml.so.1");
    refused(&node.driver(), &["mismatch"]);
    let why = node.read("validations/driver-failed").expect("a reason");
    assert!(why.contains("mismatch") && why.contains("nvidia-smi"), "{why}");
    node.library("nvml", &[], "host/usr/lib64/libnvidia-ml.so.1");
    passed(&node.driver());
    assert_eq!(node.read("validations/driver-failed"), None);
}

#[test]
fn a_library_of_another_driver_is_told_in_nvmls_words() {
    let node = Node::new();
    node.library("nvml", &["-DINIT=18"], "host/usr/lib64/libnvidia-ml.so.1");
    refused(&node.driver(), &["mismatch"]);
}

#[test]
fn a_host_without_the_library_says_so() {
    let node = Node::new();
    fs::remove_file(node.path("host/usr/lib64/libnvidia-ml.so.1")).expect("removable");
    refused(&node.driver(), &["libnvidia-ml.so.1 is not there"]);
}

#[test]
fn a_driver_without_a_gpu_does_not_pass() {
    let node = Node::new();
    node.library("nvml", &["-DGPUS=0"], "host/usr/lib64/libnvidia-ml.so.1");
    refused(&node.driver(), &["has no GPU"]);
}

#[test]
fn modules_that_were_asked_for_must_be_loaded_and_get_their_files() {
    let node = Node::with_driver_pod("GDS_ENABLED: true\nGDRCOPY_ENABLED: false\n");
    refused(&node.driver(), &["GDS_ENABLED is true, and the kernel module nvidia_fs is not loaded"]);
    node.file("host/sys/module/nvidia_fs/refcnt", "0\n");
    passed(&node.driver());
    assert_eq!(node.read("validations/nvidia-fs-ready").as_deref(), Some(""));
    assert_eq!(node.read("validations/gdrcopy-ready"), None);
}

#[test]
fn device_nodes_get_links_by_number_and_a_wrong_link_is_replaced() {
    let node = Node::new();
    let made = Command::new("mknod").arg(node.path("host/dev/nvidia0")).args(["c", "195", "0"]).status();
    assert!(made.expect("mknod should start").success());
    symlink("/nowhere", node.path("char/195:0")).expect("a link");
    passed(&node.driver());
    assert_eq!(fs::read_link(node.path("char/195:0")).expect("a link"), Path::new("/dev/nvidia0"));
}

#[test]
fn a_container_that_has_been_given_gpus_passes_the_toolkit_check() {
    let node = Node::new();
    node.library("nvml", &[], "injected/libnvidia-ml.so.1");
    passed(&node.injected("toolkit"));
    assert_eq!(node.read("validations/toolkit-ready").as_deref(), Some(""));
    node.library("nvml", &["-DGPUS=0"], "injected/libnvidia-ml.so.1");
    refused(&node.injected("toolkit"), &["given no GPU", "nvidia-container-toolkit-daemonset"]);
    assert_eq!(node.read("validations/toolkit-ready"), None);
}

#[test]
fn a_right_computation_passes_and_a_wrong_one_names_element_and_gpu() {
    let node = Node::new();
    node.library("cuda", &["-DGPUS=2"], "injected/libcuda.so.1");
    let output = node.injected("cuda");
    passed(&output);
    assert!(said(&output).contains("2 GPU(s) computed rightly"), "{}", said(&output));
    assert_eq!(node.read("validations/cuda-ready").as_deref(), Some(""));
    node.library("cuda", &["-DFAULT=1"], "injected/libcuda.so.1");
    refused(&node.injected("cuda"), &["GPU 0: element 50001 should be", "computes wrongly"]);
    assert_eq!(node.read("validations/cuda-ready"), None);
}

#[test]
fn a_container_without_cuda_or_without_gpus_says_which() {
    let node = Node::new();
    refused(&node.injected("cuda"), &["libcuda.so.1 is not there"]);
    node.library("cuda", &["-DGPUS=0"], "injected/libcuda.so.1");
    refused(&node.injected("cuda"), &["the driver has no GPU"]);
}
