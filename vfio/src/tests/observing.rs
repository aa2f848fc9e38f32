use super::at;
use crate::holders::holders;
use crate::host::Root;
use crate::inventory::{ObserveError, observe};
use crate::pcie::{Aer, Presence};
use crate::plan::Binding;
use crate::testing::Machine;
use crate::verify::deviations;
use crate::vgpu::{Mdev, VgpuParent, VgpuType};

fn primaries(machine: &Machine) -> Vec<String> {
    observe(machine).gpus().iter().map(|gpu| gpu.primary.address.to_string()).collect()
}

const T4: &str = "/sys/bus/pci/devices/0000:35:00.0";

#[test]
fn eight_t4_are_eight_gpus_with_a_group_each() {
    let machine = Machine::described("eight-t4");
    let inventory = observe(&machine);
    assert_eq!(inventory.errors, []);
    assert_eq!(inventory.gpus().len(), 8);
    for gpu in inventory.gpus() {
        assert_eq!((gpu.primary.device, gpu.primary.subsystem_device), (0x1eb8, 0x12a2));
        assert!(gpu.companions.is_empty() && gpu.foreign.is_empty() && gpu.shares_group_with.is_empty(), "{gpu:?}");
        assert_eq!(deviations(&inventory, gpu.primary.address, Binding::Vfio), []);
    }
}

#[test]
fn facts_of_the_host_are_read() {
    let facts = observe(&Machine::described("six-rtx-3090")).facts;
    assert_eq!((facts.os_id.as_str(), facts.os_version.as_str()), ("ubuntu", "24.04"));
    assert_eq!((facts.kernel_release.as_str(), facts.architecture.as_str()), ("6.8.0-45-generic", "x86_64"));
    assert!(facts.iommu && facts.iommufd && !facts.vfio_pci_loaded);
}

#[test]
fn audio_usb_and_ucsi_of_a_board_are_companions_and_its_port_is_not_in_the_way() {
    let inventory = observe(&Machine::described("rtx-4000"));
    let gpus = inventory.gpus();
    let [gpu] = gpus.as_slice() else { panic!("one GPU expected: {gpus:?}") };
    let companions: Vec<_> = gpu.companions.iter().map(|function| function.address).collect();
    assert_eq!(companions, [at("0000:52:00.1"), at("0000:52:00.2"), at("0000:52:00.3")]);
    assert!(gpu.foreign.is_empty());
    assert_eq!(gpu.primary.numa_node, None, "-1 is no node");
    assert_eq!(gpu.primary.upstream, Some(at("0000:50:02.0")));
    assert_eq!(gpu.primary.driver_override, None, "(null) is no driver");
}

#[test]
fn a_link_between_devices_that_wait_for_each_other_makes_no_companion() {
    let machine = Machine::described("rtx-4000");
    let before = observe(&machine);
    // As the kernel draws it between functions of a board; here it leads to another one's.
    let link = "/sys/bus/pci/devices/0000:52:00.0/consumer:pci:0000:61:00.0";
    machine.symlink(link, "../../../virtual/devlink/pci:0000:52:00.0--pci:0000:61:00.0");
    assert_eq!(observe(&machine), before);
}

#[test]
fn six_cards_with_audio_are_six_gpus() {
    let machine = Machine::described("six-rtx-3090");
    let expected = ["01", "25", "41", "61", "81", "a1"].map(|bus| format!("0000:{bus}:00.0"));
    assert_eq!(primaries(&machine), expected);
    let inventory = observe(&machine);
    assert!(inventory.gpus().iter().all(|gpu| gpu.companions.len() == 1 && gpu.group.is_some()));
    assert!(inventory.gpu(at("0000:01:00.0")).unwrap().primary.boot_vga);
}

#[test]
fn switches_are_no_gpus() {
    let machine = Machine::described("eight-h200");
    let expected = ["18", "2a", "3a", "5d", "9a", "ab", "ba", "db"].map(|bus| format!("0000:{bus}:00.0"));
    assert_eq!(primaries(&machine), expected);
    let inventory = observe(&machine);
    assert!(inventory.gpus().iter().all(|gpu| gpu.companions.is_empty() && gpu.foreign.is_empty()));
    assert_eq!(inventory.groups[&114].len(), 4);
}

#[test]
fn virtual_functions_are_neither_gpus_nor_companions() {
    let machine = Machine::described("a2-sriov");
    assert_eq!(primaries(&machine), ["0000:08:00.0"]);
    let inventory = observe(&machine);
    let gpu = inventory.gpu(at("0000:08:00.0")).unwrap();
    assert!(gpu.companions.is_empty());
    assert_eq!((gpu.primary.numvfs, gpu.primary.vfs_possible), (16, 16));
    assert_eq!(inventory.functions[&at("0000:08:00.5")].physfn, Some(at("0000:08:00.0")));
}

