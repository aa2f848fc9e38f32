//! To VFIO and back.

use std::time::Duration;

use super::{AUDIO, CROWDED, IDLE, TWIN, WITH_VFS, plain};

const BEHIND_A_BRIDGE: &str = "0000:04:01.0";

#[test]
fn every_gpu_goes_to_vfio_with_its_group_and_comes_back_to_where_it_was_and_bridges_stay() {
    plain(|plain| {
        plain.load_nvidia();
        let before = plain.drivers();
        assert_eq!(before[TWIN], "nvidia");
        assert_eq!(before[AUDIO], "snd_hda_intel");
        assert_eq!(before["0000:42:00.0"], "pcieport", "a port of the switch, in the group of the GPU behind it");
        let gpus = [&[TWIN, WITH_VFS, BEHIND_A_BRIDGE], &IDLE[..]].concat();

        plain.switched("vfio", &gpus);
        let mut expected = before.clone();
        for address in gpus.iter().copied().chain([AUDIO]) {
            expected.insert(address.to_owned(), "vfio-pci".to_owned());
        }
        assert_eq!(plain.drivers(), expected, "these and no others");
        for gpu in &gpus {
            let group = format!("$(basename $(readlink /sys/bus/pci/devices/{gpu}/iommu_group))");
            let opened = plain.run(&format!("hold {group} {gpu}"));
            assert!(opened.contains("viable=1"), "{gpu}: a VM can open it: {opened}");
        }
        assert_eq!(plain.switched("vfio", &gpus).said.lines().count(), 1, "nothing is left to do");

        plain.switched("host", &gpus);
        assert_eq!(plain.drivers(), before);
        assert_eq!(plain.reserved(), "");
        assert_eq!(plain.journal(), "");
    });
}

#[test]
fn a_gpu_moves_between_nvidia_and_vfio_and_its_neighbours_work_on() {
    plain(|plain| {
        plain.load_nvidia();
        let before = plain.drivers();
        let neighbour = plain.nvidia_node(IDLE[1]);
        let user = plain.start(&format!("sh -c 'exec 3<{neighbour}; echo ready; exec sleep 1000'"));
        for gpu in [IDLE[0], TWIN] {
            plain.switched("vfio", &[gpu]);
            let taken = if gpu == TWIN { vec![TWIN, AUDIO] } else { vec![gpu] };
            let mut expected = before.clone();
            expected.extend(taken.into_iter().map(|address| (address.to_owned(), "vfio-pci".to_owned())));
            assert_eq!(plain.drivers(), expected);
            plain.switched("host", &[gpu]);
            assert_eq!(plain.drivers(), before);
        }
        plain.end_process(&user);
    });
}

#[test]
fn vfio_pci_is_loaded_from_a_compressed_module_with_the_options_of_the_host() {
    plain(|plain| {
        let module = plain.run("[ ! -d /sys/module/vfio_pci ] && find /lib/modules -name 'vfio-pci.ko*'");
        assert!(module.trim().ends_with(".ko.xz"), "{module}");
        plain.run("mkdir -p /etc/modprobe.d && echo options vfio-pci disable_idle_d3=1 >/etc/modprobe.d/vm.conf");
        let answer = plain.switched("vfio", &IDLE[..1]);
        assert!(answer.said.contains("load module vfio_pci"), "{answer:?}");
        assert_eq!(plain.run("cat /sys/module/vfio_pci/parameters/disable_idle_d3").trim(), "Y");
    });
}

#[test]
fn eight_idle_gpus_are_switched_within_a_second() {
    plain(|plain| {
        plain.load_nvidia();
        // The module's load is not the switch.
        plain.switched("vfio", &IDLE);
        plain.switched("host", &IDLE);
        for binding in ["vfio", "host"] {
            // The first of ten that is: the machine that runs this one may be busy with others.
            let times = (0..10).map(|_| {
                plain.switched(if binding == "vfio" { "host" } else { "vfio" }, &IDLE);
                let answer = plain.switched(binding, &IDLE);
                let milliseconds = answer.said.lines().last().and_then(|line| line.split(' ').nth(3)?.parse().ok());
                Duration::from_millis(milliseconds.expect("the time"))
            });
            let mut all = Vec::new();
            let met = times.inspect(|took| all.push(*took)).any(|took| took < Duration::from_secs(1));
            eprintln!("eight idle GPUs to {binding}: {all:?}");
            assert!(met, "to {binding}: {all:?}");
        }
    });
}

#[test]
fn a_gpu_that_was_removed_is_no_gpu_and_after_a_rescan_it_is_one_again() {
    plain(|plain| {
        plain.load_nvidia();
        let (gone, other) = (IDLE[1], IDLE[0]);
        let before = plain.drivers();
        plain.switched("vfio", &[gone]);
        plain.run(&format!("echo 1 >/sys/bus/pci/devices/{gone}/remove"));
        let answer = plain.switch("vfio", &[gone, other]);
        assert_eq!(answer.code, 2, "{answer:?}");
        assert!(answer.said.contains(&format!("{gone} is no GPU of this host")), "{answer:?}");
        assert_eq!(plain.drivers()[other], "vfio-pci", "the other one was served");

        plain.run("echo 1 >/sys/bus/pci/rescan");
        assert_eq!(plain.drivers()[gone], "nvidia", "it forgot that it was reserved");
        plain.switched("vfio", &[gone]);
        plain.switched("host", &[gone, other]);
        assert_eq!(plain.drivers(), before);
        assert_eq!(plain.journal(), "");
    });
}

#[test]
fn a_gpu_that_fell_off_the_bus_is_reported_and_the_others_are_served() {
    plain(|plain| {
        plain.load_nvidia();
        let (lost, other) = (IDLE[1], IDLE[0]);
        plain.run(&format!("echo {} >/sys/module/pciid/parameters/gone", &lost[5..]));
        let answer = plain.switch("vfio", &[lost, other]);
        assert_eq!(plain.drivers()[other], "vfio-pci", "{answer:?}");
        assert!(answer.said.contains(lost), "{answer:?}");
        let inspected = plain.ask("gpuvirt inspect");
        assert_eq!(inspected.code, 0, "{inspected:?}");
        assert!(inspected.said.contains(lost) && inspected.said.contains(other), "{inspected:?}");
    });
}

#[test]
fn a_gpu_in_a_group_with_a_network_card_is_refused_and_left_alone() {
    plain(|plain| {
        let before = plain.drivers();
        let answer = plain.switch("vfio", &[CROWDED]);
        assert_eq!(answer.code, 2, "{answer:?}");
        for word in ["ForeignDeviceInGroup", CROWDED, "0000:06:02.0", "8086:100e", "0000:05:00.0"] {
            assert!(answer.said.contains(word), "{word}: {answer:?}");
        }
        assert_eq!(plain.drivers(), before);
        assert_eq!(plain.reserved(), "");
    });
}
