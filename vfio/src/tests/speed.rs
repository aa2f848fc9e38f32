//! Times, printed and not judged: `cargo test --release -p vfio speed -- --ignored --nocapture`.

#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "printing is what it is for, of open files")]

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::host::{Host, Root};
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

/// `/proc` cannot be made up: the descriptors of this process are looked at 2,000 times.
#[test]
#[ignore = "prints times"]
fn speed_of_a_look_at_50_descriptors_of_each_of_2000_processes() {
    let files: Vec<_> = (0..25).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
    let pipes: Vec<_> = (0..12).map(|_| std::io::pipe().unwrap()).collect();
    let root = Root::new("/").unwrap();
    let dir = format!("/proc/{}/fd", std::process::id());
    let count = root.list(dir.as_ref()).unwrap().len();
    let time = best(3, || (0..2000).map(|_| root.open_devices(dir.as_ref()).unwrap().len()).sum::<usize>());
    println!("2,000 processes with {count} descriptors: {time:?}");
    drop((files, pipes));
}
