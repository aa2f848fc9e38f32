//! Reading a host below a root directory.
//!
//! [`Root`] is the only door to the file system for reading: the same code runs on `/`, on `/host` inside a pod and on
//! a described tree. Paths are absolute as the host sees them; links are resolved as if the root were `/`, so neither an
//! absolute link nor `..` leaves it (`openat2(2)`, Linux 5.6).

#![allow(clippy::disallowed_methods, reason = "this file is the door that the lint points to")]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, readlinkat};
use nix::libc;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

use crate::late::Late;
use crate::names::each_name;

/// Most that is read of one attribute below `/sys`: the kernel never gives more than a page.
const ATTRIBUTE_LIMIT: u64 = 64 * 1024;
/// Most that is read of any other file: `modules.alias` of a distribution kernel has 1-3 MiB.
const FILE_LIMIT: u64 = 32 * 1024 * 1024;
/// How long the kernel may take to answer about one device. The slowest honest answer wakes it from D3cold (0.1-1 s).
const DEADLINE: Duration = Duration::from_secs(2);

/// Major and minor number of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The driver's.
    pub major: u32,
    /// The device's among those of the driver.
    pub minor: u32,
}

/// What kind of file a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A plain file, also an attribute of sysfs.
    Regular,
    /// A directory.
    Directory,
    /// A node of a character device, e.g. `/dev/vfio/7`.
    CharDevice(DeviceNumber),
    /// A node of a block device.
    BlockDevice(DeviceNumber),
    /// A pipe, a socket or a link.
    Other,
}

/// The part of `stat(2)` that is needed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it leads to.
    pub kind: FileKind,
}

/// A host that can be read. All paths are absolute as the host sees them, e.g. `/sys/bus/pci/devices`.
pub trait Host: Sync {
    /// The whole content; fails rather than truncating when the file is larger than anything sensible.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// The first bytes, at most `length`; nothing behind them is asked for.
    fn head(&self, path: &Path, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = self.read(path)?;
        bytes.truncate(length);
        Ok(bytes)
    }
    /// The text of a symbolic link, not followed.
    fn link(&self, path: &Path) -> io::Result<PathBuf>;
    /// Names in a directory, sorted, without `.` and `..`.
    fn list(&self, path: &Path) -> io::Result<Vec<OsString>>;
    /// Whether the path leads to something, links followed.
    fn exists(&self, path: &Path) -> bool;
    /// What the path leads to, links followed, also those of `/proc/PID/fd`.
    fn stat(&self, path: &Path) -> io::Result<Stat>;
    /// Reads about several things, one after the other, of which each may wait in the kernel for good. A thing is named by
    /// a path, e.g. a device's directory; what is given with it is handed to `read`.
    ///
    /// # Errors
    /// `TimedOut` for each whose read has not come back by the host's deadline, where it has one.
    fn each<I, T, F>(&self, subjects: Vec<(PathBuf, I)>, read: F) -> Vec<io::Result<T>>
    where
        Self: Sized,
        I: Send + Sync + 'static,
        T: Send + 'static,
        F: Fn(&Self, &I) -> T + Send + Sync + 'static,
    {
        subjects.iter().map(|(_, subject)| Ok(read(self, subject))).collect()
    }
    /// Numbers of the character devices that a process has open; `dir` is its `/proc/PID/fd`.
    fn open_devices(&self, dir: &Path) -> io::Result<BTreeSet<DeviceNumber>> {
        // Sockets, pipes and anonymous inodes have no path, so they are not asked for more.
        let has_path = |fd: &PathBuf| self.link(fd).is_ok_and(|target| target.is_absolute());
        let fds = self.list(dir)?.into_iter().map(|name| dir.join(name)).filter(has_path);
        Ok(fds.filter_map(|fd| self.stat(&fd).ok()?.kind.char_device()).collect())
    }
}

impl FileKind {
    fn char_device(self) -> Option<DeviceNumber> {
        match self {
            Self::CharDevice(number) => Some(number),
            Self::Regular | Self::Directory | Self::BlockDevice(_) | Self::Other => None,
        }
    }
}

/// Reads one value of a host as text without the newline at its end.
pub(crate) fn text(host: &(impl Host + ?Sized), path: &Path) -> io::Result<String> {
    let bytes = host.read(path)?;
    let text = String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8"))?;
    Ok(text.trim_end_matches(['\n', '\0']).to_owned())
}

