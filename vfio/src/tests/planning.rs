use super::{View, at, steps};
use crate::inventory::observe;
use crate::journal::{Journal, Pending};
use crate::plan::{Binding, Refusal, SharedPort};
use crate::testing::Machine;
use crate::verify::{Deviation, deviations};

const RTX: &str = "0000:52:00.0";

/// The refusal of what would be a plan without the mutation.
fn refusal(machine: &Machine, gpu: &str) -> Refusal {
    View::of(machine).plan(&Journal::in_memory(), gpu, Binding::Vfio).unwrap_err()
}

#[test]
fn binding_takes_companions_first_and_the_gpu_last() {
    let machine = Machine::described("rtx-4000");
    let plan = View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).unwrap();
    assert_eq!(
        steps(&plan),
        [
            "load module vfio_pci",
            "note that 0000:52:00.1 was on snd_hda_intel",
            "reserve 0000:52:00.1 for vfio-pci",
            "take 0000:52:00.1 from snd_hda_intel",
            "give 0000:52:00.1 to vfio-pci",
            "note that 0000:52:00.2 was on xhci_hcd",
            "reserve 0000:52:00.2 for vfio-pci",
            "take 0000:52:00.2 from xhci_hcd",
            "give 0000:52:00.2 to vfio-pci",
            "note that 0000:52:00.3 was on no driver",
            "reserve 0000:52:00.3 for vfio-pci",
            "give 0000:52:00.3 to vfio-pci",
            "note that 0000:52:00.0 was on nvidia",
            "reserve 0000:52:00.0 for vfio-pci",
            "take 0000:52:00.0 from nvidia",
            "give 0000:52:00.0 to vfio-pci",
        ]
    );
}

#[test]
fn what_is_so_already_needs_no_step() {
    let machine = Machine::described("eight-t4");
    let plan = View::of(&machine).plan(&Journal::in_memory(), "0000:18:00.0", Binding::Vfio).unwrap();
    assert_eq!(plan.steps, []);
    let machine = Machine::described("rtx-4000");
    let plan = View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Host).unwrap();
    assert_eq!(plan.steps, []);
}

#[test]
fn a_group_in_use_may_stay_as_it_is() {
    let machine = Machine::described("eight-t4");
    machine.open_device(4242, "qemu-system-x86", "/dev/vfio/20", None);
    let plan = View::of(&machine).plan(&Journal::in_memory(), "0000:18:00.0", Binding::Vfio).unwrap();
    assert_eq!(plan.steps, []);
}

#[test]
fn without_iommu_nothing_is_bound() {
    let machine = Machine::described("rtx-4000");
    machine.remove("/sys/kernel/iommu_groups");
    let refusal = refusal(&machine, RTX);
    assert_eq!(refusal.reason(), "IommuOff");
    assert!(refusal.to_string().contains("intel_iommu=on"), "{refusal}");
}

#[test]
fn a_gpu_without_group_is_not_bound() {
    let machine = Machine::described("rtx-4000");
    machine.remove("/sys/bus/pci/devices/0000:52:00.0/iommu_group");
    assert_eq!(refusal(&machine, RTX), Refusal::NoGroup { gpu: at(RTX) });
}

/// The RTX 4000 with a network card in its group.
const FOREIGN: &str = r#"
kernel: 6.1.0
os: debian 12
drivers: [vfio-pci]
functions:
  "0000:52:00.0": { ids: "10de:1eb1", class: "030000", driver: nvidia, group: 35 }
  "0000:53:00.0": { ids: "8086:1593", class: "020000", driver: DRIVER, group: 35 }
"#;

#[test]
fn a_foreign_device_in_the_group_is_named() {
    let machine = Machine::from_yaml(&FOREIGN.replace("DRIVER", "ice"));
    let refusal = refusal(&machine, RTX);
    assert_eq!(refusal.reason(), "ForeignDeviceInGroup");
    assert!(refusal.to_string().contains("0000:53:00.0 (8086:1593, on ice)"), "{refusal}");
    let found = deviations(&observe(&machine), at(RTX), Binding::Vfio);
    assert!(found.contains(&Deviation::GroupNotViable { gpu: at(RTX), group: 35, name: "0000:53:00.0".to_owned() }));
}

#[test]
fn a_foreign_device_on_no_driver_is_refused_and_spoils_nothing_that_is_so_already() {
    let machine = Machine::from_yaml(&FOREIGN.replace("driver: DRIVER, ", ""));
    assert_eq!(refusal(&machine, RTX).reason(), "ForeignDeviceInGroup");
    let machine = Machine::from_yaml(&FOREIGN.replace("driver: DRIVER, ", "").replace("nvidia", "vfio-pci"));
    assert_eq!(View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).unwrap().steps, []);
}

