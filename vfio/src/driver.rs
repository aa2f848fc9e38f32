//! Which VFIO driver a function wants.
//!
//! A variant driver of `vfio-pci` announces its devices as `alias vfio_pci:<pattern> <module>` in `modules.alias` of the
//! running kernel (`PCI_DRIVER_OVERRIDE_DEVICE_VFIO`, `include/linux/mod_devicetable.h`, Linux 5.16). The pattern with the
//! fewest wildcards is the most specific one; the rule is the same as in go-nvlib's `nvpassthrough`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::host::{self, Host};

/// The driver that takes any PCI device.
pub const VFIO_PCI: &str = "vfio-pci";

/// Whether a driver by this name hands its devices to VFIO. The variant drivers of the kernel are all named
/// `<vendor>_vfio_pci`, after their modules.
pub fn is_vfio(driver: &str) -> bool {
    canonical(driver).ends_with("vfio_pci")
}

/// Module names do not tell `-` from `_`.
pub(crate) fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// A VFIO driver: the module that has it and the name it has in `/sys/bus/pci/drivers`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct VfioDriver {
    /// With `_` for `-`, as the kernel has it.
    pub module: String,
    /// `vfio-pci`, or the module's name for variants.
    pub name: String,
}

impl VfioDriver {
    fn of_module(module: &str) -> Self {
        let module = canonical(module);
        // The generic driver has a name of its own; variants are named by KBUILD_MODNAME.
        let name = if module == "vfio_pci" { VFIO_PCI.to_owned() } else { module.clone() };
        Self { module, name }
    }
}

impl fmt::Display for VfioDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The VFIO drivers that the running kernel's modules offer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct VfioDrivers {
    aliases: Vec<Alias>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Alias {
    pattern: String,
    module: String,
}

impl VfioDrivers {
    /// Reads `modules.alias` of a kernel release. A kernel without that file (everything built in) has `vfio-pci` only.
    pub fn read(host: &impl Host, release: &str) -> io::Result<Self> {
        let path = PathBuf::from("/lib/modules").join(release).join("modules.alias");
        let bytes = host::optional(host.read(Path::new(&path)))?.unwrap_or_default();
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Parses the text of a `modules.alias` file; lines of other kinds are passed over.
    pub fn parse(text: &str) -> Self {
        // Searched rather than read line by line: the file has tens of thousands of lines, of which a handful count.
        let aliases = text.split("alias vfio_pci:").skip(1).filter_map(|rest| {
            let (pattern, module) = rest.lines().next()?.split_once(' ')?;
            Some(Alias { pattern: pattern.to_owned(), module: module.trim().to_owned() })
        });
        Self { aliases: aliases.collect() }
    }

    /// The driver for a function with this `modalias`, e.g. `pci:v000010DEd00002941sv…`. `vfio-pci` when nothing is more
    /// specific.
    pub fn best(&self, modalias: Option<&str>) -> VfioDriver {
        let device = modalias.and_then(|text| text.strip_prefix("pci:"));
        let matching = self.aliases.iter().filter(|alias| device.is_some_and(|text| glob(&alias.pattern, text)));
        let best = matching.min_by_key(|alias| alias.pattern.matches('*').count());
        VfioDriver::of_module(best.map_or("vfio_pci", |alias| &alias.module))
    }
}

/// Matches `*` and `?` as `fnmatch(3)` does; PCI aliases have no sets.
pub(crate) fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // Where to go on when the text behind the last `*` does not fit: let the `*` take one more byte.
    let mut retry = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                retry = Some((p, t));
            }
            Some(&byte) if byte == b'?' || byte == text[t] => {
                p += 1;
                t += 1;
            }
            Some(_) | None => {
                let Some((after, taken)) = retry else { return false };
                p = after;
                t = taken + 1;
                retry = Some((after, t));
            }
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GB200: &str = "pci:v000010DEd00002941sv000010DEsd00002046bc03sc02i00";
    const T4: &str = "pci:v000010DEd00001EB8sv000010DEsd000012A2bc03sc02i00";
    const ALIASES: &str = "# Aliases extracted from modules themselves.\n\
        alias pci:v000010DEd00002941sv*sd*bc*sc*i* nvidia\n\
        alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n\
        alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n\
        alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci\n";

    #[test]
    fn the_pattern_with_the_fewest_wildcards_wins() {
        let best = VfioDrivers::parse(ALIASES).best(Some(GB200));
        assert_eq!((best.module.as_str(), best.name.as_str()), ("nvgrace_gpu_vfio_pci", "nvgrace_gpu_vfio_pci"));
    }

    #[test]
    fn order_of_the_lines_does_not_matter() {
        let reversed: Vec<&str> = ALIASES.lines().rev().collect();
        assert_eq!(VfioDrivers::parse(&reversed.join("\n")).best(Some(GB200)).name, "nvgrace_gpu_vfio_pci");
    }

    #[test]
    fn a_device_without_variant_goes_to_the_generic_driver() {
        let best = VfioDrivers::parse(ALIASES).best(Some(T4));
        assert_eq!((best.module.as_str(), best.name.as_str()), ("vfio_pci", "vfio-pci"));
    }

    #[test]
    fn a_kernel_without_aliases_has_the_generic_driver() {
        assert_eq!(VfioDrivers::parse("").best(Some(GB200)).name, "vfio-pci");
        assert_eq!(VfioDrivers::parse(ALIASES).best(None).name, "vfio-pci");
    }

    #[test]
    fn drivers_are_known_by_name() {
        for name in ["vfio-pci", "nvgrace_gpu_vfio_pci", "mlx5_vfio_pci"] {
            assert!(is_vfio(name), "{name}");
        }
        for name in ["nvidia", "nouveau", "pci-stub", "snd_hda_intel", "vfio"] {
            assert!(!is_vfio(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_made_from_a_text_matches_it(text in "[a-d]{0,12}", cuts in proptest::collection::vec(any::<u8>(), 12)) {
            let pattern: String = text.chars().zip(cuts).map(|(c, cut)| match cut % 4 { 0 => '*', 1 => '?', _ => c }).collect();
            prop_assert!(glob(&pattern, &text), "{pattern} {text}");
        }

        #[test]
        fn a_pattern_without_wildcards_matches_only_itself(a in "[ab]{0,4}", b in "[ab]{0,4}") {
            prop_assert_eq!(glob(&a, &b), a == b);
        }
    }
}
