//! What an administrator says about modules: `modprobe.d(5)` and the kernel command line, read as kmod reads them.
//!
//! Files are read in the order of their names, wherever they lie; the kernel's own `modules.softdep` is one of them. Of
//! `softdep`, `install` and `alias` lines for one module the first counts, `options` lines all count.
//! `blacklist` lines (and `modprobe.blacklist=`) keep a module from being loaded for its hardware, not by its name, so they
//! do not matter here; what forbids it by its name is a [`Ban`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::driver::{canonical, glob};
use crate::host::{self, Host};

/// `modprobe.d(5)`: of two files with one name, the one in the earlier directory counts.
const MODPROBE_DIRS: [&str; 5] =
    ["/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];

/// Why a module may not be loaded by its name.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Ban {
    /// `module_blacklist=` of the kernel command line: the kernel itself refuses it (`blacklisted`, `kernel/module/main.c`).
    CommandLine { module: String },
    /// An `install` line: a command is to be run instead. That is a shell's work, and often just `/bin/false`.
    Install { module: String, command: String, file: PathBuf },
    /// An `alias` line gives its name to another module, or to none (`off`).
    Alias { module: String, target: String, file: PathBuf },
}

impl fmt::Display for Ban {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommandLine { module } => {
                write!(f, "module_blacklist= forbids to load {module}; boot without it in that list")
            }
            Self::Install { module, command, file } => write!(
                f,
                "{} has `install {module} {command}`, which gpuvirt does not run; remove that line, or load the module on the \
                 host",
                file.display()
            ),
            Self::Alias { module, target, file } => {
                write!(
                    f,
                    "{} has `alias {module} {target}`, so that it cannot be loaded; remove that line",
                    file.display()
                )
            }
        }
    }
}

/// The lines that matter for loading modules by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    aliases: Vec<(String, String, PathBuf)>,
    installs: Vec<(String, String, PathBuf)>,
    /// Pattern → names before and after.
    soft: Vec<(String, Vec<String>, Vec<String>)>,
    /// Canonical name → parameters.
    options: Vec<(String, String)>,
    /// As written: the kernel does not take `-` for `_` here.
    forbidden: Vec<String>,
}

impl Config {
    /// Reads the host's configuration for a kernel. A file that cannot be read is an empty one, as it is for kmod.
    pub fn read(host: &impl Host, release: &str) -> Self {
        let mut files = BTreeMap::new();
        for dir in MODPROBE_DIRS {
            for name in host.list(Path::new(dir)).unwrap_or_default() {
                if Path::new(&name).extension().is_some_and(|extension| extension == "conf") {
                    files.entry(name.clone()).or_insert_with(|| Path::new(dir).join(&name));
                }
            }
        }
        let soft = "modules.softdep";
        files.entry(soft.into()).or_insert_with(|| Path::new("/lib/modules").join(release).join(soft));
        let command_line = host::text(host, Path::new("/proc/cmdline")).unwrap_or_default();
        let texts: Vec<_> = files.values().map(|path| (path, host::text(host, path).unwrap_or_default())).collect();
        let texts: Vec<_> = texts.iter().map(|(path, text)| (path.as_path(), text.as_str())).collect();
        Self::parse(&texts, &command_line)
    }

    /// Parses files, given in the order in which they count, and a kernel command line.
    pub fn parse<P: AsRef<Path>>(files: &[(P, &str)], command_line: &str) -> Self {
        let mut config = Self::default();
        for (path, text) in files {
            // A backslash joins a line with the next one.
            for line in text.replace("\\\n", " ").lines() {
                config.line(path.as_ref(), line);
            }
        }
        config.command_line(command_line);
        config
    }

