//! Files that bind devices at boot: a udev rule by address, modprobe's order of modules, and what takes both into the
//! initramfs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde::Serialize;
use vfio::{Function, HostFacts, driver::VfioDriver};

const RULE: &str = "/etc/udev/rules.d/10-gpuvirt-vfio.rules";
const MODPROBE: &str = "/etc/modprobe.d/gpuvirt-vfio.conf";
const LOAD: &str = "/etc/modules-load.d/gpuvirt-vfio.conf";
const DRACUT: &str = "/etc/dracut.conf.d/gpuvirt-vfio.conf";
const HOOK: &str = "/etc/initramfs-tools/hooks/gpuvirt-vfio";

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BootFile {
    pub path: &'static str,
    pub mode: u16,
    pub contents: String,
    /// Whether it is for the tool that makes the initramfs, so of no use where none is made (`CoreOS`).
    #[serde(skip)]
    pub initramfs: bool,
}

/// How a distribution makes its initramfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    InitramfsTools,
    Dracut,
    /// Not known: the user is told what has to go in.
    Other,
}

impl Family {
    pub fn of(facts: &HostFacts) -> Self {
        match facts.os_id.as_str() {
            "debian" | "ubuntu" => Self::InitramfsTools,
            "almalinux" | "amzn" | "centos" | "fedora" | "ol" | "opensuse-leap" | "rhcos" | "rhel" | "rocky"
            | "scos" | "sles" => Self::Dracut,
            _ => Self::Other,
        }
    }

    pub fn commands(self) -> Vec<String> {
        let rebuild = match self {
            Self::InitramfsTools => "update-initramfs -u -k all".to_owned(),
            Self::Dracut => "dracut --force --regenerate-all".to_owned(),
            Self::Other => format!("# make the initramfs anew with {RULE}, {MODPROBE} and the modules of {LOAD} in it"),
        };
        vec![rebuild, "reboot".to_owned(), "gpuvirt inspect".to_owned()]
    }
}

/// Nothing where there is nothing to bind.
pub fn all(functions: &[(&Function, VfioDriver)], family: Family) -> Vec<BootFile> {
    if functions.is_empty() {
        return Vec::new();
    }
    let modules: BTreeSet<&str> = functions.iter().map(|(_, driver)| driver.module.as_str()).collect();
    let modules: Vec<&str> = modules.into_iter().collect();
    let of_family = match family {
        Family::InitramfsTools => Some(BootFile { path: HOOK, mode: 0o755, contents: hook(&modules), initramfs: true }),
        Family::Dracut => Some(BootFile { path: DRACUT, mode: 0o644, contents: dracut(&modules), initramfs: true }),
        Family::Other => None,
    };
    let files = [(RULE, rule(functions)), (MODPROBE, modprobe(functions, &modules)), (LOAD, lines(&modules))];
    let files = files.into_iter().map(|(path, contents)| BootFile { path, mode: 0o644, contents, initramfs: false });
    files.chain(of_family).collect()
}

/// By address, and by ids too: a card that moves takes no other one along. 10 goes before 80-drivers.rules, which loads
/// the drivers.
fn rule(functions: &[(&Function, VfioDriver)]) -> String {
    let mut text = String::new();
    for (function, driver) in functions {
        let Function { address, vendor, device, .. } = function;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            r#"ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{address}", ATTR{{vendor}}=="0x{vendor:04x}", ATTR{{device}}=="0x{device:04x}", ATTR{{driver_override}}="{}", RUN{{builtin}}+="kmod load {}""#,
            driver.name, driver.module,
        );
    }
    text
}

/// Whoever loads a driver that would take them loads VFIO first.
fn modprobe(functions: &[(&Function, VfioDriver)], modules: &[&str]) -> String {
    let rivals: BTreeSet<&str> = functions.iter().flat_map(|(function, _)| rivals(function.class)).copied().collect();
    lines(&rivals.into_iter().map(|rival| format!("softdep {rival} pre: {}", modules.join(" "))).collect::<Vec<_>>())
}

/// Modules of the kernel and of NVIDIA that take a function of this class.
fn rivals(class: u32) -> &'static [&'static str] {
    match class >> 8 {
        0x0300 | 0x0302 => &["nvidia", "nouveau", "nova_core"],
        0x0403 => &["snd_hda_intel"],
        0x0c03 => &["xhci_pci"],
        0x0c80 => &["i2c_nvidia_gpu"],
        _ => &[],
    }
}

fn hook(modules: &[&str]) -> String {
    let load: Vec<String> = modules.iter().map(|module| format!("force_load {module}")).collect();
    format!(
        "#!/bin/sh\n[ \"$1\" != prereqs ] || exit 0\n. /usr/share/initramfs-tools/hook-functions\n{}copy_file rule {RULE}\n",
        lines(&load)
    )
}

fn dracut(modules: &[&str]) -> String {
    format!("force_drivers+=\" {} \"\ninstall_items+=\" {RULE} {MODPROBE} \"\n", modules.join(" "))
}

fn lines<T: AsRef<str>>(lines: &[T]) -> String {
    lines.iter().flat_map(|line| [line.as_ref(), "\n"]).collect()
}