#[test]
fn a_foreign_device_that_an_administrator_gave_to_vfio_is_not_in_the_way() {
    let machine = Machine::from_yaml(&FOREIGN.replace("DRIVER", "vfio-pci"));
    let plan = View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).unwrap();
    assert!(!steps(&plan).iter().any(|step| step.contains("53:00.0")));
}

#[test]
fn an_unreadable_member_of_the_group_is_a_refusal() {
    let machine = Machine::described("rtx-4000");
    machine.write("/sys/bus/pci/devices/0000:52:00.2/vendor", "garbage");
    let refusal = refusal(&machine, RTX);
    assert!(refusal.to_string().contains("0000:52:00.2 (unreadable"), "{refusal}");
}

#[test]
fn a_gpu_in_use_is_refused_with_its_holder_and_the_next_step() {
    for (command, pod, next_step) in [
        ("python", Some("7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22"), "end pod 7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22"),
        ("nvidia-persiste", None, "systemctl stop nvidia-persistenced"),
    ] {
        let machine = Machine::described("rtx-4000");
        machine.open_device(4242, command, &format!("/dev/nvidia{}", 0x52 * 256), pod);
        let refusal = refusal(&machine, RTX);
        assert_eq!(refusal.reason(), "InUse");
        let text = refusal.to_string();
        assert!(text.contains(RTX) && text.contains("pid 4242") && text.contains(next_step), "{text}");
    }
}

#[test]
fn a_gpu_with_virtual_functions_is_refused() {
    let machine = Machine::described("a2-sriov");
    let gpu = at("0000:08:00.0");
    assert_eq!(refusal(&machine, "0000:08:00.0"), Refusal::VfsPresent { gpu, device: gpu, count: 16 });
}

#[test]
fn a_gpu_with_mediated_devices_is_refused() {
    let machine = Machine::from_yaml(
        r#"
kernel: 5.4.0
os: ubuntu 20.04
modules: [vfio-pci]
mdevs: { 334852fe-079b-11ee-9fc7-77463608f467: { on: "0000:03:00.0", type: nvidia-46, group: 76 } }
functions:
  "0000:03:00.0":
    ids: "10de:1b38"
    class: "030200"
    driver: nvidia
    group: 20
    mdev_types: { nvidia-46: { name: GRID P40-1Q, available: 23 } }
"#,
    );
    let refusal = refusal(&machine, "0000:03:00.0");
    assert_eq!(refusal.reason(), "MediatedDevicesPresent");
    assert!(refusal.to_string().contains("334852fe-079b-11ee-9fc7-77463608f467"), "{refusal}");
}

#[test]
fn a_gpu_that_has_fallen_off_the_bus_is_left_alone() {
    let refusal = {
        let machine = Machine::described("rtx-4000");
        machine.write("/sys/bus/pci/devices/0000:52:00.0/config", [0xff; 64]);
        refusal(&machine, RTX)
    };
    assert_eq!(refusal, Refusal::FellOff { gpu: at(RTX), device: at(RTX) });
}

#[test]
fn a_gpu_one_of_whose_functions_does_not_answer_is_left_alone() {
    let mut view = View::of(&Machine::described("rtx-4000"));
    let companion = at("0000:52:00.2");
    view.inventory.functions.get_mut(&companion).unwrap().late = true;
    let refusal = view.plan(&Journal::in_memory(), RTX, Binding::Vfio).unwrap_err();
    assert_eq!(refusal, Refusal::Late { gpu: at(RTX), device: companion });
}

#[test]
fn what_is_no_gpu_is_refused() {
    let machine = Machine::described("rtx-4000");
    for address in ["0000:52:00.1", "0000:61:00.0", "0000:99:00.0"] {
        assert_eq!(refusal(&machine, address), Refusal::NotAGpu { address: at(address) });
    }
}