/// The last component of a link's text, e.g. the driver's name of a device's `driver` link.
pub(crate) fn link_name(host: &(impl Host + ?Sized), path: &Path) -> io::Result<String> {
    let target = host.link(path)?;
    target
        .file_name()
        .and_then(|name| name.to_str())
        .map(str::to_owned)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("link to `{}`", target.display())))
}

/// A missing file is a value, not an error.
pub(crate) fn optional<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A host below a directory.
#[derive(Clone, Debug)]
pub struct Root {
    path: PathBuf,
    dir: Arc<OwnedFd>,
    late: Arc<Late>,
    deadline: Duration,
}

impl Root {
    /// Opens the directory below which the host's `/sys`, `/proc`, `/dev` and `/lib` are found.
    pub fn new(dir: impl Into<PathBuf>) -> io::Result<Self> {
        let path = dir.into();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let fd = nix::fcntl::open(&path, flags, nix::sys::stat::Mode::empty())
            .map_err(|errno| io::Error::other(format!("host root {}: {errno}", path.display())))?;
        Ok(Self { path, dir: Arc::new(fd), late: Arc::default(), deadline: DEADLINE })
    }

    /// The same host with another time that the kernel may take to answer about one device (2 s otherwise).
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The directory itself, as this process sees it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file of the host. `O_CLOEXEC` is added.
    pub(crate) fn open(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        open_below(self.dir.as_fd(), path, flags)
    }
}

fn open_below(root: BorrowedFd<'_>, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    if path.components().any(|part| matches!(part, Component::ParentDir)) || !path.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{}` is not absolute", path.display())));
    }
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    // A rename or mount anywhere on the machine makes the kernel doubt its walk through `..` and say EAGAIN.
    for _ in 0..128 {
        match openat2(root, path, how) {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
    Err(Errno::EAGAIN.into())
}

impl Host for Root {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let limit = if path.starts_with("/sys") { ATTRIBUTE_LIMIT } else { FILE_LIMIT };
        let file = File::from(self.open(path, OFlag::O_RDONLY)?);
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("larger than {limit} bytes")));
        }
        Ok(bytes)
    }

    fn each<I, T, F>(&self, subjects: Vec<(PathBuf, I)>, read: F) -> Vec<io::Result<T>>
    where
        I: Send + Sync + 'static,
        T: Send + 'static,
        F: Fn(&Self, &I) -> T + Send + Sync + 'static,
    {
        let host = self.clone();
        self.late.each(self.deadline, subjects, move |subject| read(&host, subject))
    }

    fn head(&self, path: &Path, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut file = File::from(self.open(path, OFlag::O_RDONLY)?);
        let mut got = 0;
        while got < length {
            match file.read(&mut bytes[got..])? {
                0 => break,
                count => got += count,
            }
        }
        bytes.truncate(got);
        Ok(bytes)
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        let fd = self.open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW)?;
        match readlinkat(&fd, c"") {
            Ok(target) => Ok(PathBuf::from(target)),
            // An empty path on something that is no link.
            Err(Errno::ENOENT) => Err(Errno::EINVAL.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let mut dir = Dir::from_fd(self.open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?)?;
        let mut names = Vec::new();
        for entry in dir.iter() {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name));
            }
        }
        names.sort();
        Ok(names)
    }

    /// One call a descriptor: there are 100,000 of them on a busy host.
    fn open_devices(&self, dir: &Path) -> io::Result<BTreeSet<DeviceNumber>> {
        let dir = self.open(dir, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        // Links of procfs lead to open files. Plain ones, in a tree that only looks like it, must stay below the root, and
        // there the same text leads to the same file.
        let procfs = fstatfs(&dir)?.filesystem_type() == PROC_SUPER_MAGIC;
        let (mut numbers, mut targets) = (BTreeSet::new(), BTreeSet::new());
        each_name(dir.as_fd(), |name| {
            let stat = if procfs {
                statx(dir.as_fd(), name, 0)
            } else {
                match readlinkat(&dir, name) {
                    Ok(target) if target.as_bytes().starts_with(b"/") && targets.insert(target.clone()) => {
                        self.stat(Path::new(&target))
                    }
                    Ok(_) | Err(_) => return,
                }
            };
            numbers.extend(stat.ok().and_then(|stat| stat.kind.char_device()));
        })?;
        Ok(numbers)
    }

    fn exists(&self, path: &Path) -> bool {
        self.open(path, OFlag::O_PATH).is_ok()
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        match self.open(path, OFlag::O_PATH) {
            Ok(fd) => statx(fd.as_fd(), c"", libc::AT_EMPTY_PATH),
            // RESOLVE_IN_ROOT never walks a descriptor link of /proc; the link names an open file, not a path, so
            // following it cannot leave the root.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EXDEV | libc::ELOOP)) && is_descriptor(path) => {
                let parent = path.parent().expect("a descriptor link should have a parent");
                let name = path.file_name().expect("a descriptor link should have a name");
                let dir = self.open(parent, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
                statx(dir.as_fd(), &CString::new(name.as_bytes())?, 0)
            }
            Err(error) => Err(error),
        }
    }
}

