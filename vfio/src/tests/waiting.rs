//! Devices that do not answer.

#![allow(clippy::disallowed_methods, reason = "opens the other end of what a read waits for")]

use std::time::{Duration, Instant};

use super::at;
use crate::holders::holders;
use crate::host::{Host, Root};
use crate::inventory::{observe, observe_except};
use crate::testing::Machine;

const T4: &str = "/sys/bus/pci/devices/0000:35:00.0";

#[test]
fn of_a_device_with_a_hanging_write_no_locked_attribute_is_read() {
    let machine = Machine::described("rtx-4000");
    // Reading it would hang: here it fails instead.
    machine.write("/sys/bus/pci/devices/0000:52:00.0/driver_override", [0xff]);
    assert_eq!(observe(&machine).errors.len(), 1);
    let inventory = observe_except(&machine, &[at("0000:52:00.0")].into());
    assert_eq!(inventory.errors, []);
    assert_eq!(inventory.gpus().len(), 1);
}

/// Opening a FIFO waits for its other end as the read of an attribute waits for a lock.
fn hang(machine: &Machine, path: &str) {
    if machine.exists(path.as_ref()) {
        machine.remove(path);
    }
    machine.write(path, "");
    machine.remove(path);
    let path = machine.path().join(path.trim_start_matches('/'));
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Long enough for what does answer, on a machine with other work.
const DEADLINE: Duration = Duration::from_secs(1);

fn hasty(machine: &Machine) -> Root {
    Root::new(machine.path()).unwrap().with_deadline(DEADLINE)
}

/// What is seen of the T4 whose attribute waits: at the first look and at later ones.
fn waits(attribute: &str, known: bool) {
    let machine = Machine::described("eight-t4");
    hang(&machine, &format!("{T4}/{attribute}"));
    let host = hasty(&machine);
    for look in 0..3 {
        let inventory = observe(&host);
        let gpu = inventory.functions.get(&at("0000:35:00.0"));
        let seen = gpu.map(|gpu| (gpu.late, gpu.driver.as_deref()));
        assert_eq!(seen, known.then_some((true, Some("vfio-pci"))), "{attribute}");
        assert_eq!(inventory.gpus().len(), if known { 8 } else { 7 }, "{attribute}");
        let [error] = inventory.errors.as_slice() else { panic!("{attribute}, look {look}: {:?}", inventory.errors) };
        assert!(error.to_string().contains("0000:35:00.0"), "{error}");
        assert!(!inventory.functions[&at("0000:36:00.0")].late);
    }
}

#[test]
fn a_device_that_does_not_answer_is_an_error_and_the_others_are_served() {
    let asked = ["driver_override", "resource", "power_state", "config", "current_link_speed", "aer_dev_correctable"];
    // What the kernel knows by heart never waits. If it does all the same, the function is not known.
    let by_heart = ["vendor", "numa_node"];
    std::thread::scope(|scope| {
        let all =
            asked.map(|attribute| (attribute, true)).into_iter().chain(by_heart.map(|attribute| (attribute, false)));
        for (attribute, known) in all {
            scope.spawn(move || waits(attribute, known));
        }
    });
}

#[test]
fn four_devices_that_hang_at_once_cost_the_first_look_little_more_than_one() {
    let took = |addresses: &[&str]| {
        let machine = Machine::described("eight-t4");
        for address in addresses {
            hang(&machine, &format!("/sys/bus/pci/devices/{address}/driver_override"));
        }
        let host = hasty(&machine);
        let began = Instant::now();
        let inventory = observe(&host);
        let took = began.elapsed();
        let late: Vec<_> = inventory.functions.values().filter(|f| f.late).map(|f| f.address.to_string()).collect();
        assert_eq!((late, inventory.gpus().len()), (addresses.iter().map(|a| (*a).to_owned()).collect(), 8));
        took
    };
    let (one, four) = std::thread::scope(|scope| {
        let one = scope.spawn(|| took(&["0000:35:00.0"]));
        let four = scope.spawn(|| took(&["0000:18:00.0", "0000:35:00.0", "0000:e7:00.0", "0000:f5:00.0"]));
        (one.join().unwrap(), four.join().unwrap())
    });
    assert!(four < one + DEADLINE / 2, "{four:?} and {one:?}");
}

#[test]
fn a_device_that_answers_again_is_whole_again() {
    let machine = Machine::described("eight-t4");
    let (path, host) = (format!("{T4}/resource"), hasty(&machine));
    hang(&machine, &path);
    assert!(observe(&host).functions[&at("0000:35:00.0")].late);
    // Whoever waits gets its answer, and the next look finds a file.
    let opened = std::fs::OpenOptions::new().write(true).open(machine.path().join(path.trim_start_matches('/')));
    drop(opened.unwrap());
    machine.remove(&path);
    machine.write(&path, "0xb7000000 0xb7ffffff 0x40200\n");
    while observe(&host).functions[&at("0000:35:00.0")].late {
        std::thread::yield_now();
    }
    assert_eq!(observe(&host).errors, []);
}

#[test]
fn a_group_or_a_driver_that_does_not_answer_keeps_nobody_waiting() {
    let machine = Machine::described("eight-h200");
    hang(&machine, "/sys/kernel/iommu_groups/41/reserved_regions");
    let information = "/proc/driver/nvidia/gpus/0000:2a:00.0/information";
    hang(&machine, information);
    let host = hasty(&machine);
    let inventory = observe(&host);
    assert_eq!((inventory.gpus().len(), inventory.errors.len()), (8, 1), "{:?}", inventory.errors);
    assert!(holders(&host, &inventory).is_empty());
}