#[test]
fn gpus_of_one_group_go_together_or_not_at_all() {
    let machine = Machine::described("twins");
    let mut view = View::of(&machine);
    let (first, second) = ("0000:03:00.0", "0000:04:00.0");
    let refusal = view.plan(&Journal::in_memory(), first, Binding::Vfio).unwrap_err();
    let port = Some(SharedPort { address: at("0000:02:00.0"), acs: None });
    let (gpu, others) = (at(first), vec![at(second)]);
    assert_eq!(refusal, Refusal::SharedGroup { gpu, group: 7, others, port });
    view.wanted = [(at(second), Binding::Vfio)].into();
    let plan = view.plan(&Journal::in_memory(), first, Binding::Vfio).unwrap();
    let probed: Vec<_> =
        steps(&plan).into_iter().filter_map(|step| step.strip_prefix("give ").map(str::to_owned)).collect();
    assert_eq!(probed, ["0000:03:00.1", "0000:04:00.1", second, first].map(|device| format!("{device} to vfio-pci")));
}

#[test]
fn a_gpu_that_somebody_else_gave_to_vfio_is_left_there() {
    let machine = Machine::described("two-a40");
    let mut journal = Journal::in_memory();
    let refused = View::of(&machine).plan(&journal, "0000:61:00.0", Binding::Host).unwrap_err();
    assert_eq!(refused.reason(), "Adopted");
    assert_eq!(journal.adopt(&observe(&machine)).unwrap(), [at("0000:61:00.0")]);
    assert_eq!(journal.adopt(&observe(&machine)).unwrap(), []);
    let view = View::of(&machine);
    assert_eq!(view.plan(&journal, "0000:61:00.0", Binding::Host).unwrap_err(), refused);
    assert_eq!(view.plan(&journal, "0000:4a:00.0", Binding::Host).unwrap().steps, []);
}

#[test]
fn after_a_lost_journal_nobody_is_named_as_the_one_who_bound_it() {
    let machine = Machine::described("two-a40");
    let path = machine.path().join("run/gpuvirt/journal");
    machine.write("/run/gpuvirt/journal", "half a jour");
    Journal::open(&path).unwrap_err();
    let mut journal = Journal::open(&path).unwrap();
    let refused = View::of(&machine).plan(&journal, "0000:61:00.0", Binding::Host).unwrap_err();
    assert_eq!(refused.reason(), "RecordLost");
    assert!(refused.to_string().contains("not known any more who put it there"), "{refused}");
    journal.adopt(&observe(&machine)).unwrap();
    assert_eq!(View::of(&machine).plan(&journal, "0000:61:00.0", Binding::Host).unwrap_err(), refused);
}

#[test]
fn while_a_write_hangs_nothing_is_planned_for_its_group() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    let path = "/sys/bus/pci/drivers/snd_hda_intel/unbind".into();
    journal.add_pending(at("0000:52:00.1"), Pending { pid: 4711, start_time: 1, path }).unwrap();
    let refusal = View::of(&machine).plan(&journal, RTX, Binding::Vfio).unwrap_err();
    assert_eq!(refusal.reason(), "WriteHanging");
    assert!(refusal.to_string().contains("pid 4711"), "{refusal}");
    machine.write("/proc/4711/stat", "4711 (gpuvirt) D 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0");
    assert_eq!(journal.settle(&machine).unwrap(), []);
    machine.remove("/proc/4711");
    assert_eq!(journal.settle(&machine).unwrap(), [at("0000:52:00.1")]);
    assert!(View::of(&machine).plan(&journal, RTX, Binding::Vfio).is_ok());
}

#[test]
fn a_gpu_goes_to_the_variant_driver_of_the_kernel() {
    let machine = Machine::described("gb200");
    let plan = View::of(&machine).plan(&Journal::in_memory(), "0008:01:00.0", Binding::Vfio).unwrap();
    let steps = steps(&plan);
    assert_eq!(steps[0], "load module nvgrace_gpu_vfio_pci");
    assert_eq!(steps.last().unwrap(), "give 0008:01:00.0 to nvgrace_gpu_vfio_pci");
}

#[test]
fn a_companion_on_a_driver_of_the_host_is_a_deviation() {
    let machine = Machine::from_yaml(
        r#"
kernel: 4.18.0
os: centos 7
drivers: [vfio-pci]
functions:
  "0000:01:00.0": { ids: "10de:1392", class: "030000", driver: vfio-pci, group: 1 }
  "0000:01:00.1": { ids: "10de:0fbc", class: "040300", driver: snd_hda_intel, group: 1 }
"#,
    );
    let gpu = at("0000:01:00.0");
    let found = deviations(&observe(&machine), gpu, Binding::Vfio);
    let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["0000:01:00.1 is on snd_hda_intel, expected vfio-pci"]);
}