    fn line(&mut self, file: &Path, line: &str) {
        let word = |text: &str| {
            let (word, rest) = text.trim().split_once([' ', '\t'])?;
            Some((word.to_owned(), rest.trim().to_owned()))
        };
        let Some((command, rest)) = word(line) else { return };
        let Some((module, rest)) = word(&rest) else { return };
        let module = canonical(&module);
        match command.as_str() {
            "options" => self.options.push((module, rest)),
            "install" => self.installs.push((module, rest, file.to_owned())),
            "alias" => self.aliases.push((module, canonical(&rest), file.to_owned())),
            "softdep" => {
                let (mut before, mut after) = (Vec::new(), Vec::new());
                let mut list = None;
                for word in rest.split_ascii_whitespace() {
                    match word {
                        "pre:" => list = Some(&mut before),
                        "post:" => list = Some(&mut after),
                        name => list.iter_mut().for_each(|list| list.push(canonical(name))),
                    }
                }
                self.soft.push((module, before, after));
            }
            // Of aliases (`blacklist`), of removal (`remove`), hints for initramfs tools (`weakdep`), comments.
            _ => {}
        }
    }

    fn command_line(&mut self, line: &str) {
        for word in words(line) {
            let (key, value) = word.split_once('=').map_or((word.as_str(), None), |(key, value)| (key, Some(value)));
            if let ("module_blacklist", Some(list)) = (key, value) {
                // Of several the kernel takes the last.
                self.forbidden = list.split(',').map(str::to_owned).collect();
            } else if let Some((module, _)) = key.split_once('.') {
                self.options.push((canonical(module), word[module.len() + 1..].to_owned()));
            }
        }
    }

    /// Names that should come before and after a module.
    pub(crate) fn soft(&self, name: &str) -> (&[String], &[String]) {
        let found = self.soft.iter().find(|(pattern, _, _)| glob(pattern, name));
        found.map_or((&[], &[]), |(_, before, after)| (before, after))
    }

    /// Parameters of a module, those of the command line last, as `modprobe` passes them.
    pub(crate) fn options(&self, name: &str) -> String {
        let values = self.options.iter().filter(|(module, _)| module == name).map(|(_, values)| values.as_str());
        values.collect::<Vec<_>>().join(" ")
    }

    /// What keeps a module from being loaded, when it is asked for by its own name or needed by one that is.
    pub(crate) fn ban(&self, name: &str) -> Option<Ban> {
        let module = || name.to_owned();
        if self.forbidden.iter().any(|listed| listed == name) {
            return Some(Ban::CommandLine { module: module() });
        }
        let found = self.installs.iter().find(|(pattern, _, _)| glob(pattern, name));
        found.map(|(_, command, file)| Ban::Install { module: module(), command: command.clone(), file: file.clone() })
    }

    /// What else the name stands for. Only the module that is asked for is looked up so, not what it needs.
    pub(crate) fn renamed(&self, name: &str) -> Option<Ban> {
        let found = self.aliases.iter().find(|(pattern, _, _)| glob(pattern, name));
        let (_, target, file) = found.filter(|(_, target, _)| target != name)?;
        Some(Ban::Alias { module: name.to_owned(), target: target.clone(), file: file.clone() })
    }
}

