//! The agent comes and goes, devices come and go.

use crds::{
    WorkloadMode,
    v1alpha1::{GPUNode, GPUStatus},
};

use crate::{
    node::{GPU, NODE, T4, gpu, lab},
    support::{NAMESPACE, wait},
};

#[test]
fn an_agent_that_is_killed_changes_nothing_for_a_vm_and_takes_up_where_it_was() {
    lab(WorkloadMode::VmPassthrough, async |lab, node| {
        let group = gpu(&node, GPU).and_then(|gpu| gpu.iommu_group).expect("a group");
        let holder = lab.hold(&format!("hold {group} {GPU} 1000"));
        let agent = lab.agent_pod().await;
        lab.guest("for p in $(pidof gpuvirt); do if grep -q agent /proc/$p/cmdline; then kill -9 $p; fi; done");
        lab.until_holder(&holder).await;
        lab.delete_pod(NAMESPACE, &agent).await;
        lab.until_holder(&holder).await;
        assert!(lab.lives(&holder));
        assert_eq!(lab.drivers()[GPU], "vfio-pci");
        lab.until_allocatable(T4, "1").await;
        lab.end(&holder);
        lab.until_allocatable(T4, "2").await;
        lab.switch(WorkloadMode::Container).await;
        assert_eq!(lab.drivers()["0000:01:00.1"], "snd_hda_intel", "the journal outlived the agent");
    });
}

#[test]
fn a_flip_whose_unbind_hangs_holds_up_neither_the_other_gpus_nor_the_next_agent_and_is_finished_in_the_end() {
    lab(WorkloadMode::Container, async |lab, _| {
        let minor = lab.guest(&format!(r"sed -n 's/^Device Minor:\s*//p' /proc/driver/nvidia/gpus/{GPU}/information"));
        // Opened, and no process is seen to have it: as a program that opens it after the agent's last look.
        let user = lab.hold(&format!("hide /dev/nvidia{}", minor.trim()));
        lab.label(WorkloadMode::VmPassthrough).await;
        let asked = |node: &GPUNode| node.spec.mode == Some(WorkloadMode::VmPassthrough);
        wait::until(&lab.gpu_nodes(), NODE, "the agent is asked", asked).await;
        let hangs = |gpu: &GPUStatus| gpu.refusal.as_ref().is_some_and(|r| r.message.contains("drivers/nvidia/unbind"));
        let node = lab.until_gpu(GPU, "the GPU says which write hangs", hangs).await;
        for other in ["0000:01:00.0", "0000:44:00.0", "0000:83:00.0", "0000:84:00.0"] {
            let other = gpu(&node, other).expect("a GPU");
            assert_eq!((other.mode, &other.refusal), (Some(WorkloadMode::VmPassthrough), &None), "served all the same");
        }

        let agent = lab.agent_pod().await;
        lab.guest("for p in $(pidof gpuvirt); do if grep -q agent /proc/$p/cmdline; then kill -9 $p; fi; done");
        lab.delete_pod(NAMESPACE, &agent).await;
        let next = lab.agent_pod().await;
        lab.until_ready(NAMESPACE, &next).await;
        let still = |gpu: &GPUStatus| gpu.refusal.as_ref().is_some_and(|r| r.reason == "WriteHanging");
        lab.until_gpu(GPU, "the next agent knows of it, and has looked at all GPUs", still).await;

        lab.end(&user);
        lab.until_serving(WorkloadMode::VmPassthrough).await;
        assert_eq!(lab.drivers()[GPU], "vfio-pci");
    });
}

#[test]
fn a_gpu_that_is_pulled_out_and_put_back_is_followed() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        lab.until_allocatable(T4, "2").await;
        assert_eq!(lab.monitor("device_del gpu1"), "");
        let four = |node: &GPUNode| {
            node.status.as_ref().and_then(|s| s.agent.as_ref()).is_some_and(|agent| agent.gpus.len() == 4)
        };
        wait::until(&lab.gpu_nodes(), NODE, "four GPUs are left", four).await;
        lab.until_allocatable(T4, "1").await;
        wait::eventually("QEMU has let the device go", async || {
            lab.monitor("device_add edu,id=gpu1,bus=d1").is_empty().then_some(())
        })
        .await;
        lab.until_allocatable(T4, "2").await;
        lab.until_serving(WorkloadMode::VmPassthrough).await;
    });
}
