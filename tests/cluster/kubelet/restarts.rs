//! Kubelets, agents and sockets that end and come back.

use std::{
    fmt::Write,
    fs,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Node;
use vfio::testing;

use super::{NODE, T4, allocatable, eight_t4, forget_resource, offered, offering, real_node, start_agent};
use crate::support::{
    tape::{Tape, Written, version},
    turn::turn,
    wait,
};

const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
const REGISTERED: &str = "registered with the kubelet";

pub(super) fn capacity(node: &Node) -> Option<&str> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    capacity.get(T4).map(|quantity| quantity.0.as_str())
}

#[test]
fn a_restart_of_the_agent_does_not_show_in_the_capacity_and_takes_two_seconds_at_most() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let mut agent = offering(t, host.path(), 8).await;
        let since = version(&allocatable(t, "8").await);
        let tape = Tape::<Node>::of(t.all(), NODE).await;
        for gently in [true, false] {
            let began = Instant::now();
            match gently {
                true => drop(agent.stop().await),
                false => agent.kill().await,
            }
            fs::remove_file(t.dir.path().join("agent.log")).expect("a log");
            agent = start_agent(t, host.path()).await;
            agent.says(REGISTERED).await;
            let took = began.elapsed();
            eprintln!("agent away for {took:?} (told to end: {gently})");
            assert!(took < Duration::from_secs(2), "{took:?}");
            allocatable(t, "8").await;
        }
        let odd = |written: &Written<Node>| match written {
            Written::Is(node) => capacity(node) != Some("8") || !matches!(offered(node), Some("8" | "0")),
            Written::Gone(_) => true,
        };
        assert!(!tape.ever(since, odd), "capacity is 8 all the time, and allocatable 8 or 0");
    });
}

#[test]
fn a_socket_that_somebody_removes_is_there_again_and_registered() {
    turn(async |t| {
        real_node(t).await;
        let host = eight_t4();
        let agent = offering(t, host.path(), 8).await;
        let own = || {
            let names = fs::read_dir(DEVICE_PLUGINS).expect("the kubelet's directory").flatten();
            names.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("/gpuvirt-"))
        };
        fs::remove_file(own().expect("a socket of ours")).expect("removable");
        agent.says("was removed by someone").await;
        wait::eventually("a new socket", async || own()).await;
        wait::eventually("registered again", async || (agent.log().matches(REGISTERED).count() == 2).then_some(()))
            .await;
        forget_resource(t).await;
        allocatable(t, "8").await;
    });
}

/// 16 GPUs with 16 virtual functions each.
fn large() -> testing::Machine {
    let mut text = "kernel: 6.8.0-45-generic\nos: ubuntu 24.04\niommufd: true\nfunctions:\n".to_owned();
    let mut group = 100;
    for n in 0..16 {
        let bus = 0x10 + n;
        group += 1;
        let line = format!(
            "  \"0000:{bus:02x}:00.0\": {{ ids: \"10de:1eb8\", class: \"030200\", driver: vfio-pci, group: {group}, numa: {}, vfs: 16, reset: flr }}\n",
            n / 8
        );
        text += &line;
        for vf in 1..=16 {
            group += 1;
            let (slot, function) = (vf / 8, vf % 8);
            writeln!(
                text,
                "  \"0000:{bus:02x}:{slot:02x}.{function}\": {{ ids: \"10de:1eb8\", class: \"030200\", group: {group}, physfn: \"0000:{bus:02x}:00.0\" }}"
            )
            .expect("a string takes it");
        }
    }
    let machine = testing::Machine::from_yaml(&text);
    machine.symlink("/var/lib/kubelet", "/var/lib/kubelet");
    machine
}

#[test]
fn sixteen_gpus_beside_256_functions_are_registered_within_a_second_of_the_agents_start() {
    turn(async |t| {
        real_node(t).await;
        let host = large();
        let first = offering(t, host.path(), 16).await;
        first.kill().await;
        allocatable(t, "0").await;
        fs::remove_file(t.dir.path().join("agent.log")).expect("a log");
        let second = start_agent(t, host.path()).await;
        let began = Instant::now();
        second.says(REGISTERED).await;
        let took = began.elapsed();
        eprintln!("registered {took:?} after the start");
        assert!(took < Duration::from_secs(1), "{took:?}");
        allocatable(t, "16").await;
    });
}

const RESTARTS: u32 = 200;
/// A kubelet takes some seconds to start and to write its node's status; a registration that has to be tried again comes on
/// top of that.
const BACK_WITHIN: Duration = Duration::from_secs(15);
/// Of the whole; a kubelet's restart takes about a second.
const BOUND: Duration = Duration::from_secs(20 * 60);

#[test]
#[ignore = "five minutes: make soak"]
fn soak_the_devices_are_back_after_each_of_200_restarts_of_the_kubelet() {
    turn(async |t| {
        let machine = real_node(t).await;
        let host = eight_t4();
        let mut agent = offering(t, host.path(), 8).await;
        let (began, mut slowest) = (Instant::now(), Duration::ZERO);
        for restart in 1..=RESTARTS {
            assert!(began.elapsed() < BOUND, "{restart} restarts took longer than {BOUND:?}");
            machine.stop_kubelet().expect("stoppable");
            forget_resource(t).await;
            let started = Instant::now();
            machine.start_kubelet().expect("startable");
            allocatable(t, "8").await;
            let back = started.elapsed();
            assert!(back < BACK_WITHIN, "restart {restart}: back after {back:?}");
            slowest = slowest.max(back);
            assert!(agent.lives(), "the agent is the same after restart {restart}");
        }
        eprintln!("{RESTARTS} restarts in {:?}; slowest return {slowest:?}", began.elapsed());
        assert_eq!(sockets(), 1, "one socket for one resource");
        assert!(!agent.log().contains("panicked"));
    });
}

/// How many of ours are in the kubelet's directory.
fn sockets() -> usize {
    let names = fs::read_dir(DEVICE_PLUGINS).expect("the kubelet's directory").flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with("gpuvirt-")).count()
}
