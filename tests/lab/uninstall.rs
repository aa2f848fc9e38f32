//! The chart's removal.

use crds::{WorkloadMode, labels};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt};

use crate::node::{GPU, NODE, gpu, lab};

#[test]
fn uninstalling_refuses_while_a_vm_has_a_gpu_and_then_leaves_nothing_behind() {
    lab(WorkloadMode::VmPassthrough, async |lab, node| {
        let group = gpu(&node, GPU).and_then(|gpu| gpu.iommu_group).expect("a group");
        let holder = lab.hold(&format!("hold {group} {GPU} 1000"));
        lab.until_holder(&holder).await;
        let refused = lab.uninstall().expect_err("a VM has a GPU");
        assert!(refused.contains(&holder) && refused.contains(GPU), "helm shows who has what: {refused}");
        assert!(lab.lives(&holder));
        lab.until_serving(WorkloadMode::VmPassthrough).await;

        lab.end(&holder);
        lab.until_gpu(GPU, "the holder has gone", |gpu| gpu.holders.is_empty()).await;
        lab.uninstall().unwrap_or_else(|error| panic!("{error}"));
        assert!(lab.gpu_nodes().get_opt(NODE).await.expect("readable").is_none(), "no GPUNode is left");
        let nodes: Api<Node> = Api::all(lab.client.clone());
        let node = nodes.get(NODE).await.expect("the node");
        let ours: Vec<_> = node
            .labels()
            .keys()
            .filter(|key| key.starts_with(labels::DEPLOY_PREFIX) || *key == labels::GPU_PRESENT)
            .collect();
        assert!(ours.is_empty(), "labels are left: {ours:?}");
        let drivers = lab.drivers();
        assert!(drivers.values().all(|driver| driver != "vfio-pci"), "GPUs are released: {drivers:?}");
    });
}