#[test]
fn a_group_without_node_is_a_deviation() {
    let machine = Machine::described("eight-t4");
    let gpu = at("0000:35:00.0");
    let name = observe(&machine).functions[&gpu].vfio_dev.clone().unwrap();
    machine.remove("/dev/vfio/34");
    assert_eq!(deviations(&observe(&machine), gpu, Binding::Vfio), [], "the device's own node will do");
    machine.remove(&format!("/dev/vfio/devices/{name}"));
    assert_eq!(deviations(&observe(&machine), gpu, Binding::Vfio), [Deviation::NoNode { gpu, group: 34 }]);
}

#[test]
fn a_gpu_that_is_gone_is_a_deviation() {
    let gpu = at("0000:99:00.0");
    assert_eq!(deviations(&observe(&Machine::described("eight-t4")), gpu, Binding::Vfio), [Deviation::Gone { gpu }]);
}

fn lines(machine: &Machine, gpu: &str, file: &str, text: &str) -> Refusal {
    machine.write(&format!("/sys/bus/pci/devices/{gpu}/{file}"), text);
    refusal(machine, gpu)
}

#[test]
fn a_gpu_without_a_place_for_its_memory_is_refused() {
    for (resource, named) in [
        ("0x0 0x0 0x0\n", "BAR 0 of 0000:52:00.0 has no place"),
        ("0xb7000000 0xb7ffffff 0x40200\n0x0 0x7ffffffff 0x2014220c\n", "BAR 1 of 0000:52:00.0 (32 GiB) has no place"),
    ] {
        let refusal = lines(&Machine::described("rtx-4000"), RTX, "resource", resource);
        assert_eq!(refusal.reason(), "BarUnassigned");
        let text = refusal.to_string();
        assert!(text.contains(named) && text.contains("above 4G"), "{text}");
    }
}

#[test]
fn without_a_vfio_driver_nothing_is_touched() {
    let machine = Machine::described("rtx-4000");
    machine.write("/lib/modules/6.1.0-26-amd64/modules.dep", "kernel/drivers/net/ice.ko:\n");
    let refused = refusal(&machine, RTX);
    assert_eq!(refused.reason(), "NoVfioDriver");
    assert!(refused.to_string().contains("then `modprobe vfio-pci`"), "{refused}");
    machine.write("/lib/modules/6.1.0-26-amd64/modules.builtin", "kernel/drivers/vfio/pci/vfio-pci.ko\n");
    assert!(View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).is_ok(), "built in");
}

#[test]
fn a_module_that_somebody_forbids_is_not_tried() {
    for (file, text, named) in [
        ("/proc/cmdline", "quiet module_blacklist=nouveau,vfio_pci intel_iommu=on\n", "module_blacklist="),
        ("/etc/modprobe.d/no.conf", "install vfio-pci /bin/false\n", "/etc/modprobe.d/no.conf has `install vfio_pci"),
        ("/etc/modprobe.d/no.conf", "install vfio /bin/false\n", "/etc/modprobe.d/no.conf has `install vfio "),
        ("/etc/modprobe.d/no.conf", "alias vfio-pci off\n", "/etc/modprobe.d/no.conf has `alias vfio_pci off`"),
    ] {
        let machine = Machine::described("rtx-4000");
        let dep = "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n";
        machine.write("/lib/modules/6.1.0-26-amd64/modules.dep", dep);
        machine.write(file, text);
        let refusal = refusal(&machine, RTX);
        assert_eq!(refusal.reason(), "NoVfioDriver");
        assert!(refusal.to_string().contains(named), "{refusal}");
        machine.write("/sys/bus/pci/drivers/vfio-pci/bind", "");
        assert!(View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).is_ok(), "it is there all the same");
    }
}

#[test]
fn a_blacklisted_module_is_loaded_for_a_plan_all_the_same() {
    let machine = Machine::described("rtx-4000");
    machine.write("/etc/modprobe.d/no.conf", "blacklist vfio-pci\n");
    assert!(View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).is_ok());
}

#[test]
fn the_variant_driver_that_a_gpu_needs_must_be_there_too() {
    let machine = Machine::described("gb200");
    machine.write("/lib/modules/6.11.0-1013-nvidia-64k/modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko:\n");
    let refusal = refusal(&machine, "0008:01:00.0");
    assert!(refusal.to_string().contains("nvgrace_gpu_vfio_pci"), "{refusal}");
}

