//! The agent comes and goes, devices come and go.

use crds::WorkloadMode;

use crate::{
    node::{GPU, NODE, T4, gpu, lab},
    support::{NAMESPACE, wait},
};

#[test]
fn an_agent_that_is_killed_changes_nothing_for_a_vm_and_takes_up_where_it_was() {
    lab(async |lab| {
        let node = lab.switch(WorkloadMode::VmPassthrough).await;
        let group = gpu(&node, GPU).and_then(|gpu| gpu.iommu_group).expect("a group");
        let holder = lab.hold(&format!("hold {group} {GPU} 1000"));
        let agent = lab.agent_pod().await;
        lab.guest("pkill -9 -f '^/usr/bin/gpuvirt agent'");
        lab.delete_pod(NAMESPACE, &agent).await;
        lab.until_gpu(GPU, "the new agent names the holder", |gpu| {
            gpu.holders.iter().any(|h| h.pid.to_string() == holder)
        })
        .await;
        assert!(lab.lives(&holder));
        assert_eq!(lab.drivers()[GPU], "vfio-pci");
        lab.until_allocatable(T4, "2").await;
        lab.end(&holder);
        lab.switch(WorkloadMode::Container).await;
        assert_eq!(lab.drivers()["0000:01:00.1"], "snd_hda_intel", "the journal outlived the agent");
    });
}

#[test]
fn a_gpu_that_is_pulled_out_and_put_back_is_followed() {
    lab(async |lab| {
        lab.switch(WorkloadMode::VmPassthrough).await;
        lab.until_allocatable(T4, "2").await;
        assert_eq!(lab.monitor("device_del gpu1"), "");
        let four = |node: &crds::v1alpha1::GPUNode| {
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

#[test]
fn what_the_agent_executed_took_less_than_a_second() {
    lab(async |lab| {
        lab.switch(WorkloadMode::VmPassthrough).await;
        let agent = lab.agent_pod().await;
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{agent}:8080/proxy/metrics");
        let metrics = lab.client.request_text(http::Request::get(path).body(Vec::new()).expect("a request")).await;
        let metrics = metrics.expect("metrics should be readable");
        let line =
            metrics.lines().find(|line| line.starts_with("gpuvirt_mode_change_milliseconds ")).expect("the metric");
        println!("{line}");
    });
}