#[test]
fn gpus_of_one_group_know_each_other() {
    let inventory = observe(&Machine::described("twins"));
    let gpu = inventory.gpu(at("0000:03:00.0")).unwrap();
    assert_eq!(gpu.shares_group_with, [at("0000:04:00.0")]);
    assert_eq!(gpu.companions.len(), 2);
}

#[test]
fn a_machine_without_iommu_has_gpus_without_groups() {
    let machine = Machine::described("rtx-4000");
    machine.remove("/sys/kernel/iommu_groups");
    for function in 0..4 {
        machine.remove(&format!("/sys/bus/pci/devices/0000:52:00.{function}/iommu_group"));
    }
    let inventory = observe(&machine);
    assert!(!inventory.facts.iommu);
    assert_eq!(inventory.gpus()[0].group, None);
    assert_eq!(inventory.gpus()[0].companions.len(), 3, "the slot still tells them");
}

#[test]
fn one_broken_function_hides_no_other() {
    for (attribute, content) in
        [("vendor", "garbage"), ("class", "0x"), ("device", "0x12345678"), ("vendor", "\u{fffd}")]
    {
        let machine = Machine::described("eight-t4");
        machine.write(&format!("/sys/bus/pci/devices/0000:35:00.0/{attribute}"), content);
        let inventory = observe(&machine);
        assert_eq!(inventory.gpus().len(), 7, "{attribute} = {content}");
        let [ObserveError::Function { address, attribute: named, .. }] = inventory.errors.as_slice() else {
            panic!("one error expected: {:?}", inventory.errors)
        };
        assert_eq!((*address, *named), (at("0000:35:00.0"), attribute));
    }
}

#[test]
fn an_attribute_that_can_be_missed_leaves_its_function_in() {
    let machine = Machine::described("eight-t4");
    machine.write("/sys/bus/pci/devices/0000:35:00.0/numa_node", [0xff, 0xfe]);
    machine.remove("/sys/bus/pci/devices/0000:36:00.0/boot_vga");
    let inventory = observe(&machine);
    assert_eq!(inventory.gpus().len(), 8);
    assert!(matches!(inventory.errors.as_slice(), [ObserveError::Attribute { attribute: "numa_node", .. }]));
}

#[test]
fn a_name_that_is_no_address_is_reported() {
    let machine = Machine::described("eight-t4");
    machine.write("/sys/bus/pci/devices/0000:zz:00.0/vendor", "0x10de");
    let inventory = observe(&machine);
    assert_eq!(inventory.errors, [ObserveError::Name { name: "0000:zz:00.0".to_owned() }]);
    assert_eq!(inventory.gpus().len(), 8);
}

#[test]
fn a_host_without_pci_is_an_inventory_with_errors() {
    let dir = tempfile::tempdir().unwrap();
    let inventory = observe(&Root::new(dir.path()).unwrap());
    assert!(inventory.functions.is_empty());
    let named =
        |error: &ObserveError| matches!(error, ObserveError::Host { path, .. } if path == "/sys/bus/pci/devices");
    assert!(inventory.errors.iter().any(named), "{:?}", inventory.errors);
}

#[test]
fn a_gpu_tells_its_link_and_its_errors() {
    let machine = Machine::described("eight-t4");
    for (file, text) in [
        ("current_link_speed", "2.5 GT/s PCIe\n"),
        ("current_link_width", "8\n"),
        ("max_link_speed", "8.0 GT/s PCIe\n"),
        ("max_link_width", "16\n"),
        ("aer_dev_correctable", "RxErr 2\nBadTLP 1\nTOTAL_ERR_COR 3\n"),
        ("aer_dev_nonfatal", "Undefined 0\nTOTAL_ERR_NONFATAL 0\n"),
        ("aer_dev_fatal", "DLP 1\nTOTAL_ERR_FATAL 1\n"),
    ] {
        machine.write(&format!("{T4}/{file}"), text);
    }
    let inventory = observe(&machine);
    let gpu = &inventory.functions[&at("0000:35:00.0")];
    let link = gpu.link.unwrap();
    assert_eq!((link.current.to_string(), link.maximum.to_string()), ("2.5 GT/s x8".into(), "8.0 GT/s x16".into()));
    assert_eq!(gpu.aer, Some(Aer { correctable: 3, nonfatal: 0, fatal: 1 }));
    assert_eq!(inventory.functions[&at("0000:36:00.0")].aer, None, "where the kernel counts none");
}

