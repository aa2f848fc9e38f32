//! Boards of both frameworks, one promise a test.

use nix::errno::Errno;

use super::{Lab, layout};
use crate::testing::{Fault, Machine};
use crate::vgpu::{ApplyError, Framework, VgpuRefusal, VgpuStep, framework};

const A2: &str = "0000:08:00.0";
const L40S: &str = "0000:26:00.0";
const T4: &str = "0000:3b:00.0";

/// A T4 has no virtual functions: it is the parent of its mediated devices itself.
const T4_BOARD: &str = "
kernel: 5.15.0-60-generic
os: ubuntu 22.04
drivers: [vfio-pci]
loaded: [nvidia, nvidia_vgpu_vfio, mdev]
functions:
  \"0000:3b:00.0\":
    { ids: \"10de:1eb8 10de:12a2\", class: \"030200\", driver: nvidia, group: 12, board: { framework: mdev, framebuffer: 16, types: { 222: GRID T4-1B, 230: GRID T4-1Q, 231: GRID T4-2Q, 232: GRID T4-4Q } } }
";

/// A board whose virtual functions are still to be made.
fn fresh(stub: bool, heterogeneous: bool) -> Lab {
    Lab::of(Machine::from_yaml(&format!(
        "
kernel: 6.8.0-45-generic
os: ubuntu 24.04
drivers: [vfio-pci]
modules: [pci-pf-stub]
loaded: [nvidia, nvidia_vgpu_vfio]
functions:
  \"{L40S}\":
    {{ ids: \"10de:26b9 10de:1851\", class: \"030200\", driver: nvidia, group: 47, vfs: 32, board: {{ framework: vendor, framebuffer: 48, vfs: 32, stub: {stub}, heterogeneous: {heterogeneous}, types: {{ 1150: NVIDIA L40S-4Q, 1152: NVIDIA L40S-8Q, 1155: NVIDIA L40S-24Q, 1156: NVIDIA L40S-48Q }} }} }}
"
    )))
}

fn done(applied: (Vec<VgpuStep>, Result<(), ApplyError>)) -> Vec<String> {
    let (steps, result) = applied;
    result.unwrap_or_else(|error| panic!("{error}"));
    steps.iter().map(ToString::to_string).collect()
}

fn refused(applied: (Vec<VgpuStep>, Result<(), ApplyError>)) -> (Vec<VgpuStep>, VgpuRefusal) {
    match applied {
        (steps, Err(ApplyError::Refused(refusal))) => (steps, refusal),
        (_, other) => panic!("no refusal: {other:?}"),
    }
}

#[test]
fn virtual_functions_are_made_first_and_then_become_what_was_asked_for() {
    let mut lab = fresh(false, false);
    let steps = done(lab.apply(L40S, &layout(&[("L40S-24Q", 2)])));
    assert_eq!(
        steps,
        ["make 32 virtual functions of 0000:26:00.0", "make 0000:26:00.4 a L40S-24Q", "make 0000:26:00.5 a L40S-24Q"]
    );
    assert_eq!(lab.counts(L40S), layout(&[("L40S-24Q", 2)]));
    assert_eq!(done(lab.apply(L40S, &layout(&[("L40S-24Q", 2)]))), [] as [&str; 0], "a second time nothing is done");
}

#[test]
fn a_driver_without_that_function_gets_its_virtual_functions_by_the_stub_and_is_back_after_it() {
    let mut lab = fresh(true, false);
    let steps = done(lab.apply(L40S, &layout(&[("L40S-48Q", 1)])));
    assert!(steps.contains(&"give 0000:26:00.0 to pci-pf-stub".to_owned()), "{steps:?}");
    assert_eq!(lab.counts(L40S), layout(&[("L40S-48Q", 1)]));
    let gpu = &lab.view().inventory.functions[&super::address(L40S)];
    assert_eq!((gpu.driver.as_deref(), gpu.driver_override.as_deref(), gpu.numvfs), (Some("nvidia"), None, 32));
}

#[test]
fn the_stub_is_not_given_a_gpu_that_somebody_has_open() {
    let mut lab = fresh(true, false);
    lab.machine.open_device(77, "python", "/dev/nvidia9728", None);
    let (_, refusal) = refused(lab.apply(L40S, &layout(&[("L40S-48Q", 1)])));
    assert_eq!(refusal.reason(), "InUse");
    assert!(refusal.to_string().contains("python"), "{refusal}");
}

#[test]
fn what_fits_stays_with_its_uuid_and_only_the_rest_changes() {
    let mut lab = Lab::described("a2-sriov");
    let before = lab.vgpus(A2);
    let steps = done(lab.apply(A2, &layout(&[("A2-4Q", 2), ("A2-4A", 1)])));
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert!(steps[0].contains("remove vGPU f715f63c") && steps[1].contains("A2-4Q"), "{steps:?}");
    let after = lab.vgpus(A2);
    for kept in before.iter().filter(|vgpu| vgpu.kind() != Some("A2-4C")) {
        assert!(after.contains(kept), "{kept:?}");
    }
    assert_eq!(lab.counts(A2), layout(&[("A2-4Q", 2), ("A2-4A", 1)]));
}

#[test]
fn a_vgpu_in_use_that_the_layout_has_no_place_for_is_a_refusal_that_names_its_holder_and_nothing_changes() {
    let mut lab = Lab::described("a2-sriov");
    let before = lab.vgpus(A2);
    let c = before.iter().find(|vgpu| vgpu.kind() == Some("A2-4C")).unwrap();
    lab.hold(c);
    let (steps, refusal) = refused(lab.apply(A2, &layout(&[("A2-4Q", 2)])));
    assert_eq!((steps, refusal.reason()), (vec![], "VgpuInUse"));
    for part in [A2, &c.id, "A2-4C", "qemu-kvm", "7b5c2f0e"] {
        assert!(refusal.to_string().contains(part), "{part}: {refusal}");
    }
    assert_eq!(lab.vgpus(A2), before);
    assert!(lab.kernel.writes.is_empty(), "{:?}", lab.kernel.writes);
}

#[test]
fn of_two_of_a_type_the_one_in_use_stays() {
    let mut lab = Lab::described("a2-sriov");
    done(lab.apply(A2, &layout(&[("A2-4Q", 3)])));
    let last = lab.vgpus(A2).pop().unwrap();
    lab.hold(&last);
    done(lab.apply(A2, &layout(&[("A2-4Q", 1)])));
    assert_eq!(lab.vgpus(A2), [last]);
}

#[test]
fn uuids_are_the_same_after_a_reboot() {
    let boot = || {
        let mut lab = Lab::of(Machine::from_yaml(T4_BOARD));
        done(lab.apply(T4, &layout(&[("T4-2Q", 3)])));
        lab.vgpus(T4).into_iter().map(|vgpu| vgpu.id).collect::<Vec<_>>()
    };
    let first = boot();
    assert_eq!(first.len(), 3);
    assert_eq!(boot(), first);
}

#[test]
fn a_board_without_virtual_functions_takes_as_many_as_it_has_room_for_and_the_next_is_refused() {
    let mut lab = Lab::of(Machine::from_yaml(T4_BOARD));
    done(lab.apply(T4, &layout(&[("T4-4Q", 4)])));
    let (steps, refusal) = refused(lab.apply(T4, &layout(&[("T4-4Q", 5)])));
    assert_eq!((steps, refusal.reason()), (vec![], "GpuFull"));
    assert!(refusal.to_string().contains("5 T4-4Q are asked for, 4 are there"), "{refusal}");
}

#[test]
fn sizes_differ_only_where_the_board_shows_that_they_may() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-24Q", 1)])));
    let (steps, refusal) = refused(lab.apply(L40S, &layout(&[("L40S-24Q", 1), ("L40S-8Q", 1)])));
    assert_eq!((steps, refusal.reason()), (vec![], "FramebufferSizesDiffer"));
    assert!(refusal.to_string().contains("L40S-8Q cannot be beside L40S-24Q"), "{refusal}");
    let mut lab = fresh(false, true);
    let mixed = layout(&[("L40S-24Q", 1), ("L40S-8Q", 2)]);
    done(lab.apply(L40S, &mixed));
    assert_eq!(lab.counts(L40S), mixed);
}

#[test]
fn a_full_board_knows_the_names_of_what_it_has_from_when_they_were_listed() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-48Q", 1)])));
    assert_eq!(lab.counts(L40S), layout(&[("L40S-48Q", 1)]));
    assert_eq!(done(lab.apply(L40S, &layout(&[("L40S-24Q", 2)]))).len(), 3, "one removed, two made");
}

#[test]
fn a_type_that_the_board_does_not_have_is_named_with_those_that_it_has() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-24Q", 1)])));
    done(lab.apply(L40S, &layout(&[])));
    let (_, refusal) = refused(lab.apply(L40S, &layout(&[("A10-24Q", 1)])));
    assert_eq!(refusal.reason(), "UnknownVgpuType");
    assert!(refusal.to_string().contains("A10-24Q") && refusal.to_string().contains("L40S-24Q"), "{refusal}");
    let (_, refusal) = refused(lab.apply(L40S, &layout(&[("L40S-1-12C", 1)])));
    assert!(refusal.to_string().contains("nvidia-smi -mig 1"), "{refusal}");
}

