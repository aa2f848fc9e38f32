use std::path::{Path, PathBuf};

use super::{View, at, drivers, steps};
use crate::execute::{ExecuteError, execute};
use crate::inventory::observe;
use crate::journal::{Journal, Origin};
use crate::kernel::{Kernel, KernelError};
use crate::plan::{Binding, Plan, Step};
use crate::testing::{Fault, Machine};
use crate::verify::deviations;

/// Plans, executes and verifies.
fn bring(machine: &Machine, journal: &mut Journal, gpu: &str, binding: Binding) {
    let plan = View::of(machine).plan(journal, gpu, binding).unwrap();
    execute(&plan, &mut machine.kernel(), journal).unwrap();
    assert_eq!(deviations(&observe(machine), at(gpu), binding), []);
    let again = View::of(machine).plan(journal, gpu, binding).unwrap();
    assert_eq!(again.steps, [], "a second plan has nothing to do");
}

#[test]
fn a_release_that_ended_after_its_reservation_can_be_taken_back() {
    let machine = Machine::described("rtx-4000");
    let (gpu, mut journal) = ("0000:52:00.0", Journal::in_memory());
    bring(&machine, &mut journal, gpu, Binding::Vfio);
    let bound = drivers(&machine);
    let mut plan = View::of(&machine).plan(&journal, gpu, Binding::Host).unwrap();
    plan.steps.truncate(1);
    assert_eq!(steps(&plan), ["reserve 0000:52:00.0 for nvidia"]);
    execute(&plan, &mut machine.kernel(), &mut journal).unwrap();
    assert_ne!(drivers(&machine), bound);
    bring(&machine, &mut journal, gpu, Binding::Vfio);
    assert_eq!(drivers(&machine), bound);
}

/// A process that writes, and ends right before its first unbind: the journal is as that has left it.
struct Dying<K>(K, i32);

impl<K: Kernel> Kernel for Dying<K> {
    fn writer(&mut self) -> Result<Option<(i32, u64)>, KernelError> {
        Ok(Some((self.1, 0)))
    }

    fn write(&mut self, path: &Path, value: &str) -> Result<(), KernelError> {
        assert!(!path.ends_with("unbind"), "died here");
        self.0.write(path, value)
    }

    fn load_module(&mut self, name: &str) -> Result<(), KernelError> {
        self.0.load_module(name)
    }
}

#[test]
fn an_unbind_that_outlives_the_one_who_waited_for_it_is_known_to_the_next_one() {
    let machine = Machine::described("rtx-4000");
    let (gpu, path) = ("0000:52:00.0", machine.path().join("run/gpuvirt/journal"));
    let mut journal = Journal::open(&path).unwrap();
    let plan = View::of(&machine).plan(&journal, gpu, Binding::Vfio).unwrap();
    let writer = 4242;
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        execute(&plan, &mut Dying(machine.kernel(), writer), &mut journal)
    }));
    assert!(died.is_err());
    let mut journal = Journal::open(&path).unwrap();
    assert_eq!(journal.locked(), [at("0000:52:00.1")].into(), "the companion, which goes first");
    assert_eq!(journal.settle(&machine).unwrap(), [at("0000:52:00.1")], "there is no such process any more");
    bring(&machine, &mut journal, gpu, Binding::Vfio);
}

#[test]
fn to_vfio_and_back_restores_every_driver() {
    for (machine, gpu) in [
        ("rtx-4000", "0000:52:00.0"),
        ("six-rtx-3090", "0000:01:00.0"),
        ("tu116", "0000:01:00.0"),
        ("eight-h200", "0000:2a:00.0"),
        ("gb200", "0009:01:00.0"),
    ] {
        let machine = Machine::described(machine);
        let mut journal = Journal::open(machine.path().join("run/gpuvirt/journal")).unwrap();
        let before = drivers(&machine);
        bring(&machine, &mut journal, gpu, Binding::Vfio);
        let bound = drivers(&machine);
        assert!(bound[gpu].0.as_deref().is_some_and(crate::driver::is_vfio), "{bound:?}");
        assert_ne!(bound, before);
        // Another process goes on with what is on disk.
        let mut journal = Journal::open(machine.path().join("run/gpuvirt/journal")).unwrap();
        bring(&machine, &mut journal, gpu, Binding::Host);
        assert_eq!(drivers(&machine), before);
        bring(&machine, &mut journal, gpu, Binding::Vfio);
        bring(&machine, &mut journal, gpu, Binding::Host);
        assert_eq!(drivers(&machine), before);
    }
}

