//! A vGPU driver for described boards: it lists what it would make now, as the real ones do, and refuses with their errors.
//!
//! All vGPUs of a board have one framebuffer size, unless it is heterogeneous, and no more than its memory; a virtual
//! function is one vGPU, a board without them has many.

use std::fs;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::library::{State, stands_on};
use super::{below, bind, driver_of, link, link_name, put, read, unbind};
use crate::address::PciAddress;
use crate::described::{BoardFramework, DescribedBoard};
use crate::inventory::{PCI_DEVICES, device_path};
use crate::iommu::GROUPS;
use crate::vgpu::{MDEV_PARENTS, MDEVS, kind, shape};

/// Groups of virtual functions and mediated devices are counted from here.
const GROUPS_OF_VFS: u32 = 2000;
const GROUPS_OF_MDEVS: u32 = 3000;

/// A board and where it is.
#[derive(Clone, Debug)]
pub(super) struct Board {
    pub gpu: PciAddress,
    pub described: DescribedBoard,
}

impl Board {
    fn size(&self, number: u32) -> Option<u32> {
        shape(kind(self.described.types.get(&number)?)).map(|shape| shape.framebuffer)
    }

    /// Virtual functions in the order of their links, or the board itself.
    fn parents(&self, root: &Path) -> Vec<PciAddress> {
        match self.described.vfs {
            0 => vec![self.gpu],
            _ => vfs(root, self.gpu),
        }
    }

    /// Numbers of the types of all vGPUs.
    fn made(&self, root: &Path) -> Vec<(PciAddress, u32)> {
        let on = |parent: PciAddress| match self.described.framework {
            BoardFramework::Vendor => {
                let number = read(root, &current(parent)).and_then(|text| text.parse().ok()).unwrap_or(0);
                if number == 0 { Vec::new() } else { vec![number] }
            }
            BoardFramework::Mdev => mdevs(root, parent)
                .into_iter()
                .filter_map(|uuid| {
                    let id = link_name(root, &device_path(parent).join(uuid).join("mdev_type"))?;
                    id.strip_prefix("nvidia-")?.parse().ok()
                })
                .collect(),
        };
        self.parents(root).into_iter().flat_map(|parent| on(parent).into_iter().map(move |n| (parent, n))).collect()
    }

    /// How many more of a type a parent takes.
    fn room(&self, root: &Path, made: &[(PciAddress, u32)], parent: PciAddress, number: u32) -> u32 {
        let Some(size) = self.size(number) else { return 0 };
        let single = self.described.vfs > 0;
        if let Some(mig) = &self.described.mig {
            let state = State::of(root, self.gpu);
            let on = |number: &u32| stands_on(mig, self.described.types.get(number)?);
            match (on(&number), state.on) {
                (None, true) | (Some(_), false) => return 0,
                (Some((profile, most)), true) => {
                    let taken = single && made.iter().any(|(other, _)| *other == parent);
                    let there = state.instances.iter().filter(|(_, of, _)| *of == profile).count();
                    let places = most * u32::try_from(there).expect("it should be few");
                    let used = made.iter().filter(|(_, n)| on(n).is_some_and(|(of, _)| of == profile)).count();
                    let left = places.saturating_sub(u32::try_from(used).expect("it should be few"));
                    return if taken { 0 } else { left.min(if single { 1 } else { left }) };
                }
                (None, false) => {}
            }
        }
        let sizes: Vec<u32> = made.iter().filter_map(|(_, number)| self.size(*number)).collect();
        let mixed = sizes.iter().any(|other| *other != size);
        if (single && made.iter().any(|(other, _)| *other == parent)) || (mixed && !self.described.heterogeneous) {
            return 0;
        }
        let left = self.described.framebuffer.saturating_sub(sizes.iter().sum()) / size.max(1);
        if single { left.min(1) } else { left }
    }

    /// Whether a GPU instance has a vGPU: the first ones do.
    pub(super) fn carries(&self, root: &Path, instance: u32) -> bool {
        let Some(mig) = &self.described.mig else { return false };
        let state = State::of(root, self.gpu);
        let on = |number: &u32| stands_on(mig, self.described.types.get(number)?);
        let profile = state.instances.iter().find(|(id, ..)| *id == instance).map(|(_, profile, _)| *profile);
        let made: Vec<_> = self.made(root).iter().filter_map(|(_, number)| on(number)).collect();
        let own = || made.iter().filter(|(of, _)| Some(*of) == profile);
        let most = usize::try_from(own().next().map_or(1, |(_, most)| *most)).expect("it should be few");
        let taken = own().count().div_ceil(most);
        let mut same = state.instances.iter().filter(|(_, of, _)| Some(*of) == profile);
        same.position(|(id, ..)| *id == instance).is_some_and(|place| place < taken)
    }

