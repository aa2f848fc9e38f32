//! What a pod gets.

use crds::WorkloadMode;

use crate::node::{GPU, RTX, T4, gpu, lab};

#[test]
fn a_pod_gets_the_address_and_the_devices_of_the_gpu_that_it_asked_for_and_no_others() {
    lab(WorkloadMode::VmPassthrough, async |lab, node| {
        let rtx = gpu(&node, "0000:01:00.0").expect("the RTX 4000");
        lab.until_allocatable(RTX, "1").await;
        lab.pod("rtx", RTX, 1).await;
        let log = lab.log("rtx").await;
        assert!(log.contains("PCI_RESOURCE_NVIDIA_COM_TU104GL_QUADRO_RTX_4000=0000:01:00.0\n"), "{log}");
        let group = rtx.iommu_group.expect("a group").to_string();
        let entries: Vec<&str> = log.lines().collect();
        assert!(
            entries.contains(&group.as_str()) && entries.contains(&"vfio") && entries.contains(&"/dev/iommu"),
            "{log}"
        );
        let groups = entries.iter().filter(|entry| entry.parse::<u32>().is_ok()).count();
        assert_eq!(groups, 1, "no other group: {log}");
        let cdevs = entries.iter().filter(|entry| entry.strip_prefix("vfio").is_some_and(|n| n.parse::<u32>().is_ok()));
        assert_eq!(cdevs.count(), 2, "the GPU's and its audio function's: {log}");
    });
}

#[test]
fn a_pod_that_asks_for_two_gpus_gets_both_addresses() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        lab.until_allocatable(T4, "2").await;
        lab.pod("two", T4, 2).await;
        let log = lab.log("two").await;
        let line = log.lines().find(|line| line.starts_with("PCI_RESOURCE_")).expect("a variable");
        let (_, addresses) = line.split_once('=').expect("a value");
        let mut addresses: Vec<&str> = addresses.split(',').collect();
        addresses.sort_unstable();
        assert_eq!(addresses, [GPU, "0000:44:00.0"]);
    });
}

#[test]
fn a_pod_that_has_not_opened_its_gpu_uses_it_all_the_same() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        lab.until_allocatable(T4, "2").await;
        lab.pod("vm", T4, 1).await;
        lab.label(WorkloadMode::Container).await;
        lab.until_refused(&["allocated to pod default/vm"]).await;
        assert_eq!(lab.drivers()[GPU], "vfio-pci");
        lab.delete_pod("default", "vm").await;
        lab.until_serving(WorkloadMode::Container).await;
    });
}