#[test]
fn a_release_goes_to_the_driver_that_had_it_and_not_to_the_one_that_comes_first() {
    let machine = Machine::from_yaml(
        r#"
kernel: 6.1.0
os: debian 12
drivers: [nouveau, vfio-pci]
functions:
  "0000:01:00.0": { ids: "10de:1eb8", class: "030200", driver: nvidia, native: nouveau, group: 1 }
  "0000:02:00.0": { ids: "10de:1eb8", class: "030200", native: nouveau, group: 2 }
"#,
    );
    let mut journal = Journal::in_memory();
    let before = drivers(&machine);
    for gpu in ["0000:01:00.0", "0000:02:00.0"] {
        bring(&machine, &mut journal, gpu, Binding::Vfio);
        bring(&machine, &mut journal, gpu, Binding::Host);
    }
    assert_eq!(drivers(&machine), before, "and one that nobody had is left to nobody");
}

#[test]
fn only_the_group_of_the_gpu_is_touched() {
    let machine = Machine::described("six-rtx-3090");
    let mut journal = Journal::in_memory();
    let plan = View::of(&machine).plan(&journal, "0000:41:00.0", Binding::Vfio).unwrap();
    let mut kernel = machine.kernel();
    execute(&plan, &mut kernel, &mut journal).unwrap();
    let writes = kernel.writes.join("\n");
    assert!(writes.contains("0000:41:00.0") && writes.contains("0000:41:00.1"), "{writes}");
    for other in ["0000:01:", "0000:25:", "0000:61:", "0000:81:", "0000:a1:", "new_id"] {
        assert!(!writes.contains(other), "{other} in {writes}");
    }
}

#[test]
fn twins_are_bound_and_released_as_one() {
    let machine = Machine::described("twins");
    let mut journal = Journal::in_memory();
    let before = drivers(&machine);
    let (first, second) = ("0000:03:00.0", "0000:04:00.0");
    for binding in [Binding::Vfio, Binding::Host] {
        let mut view = View::of(&machine);
        view.wanted = [(at(first), binding), (at(second), binding)].into();
        let plan = view.plan(&journal, first, binding).unwrap();
        execute(&plan, &mut machine.kernel(), &mut journal).unwrap();
        let mut view = View::of(&machine);
        view.wanted = [(at(first), binding), (at(second), binding)].into();
        assert_eq!(view.plan(&journal, second, binding).unwrap().steps, []);
        for gpu in [first, second] {
            assert_eq!(deviations(&view.inventory, at(gpu), binding), []);
        }
    }
    assert_eq!(drivers(&machine), before);
}

#[test]
fn a_held_twin_keeps_both_where_they_are() {
    let machine = Machine::described("twins");
    machine.open_device(9, "python", &format!("/dev/nvidia{}", 0x04 * 256), None);
    let mut view = View::of(&machine);
    view.wanted = [(at("0000:04:00.0"), Binding::Vfio)].into();
    let refusal = view.plan(&Journal::in_memory(), "0000:03:00.0", Binding::Vfio).unwrap_err();
    assert_eq!(refusal.reason(), "InUse");
}