#[test]
fn a_gpu_that_reads_as_all_ones_has_fallen_off() {
    let machine = Machine::described("eight-t4");
    let presence = |machine: &Machine| observe(machine).functions[&at("0000:35:00.0")].presence;
    assert_eq!(presence(&machine), Some(Presence::Answers));
    machine.write(&format!("{T4}/config"), [0xff; 64]);
    assert_eq!(presence(&machine), Some(Presence::FellOff));
    // By the kernel's account it is in D3cold now, and nobody let it sleep.
    machine.write(&format!("{T4}/power_state"), "D3cold\n");
    machine.write(&format!("{T4}/power/runtime_status"), "active\n");
    assert_eq!(presence(&machine), Some(Presence::FellOff));
    machine.write(&format!("{T4}/power/runtime_status"), "suspended\n");
    assert_eq!(presence(&machine), None, "it would be woken by the question");
}

#[test]
fn both_vgpu_frameworks_are_told_from_each_other_and_from_none() {
    let machine = Machine::described("a2-sriov");
    let vf = "0000:08:00.5";
    let dir = format!("/sys/bus/pci/devices/{vf}");
    let of = |machine: &Machine| observe(machine).functions[&at(vf)].vgpu.clone();
    machine.remove(&format!("/sys/class/mdev_bus/{vf}"));
    assert_eq!(of(&machine), None);
    machine.write(&format!("{dir}/nvidia/current_vgpu_type"), "0\n");
    machine.write(&format!("{dir}/nvidia/creatable_vgpu_types"), "ID    : vGPU Name\n1155  : NVIDIA L40S-24Q\n");
    let creatable = vec![VgpuType { id: 1155, name: "NVIDIA L40S-24Q".to_owned() }];
    assert_eq!(of(&machine), Some(VgpuParent::VendorVfio { current: None, creatable }));
    machine.write(&format!("{dir}/nvidia/current_vgpu_type"), "1155\n");
    machine.write(&format!("{dir}/nvidia/creatable_vgpu_types"), "");
    assert_eq!(of(&machine), Some(VgpuParent::VendorVfio { current: Some(1155), creatable: Vec::new() }));
    machine.symlink(&format!("/sys/class/mdev_bus/{vf}"), &dir);
    let Some(VgpuParent::Mdev { types }) = of(&machine) else { panic!("mdev first, as the peer looks") };
    let types: Vec<_> = types.into_iter().map(|kind| (kind.id, kind.name, kind.available_instances)).collect();
    assert_eq!(types[0], ("nvidia-742".to_owned(), Some("NVIDIA A2-1B".to_owned()), 0));
    assert_eq!(types[4], ("nvidia-746".to_owned(), Some("NVIDIA A2-4Q".to_owned()), 1));
    machine.write(&format!("{dir}/mdev_supported_types/nvidia-746/available_instances"), "many\n");
    let inventory = observe(&machine);
    assert_eq!(inventory.functions[&at(vf)].vgpu, None);
    assert!(matches!(inventory.errors[..], [ObserveError::Attribute { attribute: "mdev_supported_types", .. }]));
}

#[test]
fn mediated_devices_are_listed_with_their_parent() {
    let inventory = observe(&Machine::described("a2-sriov"));
    let mdev = &inventory.mdevs["f715f63c-0d00-4007-9c5a-b07b0c6c05de"];
    let expected = Mdev {
        parent: Some(at("0000:08:00.4")),
        type_id: Some("nvidia-754".to_owned()),
        iommu_group: Some(106),
        vfio_dev: None,
    };
    assert_eq!((inventory.mdevs.len(), mdev), (3, &expected));
}

#[test]
fn modules_and_the_interrupt_flag_are_facts() {
    let machine = Machine::described("eight-t4");
    assert_eq!(observe(&machine).facts.unsafe_interrupts, None, "the module is not there");
    machine.write("/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y\n");
    machine.write("/proc/modules", "vfio_pci 16384 2 - Live 0x0000000000000000\nvfio 45056 9 vfio_pci, Live 0x0\n");
    let facts = observe(&machine).facts;
    assert_eq!(facts.unsafe_interrupts, Some(true));
    assert_eq!(facts.loaded_modules, ["vfio", "vfio_pci"].map(str::to_owned).into());
}

#[test]
fn the_host_of_this_test_can_be_looked_at() {
    let host = Root::new("/").unwrap();
    let inventory = observe(&host);
    assert!(!inventory.facts.kernel_release.is_empty());
    let held = holders(&host, &inventory);
    assert!(held.keys().all(|gpu| inventory.gpu(*gpu).is_some()));
}
