//! What the kubelet is told, and what containers get.

use std::collections::HashMap;

use tonic::Code;

use super::super::proto::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    DevicePluginOptions, PreferredAllocationRequest,
};
use super::*;

async fn allocate(
    kubelet: &FakeKubelet,
    resource: &str,
    containers: &[&[u32]],
) -> Result<AllocateResponse, tonic::Status> {
    let container = |gpus: &&[u32]| ContainerAllocateRequest { device_ids: gpus.iter().map(|n| id(*n)).collect() };
    let request = AllocateRequest { container_requests: containers.iter().map(container).collect() };
    let answer = kubelet.plugin(resource).await.allocate(request).await;
    answer.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn each_resource_is_registered_with_its_devices() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2]), (A10, &[3])]);

    let t4 = kubelet.until(T4, "two devices", |seen| seen.ids() == [id(1), id(2)]).await;
    let a10 = kubelet.until(A10, "one device", |seen| seen.ids() == [id(3)]).await;

    let options = DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
    assert_eq!(t4.request.version, "v1beta1");
    assert_eq!((t4.request.options, t4.options), (Some(options), Some(options)));
    assert_ne!(t4.request.endpoint, a10.request.endpoint);
    node.until_registered(T4).await;
    node.until_registered(A10).await;
    assert_eq!(node.plugins.subscribe().borrow()[&name(T4)].devices, 2);
}

#[tokio::test]
async fn health_and_numa_node_are_passed_on_and_an_unknown_node_is_left_out() {
    let node = Node::start();
    let kubelet = node.kubelet();
    let devices = vec![gpu(1), Device { health: Health::Unhealthy, numa_node: None, ..gpu(2) }];
    node.plugins.offer(Offer::from([(name(T4), devices)]));

    let seen = kubelet.until(T4, "two devices", |seen| seen.ids() == [id(1), id(2)]).await;

    let list = &seen.lists[0];
    assert_eq!((list[0].health.as_str(), list[1].health.as_str()), ("Healthy", "Unhealthy"));
    assert_eq!(list[0].topology.as_ref().map(|topology| topology.nodes[0].id), Some(1));
    assert_eq!(list[1].topology, None);
    node.until_registered(T4).await;
    assert_eq!(node.plugins.subscribe().borrow()[&name(T4)].healthy, 1);
}

#[tokio::test]
async fn the_list_follows_the_offer_within_one_registration() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    kubelet.until(T4, "one device", |seen| seen.ids() == [id(1)]).await;

    node.offer(&[(T4, &[1, 2])]);
    let seen = kubelet.until(T4, "two devices", |seen| seen.ids() == [id(1), id(2)]).await;

    assert_eq!((seen.registrations, seen.connected), (1, true));
    node.until_state(T4, "two devices", |state| state.is_some_and(|state| state.devices == 2)).await;
}

#[tokio::test]
async fn the_same_offer_again_sends_nothing() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    kubelet.until(T4, "one device", |seen| seen.ids() == [id(1)]).await;

    node.offer(&[(T4, &[1])]);
    node.offer(&[(T4, &[1]), (A10, &[3])]);
    kubelet.until(A10, "one device", |seen| seen.ids() == [id(3)]).await;

    assert_eq!(kubelet.seen(T4).lists.len(), 1);
}

#[tokio::test]
async fn a_withdrawn_resource_is_emptied_then_closed_and_the_others_stay() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1]), (A10, &[3])]);
    node.until_registered(T4).await;
    node.until_registered(A10).await;

    node.offer(&[(A10, &[3])]);
    let seen = kubelet.until(T4, "a closed list", Seen::is_closed).await;
    node.until_state(T4, "its end", |state| state.is_none()).await;

    assert_eq!(seen.lists.last(), Some(&vec![]));
    assert_eq!(node.own_sockets(), [kubelet.seen(A10).request.endpoint]);
    assert!(kubelet.seen(A10).connected);
}

#[tokio::test]
async fn a_resource_that_comes_back_is_registered_again() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;
    node.offer(&[]);
    node.until_state(T4, "its end", |state| state.is_none()).await;

    node.offer(&[(T4, &[2])]);

    kubelet.until(T4, "the new device", |seen| seen.registrations == 2 && seen.ids() == [id(2)]).await;
    node.until_registered(T4).await;
}

