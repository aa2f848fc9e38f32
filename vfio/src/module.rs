//! Loading kernel modules without `modprobe`, by the rules of kmod's `modules.dep(5)` and `modprobe.d(5)`.
//!
//! What must be there first comes from `modules.dep`, what should come along from `modules.softdep` (`vfio` asks for
//! `vfio_iommu_type1` after it, without which no VM can use a device), options from `modprobe.d` and the kernel command
//! line. `install` and `blacklist` lines do not matter: the first are shell, the second hold for aliases only.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::kmod::{ModuleInitFlags, finit_module};

use crate::driver::canonical;
use crate::host::{self, Host, Root};

/// The kernel unpacks the file itself (Linux 5.17 with `CONFIG_MODULE_DECOMPRESS`; `include/uapi/linux/module.h`).
const COMPRESSED_FILE: u32 = 4;

/// `modprobe.d(5)`: of two files with one name, the one in the earlier directory counts.
const MODPROBE_DIRS: [&str; 5] =
    ["/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];

/// Why a module is not there.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    #[error(
        "not among the modules of kernel {release}; install the kernel's full module package, then `modprobe {name}`"
    )]
    Unknown { name: String, release: String },
    #[error("{path}: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {}{hint}; try `modprobe {name}` on the host", errno.desc(), path = path.display())]
    Refused { name: String, path: PathBuf, errno: Errno, hint: &'static str },
}

/// The tables of `/lib/modules/<release>`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// Canonical name → its file, then the files of what it needs, innermost last.
    files: BTreeMap<String, Vec<PathBuf>>,
    builtin: BTreeSet<String>,
    /// Canonical name → names before and after it.
    soft: BTreeMap<String, (Vec<String>, Vec<String>)>,
}

/// One file to load, relative to `/lib/modules/<release>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    pub name: String,
    pub path: PathBuf,
    /// Only asked for by a soft dependency: failing to load it is no failure.
    pub optional: bool,
}

impl Modules {
    /// Parses `modules.dep`, `modules.builtin` and `modules.softdep`.
    pub fn parse(dep: &str, builtin: &str, softdep: &str) -> Self {
        let files = dep.lines().filter_map(|line| {
            let (file, needs) = line.split_once(':')?;
            let all = std::iter::once(file).chain(needs.split_ascii_whitespace()).map(PathBuf::from).collect();
            Some((name_of(Path::new(file))?, all))
        });
        let mut modules = Self {
            files: files.collect(),
            builtin: builtin.lines().filter_map(|line| name_of(Path::new(line))).collect(),
            soft: BTreeMap::new(),
        };
        for line in softdep.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some("softdep"), Some(name)) = (words.next(), words.next()) else { continue };
            let (before, after) = modules.soft.entry(canonical(name)).or_default();
            let mut list = None;
            for word in words {
                match word {
                    "pre:" => list = Some(&mut *before),
                    "post:" => list = Some(&mut *after),
                    name => list.iter_mut().for_each(|list| list.push(canonical(name))),
                }
            }
        }
        modules
    }

    /// The files to load for a module, in order; empty when it is built in. `None` when this kernel has no such module.
    pub fn order(&self, name: &str) -> Option<Vec<ModuleFile>> {
        let name = canonical(name);
        if self.builtin.contains(&name) {
            return Some(Vec::new());
        }
        self.files.contains_key(&name).then(|| {
            let mut order = Vec::new();
            self.add(&name, false, &mut BTreeSet::new(), &mut order);
            order
        })
    }

    fn add(&self, name: &str, optional: bool, seen: &mut BTreeSet<String>, order: &mut Vec<ModuleFile>) {
        let Some(files) = self.files.get(name) else { return };
        if !seen.insert(name.to_owned()) {
            return;
        }
        let (before, after) = self.soft.get(name).map_or((&[][..], &[][..]), |(before, after)| (before, after));
        for soft in before {
            self.add(soft, true, seen, order);
        }
        for needed in files[1..].iter().rev().filter_map(|path| name_of(path)) {
            self.add(&needed, optional, seen, order);
        }
        order.push(ModuleFile { name: name.to_owned(), path: files[0].clone(), optional });
        for soft in after {
            self.add(soft, true, seen, order);
        }
    }
}

