//! A described function as a directory of sysfs.

use std::path::{Path, PathBuf};

use super::{DescribedAcs, DescribedFunction, Description, DescriptionError, nodes_of};
use crate::address::PciAddress;
use crate::inventory::{PCI_DRIVERS, device_path};
use crate::iommu::GROUPS;
use crate::tree::Tree;
use crate::vgpu::MDEV_PARENTS;

impl Description {
    pub(super) fn function(
        &self,
        tree: &mut Tree,
        address: PciAddress,
        function: &DescribedFunction,
    ) -> Result<(), DescriptionError> {
        let field =
            |field, text: &str, expected| DescriptionError::Field { address, field, text: text.to_owned(), expected };
        let wrong_ids = || field("ids", &function.ids, "`vendor:device` or `vendor:device subvendor:subdevice` in hex");
        let (ids, subsystem) = function.ids.split_once(' ').unwrap_or((&function.ids, "0000:0000"));
        let ids = ids.split_once(':').zip(subsystem.split_once(':')).ok_or_else(wrong_ids)?;
        let ((vendor, id), (subvendor, subdevice)) = ids;
        if ![vendor, id, subvendor, subdevice].iter().all(|text| is_hex(text, 4)) {
            return Err(wrong_ids());
        }
        let class = &function.class;
        if !is_hex(class, 6) {
            return Err(field("class", class, "six hex digits, as in 030200"));
        }
        let modalias = format!(
            "pci:v0000{}d0000{}sv0000{}sd0000{}bc{}sc{}i{}",
            vendor.to_uppercase(),
            id.to_uppercase(),
            subvendor.to_uppercase(),
            subdevice.to_uppercase(),
            &class[0..2],
            &class[2..4],
            &class[4..6]
        );
        let device = self.sysfs_path(address)?;
        let attributes = [
            ("vendor", format!("0x{vendor}")),
            ("device", format!("0x{id}")),
            ("subsystem_vendor", format!("0x{subvendor}")),
            ("subsystem_device", format!("0x{subdevice}")),
            ("class", format!("0x{class}")),
            ("modalias", modalias),
            ("numa_node", function.numa.unwrap_or(-1).to_string()),
            ("boot_vga", u8::from(function.boot_vga).to_string()),
            ("driver_override", "(null)".to_owned()),
        ];
        let total = function.vfs.map(|count| ("sriov_totalvfs", count.to_string()));
        let reset = function.reset.clone().map(|methods| ("reset_method", methods));
        let power = function.power.clone().map(|state| ("power_state", state));
        for (name, value) in attributes.into_iter().chain(total).chain(reset).chain(power) {
            tree.file(device.join(name), format!("{value}\n"));
        }
        if !function.bars.is_empty() {
            let wrong =
                |text: &str| field("bars", text, "a size as in `16M` or `32G`, with ` unassigned` after it, or `0`");
            let lines: Result<Vec<_>, _> =
                function.bars.iter().map(|text| bar(text).ok_or_else(|| wrong(text))).collect();
            tree.file(device.join("resource"), lines?.concat());
        }
        if let Some(states) = &function.link {
            for (kind, state) in ["current", "max"].into_iter().zip(states) {
                let (speed, width) = state.split_once(" x").ok_or_else(|| field("link", state, LINK))?;
                tree.file(device.join(format!("{kind}_link_speed")), format!("{speed} PCIe\n"));
                tree.file(device.join(format!("{kind}_link_width")), format!("{width}\n"));
            }
        }
        if let Some(counts) = &function.aer {
            let kinds = [("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")];
            for ((file, total), count) in kinds.into_iter().zip(counts) {
                tree.file(
                    device.join(format!("aer_dev_{file}")),
                    format!("Undefined {count}\nTOTAL_ERR_{total} {count}\n"),
                );
            }
        }
        if let Some(config) = config(function, class) {
            tree.file(device.join("config"), config);
        }
        let below_devices = device.strip_prefix("/sys").unwrap_or(&device);
        tree.link_to(device_path(address), Path::new("../../..").join(below_devices));
        if let Some(group) = function.group {
            let dir = PathBuf::from(GROUPS).join(group.to_string());
            tree.link_to(device.join("iommu_group"), &dir);
            tree.link_to(dir.join("devices").join(address.to_string()), &device);
        }
        if let Some(physfn) = function.physfn {
            tree.link_to(device.join("physfn"), device_path(physfn));
            let number =
                self.functions.iter().filter(|(other, f)| f.physfn == Some(physfn) && **other < address).count();
            tree.link_to(self.sysfs_path(physfn)?.join(format!("virtfn{number}")), device_path(address));
        }
        if let Some(driver) = &function.driver {
            let group = function.group.map(|group| group.to_string());
            tree.link_to(device.join("driver"), Path::new(PCI_DRIVERS).join(driver));
            tree.link_to(Path::new(PCI_DRIVERS).join(driver).join(address.to_string()), device_path(address));
            nodes_of(&device, address, driver, group.as_deref(), |path, text| tree.file(path, text));
        }
        vgpus(tree, address, &device, function);
        Ok(())
    }
}

