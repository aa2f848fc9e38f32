//! The kernel's door with real children. This program is its own helper, so it has no test harness.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a test without a harness: it panics to fail, prints to report, and looks at files from outside of the doors"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use vfio::kernel::{COMMAND, child_main};
use vfio::{Host, Kernel, KernelError, LinuxKernel, Root};

const UNBIND: &str = "/sys/bus/pci/drivers/nvidia/unbind";

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|word| word == COMMAND) {
        return ExitCode::from(u8::try_from(child_main(args)).unwrap());
    }
    let tests: [(&str, fn()); 10] = [
        ("one_child_serves_all_writes_until_it_may_rest", one_child_serves_all_writes_until_it_may_rest),
        ("a_child_that_was_killed_is_replaced", a_child_that_was_killed_is_replaced),
        ("a_value_reaches_its_file", a_value_reaches_its_file),
        ("a_refusal_carries_the_kernels_answer", a_refusal_carries_the_kernels_answer),
        ("files_outside_of_pci_are_not_written", files_outside_of_pci_are_not_written),
        ("a_write_that_does_not_come_back_is_left_alone", a_write_that_does_not_come_back_is_left_alone),
        ("a_child_that_says_nothing_is_known_all_the_same", a_child_that_says_nothing_is_known_all_the_same),
        ("a_helper_that_fails_is_named", a_helper_that_fails_is_named),
        ("a_module_that_is_missing_is_named_with_the_next_step", a_module_that_is_missing_is_named_with_the_next_step),
        ("a_pid_is_told_as_the_host_counts", a_pid_is_told_as_the_host_counts),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

fn kernel(root: &Path, deadline: Duration) -> LinuxKernel {
    LinuxKernel::new(root.to_owned(), std::env::current_exe().unwrap(), deadline)
}

/// Long enough for any machine: what is tested is not the time.
const PATIENT: Duration = Duration::from_secs(60);

fn machine() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("sys/bus/pci/drivers/nvidia")).unwrap();
    dir
}

fn a_value_reaches_its_file() {
    let dir = machine();
    let file = dir.path().join("sys/bus/pci/drivers/nvidia/unbind");
    fs::write(&file, "").unwrap();
    kernel(dir.path(), PATIENT).write(UNBIND.as_ref(), "0000:01:00.0").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "0000:01:00.0");
    kernel(dir.path(), PATIENT).write(UNBIND.as_ref(), "\n").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "\n000:01:00.0", "written in one piece, not truncated");
}

fn a_refusal_carries_the_kernels_answer() {
    let dir = machine();
    let error = kernel(dir.path(), PATIENT).write(UNBIND.as_ref(), "x").unwrap_err();
    assert!(
        matches!(&error, KernelError::Refused { path, errno: nix::libc::ENOENT } if path == Path::new(UNBIND)),
        "{error}"
    );
    assert!(error.to_string().contains(UNBIND), "{error}");
}

fn files_outside_of_pci_are_not_written() {
    let dir = machine();
    fs::create_dir(dir.path().join("etc")).unwrap();
    fs::write(dir.path().join("etc/passwd"), "root").unwrap();
    for path in ["/etc/passwd", "/sys/bus/pci/devices/../../../../etc/passwd", "/sys/bus/pci/rescan"] {
        let error = kernel(dir.path(), PATIENT).write(path.as_ref(), "x").unwrap_err();
        assert!(matches!(error, KernelError::Child { .. }), "{error}");
    }
    assert_eq!(fs::read_to_string(dir.path().join("etc/passwd")).unwrap(), "root");
}