    /// Writes what is listed now.
    pub(super) fn refresh(&self, root: &Path) {
        let made = self.made(root);
        for parent in self.parents(root) {
            if driver_of(root, parent).as_deref() != Some("nvidia") {
                continue;
            }
            let dir = device_path(parent);
            let left = |number: &u32| self.room(root, &made, parent, *number);
            match self.described.framework {
                BoardFramework::Vendor => {
                    let lines = self.described.types.iter().filter(|(number, _)| left(number) > 0);
                    let lines: Vec<_> = lines.map(|(number, name)| format!("{number:<6}: {name}\n")).collect();
                    put(
                        root,
                        &text(&dir.join("nvidia/creatable_vgpu_types")),
                        format!("ID    : vGPU Name\n{}", lines.concat()),
                    );
                    if read(root, &current(parent)).is_none() {
                        put(root, &text(&current(parent)), "0\n");
                    }
                }
                BoardFramework::Mdev => {
                    for (number, name) in &self.described.types {
                        let types = dir.join(format!("mdev_supported_types/nvidia-{number}"));
                        put(root, &text(&types.join("name")), format!("{name}\n"));
                        put(root, &text(&types.join("available_instances")), format!("{}\n", left(number)));
                        put(root, &text(&types.join("device_api")), "vfio-pci\n");
                    }
                    let listed = Path::new(MDEV_PARENTS).join(parent.to_string());
                    if !below(root, &listed).is_symlink() {
                        link(root, &listed, &dir);
                    }
                }
            }
        }
    }

    /// `None`: the path is no business of this board's.
    pub(super) fn write(&self, root: &Path, path: &Path, value: &str) -> Option<Result<(), Errno>> {
        let file = path.file_name()?.to_str()?;
        let parts: Vec<_> = path.iter().rev().skip(1).filter_map(|part| part.to_str()).collect();
        let ours = |address: &str| address.parse().ok().filter(|address| self.parents(root).contains(address));
        let done = match (file, parts.as_slice()) {
            ("sriov_numvfs", [address, ..]) if *address == self.gpu.to_string() => self.set_vfs(root, value),
            ("current_vgpu_type", [_, address, ..]) => self.set_type(root, ours(address)?, value),
            ("create", [id, _, address, ..]) => self.create(root, ours(address)?, id, value),
            ("remove", [uuid, ..]) => {
                let parent = self.parents(root).into_iter().find(|p| mdevs(root, *p).iter().any(|u| u == uuid))?;
                remove_mdev(root, parent, uuid);
                Ok(())
            }
            (_, _) => return None,
        };
        self.refresh(root);
        Some(done)
    }

    fn set_vfs(&self, root: &Path, value: &str) -> Result<(), Errno> {
        let count: u16 = value.trim().parse().map_err(|_| Errno::EINVAL)?;
        let there = vfs(root, self.gpu);
        if count > self.described.vfs {
            return Err(Errno::ERANGE);
        }
        if self.described.stub && driver_of(root, self.gpu).as_deref() == Some("nvidia") {
            return Err(Errno::ENOENT);
        }
        if usize::from(count) == there.len() {
            return Ok(());
        }
        if count == 0 {
            for vf in there {
                remove_vf(root, self.gpu, vf);
            }
            return Ok(());
        }
        if !there.is_empty() {
            return Err(Errno::EBUSY);
        }
        (0..count).for_each(|index| add_vf(root, self.gpu, index));
        Ok(())
    }

    fn set_type(&self, root: &Path, vf: PciAddress, value: &str) -> Result<(), Errno> {
        let number: u32 = value.trim().parse().map_err(|_| Errno::EINVAL)?;
        let now: u32 = read(root, &current(vf)).and_then(|text| text.parse().ok()).unwrap_or(0);
        if number > 0 && now > 0 {
            return Err(Errno::EBUSY);
        }
        if number > 0 && self.room(root, &self.made(root), vf, number) == 0 {
            return Err(Errno::EINVAL);
        }
        put(root, &text(&current(vf)), format!("{number}\n"));
        let group = link_name(root, &device_path(vf).join("iommu_group")).ok_or(Errno::ENODEV)?;
        let node = PathBuf::from(format!("/dev/vfio/{group}"));
        match number {
            0 => drop(fs::remove_file(below(root, &node))),
            _ => put(root, &text(&node), format!("char 240:{group}")),
        }
        Ok(())
    }

