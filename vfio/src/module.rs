//! Loading kernel modules without `modprobe`, by the rules of kmod.
//!
//! What must be there first comes from `modules.dep`, what should come along from `softdep` lines (`vfio` asks for
//! `vfio_iommu_type1` after it, without which no VM can use a device), parameters from `modprobe.d` and the kernel command
//! line. What forbids a module is a [`Ban`].

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::kmod::{ModuleInitFlags, finit_module, init_module};

use crate::driver::canonical;
use crate::host::{self, Host, Root};

mod config;
mod tables;
mod unpack;

pub use config::{Ban, Config};
pub(crate) use tables::name_of;
pub use tables::{ModuleFile, Modules};

/// The kernel unpacks the file itself (Linux 5.17 with `CONFIG_MODULE_DECOMPRESS`; `include/uapi/linux/module.h`).
const COMPRESSED_FILE: u32 = 4;

/// Why a module is not there.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// Neither a file of it nor built in.
    #[error(
        "not among the modules of kernel {release}; install the kernel's full module package, then `modprobe {name}`"
    )]
    Unknown { name: String, release: String },
    /// Somebody forbids it.
    #[error("{ban}")]
    Forbidden { ban: Ban },
    /// A table or the module's file.
    #[error("{path}: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The kernel's answer (`finit_module(2)`), with what it means most often.
    #[error("{path}: {}{hint}; try `modprobe {name}` on the host", errno.desc(), path = path.display())]
    Refused { name: String, path: PathBuf, errno: Errno, hint: &'static str },
}

/// One thing to give to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The module and where it lies.
    pub file: ModuleFile,
    /// As `modprobe` would pass them.
    pub parameters: String,
}

/// What is to be loaded for a module on this host, in order; empty when it is loaded or built in.
///
/// # Errors
/// When the kernel has no such module, or it or one that it needs is forbidden.
pub fn needed(host: &impl Host, name: &str) -> Result<Vec<Load>, ModuleError> {
    let release = read(host, Path::new("/proc/sys/kernel/osrelease"))?;
    let dir = directory(&release);
    let modules = Modules::parse(&read(host, &dir.join("modules.dep"))?, &read(host, &dir.join("modules.builtin"))?);
    let asked = canonical(name);
    if loaded(host, &asked) {
        return Ok(Vec::new());
    }
    let config = Config::read(host, &release);
    let forbidden = |ban| ModuleError::Forbidden { ban };
    let unknown = || ModuleError::Unknown { name: name.to_owned(), release: release.clone() };
    let order = modules.order(name, &config).ok_or_else(unknown)?;
    if let Some(ban) = config.renamed(&asked).filter(|_| !order.is_empty()) {
        return Err(forbidden(ban));
    }
    let mut loads = Vec::new();
    for file in order.into_iter().filter(|file| !loaded(host, &file.name)) {
        match config.ban(&file.name) {
            Some(ban) if file.optional => tracing::debug!(module = file.name, %ban, "optional module left out"),
            Some(ban) => return Err(forbidden(ban)),
            None => loads.push(Load { parameters: config.options(&file.name), file }),
        }
    }
    Ok(loads)
}

