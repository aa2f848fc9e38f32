//! Times, printed and not judged: `cargo test --release -p vfio speed -- --ignored --nocapture`.

#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::holders::holders;
use crate::host::Host;
use crate::inventory::observe;
use crate::testing::Machine;
use crate::{Description, Tree};

/// The best of some rounds: the machine's other work is not ours.
fn best<T>(rounds: u32, mut work: impl FnMut() -> T) -> Duration {
    let round = |_| {
        let begun = Instant::now();
        black_box(work());
        begun.elapsed()
    };
    (0..rounds).map(round).min().unwrap()
}

/// 16 GPUs, each with 16 virtual functions.
fn many() -> String {
    let mut yaml = "kernel: 6.8.0\nos: ubuntu 24.04\nmodules: [vfio-pci]\nfunctions:\n".to_owned();
    for bus in 0x10..0x20 {
        let pf = format!("0000:{bus:02x}:00.0");
        writeln!(
            yaml,
            "  \"{pf}\": {{ ids: \"10de:26b9\", class: \"030200\", driver: nvidia, group: {bus}, vfs: 16 }}"
        )
        .unwrap();
        for number in 4..20u32 {
            let (slot, function, group) = (number / 8, number % 8, bus * 100 + number);
            writeln!(
                yaml,
                "  \"0000:{bus:02x}:{slot:02x}.{function}\": {{ ids: \"10de:26b9\", class: \"030200\", driver: nvidia, group: {group}, physfn: \"{pf}\" }}"
            )
            .unwrap();
        }
    }
    yaml
}

#[test]
#[ignore = "prints times"]
fn speed_of_a_scan_of_16_gpus_with_256_virtual_functions() {
    let tree: Tree = Description::parse(&many()).unwrap().tree().unwrap();
    let machine = Machine::from_yaml(&many());
    assert_eq!((observe(&tree).gpus().len(), observe(&machine).functions.len()), (16, 272));
    println!(
        "16 GPUs, 256 VFs: {:?} in memory, {:?} on disk",
        best(10, || observe(&tree)),
        best(10, || observe(&machine))
    );
}

#[test]
#[ignore = "prints times"]
fn speed_of_a_look_for_holders_among_2000_processes_with_50_descriptors() {
    let machine = Machine::from_yaml(&many());
    machine.write("/var/log/some", "");
    machine.write("/dev/null", "char 1:3");
    for pid in 1000..3000 {
        // As on a node: half sockets and pipes, the rest files and a few devices.
        for fd in 0..50 {
            let target = match fd {
                0..3 => "/dev/null",
                3..25 => "/var/log/some",
                _ => "socket:[123456]",
            };
            machine.symlink(&format!("/proc/{pid}/fd/{fd}"), target);
        }
    }
    machine.open_device(4242, "python", "/dev/nvidia4096", None);
    let inventory = observe(&machine);
    assert_eq!(holders(&machine, &inventory).len(), 1);
    let time = best(3, || holders(&machine, &inventory));
    let raw = best(3, || {
        let pids = 1000..3000;
        pids.map(|pid| machine.list(format!("/proc/{pid}/fd").as_ref()).unwrap().len()).sum::<usize>()
    });
    println!("2,000 processes with 50 descriptors: {time:?}, of which {raw:?} for listing them");
}