/// `/proc/PID/fd/N`.
fn is_descriptor(path: &Path) -> bool {
    let mut parts = path.components().rev().skip(1).map(Component::as_os_str);
    path.starts_with("/proc") && parts.next().is_some_and(|name| name == "fd")
}

/// `statx` rather than `fstatat`: it can be told not to ask a network file system's server, which may be gone.
fn statx(dir: BorrowedFd<'_>, path: &CStr, flags: libc::c_int) -> io::Result<Stat> {
    let mut out = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: `dir` is an open descriptor, `path` ends in NUL, `out` has room for one `struct statx`.
    let result = unsafe {
        libc::statx(
            dir.as_raw_fd(),
            path.as_ptr(),
            flags | libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT,
            libc::STATX_TYPE,
            out.as_mut_ptr(),
        )
    };
    Errno::result(result)?;
    // SAFETY: all bytes were zeroed, which is a valid value, and the kernel has filled them in.
    let out = unsafe { out.assume_init() };
    let number = DeviceNumber { major: out.stx_rdev_major, minor: out.stx_rdev_minor };
    let kind = match u32::from(out.stx_mode) & libc::S_IFMT {
        libc::S_IFREG => FileKind::Regular,
        libc::S_IFDIR => FileKind::Directory,
        libc::S_IFCHR => FileKind::CharDevice(number),
        libc::S_IFBLK => FileKind::BlockDevice(number),
        _ => FileKind::Other,
    };
    Ok(Stat { kind })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("etc/name"), "inside\n").unwrap();
        let root = Root::new(dir.path()).unwrap();
        (dir, root)
    }

    #[test]
    fn an_absolute_link_stays_below_the_root() {
        let (dir, root) = tree();
        symlink("/etc/name", dir.path().join("alias")).unwrap();
        assert_eq!(text(&root, Path::new("/alias")).unwrap(), "inside");
    }

    #[test]
    fn climbing_links_stay_below_the_root() {
        let (dir, root) = tree();
        symlink("../../../../../etc/name", dir.path().join("climber")).unwrap();
        assert_eq!(text(&root, Path::new("/climber")).unwrap(), "inside");
        assert_eq!(root.link(Path::new("/climber")).unwrap(), Path::new("../../../../../etc/name"));
    }

    #[test]
    fn an_oversized_attribute_is_an_error_and_not_cut() {
        let (dir, root) = tree();
        std::fs::create_dir_all(dir.path().join("sys")).unwrap();
        std::fs::write(dir.path().join("sys/big"), vec![b'x'; 70_000]).unwrap();
        assert_eq!(root.read(Path::new("/sys/big")).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_plain_file_is_no_link() {
        let (_dir, root) = tree();
        assert_eq!(root.link(Path::new("/etc/name")).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn descriptors_of_a_process_are_seen_with_their_device_number() {
        let root = Root::new("/").unwrap();
        let null = File::open("/dev/null").unwrap();
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), null.as_raw_fd()));
        let expected = FileKind::CharDevice(DeviceNumber { major: 1, minor: 3 });
        assert_eq!(root.stat(&path).unwrap().kind, expected);
        assert_eq!(root.link(&path).unwrap(), Path::new("/dev/null"));
        let all = root.open_devices(path.parent().unwrap()).unwrap();
        assert!(all.contains(&DeviceNumber { major: 1, minor: 3 }), "{all:?}");
    }
}
