//! A file tree in memory that reads like a host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;

use crate::host::{DeviceNumber, FileKind, Host, Stat};

/// Most links on one way (`MAXSYMLINKS`, `include/linux/namei.h`).
const MOST_LINKS: usize = 40;

/// One node of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Dir(BTreeMap<OsString, Node>),
    /// A file whose text is `char MAJOR:MINOR` stands for a device node: real ones take root to make.
    File(Vec<u8>),
    Link(PathBuf),
}

/// A file tree in memory. Links are resolved as if its top were `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree(Node);

impl Default for Tree {
    fn default() -> Self {
        Self(Node::Dir(BTreeMap::new()))
    }
}

impl Tree {
    pub(crate) fn file(&mut self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        self.put(path.as_ref(), Node::File(content.as_ref().to_vec()));
    }

    pub(crate) fn link_to(&mut self, path: impl AsRef<Path>, target: impl Into<PathBuf>) {
        self.put(path.as_ref(), Node::Link(target.into()));
    }

    pub(crate) fn dir(&mut self, path: impl AsRef<Path>) {
        self.put(path.as_ref(), Node::Dir(BTreeMap::new()));
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn top(&self) -> &Node {
        &self.0
    }

    /// Links on the way are not followed; what stands in the way is replaced.
    pub(crate) fn put(&mut self, path: &Path, node: Node) {
        let mut at = &mut self.0;
        for part in names(path) {
            if !matches!(at, Node::Dir(_)) {
                *at = Node::Dir(BTreeMap::new());
            }
            let Node::Dir(children) = at else { return };
            at = children.entry(part.to_owned()).or_insert_with(|| Node::Dir(BTreeMap::new()));
        }
        match (&at, &node) {
            (Node::Dir(_), Node::Dir(_)) => {}
            (_, _) => *at = node,
        }
    }

    fn find(&self, path: &Path, follow_last: bool) -> io::Result<&Node> {
        let mut todo: Vec<Part> = parts(path);
        let mut way = vec![&self.0];
        let mut links = 0;
        while let Some(part) = todo.pop() {
            let here = way.last().copied().unwrap_or(&self.0);
            let name = match part {
                Part::Up if way.len() > 1 => {
                    way.pop();
                    continue;
                }
                Part::Up => continue,
                Part::Name(name) => name,
            };
            let Node::Dir(children) = here else { return Err(Errno::ENOTDIR.into()) };
            let child = children.get(&name).ok_or_else(|| io::Error::from(Errno::ENOENT))?;
            match child {
                Node::Link(target) if follow_last || !todo.is_empty() => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Errno::ELOOP.into());
                    }
                    if target.is_absolute() {
                        way.truncate(1);
                    }
                    todo.extend(parts(target));
                }
                Node::Link(_) | Node::Dir(_) | Node::File(_) => way.push(child),
            }
        }
        Ok(way.last().copied().unwrap_or(&self.0))
    }
}

enum Part {
    Up,
    Name(OsString),
}

/// Components, the first one last.
fn parts(path: &Path) -> Vec<Part> {
    let part = |component| match component {
        Component::ParentDir => Some(Part::Up),
        Component::Normal(name) => Some(Part::Name(name.to_owned())),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    let mut parts: Vec<_> = path.components().filter_map(part).collect();
    parts.reverse();
    parts
}

fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.iter().filter(|part| *part != "/")
}

/// The number in the text that stands for a device node.
pub(crate) fn device_number(content: &[u8]) -> Option<DeviceNumber> {
    let (major, minor) = std::str::from_utf8(content).ok()?.strip_prefix("char ")?.split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.trim().parse().ok()? })
}

impl Host for Tree {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        match self.find(path, true)? {
            Node::File(content) => Ok(content.clone()),
            Node::Dir(_) => Err(Errno::EISDIR.into()),
            Node::Link(_) => Err(Errno::ELOOP.into()),
        }
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        match self.find(path, false)? {
            Node::Link(target) => Ok(target.clone()),
            Node::Dir(_) | Node::File(_) => Err(Errno::EINVAL.into()),
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
        match self.find(path, true)? {
            Node::Dir(children) => Ok(children.keys().cloned().collect()),
            Node::File(_) | Node::Link(_) => Err(Errno::ENOTDIR.into()),
        }
    }

    fn exists(&self, path: &Path) -> bool {
        self.find(path, true).is_ok()
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let kind = match self.find(path, true)? {
            Node::Dir(_) => FileKind::Directory,
            Node::File(content) => device_number(content).map_or(FileKind::Regular, FileKind::CharDevice),
            Node::Link(_) => FileKind::Other,
        };
        Ok(Stat { kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_and_never_lead_out() {
        let mut tree = Tree::default();
        tree.file("/etc/name", "inside");
        tree.link_to("/a/alias", "/etc/name");
        tree.link_to("/a/climber", "../../../../etc/name");
        tree.link_to("/a/dir", "../etc");
        for path in ["/a/alias", "/a/climber", "/a/dir/name"] {
            assert_eq!(tree.read(Path::new(path)).unwrap(), b"inside", "{path}");
        }
        assert_eq!(tree.link(Path::new("/a/alias")).unwrap(), Path::new("/etc/name"));
        assert_eq!(tree.list(Path::new("/a")).unwrap(), ["alias", "climber", "dir"]);
    }

    #[test]
    fn a_circle_of_links_ends() {
        let mut tree = Tree::default();
        tree.link_to("/a", "/b");
        tree.link_to("/b", "a");
        assert_eq!(tree.read(Path::new("/a")).unwrap_err().raw_os_error(), Some(Errno::ELOOP as i32));
    }

    #[test]
    fn what_is_not_there_is_said_as_the_kernel_does() {
        let mut tree = Tree::default();
        tree.file("/file", "char 10:196");
        assert_eq!(tree.read(Path::new("/none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(tree.list(Path::new("/file")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        let number = DeviceNumber { major: 10, minor: 196 };
        assert_eq!(tree.stat(Path::new("/file")).unwrap().kind, FileKind::CharDevice(number));
    }
}