#[test]
fn slices_and_shares_of_time_are_not_mixed() {
    let mut lab = fresh(false, false);
    let refusal = lab.plan(L40S, &layout(&[("L40S-24Q", 1), ("L40S-1-12C", 1)])).unwrap_err();
    assert_eq!(refusal.reason(), "MigAndTimeSliced");
}

#[test]
fn virtual_functions_that_were_lost_are_made_again_with_what_was_on_them() {
    let mut lab = fresh(false, false);
    let wanted = layout(&[("L40S-24Q", 2)]);
    done(lab.apply(L40S, &wanted));
    let before = lab.vgpus(L40S);
    let gone = format!("/sys/bus/pci/devices/{L40S}/sriov_numvfs");
    crate::Kernel::write(&mut lab.kernel, gone.as_ref(), "0").unwrap();
    assert_eq!(lab.vgpus(L40S), []);
    done(lab.apply(L40S, &wanted));
    assert_eq!(lab.vgpus(L40S), before);
}

#[test]
fn another_mode_takes_away_what_was_made_and_nothing_that_was_there() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-24Q", 2)])));
    let steps = done(lab.leave(L40S));
    assert_eq!(steps.last().unwrap(), "remove the virtual functions of 0000:26:00.0");
    assert_eq!(lab.view().inventory.functions[&super::address(L40S)].numvfs, 0);
    let mut others = Lab::described("a2-sriov");
    assert_eq!(done(others.leave(A2)), [] as [&str; 0]);
    assert_eq!(others.vgpus(A2).len(), 3);
}

