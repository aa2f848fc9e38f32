//! What must not be touched.

use super::{IDLE, WITH_VFS, plain, plain_with};

#[test]
fn a_gpu_with_virtual_functions_is_refused_until_they_are_gone() {
    plain(|plain| {
        plain.load_nvidia();
        let device = format!("/sys/bus/pci/devices/{WITH_VFS}");
        plain.run(&format!(
            "echo nvidia >{device}/driver_override; echo {WITH_VFS} >{device}/driver/unbind; echo {WITH_VFS} >/sys/bus/pci/drivers_probe; echo >{device}/driver_override"
        ));
        plain.run(&format!("echo 4 >{device}/sriov_numvfs"));
        let before = plain.drivers();
        assert!(before.contains_key("0000:02:00.1"), "a virtual function: {before:?}");

        let answer = plain.switch("vfio", &[WITH_VFS]);
        assert_eq!(answer.code, 2, "{answer:?}");
        for word in ["VirtualFunctionsPresent", WITH_VFS, "4 virtual functions", "sriov_numvfs"] {
            assert!(answer.said.contains(word), "{word}: {answer:?}");
        }
        assert_eq!(plain.drivers(), before);
        let vf = plain.switch("vfio", &["0000:02:00.1"]);
        assert!(vf.code == 2 && vf.said.contains("NotAGpu"), "a virtual function is no GPU: {vf:?}");
        let inspected = plain.run("gpuvirt inspect");
        assert!(inspected.contains(WITH_VFS) && !inspected.contains("0000:02:00.1"), "{inspected}");

        plain.run(&format!("echo 0 >{device}/sriov_numvfs"));
        plain.switched("vfio", &[WITH_VFS]);
        plain.switched("host", &[WITH_VFS]);
        assert_eq!(plain.drivers()[WITH_VFS], "nvidia");
    });
}

#[test]
fn a_gpu_that_somebody_has_open_is_refused_and_the_holder_is_named_and_the_others_are_served() {
    plain(|plain| {
        plain.load_nvidia();
        let (busy, free) = (IDLE[0], IDLE[1]);
        let node = plain.nvidia_node(busy);
        let user = plain.start(&format!("sh -c 'exec 3<{node}; echo ready; exec sleep 1000'"));
        let answer = plain.switch("vfio", &[busy, free]);
        assert_eq!(answer.code, 2, "{answer:?}");
        let holder = format!("gpu {busy} is in use by pid {user} (sleep) with {node}; end process {user}");
        assert!(answer.said.contains(&holder), "{answer:?}");
        assert_eq!((plain.drivers()[busy].as_str(), plain.drivers()[free].as_str()), ("nvidia", "vfio-pci"));
        plain.end_process(&user);
        plain.switched("vfio", &[busy, free]);

        let group = plain.run(&format!("basename $(readlink /sys/bus/pci/devices/{busy}/iommu_group)"));
        let group = group.trim();
        let vm = plain.start(&format!("hold {group} {busy} 1000"));
        let answer = plain.switch("host", &[busy, free]);
        assert_eq!(answer.code, 2, "{answer:?}");
        let holder = format!("gpu {busy} is in use by pid {vm} (hold) with /dev/vfio/{group}; end process {vm}");
        assert!(answer.said.contains(&holder), "{answer:?}");
        assert_eq!((plain.drivers()[busy].as_str(), plain.drivers()[free].as_str()), ("vfio-pci", "nvidia"));
        plain.end_process(&vm);
        plain.switched("host", &[busy, free]);
    });
}

#[test]
fn without_an_iommu_every_gpu_is_refused_and_nothing_is_touched() {
    plain_with("intel_iommu=off", |plain| {
        plain.load_nvidia();
        let before = plain.drivers();
        let answer = plain.switch("vfio", &IDLE);
        assert_eq!(answer.code, 2, "{answer:?}");
        assert_eq!(answer.said.matches("IommuOff: gpu 0000:").count(), IDLE.len(), "{answer:?}");
        assert!(answer.said.contains("intel_iommu=on"), "the next step: {answer:?}");
        let planned = plain.ask("gpuvirt plan --mode vm-passthrough");
        assert!(planned.code == 2 && planned.said.contains("IommuOff"), "{planned:?}");
        assert_eq!(plain.drivers(), before);
        assert_eq!(plain.reserved(), "");
        assert_eq!(plain.run("ls -d /sys/module/vfio_pci 2>/dev/null || true"), "", "no module was loaded");
    });
}