/// Words of a kernel command line (`next_arg`, `lib/cmdline.c`): blanks in quotes do not end a word, and quotes around a
/// whole word are handed on around its value.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quoted) = (String::new(), false);
    for letter in line.chars().chain([' ']) {
        if letter == '"' {
            quoted = !quoted;
        }
        if !letter.is_ascii_whitespace() || quoted {
            word.push(letter);
        } else if !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
    }
    words.extend(Some(word).filter(|word| !word.is_empty()));
    let unwrap = |word: String| match word.strip_prefix('"').and_then(|word| word.strip_suffix('"')) {
        Some(inner) => match inner.split_once('=') {
            Some((key, value)) => format!("{key}=\"{value}\""),
            None => inner.to_owned(),
        },
        None => word,
    };
    words.into_iter().map(unwrap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    fn of(text: &str) -> Config {
        Config::parse(&[("/etc/modprobe.d/a.conf", text)], "")
    }

    #[test]
    fn options_are_those_of_the_module_with_the_command_line_last() {
        let config = Config::parse(
            &[("a.conf", "# options vfio-pci no=1\noptions vfio-pci disable_idle_d3=1\noptions snd x=1\n")],
            "quiet vfio_pci.ids=10de:1eb8 vfio-pci.disable_vga=1 vfio.x=2 vfio_pci.flag",
        );
        assert_eq!(config.options("vfio_pci"), "disable_idle_d3=1 ids=10de:1eb8 disable_vga=1 flag");
        assert_eq!(config.options("nvidia"), "");
    }

    #[test]
    fn quotes_of_the_command_line_are_understood_in_both_places() {
        for line in [r#"vfio_pci.x="a b" quiet"#, r#""vfio_pci.x=a b" quiet"#] {
            assert_eq!(Config::parse::<&str>(&[], line).options("vfio_pci"), r#"x="a b""#, "{line}");
        }
        assert_eq!(words(r#"a "b"#), ["a", "\"b "], "a quote that is not closed");
    }

    #[test]
    fn a_line_goes_on_behind_a_backslash() {
        let config = of("options vfio-pci \\\n  ids=10de:1eb8\ninstall \\\nvfio /bin/true\n");
        assert_eq!(config.options("vfio_pci"), "ids=10de:1eb8");
        assert!(config.ban("vfio").is_some());
    }

    #[test]
    fn a_blacklisted_module_is_loaded_by_its_name_all_the_same() {
        let config = Config::parse(&[("a.conf", "blacklist vfio_pci\n")], "modprobe.blacklist=vfio_pci");
        assert_eq!((config.ban("vfio_pci"), config.renamed("vfio_pci")), (None, None));
    }

    #[test]
    fn an_install_line_is_a_ban_that_names_its_file_and_the_next_step() {
        for line in ["install vfio-pci /bin/false", " install  vfio_pci\t /bin/false", "install vfio* /bin/false"] {
            let ban = of(line).ban("vfio_pci").unwrap().to_string();
            assert!(ban.contains("/etc/modprobe.d/a.conf has `install vfio_pci /bin/false`"), "{ban}");
            assert!(ban.contains("remove that line"), "{ban}");
        }
        assert_eq!(of("install vfio /bin/false").ban("vfio_pci"), None);
        assert_eq!(of("#install vfio-pci /bin/false").ban("vfio_pci"), None);
        assert_eq!(of("remove vfio-pci /bin/false").ban("vfio_pci"), None);
    }

    #[test]
    fn the_kernels_own_list_is_compared_letter_by_letter_and_its_last_one_counts() {
        let ban = |line| Config::parse::<&str>(&[], line).ban("vfio_pci");
        assert!(ban("module_blacklist=nouveau,vfio_pci").unwrap().to_string().contains("module_blacklist="));
        assert_eq!(ban("module_blacklist=vfio-pci"), None);
        assert_eq!(ban("module_blacklist=vfio_pci module_blacklist=nouveau"), None);
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_a_ban() {
        let ban = of("alias vfio-pci off").renamed("vfio_pci").unwrap().to_string();
        assert!(ban.contains("alias vfio_pci off"), "{ban}");
        assert_eq!(of("alias pci:v000010DE* nvidia").renamed("vfio_pci"), None);
        assert_eq!(of("alias vfio-pci vfio_pci").renamed("vfio_pci"), None);
    }

    #[test]
    fn of_several_soft_dependencies_the_first_file_by_name_counts() {
        let soft = "softdep vfio post: vfio_iommu_type1\n";
        let mut tree = Tree::default();
        tree.file("/lib/modules/6.1.0/modules.softdep", soft);
        tree.file("/etc/modprobe.d/zz.conf", "softdep vfio post: late\n");
        assert_eq!(Config::read(&tree, "6.1.0").soft("vfio").1, ["vfio_iommu_type1"]);
        tree.file("/etc/modprobe.d/10.conf", "softdep vfio pre: early\n");
        assert_eq!(Config::read(&tree, "6.1.0").soft("vfio"), (&["early".to_owned()][..], &[][..]));
    }

    #[test]
    fn a_file_of_the_administrator_hides_that_of_the_distribution() {
        let mut tree = Tree::default();
        tree.file("/lib/modprobe.d/vfio.conf", "install vfio-pci /bin/false\n");
        tree.file("/lib/modprobe.d/readme", "install vfio /bin/false\n");
        assert!(Config::read(&tree, "6.1.0").ban("vfio_pci").is_some());
        assert!(Config::read(&tree, "6.1.0").ban("vfio").is_none(), "no file of modprobe.d");
        tree.file("/etc/modprobe.d/vfio.conf", "");
        assert_eq!(Config::read(&tree, "6.1.0").ban("vfio_pci"), None);
    }
}