/// A FIFO without reader: opening it for writing waits in the kernel, as `unbind` of a device in use does.
fn a_write_that_does_not_come_back_is_left_alone() {
    let dir = machine();
    let fifo = dir.path().join("sys/bus/pci/drivers/nvidia/unbind");
    nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let deadline = Duration::from_secs(2);
    let mut kernel = kernel(dir.path(), deadline);
    let begin = Instant::now();
    let error = kernel.write(UNBIND.as_ref(), "0000:01:00.0").unwrap_err();
    assert!(begin.elapsed() >= deadline);
    let KernelError::Hung { pid, start_time, wait_channel, path, .. } = &error else { panic!("{error}") };
    assert_eq!(path, Path::new(UNBIND));
    assert!(*start_time > 0 && !wait_channel.is_empty());
    let own = Root::new("/").unwrap();
    let stat = PathBuf::from(format!("/proc/{pid}/stat"));
    assert!(own.exists(&stat), "the child is still there");
    // Its user lets go: the write ends by itself, with what it was told to write.
    assert_eq!(fs::read_to_string(&fifo).unwrap(), "0000:01:00.0");
    waitid(Id::Pid(Pid::from_raw(*pid)), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    assert!(own.exists(&stat), "nobody has waited for it");
    // The next write cleans up after it.
    fs::remove_file(&fifo).unwrap();
    fs::write(&fifo, "").unwrap();
    kernel.write(UNBIND.as_ref(), "0000:01:00.0").unwrap();
    assert!(!own.exists(&stat));
}

fn script(dir: &Path, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("helper.sh");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn a_child_that_says_nothing_is_known_all_the_same() {
    let dir = machine();
    let helper = script(dir.path(), "exec sleep 600");
    let mut kernel = LinuxKernel::new(dir.path().to_owned(), helper, Duration::from_millis(200));
    let error = kernel.write(UNBIND.as_ref(), "0000:01:00.0").unwrap_err();
    let KernelError::Hung { pid, start_time, .. } = error else { panic!("{error}") };
    assert!(start_time > 0);
    nix::sys::signal::kill(Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
}

fn a_helper_that_fails_is_named() {
    let dir = machine();
    for helper in [script(dir.path(), "exit 7"), dir.path().join("absent")] {
        let name = helper.display().to_string();
        let error = LinuxKernel::new(dir.path().to_owned(), helper, PATIENT).write(UNBIND.as_ref(), "x").unwrap_err();
        assert!(matches!(error, KernelError::Child { .. }) && error.to_string().contains(&name), "{error}");
    }
}

fn a_module_that_is_missing_is_named_with_the_next_step() {
    let dir = machine();
    let error = kernel(dir.path(), PATIENT).load_module("vfio-pci").unwrap_err();
    assert!(error.to_string().contains("modprobe vfio-pci"), "{error}");
}

/// With `/` as the host's root, the host's `/proc` is this process's own.
fn a_pid_is_told_as_the_host_counts() {
    let mut helper = Command::new(std::env::current_exe().unwrap());
    let output = helper.args([COMMAND, "/"]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words: Vec<_> = text.split_whitespace().collect();
    let ["pid", pid, start_time] = words.as_slice() else { panic!("{text}") };
    assert!(pid.parse::<i32>().unwrap() > 1 && start_time.parse::<u64>().unwrap() > 0, "{text}");
    assert!(output.status.success(), "it ends with its input");
}

fn one_child_serves_all_writes_until_it_may_rest() {
    let dir = machine();
    let log = dir.path().join("log");
    let own = std::env::current_exe().unwrap();
    let helper = script(dir.path(), &format!("echo $$ >> {}; exec {} \"$@\"", log.display(), own.display()));
    fs::write(dir.path().join("sys/bus/pci/drivers/nvidia/unbind"), "").unwrap();
    let mut kernel = LinuxKernel::new(dir.path().to_owned(), helper, PATIENT);
    for _ in 0..3 {
        kernel.write(UNBIND.as_ref(), "0000:01:00.0").unwrap();
        kernel.write("/sys/bus/pci/drivers/absent/unbind".as_ref(), "0000:01:00.0").unwrap_err();
    }
    let pids = fs::read_to_string(&log).unwrap();
    assert_eq!(pids.lines().count(), 1, "{pids}");
    let proc = PathBuf::from(format!("/proc/{}", pids.trim()));
    assert!(proc.exists());
    kernel.rest();
    assert!(!proc.exists());
    kernel.write(UNBIND.as_ref(), "0000:01:00.0").unwrap();
}

fn a_child_that_was_killed_is_replaced() {
    let dir = machine();
    let log = dir.path().join("log");
    let own = std::env::current_exe().unwrap();
    let helper = script(dir.path(), &format!("echo $$ > {}; exec {} \"$@\"", log.display(), own.display()));
    fs::write(dir.path().join("sys/bus/pci/drivers/nvidia/unbind"), "").unwrap();
    let mut kernel = LinuxKernel::new(dir.path().to_owned(), helper, PATIENT);
    kernel.write(UNBIND.as_ref(), "x").unwrap();
    let pid = Pid::from_raw(fs::read_to_string(&log).unwrap().trim().parse().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
    let error = kernel.write(UNBIND.as_ref(), "x").unwrap_err();
    assert!(error.to_string().contains("signal: 9"), "{error}");
    kernel.write(UNBIND.as_ref(), "x").unwrap();
}
