//! What shows the host's console.
//!
//! Firmware leaves a picture buffer in a GPU's memory, and the kernel goes on drawing into it (efifb, vesafb, simplefb,
//! simpledrm) until a driver of the GPU asks it to stop. `vfio-pci` does not ask: it is bound, and the VM that opens it
//! fails with "can't reserve [mem …]". A driver of the GPU itself may show the console, too, and then does not let go.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::address::PciAddress;
use crate::host::{self, Host};

const GRAPHICS: &str = "/sys/class/graphics";
const CONSOLES: &str = "/sys/class/vtconsole";
/// Names of a firmware buffer in `/proc/iomem`: as the kernel keeps it (`drivers/firmware/sysfb.c`), or its drivers.
const BUFFERS: [&str; 6] = ["BOOTFB", "efifb", "vesafb", "simplefb", "simple-framebuffer", "simpledrm"];

/// Something that the console is drawn into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Framebuffer {
    /// `fb0`, or the name of its memory in `/proc/iomem` where no driver has it.
    pub name: String,
    /// As the kernel says, e.g. `EFI VGA`, `simpledrmdrmfb`, `nvidia-drmdrmfb`.
    pub driver: String,
    /// The GPU that it is part of; `None`: not known, so that of the machine's first screen (`boot_vga`).
    pub device: Option<PciAddress>,
    /// The console (`vtconN`) that is drawn into it now.
    pub console: Option<String>,
    /// Who made it, and so when it goes.
    pub kind: FramebufferKind,
}

/// Who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum FramebufferKind {
    /// Firmware: its memory is taken as long as the kernel keeps it.
    Firmware,
    /// The GPU's own driver: it goes with that driver, unless the console is on it.
    Driver,
}

impl Framebuffer {
    /// Whether it keeps a GPU from being given away.
    pub(crate) fn is_on(&self, address: PciAddress, boot_vga: bool) -> bool {
        let here = self.device.map_or(boot_vga, |device| device == address);
        let keeps = match self.kind {
            FramebufferKind::Firmware => true,
            FramebufferKind::Driver => self.console.is_some(),
        };
        here && keeps
    }
}

pub(crate) fn framebuffers(host: &impl Host) -> Vec<Framebuffer> {
    let claimed = claimed(&host::text(host, Path::new("/proc/iomem")).unwrap_or_default());
    let mut numbers: Vec<u32> = host
        .list(Path::new(GRAPHICS))
        .unwrap_or_default()
        .iter()
        .filter_map(|name| name.to_str()?.strip_prefix("fb")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let console = console(host);
    let mut found: Vec<Framebuffer> = Vec::new();
    for number in numbers {
        let dir = PathBuf::from(GRAPHICS).join(format!("fb{number}"));
        let target = host.link(&dir).unwrap_or_default();
        let parts: Vec<&str> = target.iter().filter_map(|part| part.to_str()).collect();
        // …/0000:01:00.0/drm/card1/graphics/fb0 or …/0000:01:00.0/graphics/fb0 is a driver's; a firmware buffer is a
        // platform device: …/platform/efi-framebuffer.0/graphics/fb0, below its GPU since Linux 6.9.
        let kind = match parts.iter().any(|part| part.contains("framebuffer.") || part.starts_with("vesa")) {
            true => FramebufferKind::Firmware,
            false => FramebufferKind::Driver,
        };
        let below = parts.iter().rev().find_map(|part| part.parse().ok());
        let device = match kind {
            FramebufferKind::Firmware => below.or_else(|| claimed.first().map(|(_, device)| *device)),
            FramebufferKind::Driver if below.is_none() => continue,
            FramebufferKind::Driver => below,
        };
        found.push(Framebuffer {
            name: format!("fb{number}"),
            driver: host::text(host, &dir.join("name")).unwrap_or_default(),
            device,
            // fbcon draws into the first one.
            console: console.clone().filter(|_| found.is_empty()),
            kind,
        });
    }
    for (name, device) in claimed {
        if !found.iter().any(|other| other.kind == FramebufferKind::Firmware && other.device == Some(device)) {
            let (device, kind) = (Some(device), FramebufferKind::Firmware);
            found.push(Framebuffer { driver: name.clone(), name, device, console: None, kind });
        }
    }
    found
}

/// `(M) frame buffer device` of a console that is bound (`Documentation/driver-api/console.rst`).
fn console(host: &impl Host) -> Option<String> {
    let names = host.list(Path::new(CONSOLES)).unwrap_or_default();
    names.into_iter().find_map(|name| {
        let dir = PathBuf::from(CONSOLES).join(&name);
        let text = |file| host::text(host, &dir.join(file)).unwrap_or_default();
        let here = text("name").contains("frame buffer") && text("bind") == "1";
        here.then(|| name.to_string_lossy().into_owned())
    })
}

/// Firmware buffers in `/proc/iomem`, each with the PCI function whose memory it lies in. Nesting is told by two blanks a
/// level, also to readers without rights, who see zeros for addresses.
fn claimed(iomem: &str) -> Vec<(String, PciAddress)> {
    let mut above: Vec<(usize, PciAddress)> = Vec::new();
    let mut found = Vec::new();
    for line in iomem.lines() {
        let depth = line.len() - line.trim_start().len();
        let Some((_, name)) = line.split_once(" : ") else { continue };
        above.retain(|(level, _)| *level < depth);
        if let Ok(address) = name.parse() {
            above.push((depth, address));
        } else if let Some((_, device)) = above.last().filter(|_| BUFFERS.contains(&name))
            && !found.iter().any(|(_, other)| other == device)
        {
            found.push((name.to_owned(), *device));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_firmware_buffer_belongs_to_the_function_whose_memory_it_lies_in() {
        let iomem = "c0000000-d2ffffff : PCI Bus 0000:01\n  c0000000-cfffffff : 0000:01:00.0\n    c0000000-c02fffff : BOOTFB\n      \
            c0000000-c02fffff : efifb\n  d0000000-d1ffffff : 0000:01:00.0\nd3000000-d3ffffff : 0000:02:00.0\nd4000000-d4ffffff : efifb\n";
        assert_eq!(claimed(iomem), [("BOOTFB".to_owned(), "0000:01:00.0".parse().unwrap())]);
        assert_eq!(claimed("00000000-00000000 : System RAM\n"), []);
    }
}