#[tokio::test]
async fn a_container_gets_the_variable_and_the_nodes_of_its_devices() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2, 3])]);
    node.until_registered(T4).await;

    let answer = allocate(&kubelet, T4, &[&[3, 1]]).await.unwrap();

    let [container] = answer.container_responses.as_slice() else { panic!("{answer:?}") };
    let env = ("PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4".to_owned(), format!("{},{}", id(3), id(1)));
    assert_eq!(container.envs, HashMap::from([env]));
    let paths: Vec<&str> = container.devices.iter().map(|spec| spec.host_path.as_str()).collect();
    let own = ["/dev/vfio/3", "/dev/vfio/devices/vfio3", "/dev/vfio/1", "/dev/vfio/devices/vfio1"];
    assert_eq!(paths, [&["/dev/vfio/vfio"], own.as_slice(), &["/dev/iommu"]].concat());
    assert!(container.devices.iter().all(|spec| spec.permissions == "mrw" && spec.container_path == spec.host_path));
}

#[tokio::test]
async fn nothing_leaks_between_the_containers_of_one_request() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2])]);
    node.until_registered(T4).await;

    let both = allocate(&kubelet, T4, &[&[1], &[2]]).await.unwrap().container_responses;

    let alone = allocate(&kubelet, T4, &[&[2]]).await.unwrap().container_responses;
    assert_eq!(both[1..], alone);
    assert_eq!(both.len(), 2);
}

#[tokio::test]
async fn a_request_that_comes_before_the_list_was_read_is_answered() {
    let node = Node::start();
    let kubelet = FakeKubelet::start_slow(node.path(), Held::List);
    node.offer(&[(T4, &[1, 2])]);
    kubelet.until(T4, "a registration", |seen| seen.registrations == 1).await;

    let answer = allocate(&kubelet, T4, &[&[2]]).await.unwrap();

    assert!(answer.container_responses[0].envs.values().eq([&id(2)]), "{answer:?}");
    assert_eq!(kubelet.seen(T4).lists.len(), 0);
}

#[tokio::test]
async fn a_device_that_never_was_is_refused_in_words() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2])]);
    node.until_registered(T4).await;

    let refusal = allocate(&kubelet, T4, &[&[1], &[7]]).await.unwrap_err();

    assert_eq!(refusal.code(), Code::FailedPrecondition);
    assert!(refusal.message().contains("device 0000:07:00.0 is not offered"), "{refusal:?}");
}

#[tokio::test]
async fn a_device_that_left_the_offer_is_refused_in_words() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2])]);
    node.until_registered(T4).await;
    node.offer(&[(T4, &[1])]);
    kubelet.until(T4, "one device", |seen| seen.ids() == [id(1)]).await;

    let refusal = allocate(&kubelet, T4, &[&[2]]).await.unwrap_err();

    assert_eq!(refusal.code(), Code::FailedPrecondition);
    assert!(refusal.message().contains("device 0000:02:00.0 is not offered any more"), "{refusal:?}");
}

#[tokio::test]
async fn a_device_that_the_host_no_longer_vouches_for_is_refused() {
    let node = Node::with(|device| match device {
        "0000:02:00.0" => Some("driver is nvidia, not vfio-pci; set the node's mode again".to_owned()),
        _ => None,
    });
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2])]);
    node.until_registered(T4).await;

    let refusal = allocate(&kubelet, T4, &[&[1, 2]]).await.unwrap_err();

    assert_eq!(
        refusal.message(),
        "nvidia.com/TU104GL_TESLA_T4: device 0000:02:00.0: driver is nvidia, not vfio-pci; set the node's mode again"
    );
    assert!(allocate(&kubelet, T4, &[&[1]]).await.is_ok());
}

async fn preferred(kubelet: &FakeKubelet, available: &[u32], size: i32) -> Vec<String> {
    let container = ContainerPreferredAllocationRequest {
        available_device_ids: available.iter().map(|n| id(*n)).collect(),
        must_include_device_ids: vec![],
        allocation_size: size,
    };
    let request = PreferredAllocationRequest { container_requests: vec![container] };
    let answer = kubelet.plugin(T4).await.get_preferred_allocation(request).await.unwrap().into_inner();
    answer.container_responses[0].device_ids.clone()
}

#[tokio::test]
async fn devices_that_fit_together_are_preferred() {
    let node = Node::start();
    let kubelet = node.kubelet();
    let on = |numa_node, n| Device { numa_node: Some(numa_node), ..gpu(n) };
    node.plugins.offer(Offer::from([(name(T4), vec![on(0, 1), on(1, 2), on(1, 3)])]));
    node.until_registered(T4).await;

    assert_eq!(preferred(&kubelet, &[3, 1, 2], 2).await, [id(2), id(3)]);
}

#[tokio::test]
async fn a_device_that_would_be_refused_is_not_preferred() {
    let node = Node::with(|device| (device == id(1)).then(|| "pid 4711 (qemu-kvm) has it open still".to_owned()));
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1, 2])]);
    node.until_registered(T4).await;

    assert_eq!(preferred(&kubelet, &[1, 2], 1).await, [id(2)]);
    assert_eq!(preferred(&kubelet, &[1], 1).await, [] as [String; 0]);
}