#[test]
fn a_gpu_that_shows_the_console_is_refused() {
    const GPU: &str = "0000:01:00.0";
    let iomem = "c0000000-cfffffff : 0000:01:00.0\n  c0000000-c02fffff : BOOTFB\n";
    let efi = ("/sys/class/graphics/fb0", "../../devices/platform/efi-framebuffer.0/graphics/fb0");
    let below = ("/sys/class/graphics/fb0", "../../devices/pci0000:00/0000:01:00.0/simple-framebuffer.0/graphics/fb0");
    let own = ("/sys/class/graphics/fb0", "../../devices/pci0000:00/0000:01:00.0/drm/card0/graphics/fb0");
    for (link, iomem, console, next_step) in [
        (None, iomem, false, "initcall_blacklist=sysfb_init"),
        (Some(efi), "", false, "initcall_blacklist=sysfb_init"),
        (Some(below), "", true, "initcall_blacklist=sysfb_init"),
        (Some(own), "", true, "echo 0 > /sys/class/vtconsole/vtcon1/bind"),
    ] {
        let machine = Machine::described("six-rtx-3090");
        machine.write("/proc/iomem", iomem);
        if let Some((path, target)) = link {
            machine.symlink(path, target);
        }
        machine.write("/sys/class/vtconsole/vtcon1/name", "(M) frame buffer device\n");
        machine.write("/sys/class/vtconsole/vtcon1/bind", u8::from(console).to_string());
        let refusal = refusal(&machine, GPU);
        assert_eq!(refusal.reason(), "Console", "{link:?}");
        assert!(refusal.to_string().contains(next_step), "{refusal}");
        let other = View::of(&machine).plan(&Journal::in_memory(), "0000:25:00.0", Binding::Vfio);
        assert!(other.is_ok(), "another card goes all the same");
    }
}

#[test]
fn a_screen_of_its_own_driver_without_console_goes_along() {
    let machine = Machine::described("six-rtx-3090");
    let target = "../../devices/pci0000:00/0000:01:00.0/drm/card0/graphics/fb0";
    machine.symlink("/sys/class/graphics/fb0", target);
    machine.write("/sys/class/vtconsole/vtcon0/name", "(S) dummy device\n");
    machine.write("/sys/class/vtconsole/vtcon0/bind", "1\n");
    assert!(View::of(&machine).plan(&Journal::in_memory(), "0000:01:00.0", Binding::Vfio).is_ok());
}

#[test]
fn memory_that_firmware_uses_through_the_group_is_a_refusal() {
    let machine = Machine::described("rtx-4000");
    let regions = "/sys/kernel/iommu_groups/35/reserved_regions";
    machine.write(regions, "0x00000000fee00000 0x00000000feefffff msi\n0xbc000000 0xbdffffff direct-relaxable\n");
    assert!(View::of(&machine).plan(&Journal::in_memory(), RTX, Binding::Vfio).is_ok(), "no obstacles");
    machine.write(regions, "0x00000000bdf6f000 0x00000000bdf7efff direct\n0xfee00000 0xfeefffff msi\n");
    let refusal = refusal(&machine, RTX);
    assert_eq!(refusal.reason(), "FirmwareMemory");
    let found = deviations(&observe(&machine), at(RTX), Binding::Vfio);
    assert!(found.contains(&Deviation::FirmwareMemory { gpu: at(RTX), group: 35 }), "{found:?}");
    assert!(refusal.to_string().contains("0xbdf6f000-0xbdf7efff"), "{refusal}");
}

#[test]
fn the_port_that_does_not_keep_a_foreign_device_apart_is_named() {
    let yaml = FOREIGN.replace("DRIVER", "ice").replace("group: 35 }", "group: 35, under: \"0000:50:02.0\" }")
        + "  \"0000:50:02.0\": { ids: \"8086:347a\", class: \"060400\", group: 34 }\n";
    let config = |control: u8| {
        let mut config = vec![0; 0x1000];
        config[0x100..0x107].copy_from_slice(&[0x0d, 0, 1, 0, 0, 0, control]);
        config
    };
    for (config, hint) in [
        (Some(config(0x1d)), "(both behind 0000:50:02.0, which has ACS on"),
        (Some(config(0)), "(both behind 0000:50:02.0, whose ACS is off"),
        (Some(vec![0; 0x1000]), "(both behind 0000:50:02.0, which has no ACS"),
        (None, "(both behind 0000:50:02.0)"),
    ] {
        let machine = Machine::from_yaml(&yaml);
        if let Some(config) = config {
            machine.write("/sys/bus/pci/devices/0000:50:02.0/config", config);
        }
        let refusal = refusal(&machine, RTX);
        assert_eq!(refusal.reason(), "ForeignDeviceInGroup");
        assert!(refusal.to_string().contains(hint), "{refusal}");
    }
}
