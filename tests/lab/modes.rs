//! Label flips, and what stands in their way.

use std::collections::BTreeSet;

use crds::{WorkloadMode, v1alpha1::GPUNode};

use crate::node::{GPU, H100, Lab, RTX, T4, gpu, lab};

fn drivers_in_use(lab: &Lab) -> BTreeSet<String> {
    lab.drivers().into_values().collect()
}

#[test]
fn a_change_of_label_takes_whole_groups_to_vfio_and_offers_them() {
    lab(WorkloadMode::Container, async |lab, _| {
        let before = lab.drivers();
        assert_eq!(before[GPU], "nvidia");
        assert_eq!(before["0000:01:00.1"], "snd_hda_intel");

        let node = lab.switch(WorkloadMode::VmPassthrough).await;
        assert_eq!(drivers_in_use(lab), ["vfio-pci".to_owned()].into(), "GPUs and the audio function");
        let companions = &gpu(&node, "0000:01:00.0").expect("the RTX 4000").companions;
        assert_eq!(companions[0].driver.as_deref(), Some("vfio-pci"));
        for (resource, count) in [(T4, "2"), (RTX, "1"), (H100, "2")] {
            lab.until_allocatable(resource, count).await;
        }
    });
}

#[test]
fn a_gpu_that_a_process_holds_is_left_until_it_lets_go_and_then_all_go_back_to_where_they_were() {
    lab(WorkloadMode::VmPassthrough, async |lab, node| {
        let group = group(&node);
        let holder = lab.hold(&format!("hold {group} {GPU} 1000"));
        lab.label(WorkloadMode::Container).await;
        lab.until_refused(&[GPU, &holder, &format!("/dev/vfio/{group}")]).await;
        assert_eq!(drivers_in_use(lab), ["vfio-pci".to_owned()].into());
        // The other one is offered again; the held one did not get its holder from the kubelet.
        lab.until_allocatable(T4, "1").await;

        lab.end(&holder);
        lab.until_serving(WorkloadMode::Container).await;
        let drivers = lab.drivers();
        for (function, driver) in &drivers {
            let own = if function.ends_with(".1") { "snd_hda_intel" } else { "nvidia" };
            assert_eq!(driver, own, "each function is back where it came from: {drivers:?}");
        }
        for resource in [T4, RTX, H100] {
            lab.until_allocatable(resource, "0").await;
        }
    });
}

#[test]
fn a_process_that_has_the_nvidia_device_open_keeps_the_container_mode() {
    lab(WorkloadMode::Container, async |lab, _| {
        let holder = lab.hold("sh -c 'exec 3</dev/nvidia0; exec sleep 1000'");
        lab.label(WorkloadMode::VmPassthrough).await;
        lab.until_refused(&[&holder, "/dev/nvidia0"]).await;
        assert_eq!(lab.drivers()[GPU], "nvidia");
        lab.end(&holder);
        lab.until_serving(WorkloadMode::VmPassthrough).await;
    });
}

#[test]
fn an_unknown_mode_changes_nothing_and_says_so() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(lab.client.clone());
        let patch = serde_json::json!({"metadata": {"labels": {crds::labels::WORKLOAD_CONFIG: "vm-passthru"}}});
        let patched =
            nodes.patch(crate::node::NODE, &kube::api::PatchParams::default(), &kube::api::Patch::Merge(&patch)).await;
        patched.expect("a node should be patchable");
        let complains = |node: &GPUNode| {
            let operator = node.status.as_ref().and_then(|s| s.operator.as_ref());
            operator.is_some_and(|o| o.conditions.iter().any(|c| c.message.contains("vm-passthru")))
        };
        crate::support::wait::until(&lab.gpu_nodes(), crate::node::NODE, "a condition names the value", complains)
            .await;
        assert_eq!(lab.drivers()[GPU], "vfio-pci");
    });
}

fn group(node: &GPUNode) -> i32 {
    gpu(node, GPU).and_then(|gpu| gpu.iommu_group).expect("a GPU in passthrough should have a group")
}
