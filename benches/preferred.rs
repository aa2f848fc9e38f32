//! The choice among 16 GPUs, for every size of a request: the kubelet waits for it while it admits a pod.

use criterion::{Criterion, criterion_group, criterion_main};
use gpuvirt::agent::device_plugin::{Device, Health, prefer};

/// Two NUMA nodes, two root ports on each, a switch of four below each.
fn sixteen() -> Vec<Device> {
    let device = |n: u16| Device {
        id: format!("0000:{n:02x}:00.0"),
        health: Health::Healthy,
        numa_node: Some(n / 8),
        nodes: vec![format!("/dev/vfio/{n}").into()],
        others: Vec::new(),
        path: vec![format!("port {}", n / 4), format!("switch {}", n / 4), format!("slot {n}")],
        egm: None,
        partition: None,
    };
    (0..16).map(device).collect()
}

fn preferred(criterion: &mut Criterion) {
    let devices = sixteen();
    let all: Vec<String> = devices.iter().map(|device| device.id.clone()).collect();
    let mut group = criterion.benchmark_group("preferred allocation of 16 GPUs");
    for size in 1..=all.len() {
        group.bench_function(size.to_string(), |bencher| bencher.iter(|| prefer(&devices, &all, &[], size)));
    }
    group.finish();
}

criterion_group!(benches, preferred);
criterion_main!(benches);
