//! How long it takes to look at a large host, to plan for it, and to find out who uses its GPUs. `make bench` runs this and
//! compares with the budgets.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "benchmarks: they panic to fail, and lay out what is looked at"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use criterion::{Criterion, criterion_group, criterion_main};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use vfio::host::{DeviceNumber, FileKind, Stat};
use vfio::testing::Machine;
use vfio::{Binding, Description, Host, Journal, Root, World, holders, observe, plan};

/// 16 GPUs, each with 16 virtual functions.
fn many() -> String {
    let mut yaml = "kernel: 6.8.0\nos: ubuntu 24.04\nmodules: [vfio-pci]\nfunctions:\n".to_owned();
    for bus in 0x10..0x20 {
        let gpu = format!("0000:{bus:02x}:00.0");
        let about = "ids: \"10de:26b9\", class: \"030200\", driver: nvidia";
        writeln!(yaml, "  \"{gpu}\": {{ {about}, group: {bus}, vfs: 16 }}").unwrap();
        for number in 4..20 {
            let (slot, function, group) = (number / 8, number % 8, bus * 100 + number);
            let place = format!("0000:{bus:02x}:{slot:02x}.{function}");
            writeln!(yaml, "  \"{place}\": {{ {about}, group: {group}, physfn: \"{gpu}\" }}").unwrap();
        }
    }
    yaml
}

/// A host below which one file is a device node, whose making takes root.
struct Staged {
    root: Root,
    node: &'static str,
    /// Processes that are there instead of those that are.
    processes: Option<Vec<OsString>>,
}

impl Host for Staged {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.root.read(path)
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        self.root.link(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        match &self.processes {
            Some(processes) if path == Path::new("/proc") => Ok(processes.clone()),
            Some(_) | None => self.root.list(path),
        }
    }

    fn exists(&self, path: &Path) -> bool {
        self.root.exists(path)
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let number = DeviceNumber { major: 195, minor: 0 };
        match path.to_str() == Some(self.node) {
            true => Ok(Stat { kind: FileKind::CharDevice(number) }),
            false => self.root.stat(path),
        }
    }

    fn open_devices(&self, dir: &Path) -> io::Result<BTreeSet<DeviceNumber>> {
        self.root.open_devices(dir)
    }
}

/// 2,000 processes with 50 descriptors each, as `/proc` has them: files, pipes and sockets.
fn add_processes(root: &Path) {
    let targets = ["/dev/null", "/etc/os-release", "pipe:[4711]", "socket:[4712]", "anon_inode:[eventpoll]"];
    for pid in 1000..3000 {
        let proc = root.join(format!("proc/{pid}"));
        std::fs::create_dir_all(proc.join("fd")).unwrap();
        std::fs::write(proc.join("comm"), "busy\n").unwrap();
        for fd in 0..50 {
            symlink(targets[fd % targets.len()], proc.join("fd").join(fd.to_string())).unwrap();
        }
    }
    std::fs::write(root.join("dev/null"), "").unwrap();
}

/// Processes of the kernel's own `/proc`, with 50 descriptors each: files, pipes and three of every process.
struct Processes(Vec<Child>);

impl Processes {
    fn start(count: usize) -> Self {
        let files = (0..19).map(|_| OwnedFd::from(File::open("/dev/null").unwrap()));
        let pipes =
            (0..14).flat_map(|_| io::pipe().map(|(from, to)| [OwnedFd::from(from), OwnedFd::from(to)]).unwrap());
        let inherited: Vec<OwnedFd> = files.chain(pipes).collect();
        for fd in &inherited {
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        }
        let processes = Self((0..count).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect());
        let has = |process: &Child| std::fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().count();
        assert!(processes.0.iter().all(|process| (50..60).contains(&has(process))));
        processes
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn looking(criterion: &mut Criterion) {
    let machine = Machine::from_yaml(&many());
    let (root, tree) = (Root::new(machine.path()).unwrap(), Description::parse(&many()).unwrap().tree().unwrap());
    let inventory = observe(&root);
    assert_eq!((inventory.gpus().len(), inventory.functions.len(), inventory.errors.len()), (16, 272, 0));
    criterion.bench_function("observe 16 GPUs with 256 VFs on disk", |bencher| bencher.iter(|| observe(&root)));
    criterion.bench_function("observe 16 GPUs with 256 VFs in memory", |bencher| bencher.iter(|| observe(&tree)));

    let (nobody, journal) = (BTreeMap::new(), Journal::in_memory());
    let wanted: BTreeMap<_, _> = inventory.gpus().iter().map(|gpu| (gpu.primary.address, Binding::Vfio)).collect();
    let world = World { inventory: &inventory, holders: &nobody, journal: &journal, wanted: &wanted };
    criterion.bench_function("plan 16 GPUs with 256 VFs", |bencher| {
        bencher.iter(|| wanted.keys().map(|gpu| plan(&world, *gpu, Binding::Vfio).is_ok()).collect::<Vec<_>>());
    });
}

fn holding(criterion: &mut Criterion) {
    let machine = Machine::from_yaml(&many());
    add_processes(machine.path());
    let disk = Staged { root: Root::new(machine.path()).unwrap(), node: "/dev/vfio/16", processes: None };
    let inventory = observe(&disk);
    criterion.bench_function("holders among 2000 processes with 50 descriptors on disk", |bencher| {
        bencher.iter(|| holders(&disk, &inventory));
    });

    let busy = Processes::start(2000);
    let processes = Some(busy.0.iter().map(|process| OsString::from(process.id().to_string())).collect());
    let kernel = Staged { root: Root::new("/").unwrap(), node: "/dev/vfio/16", processes };
    criterion.bench_function("holders among 2000 processes with 50 descriptors of the kernel", |bencher| {
        bencher.iter(|| holders(&kernel, &inventory));
    });
    drop(busy);
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = looking, holding
}
criterion_main!(benches);
