//! Described machines for tests: a YAML file becomes a tree as `/sys`, `/proc` and `/dev` have it, and a kernel in memory
//! moves devices about in that tree as the real one would.
//!
//! They prove parsing and planning on machines that cannot be had; what a kernel really does is tested on one.

#![allow(clippy::disallowed_methods, reason = "builds the trees that the doors are tested on")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::address::PciAddress;
use crate::described::{self, DescribedFunction, Description, ProcessEntry};
use crate::driver::{self, canonical};
use crate::host::{FileKind, Host, Root, Stat};
use crate::inventory::{PCI_DRIVERS, device_path};
use crate::kernel::{Kernel, KernelError};
use crate::tree::{self, Node};

mod library;
mod vgpus;

pub use library::MemoryLibrary;

use vgpus::Board;

/// A machine below a temporary directory, which goes with it. Read it through [`Host`], change it through
/// [`Machine::kernel`] or with the mutations below.
pub struct Machine {
    dir: tempfile::TempDir,
    root: Root,
    modules: BTreeSet<String>,
    native: BTreeMap<PciAddress, String>,
    boards: Vec<Board>,
}

impl Machine {
    /// A machine of `vfio/fixtures/<name>.yaml`.
    ///
    /// # Panics
    /// When there is none, or when it is malformed: this is for tests.
    pub fn described(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name).with_extension("yaml");
        let text = fs::read_to_string(&path).expect("a described machine should be among the fixtures");
        Self::from_yaml(&text)
    }

    /// A machine from the text of a description.
    ///
    /// # Panics
    /// When it is malformed.
    pub fn from_yaml(text: &str) -> Self {
        let described = Description::parse(text).expect("the description should be well-formed");
        let tree = described.tree().expect("the description should be well-formed");
        // Trees of many small files: in memory where there is room, which is several times faster.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.expect("a temporary directory should be creatable");
        lay_out(dir.path(), tree.top());
        let root = Root::new(dir.path()).expect("the temporary directory should be there");
        let native = described.functions.iter().filter_map(|(address, function)| {
            let name = function.native.clone().or_else(|| function.driver.clone())?;
            Some((*address, name)).filter(|(_, name)| !driver::is_vfio(name))
        });
        let board = |(gpu, described): (&PciAddress, &DescribedFunction)| {
            Some(Board { gpu: *gpu, described: described.board.clone()? })
        };
        let boards: Vec<Board> = described.functions.iter().filter_map(board).collect();
        for board in &boards {
            board.refresh(dir.path());
        }
        Self { root, modules: described.modules.clone(), native: native.collect(), boards, dir }
    }

    /// Where the machine's `/` is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The kernel that drives it.
    pub fn kernel(&self) -> MemoryKernel {
        MemoryKernel {
            root: self.dir.path().to_owned(),
            modules: self.modules.clone(),
            native: self.native.clone(),
            boards: self.boards.clone(),
            writes: Vec::new(),
            faults: BTreeMap::new(),
        }
    }

    /// The library of its driver.
    pub fn library(&self) -> MemoryLibrary {
        let (root, boards) = (self.dir.path().to_owned(), self.boards.clone());
        MemoryLibrary {
            root,
            boards,
            acts: Vec::new(),
            refuses: None,
            silence: None,
            active: Vec::new(),
            says: BTreeMap::new(),
            in_use: Vec::new(),
        }
    }

    /// Gives a file of the machine another content.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        put(self.path(), path, content);
    }

    /// Adds a symbolic link to the machine.
    pub fn symlink(&self, path: &str, target: &str) {
        link(self.path(), Path::new(path), target);
    }

    /// Removes a file or directory of the machine.
    ///
    /// # Panics
    /// When there is none.
    pub fn remove(&self, path: &str) {
        let path = below(self.path(), Path::new(path));
        let gone = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.expect("what is removed should have been there");
    }

    /// A process that has a device node open.
    ///
    /// # Panics
    /// When there is a process with that pid already.
    pub fn open_device(&self, pid: i32, command: &str, node: &str, pod: Option<&str>) {
        described::process(pid, command, node, pod, |path, entry| match entry {
            ProcessEntry::File(text) => put(self.path(), &path.to_string_lossy(), text),
            ProcessEntry::Link(target) => link(self.path(), path, target),
        });
    }
}

