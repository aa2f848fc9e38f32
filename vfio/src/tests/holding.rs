use std::path::PathBuf;

use super::{View, at};
use crate::inventory::observe;
use crate::testing::Machine;

#[test]
fn a_gpu_whose_number_is_not_told_is_held_by_whoever_holds_one_that_is_no_others() {
    let machine = Machine::described("eight-h200");
    let (known, unknown) = (0x18 * 256, 0x2a * 256);
    machine.remove("/proc/driver/nvidia/gpus/0000:2a:00.0/information");
    machine.open_device(11, "python", &format!("/dev/nvidia{known}"), None);
    assert_eq!(View::of(&machine).holders.keys().copied().collect::<Vec<_>>(), [at("0000:18:00.0")]);
    machine.open_device(12, "python", &format!("/dev/nvidia{unknown}"), None);
    let view = View::of(&machine);
    assert_eq!(view.holders[&at("0000:2a:00.0")][0].pid, 12);
}

#[test]
fn a_vm_with_a_vgpu_holds_the_gpu() {
    for (machine, node, gpu) in
        [("a2-sriov", "/dev/vfio/106", "0000:08:00.0"), ("l40s-vgpu", "/dev/vfio/120", "0000:26:00.0")]
    {
        let machine = Machine::described(machine);
        machine.write(node, format!("char 240:{}", &node[10..]));
        machine.open_device(4242, "qemu-system-x86", node, None);
        assert_eq!(View::of(&machine).holders[&at(gpu)][0].path, PathBuf::from(node));
    }
}

#[test]
fn a_process_with_the_group_open_holds_the_gpu() {
    let machine = Machine::described("eight-t4");
    let pod = "7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22";
    machine.open_device(4242, "qemu-system-x86", "/dev/vfio/34", Some(pod));
    let view = View::of(&machine);
    assert_eq!(view.holders.len(), 1);
    let [holder] = view.holders[&at("0000:35:00.0")].as_slice() else { panic!("{:?}", view.holders) };
    assert_eq!((holder.pid, holder.command.as_str(), holder.pod.as_deref()), (4242, "qemu-system-x86", Some(pod)));
    assert_eq!(holder.path, PathBuf::from("/dev/vfio/34"));
}

#[test]
fn a_device_is_known_by_its_number_also_under_another_name() {
    let machine = Machine::described("eight-t4");
    machine.write("/srv/jail/gpu", "char 240:34");
    machine.open_device(4242, "odd", "/srv/jail/gpu", None);
    assert!(View::of(&machine).holders.contains_key(&at("0000:35:00.0")));
}

#[test]
fn a_vfio_device_node_holds_the_gpu() {
    let machine = Machine::described("eight-t4");
    let name = observe(&machine).functions[&at("0000:35:00.0")].vfio_dev.clone().unwrap();
    machine.open_device(4242, "cloud-hypervisor", &format!("/dev/vfio/devices/{name}"), None);
    assert_eq!(View::of(&machine).holders.keys().copied().collect::<Vec<_>>(), [at("0000:35:00.0")]);
}

#[test]
fn a_cuda_process_holds_only_its_own_gpu_and_the_control_node_holds_none() {
    let machine = Machine::described("eight-h200");
    machine.write("/dev/nvidiactl", "char 195:255");
    machine.open_device(10, "python", "/dev/nvidiactl", None);
    assert!(View::of(&machine).holders.is_empty());
    let minor = 0x2a * 256;
    machine.open_device(11, "python", &format!("/dev/nvidia{minor}"), None);
    let view = View::of(&machine);
    assert_eq!(view.holders.keys().copied().collect::<Vec<_>>(), [at("0000:2a:00.0")]);
    assert_eq!(view.holders[&at("0000:2a:00.0")][0].pid, 11);
}

#[test]
fn sound_and_display_nodes_hold_the_gpu() {
    for (file, node) in [
        ("/sys/bus/pci/devices/0000:52:00.1/sound/card0/controlC0/dev", "/dev/snd/controlC0"),
        ("/sys/bus/pci/devices/0000:52:00.0/drm/renderD128/dev", "/dev/dri/renderD128"),
    ] {
        let machine = Machine::described("rtx-4000");
        machine.write(file, "116:0\n");
        machine.write(node, "char 116:0");
        machine.open_device(77, "pulseaudio", node, None);
        assert_eq!(View::of(&machine).holders[&at("0000:52:00.0")][0].path, PathBuf::from(node));
    }
}

#[test]
fn a_mounted_disk_behind_the_usb_port_holds_the_gpu() {
    let machine = Machine::described("rtx-4000");
    let disk = "/sys/devices/pci0000:00/0000:50:02.0/0000:52:00.2/usb1/1-1/host0/block/sdb";
    machine.write(&format!("{disk}/dev"), "8:16\n");
    machine.symlink("/sys/class/block/sdb", &format!("../..{}", disk.trim_start_matches("/sys")));
    machine.write("/proc/1/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
    assert!(View::of(&machine).holders.is_empty(), "plugged in but not in use");
    machine.write(
        "/proc/1/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:16 / /mnt/usb rw - vfat /dev/sdb rw\n",
    );
    let view = View::of(&machine);
    let [holder] = view.holders[&at("0000:52:00.0")].as_slice() else { panic!("{:?}", view.holders) };
    assert_eq!(holder.to_string(), "/dev/sdb (mounted at /mnt/usb)");
}

#[test]
fn a_companion_in_a_group_of_its_own_is_held_by_who_has_that_group() {
    let machine = Machine::from_yaml(
        r#"
kernel: 6.1.0
os: debian 12
functions:
  "0000:01:00.0": { ids: "10de:2204", class: "030000", driver: nvidia, group: 1 }
  "0000:01:00.1": { ids: "10de:1aef", class: "040300", driver: vfio-pci, group: 2 }
"#,
    );
    machine.open_device(4242, "qemu-system-x86", "/dev/vfio/2", None);
    assert!(View::of(&machine).holders.contains_key(&at("0000:01:00.0")));
}
