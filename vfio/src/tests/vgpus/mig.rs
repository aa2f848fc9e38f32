//! Boards with MIG: its mode, GPU instances, and vGPUs on them. One promise a test.

use super::{Lab, address, layout};
use crate::testing::Machine;
use crate::vgpu::{ApplyError, Silence, SilenceReason, VgpuRefusal, VgpuStep};

const GPU: &str = "0000:26:00.0";

/// Seven slices of 10 GB; a slice carries one vGPU of 10 GB or two of 5.
fn board(reset: bool) -> Lab {
    Lab::of(Machine::from_yaml(&format!(
        "
kernel: 6.8.0-45-generic
os: ubuntu 24.04
loaded: [nvidia, nvidia_vgpu_vfio]
functions:
  \"{GPU}\":
    {{ ids: \"10de:2331 10de:1626\", class: \"030200\", driver: nvidia, group: 47, vfs: 16, board: {{ framework: vendor, framebuffer: 80, vfs: 16, mig: {{ slices: 7, memory: 10, reset: {reset} }}, types: {{ 821: NVIDIA H100-1-10C, 822: NVIDIA H100-2-20C, 823: NVIDIA H100-4-40C, 824: NVIDIA H100-1-5C, 833: NVIDIA H100-40C }} }} }}
"
    )))
}

fn done(applied: (Vec<VgpuStep>, Result<(), ApplyError>)) -> Vec<String> {
    let (steps, result) = applied;
    result.unwrap_or_else(|error| panic!("{error}\nafter {steps:?}"));
    steps.iter().map(ToString::to_string).collect()
}

fn refused(applied: (Vec<VgpuStep>, Result<(), ApplyError>)) -> VgpuRefusal {
    match applied {
        (steps, Err(ApplyError::Refused(refusal))) if steps.is_empty() => refusal,
        other => panic!("{other:?}"),
    }
}

fn profiles(lab: &mut Lab) -> Vec<u32> {
    lab.facts().gpus[&address(GPU)].instances.iter().map(|one| one.profile).collect()
}

#[test]
fn mode_then_instances_then_virtual_functions_then_types_and_a_second_time_nothing() {
    let mut lab = board(false);
    let wanted = layout(&[("H100-2-20C", 1), ("H100-1-10C", 2)]);
    let steps = done(lab.apply(GPU, &wanted));
    let expected = [
        "turn MIG mode on of 0000:26:00.0",
        "make GPU instance 2g.20gb, number 1 of its kind of 0000:26:00.0",
        "make the compute instance of GPU instance 1 of 0000:26:00.0",
        "make GPU instance 1g.10gb, number 1 of its kind of 0000:26:00.0",
        "make the compute instance of GPU instance 2 of 0000:26:00.0",
        "make GPU instance 1g.10gb, number 2 of its kind of 0000:26:00.0",
        "make the compute instance of GPU instance 3 of 0000:26:00.0",
        "make 16 virtual functions of 0000:26:00.0",
    ];
    assert_eq!(steps[..8], expected, "{steps:#?}");
    assert_eq!((steps.len(), lab.counts(GPU)), (11, wanted.clone()));
    assert_eq!(done(lab.apply(GPU, &wanted)), [] as [&str; 0]);
}

#[test]
fn vgpus_share_an_instance_where_it_carries_several() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-1-5C", 3)])));
    assert_eq!((profiles(&mut lab), lab.counts(GPU)), (vec![1, 1], layout(&[("H100-1-5C", 3)])));
}

#[test]
fn only_what_is_in_the_way_goes_and_what_fits_stays() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-1-10C", 4)])));
    let before = lab.vgpus(GPU);
    let steps = done(lab.apply(GPU, &layout(&[("H100-1-10C", 1), ("H100-4-40C", 1)])));
    assert_eq!(lab.counts(GPU), layout(&[("H100-1-10C", 1), ("H100-4-40C", 1)]));
    assert!(lab.vgpus(GPU).contains(&before[0]), "{steps:#?}");
    // Of seven slices one had to go for the four: not the first, which carries the vGPU that stays.
    let mut all = profiles(&mut lab);
    all.sort_unstable();
    assert_eq!(all, [1, 1, 1, 4], "{steps:#?}");
}