impl Host for Machine {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.root.read(path)
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        self.root.link(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.root.list(path)
    }

    fn exists(&self, path: &Path) -> bool {
        self.root.exists(path)
    }

    /// Device nodes are files like `char 240:3`: making real ones takes root.
    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let stat = self.root.stat(path)?;
        let content = if stat.kind == FileKind::Regular { self.root.read(path)? } else { Vec::new() };
        let number = tree::device_number(&content);
        Ok(number.map_or(stat, |number| Stat { kind: FileKind::CharDevice(number) }))
    }
}

/// What a write does instead of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel refuses it with this error number.
    Errno(i32),
    /// It does not come back.
    Hang,
}

/// A kernel that moves the devices of a [`Machine`].
pub struct MemoryKernel {
    root: PathBuf,
    modules: BTreeSet<String>,
    native: BTreeMap<PciAddress, String>,
    boards: Vec<Board>,
    /// Everything that was asked for, as `path <- value`, modules as `module <name>`.
    pub writes: Vec<String>,
    /// Files whose writes go wrong.
    pub faults: BTreeMap<PathBuf, Fault>,
}

impl Kernel for MemoryKernel {
    fn write(&mut self, path: &Path, value: &str) -> Result<(), KernelError> {
        self.writes.push(format!("{} <- {}", path.display(), value.trim_end()));
        match self.faults.get(path) {
            Some(Fault::Errno(errno)) => Err(KernelError::Refused { path: path.to_owned(), errno: *errno }),
            Some(Fault::Hang) => Err(KernelError::Hung {
                path: path.to_owned(),
                pid: 4711,
                start_time: 1234,
                wait_channel: "vfio_unregister_group_dev".to_owned(),
                after: std::time::Duration::from_secs(10),
            }),
            None => self
                .apply(path, value)
                .map_err(|errno| KernelError::Refused { path: path.to_owned(), errno: errno as i32 }),
        }
    }

    fn load_module(&mut self, name: &str) -> Result<(), KernelError> {
        self.writes.push(format!("module {name}"));
        match self.modules.iter().find(|driver| canonical(driver) == canonical(name)) {
            Some(driver) => {
                add_driver(&self.root, driver);
                Ok(())
            }
            None => Err(KernelError::Module { name: name.to_owned(), reason: "not among the modules".to_owned() }),
        }
    }
}

impl MemoryKernel {
    fn apply(&self, path: &Path, value: &str) -> Result<(), nix::errno::Errno> {
        use nix::errno::Errno;
        if let Some(done) = self.boards.iter().find_map(|board| board.write(&self.root, path, value)) {
            return done;
        }
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        let device = || value.trim().parse::<PciAddress>().map_err(|_| Errno::ENODEV);
        match file {
            "driver_override" => {
                let address: PciAddress = parent.parse().map_err(|_| Errno::ENOENT)?;
                let value = if value.trim().is_empty() { "(null)" } else { value.trim() };
                put(&self.root, &device_path(address).join(file).to_string_lossy(), format!("{value}\n"));
                Ok(())
            }
            "unbind" => {
                let address = device()?;
                if !below(&self.root, path).exists() {
                    return Err(Errno::ENOENT);
                }
                if driver_of(&self.root, address).as_deref() != Some(parent) {
                    return Err(Errno::ENODEV);
                }
                unbind(&self.root, address, parent);
                Ok(())
            }
            "drivers_probe" => {
                let address = device()?;
                if !below(&self.root, &device_path(address)).exists() {
                    return Err(Errno::ENODEV);
                }
                if driver_of(&self.root, address).is_some() {
                    return Ok(());
                }
                let reserved =
                    read(&self.root, &device_path(address).join("driver_override")).filter(|name| name != "(null)");
                let Some(driver) = reserved.or_else(|| self.native.get(&address).cloned()) else { return Ok(()) };
                if !below(&self.root, &Path::new(PCI_DRIVERS).join(&driver)).exists() {
                    return Ok(());
                }
                if driver::is_vfio(&driver) && group_of(&self.root, address).is_none() {
                    return Err(Errno::EINVAL);
                }
                bind(&self.root, address, &driver);
                Ok(())
            }
            _ => Err(Errno::ENOENT),
        }
    }
}