fn vgpus(tree: &mut Tree, address: PciAddress, device: &Path, function: &DescribedFunction) {
    if !function.mdev_types.is_empty() {
        tree.link_to(Path::new(MDEV_PARENTS).join(address.to_string()), device_path(address));
    }
    for (id, kind) in &function.mdev_types {
        let dir = device.join("mdev_supported_types").join(id);
        let optional = [("name", &kind.name), ("description", &kind.description)];
        for (file, text) in optional.into_iter().filter_map(|(file, text)| Some((file, text.as_ref()?))) {
            tree.file(dir.join(file), format!("{text}\n"));
        }
        tree.file(dir.join("available_instances"), format!("{}\n", kind.available));
        tree.file(dir.join("device_api"), "vfio-pci\n");
        tree.file(dir.join("create"), "");
    }
    if let Some(vgpu) = &function.vgpu {
        let lines: Vec<_> = vgpu.creatable.iter().map(|(id, name)| format!("{id:<6}: {name}\n")).collect();
        tree.file(device.join("nvidia/creatable_vgpu_types"), format!("ID    : vGPU Name\n{}", lines.concat()));
        tree.file(device.join("nvidia/current_vgpu_type"), format!("{}\n", vgpu.current));
    }
}
const LINK: &str = "speed and lanes, as in `16.0 GT/s x16`";

/// The configuration space, as far as somebody asks: ports for ACS, GPUs for whether they answer.
fn config(function: &DescribedFunction, class: &str) -> Option<Vec<u8>> {
    if function.fell_off {
        return Some(vec![0xff; 0x1000]);
    }
    // The first 64 bytes, which everybody may read. Their ids are told by other files.
    function.acs.map(port_config).or_else(|| class.starts_with("03").then(|| vec![0; 64]))
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A line of `resource`.
fn bar(text: &str) -> Option<String> {
    let (size, assigned) = match text.split_once(' ') {
        Some((size, "unassigned")) => (size, false),
        Some(_) => return None,
        None => (text, true),
    };
    if size == "0" {
        return Some("0x0 0x0 0x0\n".to_owned());
    }
    let (number, shift) = match (size.strip_suffix('M'), size.strip_suffix('G')) {
        (Some(number), _) => (number, 20),
        (None, Some(number)) => (number, 30),
        (None, None) => return None,
    };
    let bytes = number.parse::<u64>().ok()?.checked_shl(shift).filter(|bytes| *bytes > 0)?;
    // Where it lies is of no interest; the upper half of the address space has room for all.
    let start = 1 << 45;
    match assigned {
        true => Some(format!("{start:#x} {:#x} 0x14220c\n", start + bytes - 1)),
        false => Some(format!("0x0 {:#x} 0x2014220c\n", bytes - 1)),
    }
}

fn port_config(acs: DescribedAcs) -> Vec<u8> {
    let mut config = vec![0; 0x1000];
    let (capability, control) = match acs {
        DescribedAcs::Missing => (0x01, 0),
        DescribedAcs::Off => (0x0d, 0),
        DescribedAcs::On => (0x0d, 0x1d),
    };
    config[0x100..0x107].copy_from_slice(&[capability, 0, 1, 0, 0, 0, control]);
    config
}