    fn create(&self, root: &Path, parent: PciAddress, id: &str, uuid: &str) -> Result<(), Errno> {
        if below(root, &Path::new(MDEVS).join(uuid)).exists() {
            return Err(Errno::EEXIST);
        }
        let number = id.strip_prefix("nvidia-").and_then(|number| number.parse().ok()).ok_or(Errno::ENOENT)?;
        if self.room(root, &self.made(root), parent, number) == 0 {
            return Err(Errno::EUSERS);
        }
        let group = (GROUPS_OF_MDEVS..GROUPS_OF_MDEVS + 1000)
            .find(|group| !below(root, &Path::new(GROUPS).join(group.to_string())).exists())
            .expect("there should be a free number");
        let real = real_dir(root, parent).join(uuid);
        link(root, &real.join("mdev_type"), device_path(parent).join("mdev_supported_types").join(id));
        let dir = Path::new(GROUPS).join(group.to_string());
        link(root, &real.join("iommu_group"), &dir);
        link(root, &dir.join("devices").join(uuid), &real);
        link(root, &Path::new(MDEVS).join(uuid), &real);
        put(root, &format!("/dev/vfio/{group}"), format!("char 240:{group}"));
        Ok(())
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn current(vf: PciAddress) -> PathBuf {
    device_path(vf).join("nvidia/current_vgpu_type")
}

fn real_dir(root: &Path, address: PciAddress) -> PathBuf {
    let target = fs::read_link(below(root, &device_path(address))).expect("a function should be linked to");
    // `../../../devices/…`, from `/sys/bus/pci/devices`.
    Path::new("/sys").join(target.strip_prefix("../../..").unwrap_or(&target))
}

fn vfs(root: &Path, gpu: PciAddress) -> Vec<PciAddress> {
    let link = |index: u32| link_name(root, &device_path(gpu).join(format!("virtfn{index}")))?.parse().ok();
    (0..).map_while(link).collect()
}

fn mdevs(root: &Path, parent: PciAddress) -> Vec<String> {
    let entries = fs::read_dir(below(root, &device_path(parent))).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.len() == 36 && below(root, &Path::new(MDEVS).join(name)).is_symlink()).collect()
}

fn remove_mdev(root: &Path, parent: PciAddress, uuid: &str) {
    let group = link_name(root, &device_path(parent).join(uuid).join("iommu_group"));
    let group = group.expect("a mediated device should have a group");
    fs::remove_file(below(root, &Path::new(MDEVS).join(uuid))).expect("it should be linked to");
    fs::remove_dir_all(below(root, &real_dir(root, parent).join(uuid))).expect("it should be there");
    fs::remove_dir_all(below(root, &Path::new(GROUPS).join(&group))).expect("its group should be there");
    fs::remove_file(below(root, Path::new(&format!("/dev/vfio/{group}")))).expect("its node should be there");
}

/// The first one is four functions on, as with NVIDIA's boards.
fn vf_address(gpu: PciAddress, index: u16) -> PciAddress {
    let place = u32::from(gpu.device()) * 8 + u32::from(gpu.function()) + 4 + u32::from(index);
    let (bus, slot) = (u32::from(gpu.bus()) + place / 256, place % 256);
    let text = format!("{:04x}:{bus:02x}:{:02x}.{}", gpu.domain(), slot / 8, slot % 8);
    text.parse().expect("a function should have an address")
}

fn add_vf(root: &Path, gpu: PciAddress, index: u16) {
    let (vf, dir) = (vf_address(gpu, index), device_path(gpu));
    let real = PathBuf::from(format!("/sys/devices/pci{:04x}:{:02x}", gpu.domain(), gpu.bus())).join(vf.to_string());
    for (file, value) in [
        ("vendor", read(root, &dir.join("vendor"))),
        ("device", read(root, &dir.join("device"))),
        ("class", read(root, &dir.join("class"))),
        ("subsystem_vendor", Some("0x10de".to_owned())),
        ("subsystem_device", Some("0x0000".to_owned())),
        ("driver_override", Some("(null)".to_owned())),
        ("numa_node", read(root, &dir.join("numa_node"))),
    ] {
        put(root, &text(&real.join(file)), format!("{}\n", value.unwrap_or_default()));
    }
    let group = Path::new(GROUPS).join((GROUPS_OF_VFS + u32::from(index) + u32::from(gpu.bus()) * 64).to_string());
    link(root, &real.join("iommu_group"), &group);
    link(root, &group.join("devices").join(vf.to_string()), &real);
    let below_sys = real.strip_prefix("/sys").expect("it should be below /sys");
    link(root, &Path::new(PCI_DEVICES).join(vf.to_string()), Path::new("../../..").join(below_sys));
    link(root, &real.join("physfn"), &dir);
    link(root, &dir.join(format!("virtfn{index}")), device_path(vf));
    if read(root, &dir.join("sriov_drivers_autoprobe")).as_deref() != Some("0") {
        bind(root, vf, "nvidia");
    }
}

fn remove_vf(root: &Path, gpu: PciAddress, vf: PciAddress) {
    for uuid in mdevs(root, vf) {
        remove_mdev(root, vf, &uuid);
    }
    if let Some(driver) = driver_of(root, vf) {
        unbind(root, vf, &driver);
    }
    let group = link_name(root, &device_path(vf).join("iommu_group")).expect("it should have a group");
    fs::remove_dir_all(below(root, &Path::new(GROUPS).join(&group))).expect("its group should be there");
    let _ = fs::remove_file(below(root, Path::new(&format!("/dev/vfio/{group}"))));
    let _ = fs::remove_file(below(root, &Path::new(MDEV_PARENTS).join(vf.to_string())));
    let link = (0..).map(|index| below(root, &device_path(gpu).join(format!("virtfn{index}"))));
    let link = link.take(256).find(|link| fs::read_link(link).is_ok_and(|to| to.ends_with(vf.to_string())));
    fs::remove_file(link.expect("its physical function should link to it")).expect("a link should be removable");
    let real = real_dir(root, vf);
    fs::remove_file(below(root, &device_path(vf))).expect("it should be linked to");
    fs::remove_dir_all(below(root, &real)).expect("it should be there");
}