#[test]
fn a_driver_that_is_not_loaded_now_leaves_the_gpu_free_for_it() {
    let machine = Machine::described("eight-h200");
    let mut journal = Journal::in_memory();
    bring(&machine, &mut journal, "0000:2a:00.0", Binding::Vfio);
    machine.remove("/sys/bus/pci/drivers/nvidia");
    bring(&machine, &mut journal, "0000:2a:00.0", Binding::Host);
    assert_eq!(drivers(&machine)["0000:2a:00.0"], (None, None));
}

#[test]
fn a_vm_that_came_meanwhile_stops_the_release() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    bring(&machine, &mut journal, "0000:52:00.0", Binding::Vfio);
    machine.open_device(4242, "qemu-system-x86", "/dev/vfio/35", None);
    let refusal = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Host).unwrap_err();
    assert_eq!(refusal.reason(), "InUse");
}

#[test]
fn work_that_stopped_anywhere_goes_on_and_goes_back() {
    let whole = {
        let machine = Machine::described("rtx-4000");
        View::of(&machine).plan(&Journal::in_memory(), "0000:52:00.0", Binding::Vfio).unwrap()
    };
    for stop in 0..=whole.steps.len() {
        for end in [Binding::Vfio, Binding::Host] {
            let machine = Machine::described("rtx-4000");
            let before = drivers(&machine);
            let mut journal = Journal::in_memory();
            let mut part = whole.clone();
            part.steps.truncate(stop);
            execute(&part, &mut machine.kernel(), &mut journal).unwrap();
            bring(&machine, &mut journal, "0000:52:00.0", end);
            bring(&machine, &mut journal, "0000:52:00.0", Binding::Host);
            assert_eq!(drivers(&machine), before, "stopped after step {stop}, then {end:?}");
        }
    }
}

#[test]
fn a_release_that_stopped_anywhere_ends_where_it_began() {
    let count = 5 * 4;
    for stop in 0..count {
        let machine = Machine::described("rtx-4000");
        let before = drivers(&machine);
        let mut journal = Journal::in_memory();
        bring(&machine, &mut journal, "0000:52:00.0", Binding::Vfio);
        let mut part = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Host).unwrap();
        part.steps.truncate(stop);
        execute(&part, &mut machine.kernel(), &mut journal).unwrap();
        bring(&machine, &mut journal, "0000:52:00.0", Binding::Vfio);
        bring(&machine, &mut journal, "0000:52:00.0", Binding::Host);
        assert_eq!(drivers(&machine), before, "stopped after step {stop}");
    }
}

#[test]
fn a_driver_that_somebody_gave_it_meanwhile_is_left_alone() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    bring(&machine, &mut journal, "0000:52:00.0", Binding::Vfio);
    // By hand: the audio function goes back to its driver.
    let mut kernel = machine.kernel();
    kernel.write("/sys/bus/pci/drivers/vfio-pci/unbind".as_ref(), "0000:52:00.1").unwrap();
    kernel.write("/sys/bus/pci/devices/0000:52:00.1/driver_override".as_ref(), "snd_hda_intel").unwrap();
    kernel.write("/sys/bus/pci/drivers_probe".as_ref(), "0000:52:00.1").unwrap();
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Host).unwrap();
    let audio: Vec<_> = steps(&plan).into_iter().filter(|step| step.contains("52:00.1")).collect();
    assert_eq!(audio, ["lift the reservation of 0000:52:00.1", "forget where 0000:52:00.1 was before"]);
}

#[test]
fn a_refusal_of_the_kernel_names_the_step_and_nothing_follows_it() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Vfio).unwrap();
    let mut kernel = machine.kernel();
    let probe = PathBuf::from("/sys/bus/pci/drivers_probe");
    kernel.faults.insert(probe, Fault::Errno(nix::libc::EINVAL));
    let error = execute(&plan, &mut kernel, &mut journal).unwrap_err();
    assert!(error.to_string().starts_with("gpu 0000:52:00.0: could not give 0000:52:00.1 to vfio-pci: "), "{error}");
    assert_eq!(kernel.writes.last().unwrap(), "/sys/bus/pci/drivers_probe <- 0000:52:00.1");
    assert!(!kernel.writes.join("\n").contains("52:00.0"));
    bring(&machine, &mut journal, "0000:52:00.0", Binding::Host);
}

