//! The tables that `depmod` makes of a kernel's modules: `modules.dep` and `modules.builtin` (`modules.dep(5)`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::config::Config;
use crate::driver::canonical;

/// The modules of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// Canonical name → its file, then the files of what it needs, innermost last.
    files: BTreeMap<String, Vec<PathBuf>>,
    builtin: BTreeSet<String>,
}

/// One file to load, relative to `/lib/modules/<release>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    /// With `_` for `-`, as the kernel has it.
    pub name: String,
    /// E.g. `kernel/drivers/vfio/pci/vfio-pci.ko.xz`.
    pub path: PathBuf,
    /// Only asked for by a soft dependency: failing to load it is no failure.
    pub optional: bool,
}

impl Modules {
    /// Parses `modules.dep` and `modules.builtin`.
    pub fn parse(dep: &str, builtin: &str) -> Self {
        let files = dep.lines().filter_map(|line| {
            let (file, needs) = line.split_once(':')?;
            let all = std::iter::once(file).chain(needs.split_ascii_whitespace()).map(PathBuf::from).collect();
            Some((name_of(Path::new(file))?, all))
        });
        let builtin = builtin.lines().filter_map(|line| name_of(Path::new(line)));
        Self { files: files.collect(), builtin: builtin.collect() }
    }

    /// The files to load for a module, in order; empty when it is built in. `None` when this kernel has no such module.
    pub fn order(&self, name: &str, config: &Config) -> Option<Vec<ModuleFile>> {
        let name = canonical(name);
        if self.builtin.contains(&name) {
            return Some(Vec::new());
        }
        self.files.contains_key(&name).then(|| {
            let mut order = Vec::new();
            self.add(&name, config, false, &mut BTreeSet::new(), &mut order);
            order
        })
    }

    fn add(
        &self,
        name: &str,
        config: &Config,
        optional: bool,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<ModuleFile>,
    ) {
        let Some(files) = self.files.get(name) else { return };
        if !seen.insert(name.to_owned()) {
            return;
        }
        let (before, after) = config.soft(name);
        for soft in before {
            self.add(soft, config, true, seen, order);
        }
        for needed in files[1..].iter().rev().filter_map(|path| name_of(path)) {
            self.add(&needed, config, optional, seen, order);
        }
        order.push(ModuleFile { name: name.to_owned(), path: files[0].clone(), optional });
        for soft in after {
            self.add(soft, config, true, seen, order);
        }
    }
}

/// `kernel/drivers/vfio/pci/vfio-pci.ko.xz` → `vfio_pci`.
pub(crate) fn name_of(path: &Path) -> Option<String> {
    let (name, _) = path.file_name()?.to_str()?.split_once(".ko")?;
    Some(canonical(name))
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

    fn soft(text: &str) -> Config {
        Config::parse(&[("modules.softdep", text)], "")
    }

    fn names(modules: &Modules, config: &Config, name: &str) -> Option<Vec<String>> {
        Some(modules.order(name, config)?.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn what_a_module_needs_comes_before_it_and_soft_dependencies_come_along() {
        let (modules, config) = (Modules::parse(DEP, ""), soft(SOFTDEP));
        let expected = ["irqbypass", "vfio", "vfio_iommu_type1", "vfio_pci_core", "vfio_pci"];
        assert_eq!(names(&modules, &config, "vfio-pci").unwrap(), expected);
        assert_eq!(names(&modules, &config, "vfio_pci").unwrap(), expected, "`-` and `_` are the same");
        let order = modules.order("vfio-pci", &config).unwrap();
        let optional: Vec<_> = order.into_iter().filter(|file| file.optional).collect();
        assert_eq!(optional.len(), 1);
        assert_eq!(optional[0].path, Path::new("kernel/drivers/vfio/vfio_iommu_type1.ko.xz"));
    }

    #[test]
    fn a_soft_dependency_that_a_person_wrote_counts_like_the_kernels() {
        let config = soft("softdep vfio-pci pre: vfio_iommu_type1\n");
        let names = names(&Modules::parse(DEP, ""), &config, "vfio-pci").unwrap();
        assert_eq!(names, ["vfio", "vfio_iommu_type1", "irqbypass", "vfio_pci_core", "vfio_pci"]);
    }

    #[test]
    fn a_built_in_module_needs_no_file() {
        let modules = Modules::parse("", "kernel/drivers/vfio/pci/vfio-pci.ko\n");
        assert_eq!(names(&modules, &Config::default(), "vfio-pci"), Some(Vec::new()));
    }

    #[test]
    fn a_module_that_the_kernel_lacks_is_said_to_be_missing() {
        assert_eq!(names(&Modules::parse(DEP, ""), &Config::default(), "nvgrace-gpu-vfio-pci"), None);
    }

    #[test]
    fn a_circle_of_soft_dependencies_ends() {
        let config = soft("softdep a pre: b\nsoftdep b pre: a\n");
        assert_eq!(names(&Modules::parse("a.ko:\nb.ko:\n", ""), &config, "a").unwrap(), ["b", "a"]);
    }
}