#[test]
fn another_mode_waits_for_who_has_a_vgpu() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-24Q", 2)])));
    lab.hold(&lab.vgpus(L40S)[1]);
    let (steps, refusal) = refused(lab.leave(L40S));
    assert_eq!((steps, refusal.reason()), (vec![], "VgpuInUse"));
}

#[test]
fn what_the_kernel_answers_is_told_with_what_it_means() {
    for (errno, words) in
        [(Errno::EBUSY, "taken already"), (Errno::EINVAL, "framebuffer size"), (Errno::ENOSPC, "no room")]
    {
        let mut lab = fresh(false, false);
        let path = "/sys/bus/pci/devices/0000:26:00.4/nvidia/current_vgpu_type";
        lab.kernel.faults.insert(path.into(), Fault::Errno(errno as i32));
        let (steps, result) = lab.apply(L40S, &layout(&[("L40S-24Q", 1)]));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("0000:26:00.4"), "{errno}: {error}");
        assert_eq!(steps.len(), 1, "the virtual functions stand");
    }
}

#[test]
fn a_write_that_hangs_is_noted_and_the_gpu_is_left_alone_then() {
    let mut lab = fresh(false, false);
    let path = "/sys/bus/pci/devices/0000:26:00.4/nvidia/current_vgpu_type";
    lab.kernel.faults.insert(path.into(), Fault::Hang);
    lab.apply(L40S, &layout(&[("L40S-24Q", 1)])).1.unwrap_err();
    let (_, refusal) = refused(lab.apply(L40S, &layout(&[("L40S-24Q", 1)])));
    assert_eq!(refusal.reason(), "WriteHanging");
}

#[test]
fn a_gpu_without_a_framework_says_why() {
    let machine = |driver: &str, loaded: &str, vfs: &str| {
        let yaml = format!(
            "{{ kernel: 6.8.0, os: ubuntu 24.04, drivers: [vfio-pci], loaded: [{loaded}], functions: {{ \"{L40S}\": {{ ids: \"10de:26b9\", class: \"030200\", {driver} group: 47 {vfs} }} }} }}"
        );
        let lab = Lab::of(Machine::from_yaml(&yaml));
        match framework(&lab.view().inventory, &lab.view().inventory.functions[&super::address(L40S)], None) {
            Framework::None(why) => why.reason(),
            found @ (Framework::Mdev | Framework::VendorVfio) => panic!("{found:?}"),
        }
    };
    assert_eq!(machine("driver: vfio-pci,", "nvidia_vgpu_vfio", ""), "NotOnNvidiaDriver");
    assert_eq!(machine("", "nvidia_vgpu_vfio", ""), "NotOnNvidiaDriver");
    assert_eq!(machine("driver: nvidia,", "nvidia", ", vfs: 16"), "NoVgpuDriver");
    assert_eq!(machine("driver: nvidia,", "nvidia_vgpu_vfio", ", vfs: 16"), "NoVirtualFunctions");
    assert_eq!(machine("driver: nvidia,", "nvidia_vgpu_vfio", ""), "NoSriov");
}

#[test]
fn nothing_is_removed_for_a_type_of_another_board() {
    let mut lab = fresh(false, false);
    done(lab.apply(L40S, &layout(&[("L40S-48Q", 1)])));
    let (steps, refusal) = refused(lab.apply(L40S, &layout(&[("A10-24Q", 1)])));
    assert_eq!((steps, refusal.reason()), (vec![], "UnknownVgpuType"));
    assert_eq!(lab.counts(L40S), layout(&[("L40S-48Q", 1)]));
}

#[test]
fn functions_that_get_no_driver_by_the_administrators_choice_are_left_without_one_and_named() {
    let mut lab = fresh(false, false);
    let choice = format!("/sys/bus/pci/devices/{L40S}/sriov_drivers_autoprobe");
    lab.machine.write(&choice, "0\n");
    let (_, result) = lab.apply(L40S, &layout(&[("L40S-24Q", 1)]));
    let Err(ApplyError::Refused(refusal)) = result else { panic!("{result:?}") };
    assert_eq!(refusal.reason(), "VirtualFunctionsUnbound");
    assert!(refusal.to_string().contains("sriov_drivers_autoprobe"), "{refusal}");
    assert!(!lab.kernel.writes.iter().any(|write| write.contains("autoprobe")), "it is the administrator's");
}