/// `kernel/drivers/vfio/pci/vfio-pci.ko.xz` → `vfio_pci`.
fn name_of(path: &Path) -> Option<String> {
    let (name, _) = path.file_name()?.to_str()?.split_once(".ko")?;
    Some(canonical(name))
}

/// Parameters of a module in lines like `options vfio-pci disable_idle_d3=1` and in a kernel command line like
/// `vfio_pci.disable_idle_d3=1`, the command line last, as `modprobe` passes them.
fn options(name: &str, config: &str, command_line: &str) -> String {
    let configured = config.lines().filter_map(|line| {
        let mut words = line.trim().splitn(3, [' ', '\t']);
        let (Some("options"), Some(module), Some(values)) = (words.next(), words.next(), words.next()) else {
            return None;
        };
        (canonical(module) == name).then(|| values.trim().to_owned())
    });
    let passed = command_line.split_ascii_whitespace().filter_map(|word| {
        let (key, _) = word.split_once('=').unwrap_or((word, ""));
        let (module, _) = key.split_once('.')?;
        (canonical(module) == name).then(|| word[module.len() + 1..].to_owned())
    });
    configured.chain(passed).collect::<Vec<_>>().join(" ")
}

/// Loads a module and what it needs into the running kernel.
///
/// # Errors
/// When the module does not exist, or the kernel does not take it or one that it needs.
pub fn load(root: &Root, name: &str) -> Result<(), ModuleError> {
    let release = read(root, Path::new("/proc/sys/kernel/osrelease"))?;
    let dir = Path::new("/lib/modules").join(release.trim());
    let dep = read(root, &dir.join("modules.dep"))?;
    let builtin = read(root, &dir.join("modules.builtin"))?;
    let modules = Modules::parse(&dep, &builtin, &read(root, &dir.join("modules.softdep"))?);
    let order = modules.order(name).or_else(|| loaded(root, &canonical(name)).then(Vec::new));
    let order =
        order.ok_or_else(|| ModuleError::Unknown { name: name.to_owned(), release: release.trim().to_owned() })?;
    let config = modprobe_config(root);
    let command_line = read(root, Path::new("/proc/cmdline"))?;
    for file in order.iter().filter(|file| !loaded(root, &file.name)) {
        let options = options(&file.name, &config, &command_line);
        match insert(root, &dir.join(&file.path), name, &options) {
            Ok(()) => {}
            Err(error) if file.optional => tracing::debug!(module = file.name, %error, "optional module not loaded"),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Modules and built-in code with parameters are both there; the latter need no loading either.
fn loaded(root: &Root, canonical_name: &str) -> bool {
    root.exists(&Path::new("/sys/module").join(canonical_name))
}

fn insert(root: &Root, path: &Path, asked: &str, options: &str) -> Result<(), ModuleError> {
    let fd = root.open(path, OFlag::O_RDONLY).map_err(|source| ModuleError::Read { path: path.to_owned(), source })?;
    let compressed = path.extension().is_none_or(|extension| extension != "ko");
    let flags = ModuleInitFlags::from_bits_retain(if compressed { COMPRESSED_FILE } else { 0 });
    let options = CString::new(options).unwrap_or_default();
    let Err(errno) = finit_module(&fd, &options, flags) else { return Ok(()) };
    let cannot_unpack = compressed && matches!(errno, Errno::EINVAL | Errno::ENOEXEC | Errno::EOPNOTSUPP);
    let hint = if errno == Errno::EEXIST {
        return Ok(());
    } else if cannot_unpack {
        " (this kernel may not unpack modules itself)"
    } else if errno == Errno::EPERM {
        " (lockdown, or CAP_SYS_MODULE is missing)"
    } else if matches!(errno, Errno::ENOKEY | Errno::EKEYREJECTED) {
        " (the module is not signed with a key that the kernel trusts)"
    } else {
        ""
    };
    Err(ModuleError::Refused { name: asked.to_owned(), path: path.to_owned(), errno, hint })
}

/// All `modprobe.d` files as one text, in the order that kmod reads them.
fn modprobe_config(root: &Root) -> String {
    let mut files = BTreeMap::new();
    for dir in MODPROBE_DIRS {
        for name in root.list(Path::new(dir)).unwrap_or_default() {
            if Path::new(&name).extension().is_some_and(|extension| extension == "conf") {
                files.entry(name.clone()).or_insert_with(|| Path::new(dir).join(&name));
            }
        }
    }
    let texts = files.values().map(|path| host::text(root, path).unwrap_or_default());
    // A backslash joins a line with the next one.
    texts.collect::<Vec<_>>().join("\n").replace("\\\n", " ")
}

/// A missing file is an empty one: kernels without modules have none of them.
fn read(root: &Root, path: &Path) -> Result<String, ModuleError> {
    let text = host::optional(host::text(root, path));
    Ok(text.map_err(|source| ModuleError::Read { path: path.to_owned(), source })?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/pci/vfio-pci-core.ko.xz \
        kernel/drivers/vfio/vfio.ko.xz kernel/virt/lib/irqbypass.ko.xz\n\
        kernel/drivers/vfio/pci/vfio-pci-core.ko.xz: kernel/drivers/vfio/vfio.ko.xz kernel/virt/lib/irqbypass.ko.xz\n\
        kernel/drivers/vfio/vfio.ko.xz:\n\
        kernel/drivers/vfio/vfio_iommu_type1.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n\
        kernel/virt/lib/irqbypass.ko.xz:\n";
    const SOFTDEP: &str = "# Soft dependencies\nsoftdep vfio post: vfio_iommu_type1 vfio_iommu_spapr_tce\n";

    fn names(modules: &Modules, name: &str) -> Option<Vec<String>> {
        Some(modules.order(name)?.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn what_a_module_needs_comes_before_it_and_soft_dependencies_come_along() {
        let modules = Modules::parse(DEP, "", SOFTDEP);
        let expected = ["irqbypass", "vfio", "vfio_iommu_type1", "vfio_pci_core", "vfio_pci"];
        assert_eq!(names(&modules, "vfio-pci").unwrap(), expected);
        assert_eq!(names(&modules, "vfio_pci").unwrap(), expected, "`-` and `_` are the same");
        let optional: Vec<_> = modules.order("vfio-pci").unwrap().into_iter().filter(|file| file.optional).collect();
        assert_eq!(optional.len(), 1);
        assert_eq!(optional[0].path, Path::new("kernel/drivers/vfio/vfio_iommu_type1.ko.xz"));
    }

    #[test]
    fn a_built_in_module_needs_no_file() {
        let modules = Modules::parse("", "kernel/drivers/vfio/pci/vfio-pci.ko\n", "");
        assert_eq!(names(&modules, "vfio-pci"), Some(Vec::new()));
    }

    #[test]
    fn a_module_that_the_kernel_lacks_is_said_to_be_missing() {
        assert_eq!(names(&Modules::parse(DEP, "", ""), "nvgrace-gpu-vfio-pci"), None);
    }

    #[test]
    fn a_circle_of_soft_dependencies_ends() {
        let modules = Modules::parse("a.ko:\nb.ko:\n", "", "softdep a pre: b\nsoftdep b pre: a\n");
        assert_eq!(names(&modules, "a").unwrap(), ["b", "a"]);
    }

    #[test]
    fn options_are_those_of_the_module_with_the_command_line_last() {
        let config = "# options vfio-pci no=1\noptions vfio-pci disable_idle_d3=1\noptions snd x=1\n";
        let line = "quiet vfio_pci.ids=10de:1eb8 vfio-pci.disable_vga=1 vfio.x=2";
        assert_eq!(options("vfio_pci", config, line), "disable_idle_d3=1 ids=10de:1eb8 disable_vga=1");
        assert_eq!(options("nvidia", config, line), "");
    }

    #[test]
    fn an_unknown_module_names_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let error = load(&Root::new(dir.path()).unwrap(), "vfio-pci").unwrap_err();
        assert!(error.to_string().contains("`modprobe vfio-pci`"), "{error}");
    }
}