/// The same path below the machine's root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").expect("a path of a machine should be absolute"))
}

fn put(root: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = below(root, Path::new(path));
    fs::create_dir_all(path.parent().expect("a file should have a directory"))
        .expect("a directory should be creatable");
    fs::write(path, content).expect("a file should be writable");
}

fn link(root: &Path, path: &Path, target: impl AsRef<Path>) {
    let path = below(root, path);
    fs::create_dir_all(path.parent().expect("a link should have a directory"))
        .expect("a directory should be creatable");
    symlink(target, path).expect("a link should be creatable");
}

fn read(root: &Path, path: &Path) -> Option<String> {
    fs::read_to_string(below(root, path)).ok().map(|text| text.trim_end().to_owned())
}

fn link_name(root: &Path, path: &Path) -> Option<String> {
    let target = fs::read_link(below(root, path)).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

fn driver_of(root: &Path, address: PciAddress) -> Option<String> {
    link_name(root, &device_path(address).join("driver"))
}

fn group_of(root: &Path, address: PciAddress) -> Option<String> {
    link_name(root, &device_path(address).join("iommu_group"))
}

fn add_driver(root: &Path, name: &str) {
    described::add_driver(name, |path, text| put(root, &path.to_string_lossy(), text));
}

fn bind(root: &Path, address: PciAddress, driver: &str) {
    let device = device_path(address);
    link(root, &device.join("driver"), format!("/sys/bus/pci/drivers/{driver}"));
    link(root, &PathBuf::from(PCI_DRIVERS).join(driver).join(address.to_string()), &device);
    let group = group_of(root, address);
    described::nodes_of(&device, address, driver, group.as_deref(), |path, text| {
        put(root, &path.to_string_lossy(), text);
    });
}

/// A tree on disk.
fn lay_out(path: &Path, node: &Node) {
    match node {
        Node::Dir(children) => {
            fs::create_dir_all(path).expect("a directory should be creatable");
            for (name, child) in children {
                lay_out(&path.join(name), child);
            }
        }
        Node::File(content) => fs::write(path, content).expect("a file should be writable"),
        Node::Link(target) => symlink(target, path).expect("a link should be creatable"),
    }
}

fn unbind(root: &Path, address: PciAddress, driver: &str) {
    let device = below(root, &device_path(address));
    let gone = |path: PathBuf| fs::remove_file(path).expect("a bound device should have its links and nodes");
    gone(device.join("driver"));
    gone(below(root, &PathBuf::from(PCI_DRIVERS).join(driver).join(address.to_string())));
    if driver::is_vfio(driver) {
        let group = group_of(root, address).expect("a device on VFIO should have a group");
        let vfio_dev = device.join("vfio-dev");
        for name in fs::read_dir(&vfio_dev).expect("a device on VFIO should have a node").flatten() {
            gone(below(root, &Path::new("/dev/vfio/devices").join(name.file_name())));
        }
        fs::remove_dir_all(vfio_dev).expect("a device on VFIO should have a node");
        let members = fs::read_dir(below(root, Path::new(&format!("/sys/kernel/iommu_groups/{group}/devices"))));
        let mut members = members.expect("a group should have members").flatten();
        let in_use = |name: OsString| {
            let member = name.to_str().and_then(|name| name.parse().ok());
            member.and_then(|member| driver_of(root, member)).is_some_and(|name| driver::is_vfio(&name))
        };
        if !members.any(|member| in_use(member.file_name())) {
            gone(below(root, Path::new(&format!("/dev/vfio/{group}"))));
        }
    }
    if driver == "nvidia" {
        let proc = below(root, Path::new(&format!("/proc/driver/nvidia/gpus/{address}")));
        fs::remove_dir_all(proc).expect("a device on nvidia should be listed");
    }
}