#[test]
fn a_write_that_hangs_is_remembered_with_its_process() {
    let machine = Machine::described("rtx-4000");
    let path = machine.path().join("run/gpuvirt/journal");
    let mut journal = Journal::open(&path).unwrap();
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Vfio).unwrap();
    let mut kernel = machine.kernel();
    kernel.faults.insert("/sys/bus/pci/drivers/nvidia/unbind".into(), Fault::Hang);
    let error = execute(&plan, &mut kernel, &mut journal).unwrap_err();
    assert!(matches!(error, ExecuteError::Kernel { source: KernelError::Hung { pid: 4711, .. }, .. }), "{error}");
    let journal = Journal::open(&path).unwrap();
    assert_eq!(journal.locked(), [at("0000:52:00.0")].into());
    assert_eq!(journal.pending()[&at("0000:52:00.0")].start_time, 1234);
}

#[test]
fn while_one_unbind_hangs_the_other_gpus_are_served() {
    let machine = Machine::described("v100");
    let mut journal = Journal::in_memory();
    let (stuck, other) = ("0000:8a:00.0", "0000:8b:00.0");
    let plan = View::of(&machine).plan(&journal, stuck, Binding::Vfio).unwrap();
    let mut kernel = machine.kernel();
    kernel.faults.insert("/sys/bus/pci/drivers/nvidia/unbind".into(), Fault::Hang);
    execute(&plan, &mut kernel, &mut journal).unwrap_err();
    bring(&machine, &mut journal, other, Binding::Vfio);
    for binding in [Binding::Vfio, Binding::Host] {
        let refusal = View::of(&machine).plan(&journal, stuck, binding).unwrap_err();
        assert_eq!(refusal.reason(), "WriteHanging");
    }
}

#[test]
fn nothing_is_changed_before_it_is_in_the_journal() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::open(machine.path().join("run/gpuvirt/journal")).unwrap();
    // A file where the journal's directory should be.
    machine.write("/run/gpuvirt", "");
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Vfio).unwrap();
    let mut kernel = machine.kernel();
    let error = execute(&plan, &mut kernel, &mut journal).unwrap_err();
    assert!(matches!(error, ExecuteError::Journal { .. }), "{error}");
    assert_eq!(kernel.writes, ["module vfio_pci"]);
}

#[test]
fn another_card_in_the_same_slot_is_not_the_one_in_the_journal() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    bring(&machine, &mut journal, "0000:52:00.0", Binding::Vfio);
    machine.write("/sys/bus/pci/devices/0000:52:00.0/device", "0x2230\n");
    let inventory = observe(&machine);
    assert_eq!(journal.stale(&inventory), [at("0000:52:00.0")]);
    assert_eq!(journal.origin(&inventory.functions[&at("0000:52:00.0")]), None);
    assert_eq!(journal.origin(&inventory.functions[&at("0000:52:00.3")]), Some(&Origin::Unbound));
}

#[test]
fn forgetting_a_gpu_that_others_use_again_disturbs_nobody() {
    let machine = Machine::described("rtx-4000");
    let mut journal = Journal::in_memory();
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Vfio).unwrap();
    let noted: Vec<_> = plan.steps.iter().filter(|step| matches!(step, Step::RecordOriginal { .. })).cloned().collect();
    execute(&Plan { steps: noted, ..plan }, &mut machine.kernel(), &mut journal).unwrap();
    machine.open_device(4242, "python", &format!("/dev/nvidia{}", 0x52 * 256), None);
    let plan = View::of(&machine).plan(&journal, "0000:52:00.0", Binding::Host).unwrap();
    assert!(!plan.steps.is_empty() && !plan.disrupts(), "{plan:?}");
}
