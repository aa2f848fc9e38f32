//! Mode vm-vgpu as a user has it: labels on a node, resources in the scheduler's hands, and VMs that keep what they have.
//! The T4s of the node make mediated devices; vGPUs of virtual functions are in `plain/vgpu.rs`.

use std::time::Instant;

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUNode, VgpuProgress, VgpuState},
};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::{
    node::{GPU, Lab, NODE, gpu, lab},
    support::wait,
};

const Q4: &str = "nvidia.com/GRID_T4-4Q";
const Q8: &str = "nvidia.com/GRID_T4-8Q";
/// See [`Lab::board_with_functions`].
pub const WITH_FUNCTIONS: &str = "0000:02:00.0";

impl Lab {
    /// Makes the `NVMe` controller an L40S with four virtual functions, on a node whose next vGPU driver is of the vendor's own
    /// framework; or undoes that.
    pub fn board_with_functions(&self, there: bool) {
        let identity = |n: u8| format!(",02:00.{n}@0=26b910de,02:00.{n}@8=030200a1,02:00.{n}@2c=185110de");
        let identity = (0..5).map(identity).collect::<Vec<_>>().concat();
        let (set, framework) = match there {
            true => (format!("$PCI_SET{identity}"), "echo vendor >/run/nvidia/framework"),
            false => ("$PCI_SET".to_owned(), "rm -f /run/nvidia/framework"),
        };
        self.guest(&format!(
            ". /host/env; mkdir -p /run/nvidia; {framework}; echo 1 >/sys/bus/pci/devices/{WITH_FUNCTIONS}/remove; rmmod pciid; modprobe pciid set=\"{set}\"; echo 1 >/sys/bus/pci/rescan"
        ));
    }

    pub async fn label_vgpus(&self, config: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let labels = json!({labels::WORKLOAD_CONFIG: WorkloadMode::VmVgpu, labels::VGPU_CONFIG: config});
        let patch = json!({"metadata": {"labels": labels}});
        nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(&patch)).await.expect("a node should be patchable");
    }

    async fn until_vgpus(&self, promise: &str, holds: impl Fn(&VgpuState) -> bool) -> GPUNode {
        let is_so = |node: &GPUNode| {
            let agent = node.status.as_ref().and_then(|status| status.agent.as_ref());
            agent.and_then(|agent| agent.vgpu.as_ref()).is_some_and(&holds)
        };
        wait::until(&self.gpu_nodes(), NODE, promise, is_so).await
    }

    /// UUIDs of the GPU's vGPUs.
    pub fn mdevs(&self, gpu: &str) -> Vec<String> {
        let said = self.guest(&format!("cd /sys/bus/pci/devices/{gpu} && ls -d *-*-*-*-* 2>/dev/null || true"));
        said.lines().map(str::to_owned).collect()
    }
}

#[test]
fn labels_make_vgpus_and_offer_them_and_a_vm_keeps_its_own_while_the_rest_changes() {
    lab(WorkloadMode::Container, async |lab, _| {
        // A container node: its driver's pod goes, that of vGPUs comes.
        let began = Instant::now();
        lab.label_vgpus("T4-4Q").await;
        lab.until_allocatable(Q4, "8").await;
        let took = began.elapsed();
        eprintln!("vGPUs on a container node: from labels to allocatable in {} ms", took.as_millis());
        lab.until_serving(WorkloadMode::VmVgpu).await;
        let before = lab.mdevs(GPU);
        assert_eq!(before.len(), 4, "{before:?}");

        let pod = lab.pod("vm", Q4, 1).await;
        let log = lab.log("vm").await;
        let (_, uuid) = log.split_once("MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-4Q=").expect("a variable");
        let uuid = uuid.lines().next().unwrap_or_default().to_owned();
        let groups = log.lines().filter(|entry| entry.parse::<u32>().is_ok()).count();
        assert_eq!(groups, 1, "its own group and no other: {log}");
        assert!(pod.metadata.name.is_some());

        // Its GPU has no place for the type that is asked for: it stays as it is, and the other GPU changes.
        lab.label_vgpus("T4-8Q").await;
        let failed = |state: &VgpuState| state.config == "T4-8Q" && state.state == VgpuProgress::Failed;
        let node = lab.until_vgpus("the layout is refused for the GPU of the VM", failed).await;
        let message = &node.status.as_ref().unwrap().agent.as_ref().unwrap().vgpu.as_ref().unwrap().message;
        assert!(message.contains(&uuid) && message.contains("default/vm"), "{message}");
        lab.until_allocatable(Q8, "2").await;
        let held = ["0000:43:00.0", "0000:44:00.0"].into_iter().find(|gpu| lab.mdevs(gpu).contains(&uuid));
        assert_eq!(lab.mdevs(held.expect("the VM's vGPU is there")), lab.mdevs(held.unwrap()));
        let shown = gpu(&node, held.unwrap()).and_then(|gpu| gpu.vgpu.as_ref()).expect("its vGPUs are shown");
        let own = shown.instances.iter().find(|vgpu| vgpu.id == uuid).expect("the VM's");
        assert_eq!((own.resource.as_deref(), own.holders.len()), (Some(Q4), 1));

        // Another mode has to wait for it, too.
        lab.label(WorkloadMode::Container).await;
        lab.until_refused(&["default/vm"]).await;
        assert!(lab.mdevs(held.unwrap()).contains(&uuid));

        lab.label_vgpus("T4-8Q").await;
        lab.delete_pod("default", "vm").await;
        lab.until_allocatable(Q8, "4").await;
        lab.until_vgpus("the layout is there", |state| state.state == VgpuProgress::Success).await;

        // The driver is there: from the label to the scheduler's hands.
        let began = Instant::now();
        lab.label_vgpus("T4-4Q").await;
        lab.until_allocatable(Q4, "8").await;
        let took = began.elapsed();
        eprintln!("another layout: from label to allocatable in {} ms", took.as_millis());
        assert_eq!(lab.mdevs(GPU), before, "the same UUIDs each time");
        lab.until_allocatable(Q8, "0").await;
    });
}