/// Loads a module and what it needs into the running kernel.
///
/// # Errors
/// As [`needed`], or when the kernel does not take one of them.
pub fn load(root: &Root, name: &str) -> Result<(), ModuleError> {
    let loads = needed(root, name)?;
    let dir = directory(&read(root, Path::new("/proc/sys/kernel/osrelease"))?);
    for Load { file, parameters } in &loads {
        match insert(root, &dir.join(&file.path), name, parameters) {
            Ok(()) => {}
            Err(error) if file.optional => tracing::debug!(module = file.name, %error, "optional module not loaded"),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Where a kernel's modules lie.
fn directory(release: &str) -> PathBuf {
    Path::new("/lib/modules").join(release)
}

/// Modules and built-in code with parameters are both there; the latter need no loading either.
fn loaded(host: &impl Host, canonical_name: &str) -> bool {
    host.exists(&Path::new("/sys/module").join(canonical_name))
}

fn insert(root: &Root, path: &Path, asked: &str, parameters: &str) -> Result<(), ModuleError> {
    let unreadable = |source| ModuleError::Read { path: path.to_owned(), source };
    let fd = root.open(path, OFlag::O_RDONLY).map_err(unreadable)?;
    let compressed = path.extension().is_none_or(|extension| extension != "ko");
    let flags = ModuleInitFlags::from_bits_retain(if compressed { COMPRESSED_FILE } else { 0 });
    let parameters = CString::new(parameters).unwrap_or_default();
    let mut result = finit_module(&fd, &parameters, flags);
    // A kernel that does not know the flag, was built without it, or for another format.
    if compressed && matches!(result, Err(Errno::EINVAL | Errno::ENOEXEC | Errno::EOPNOTSUPP)) {
        let image = unpack::image(path, &root.read(path).map_err(unreadable)?).map_err(unreadable)?;
        result = init_module(&image, &parameters);
    }
    let hint = match result {
        Ok(()) | Err(Errno::EEXIST) => return Ok(()),
        Err(Errno::EPERM) => " (lockdown, or CAP_SYS_MODULE is missing)",
        Err(Errno::ENOKEY | Errno::EKEYREJECTED) => " (the module is not signed with a key that the kernel trusts)",
        Err(Errno::ENOEXEC) => " (it was made for another kernel)",
        Err(_) => "",
    };
    let errno = result.err().unwrap_or(Errno::UnknownErrno);
    Err(ModuleError::Refused { name: asked.to_owned(), path: path.to_owned(), errno, hint })
}

/// A missing file is an empty one: kernels without modules have none of them.
fn read(host: &impl Host, path: &Path) -> Result<String, ModuleError> {
    let text = host::optional(host::text(host, path));
    Ok(text.map_err(|source| ModuleError::Read { path: path.to_owned(), source })?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    /// A kernel that has `vfio-pci` as Debian has it.
    fn host() -> Tree {
        let mut tree = Tree::default();
        tree.file("/proc/sys/kernel/osrelease", "6.1.0\n");
        let dep = "kernel/vfio-pci.ko.xz: kernel/vfio.ko.xz\nkernel/vfio.ko.xz:\nkernel/vfio_iommu_type1.ko.xz: kernel/vfio.ko.xz\n";
        tree.file("/lib/modules/6.1.0/modules.dep", dep);
        tree.file("/lib/modules/6.1.0/modules.softdep", "softdep vfio post: vfio_iommu_type1\n");
        tree
    }

    fn names(host: &Tree) -> Vec<String> {
        needed(host, "vfio-pci").unwrap().into_iter().map(|load| load.file.name).collect()
    }

    fn refusal(host: &Tree) -> String {
        needed(host, "vfio-pci").unwrap_err().to_string()
    }

    #[test]
    fn what_is_loaded_is_not_loaded_again() {
        let mut host = host();
        assert_eq!(names(&host), ["vfio", "vfio_iommu_type1", "vfio_pci"]);
        host.dir("/sys/module/vfio");
        assert_eq!(names(&host), ["vfio_iommu_type1", "vfio_pci"]);
        host.dir("/sys/module/vfio_pci");
        assert_eq!(names(&host), Vec::<String>::new(), "nothing is added to what others have set up");
    }

    #[test]
    fn every_module_gets_its_own_parameters() {
        let mut host = host();
        host.file("/etc/modprobe.d/vfio.conf", "options vfio_iommu_type1 allow_unsafe_interrupts=1\n");
        host.file("/proc/cmdline", "vfio_pci.disable_vga=1");
        let loads = needed(&host, "vfio-pci").unwrap();
        let parameters: Vec<_> = loads.iter().map(|load| load.parameters.as_str()).collect();
        assert_eq!(parameters, ["", "allow_unsafe_interrupts=1", "disable_vga=1"]);
    }

    #[test]
    fn a_ban_on_the_module_or_on_one_that_it_needs_is_a_refusal() {
        for (file, line) in [
            ("/etc/modprobe.d/a.conf", "install vfio-pci /bin/false\n"),
            ("/etc/modprobe.d/a.conf", "install vfio /bin/true\n"),
            ("/etc/modprobe.d/a.conf", "alias vfio-pci off\n"),
            ("/proc/cmdline", "module_blacklist=vfio\n"),
        ] {
            let mut host = host();
            host.file(file, line);
            let text = refusal(&host);
            assert!(text.contains(line.split('=').next().unwrap().trim().replace('-', "_").as_str()), "{line}: {text}");
            host.dir("/sys/module/vfio_pci");
            assert_eq!(names(&host), Vec::<String>::new(), "{line}: it is there all the same");
        }
    }

    #[test]
    fn a_banned_soft_dependency_is_left_out() {
        let mut host = host();
        host.file("/etc/modprobe.d/a.conf", "install vfio_iommu_type1 /bin/false\n");
        assert_eq!(names(&host), ["vfio", "vfio_pci"]);
    }

    #[test]
    fn a_blacklisted_module_is_loaded_by_name() {
        let mut host = host();
        host.file("/etc/modprobe.d/a.conf", "blacklist vfio_pci\nblacklist vfio\n");
        assert_eq!(names(&host).len(), 3);
    }

    #[test]
    fn an_unknown_module_names_the_next_step() {
        let error = needed(&Tree::default(), "vfio-pci").unwrap_err();
        assert!(error.to_string().contains("`modprobe vfio-pci`"), "{error}");
    }
}
