//! Which pods have which devices, as the kubelet has given them out: `PodResourcesLister.List` of the kubelet's
//! pod-resources API v1.
//!
//! A VM's pod has its GPU from the moment that it is admitted, long before QEMU opens it: only the kubelet knows then.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use crds::labels;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    client::Grpc,
    transport::{Endpoint, Uri},
};
use tonic_prost::ProstCodec;
use tower::service_fn;

const LIST: &str = "/v1.PodResourcesLister/List";
const DEADLINE: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("kubelet socket {socket} does not answer; pods whose VM has not opened its GPU yet cannot be seen")]
    Connect { socket: PathBuf, source: tonic::transport::Error },
    #[error("kubelet at {socket} does not list its pods' devices")]
    List { socket: PathBuf, source: Box<tonic::Status> },
}

/// A device that a container of a pod has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// `namespace/name`.
    pub pod: String,
    /// The name that the pod has requested it by.
    pub resource: String,
}

/// By device id.
pub type Allocations = BTreeMap<String, Vec<Allocation>>;

/// Those that this node's GPUs can be meant by: a GPU by its id, or any of the container stack's.
pub fn ours(all: &Allocations, is_gpu: impl Fn(&str) -> bool) -> Allocations {
    let mut ours = all.clone();
    ours.retain(|id, given| is_gpu(id) || given.iter().any(|given| labels::is_container_resource(&given.resource)));
    ours
}

/// What is listed, and what was had before of devices that are not.
pub fn kept(before: &Allocations, listed: Allocations) -> Allocations {
    let mut kept = before.clone();
    kept.extend(listed);
    kept
}

pub async fn allocations(socket: &Path) -> Result<Allocations, Error> {
    let path = socket.to_owned();
    let connect = service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is a placeholder: the connector knows the socket.
    let channel = Endpoint::from_static("http://kubelet")
        .connect_timeout(DEADLINE)
        .timeout(DEADLINE)
        .connect_with_connector(connect)
        .await
        .map_err(|source| Error::Connect { socket: socket.to_owned(), source })?;
    let failed = |source| Error::List { socket: socket.to_owned(), source: Box::new(source) };
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|source| Error::Connect { socket: socket.to_owned(), source })?;
    let codec = ProstCodec::<ListRequest, ListResponse>::default();
    let request = tonic::Request::new(ListRequest {});
    let response = client.unary(request, PathAndQuery::from_static(LIST), codec).await.map_err(failed)?;
    Ok(by_device(&response.into_inner()))
}

fn by_device(response: &ListResponse) -> Allocations {
    let mut allocations = Allocations::new();
    for pod in &response.pods {
        for devices in pod.containers.iter().flat_map(|container| &container.devices) {
            for id in &devices.device_ids {
                allocations.entry(id.clone()).or_default().push(Allocation {
                    pod: format!("{}/{}", pod.namespace, pod.name),
                    resource: devices.resource_name.clone(),
                });
            }
        }
    }
    allocations
}

// The fields of the kubelet's messages that are read here; protobuf skips the others.

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct ListRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<PodResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerResources {
    #[prost(message, repeated, tag = "2")]
    devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerDevices {
    #[prost(string, tag = "1")]
    resource_name: String,
    #[prost(string, repeated, tag = "2")]
    device_ids: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, resource: &str, ids: &[&str]) -> PodResources {
        let device_ids = ids.iter().map(|id| (*id).to_owned()).collect();
        let devices = vec![ContainerDevices { resource_name: resource.to_owned(), device_ids }];
        PodResources {
            name: name.to_owned(),
            namespace: "vms".to_owned(),
            containers: vec![ContainerResources { devices }],
        }
    }

    #[test]
    fn devices_lead_to_their_pods_and_to_the_names_that_they_were_requested_by() {
        let response =
            ListResponse { pods: vec![pod("a", "nvidia.com/TU104GL_TESLA_T4", &["0000:43:00.0", "0000:44:00.0"])] };
        let allocations = by_device(&response);
        assert_eq!(allocations.keys().collect::<Vec<_>>(), ["0000:43:00.0", "0000:44:00.0"]);
        let allocation = Allocation { pod: "vms/a".to_owned(), resource: "nvidia.com/TU104GL_TESLA_T4".to_owned() };
        assert_eq!(allocations["0000:44:00.0"], [allocation]);
    }

    #[test]
    fn what_a_new_kubelet_does_not_list_yet_is_kept_and_what_it_lists_counts() {
        let of = |name: &str, ids: &[&str]| by_device(&ListResponse { pods: vec![pod(name, "nvidia.com/A", ids)] });
        let kept = kept(&of("old", &["0000:43:00.0", "0000:44:00.0"]), of("new", &["0000:44:00.0"]));
        assert_eq!((&*kept["0000:43:00.0"][0].pod, &*kept["0000:44:00.0"][0].pod), ("vms/old", "vms/new"));
    }

    #[tokio::test]
    async fn an_absent_kubelet_is_an_error_that_names_the_socket() {
        let error = allocations(Path::new("/nonexistent/kubelet.sock")).await.expect_err("no kubelet");
        assert!(error.to_string().contains("/nonexistent/kubelet.sock"), "{error}");
    }
}