#[test]
fn an_instance_that_a_vm_runs_on_is_not_taken_and_the_refusal_says_how_much_room_there_is() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-1-10C", 4)])));
    done(lab.apply(GPU, &layout(&[("H100-1-10C", 0)])));
    lab.library.in_use = vec![1, 2, 3, 4];
    let refusal = refused(lab.apply(GPU, &layout(&[("H100-4-40C", 1)])));
    assert_eq!(refusal.reason(), "NoGpuInstance");
    assert!(refusal.to_string().contains("4g.40gb") && refusal.to_string().contains("room for 0"), "{refusal}");
    assert_eq!(profiles(&mut lab), [1, 1, 1, 1], "nothing went");
}

#[test]
fn mig_mode_changes_only_where_nobody_has_the_gpu() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-40C", 1)])));
    lab.hold(&lab.vgpus(GPU)[0]);
    assert_eq!(refused(lab.apply(GPU, &layout(&[("H100-1-10C", 1)]))).reason(), "VgpuInUse");
    let mut lab = board(false);
    lab.machine.open_device(77, "python", "/dev/nvidia9728", None);
    let refusal = refused(lab.apply(GPU, &layout(&[("H100-1-10C", 1)])));
    assert_eq!(refusal.reason(), "InUse");
    assert!(refusal.to_string().contains("python"), "{refusal}");
    assert_eq!(lab.library.acts, [] as [&str; 0]);
}

#[test]
fn types_that_share_time_come_back_after_mig_and_its_functions_are_made_anew() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-1-10C", 2)])));
    let steps = done(lab.apply(GPU, &layout(&[("H100-40C", 2)])));
    let place = |of: &str| steps.iter().position(|step| step.starts_with(of)).unwrap_or_else(|| panic!("{steps:#?}"));
    assert!(
        place("remove vGPU") < place("remove the virtual") && place("remove the virtual") < place("turn MIG mode off")
    );
    assert_eq!(lab.counts(GPU), layout(&[("H100-40C", 2)]));
}

#[test]
fn a_board_that_needs_a_reset_says_so_and_nothing_else_is_done() {
    let mut lab = board(true);
    let (steps, result) = lab.apply(GPU, &layout(&[("H100-1-10C", 1)]));
    assert_eq!(steps.len(), 1);
    let refusal = result.unwrap_err().to_string();
    assert!(refusal.contains("nvidia-smi --gpu-reset -i 0000:26:00.0"), "{refusal}");
    assert_eq!(refused(lab.apply(GPU, &layout(&[("H100-1-10C", 1)]))).reason(), "MigNeedsReset");
}

#[test]
fn what_the_library_says_to_a_step_is_told() {
    let mut lab = board(false);
    lab.library.refuses = Some("Insufficient Permissions".to_owned());
    let (_, result) = lab.apply(GPU, &layout(&[("H100-1-10C", 1)]));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("turn MIG mode on") && error.contains("Insufficient Permissions"), "{error}");
}

#[test]
fn another_mode_takes_mig_away_that_came_from_here() {
    let mut lab = board(false);
    done(lab.apply(GPU, &layout(&[("H100-1-10C", 1)])));
    let steps = done(lab.leave(GPU));
    assert_eq!(steps.last().map(String::as_str), Some("turn MIG mode off of 0000:26:00.0"), "{steps:?}");
    assert_eq!(profiles(&mut lab), [] as [u32; 0]);
}

#[test]
fn a_library_that_says_nothing_leaves_mig_to_what_the_kernel_lists() {
    let mut lab = board(false);
    let reason = SilenceReason::NoLibrary;
    lab.library.silence = Some(Silence { reason, message: "there is none".to_owned() });
    done(lab.apply(GPU, &layout(&[("H100-40C", 1)])));
    done(lab.apply(GPU, &layout(&[])));
    let refusal = refused(lab.apply(GPU, &layout(&[("H100-1-10C", 1)])));
    assert!(refusal.to_string().contains("nvidia-smi -mig 1"), "{refusal}");
}

#[test]
fn a_gpu_that_says_that_sizes_may_not_differ_is_not_half_done() {
    let mut lab = board(false);
    let refusal = lab.plan(GPU, &layout(&[("H100-40C", 1), ("H100-80C", 1)])).unwrap_err();
    assert_eq!(refusal.reason(), "FramebufferSizesDiffer");
}
