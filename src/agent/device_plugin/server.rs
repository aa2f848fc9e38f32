//! The plugin's own gRPC service on its own socket. Thin: it translates between the wire and the pure modules.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::Stream;
use tokio::{net::UnixListener, sync::watch, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::{
    Recheck,
    allocate::{Grant, allocate},
    device::{Device, find},
    directory::{Identity, MAX_PATH},
    names::ResourceName,
    preferred::prefer,
    proto::{
        self,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
};

/// How long a closing server waits for the kubelet to take the last list and hang up.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// How long the fresh look at the host before an allocation may take. A lost device can make a read hang.
const RECHECK_WITHIN: Duration = Duration::from_secs(10);

/// What a plugin serves at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Listing {
    Offered(Vec<Device>),
    /// Not part of the offer any more: the kubelet is told an empty list, nothing is allocated.
    Withdrawn,
}

/// Why a plugin's socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("socket path {path} is longer than {MAX_PATH} bytes; use a shorter --kubelet-root")]
    PathTooLong { path: PathBuf },
    #[error(
        "cannot listen on {path}: {source}; the agent must be root and the kubelet's directory mounted for writing"
    )]
    Listen { path: PathBuf, source: io::Error },
}

/// The parts that outlive one server.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) resource: ResourceName,
    pub(super) listing: watch::Receiver<Listing>,
    /// The host has `/dev/iommu`.
    pub(super) iommufd: bool,
    pub(super) recheck: Recheck,
}

/// A running server. [`Server::stop`] ends it; dropping it leaves its socket behind.
pub(super) struct Server {
    socket: PathBuf,
    identity: Option<Identity>,
    closing: watch::Sender<bool>,
    readers: watch::Receiver<usize>,
    task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Server {
    /// Opens the socket, in place of one that is there. The kubelet may dial it as soon as this returns.
    pub(super) fn start(socket: PathBuf, service: Service) -> Result<Self, Error> {
        if socket.as_os_str().len() > MAX_PATH {
            return Err(Error::PathTooLong { path: socket });
        }
        let listen = || {
            match fs::remove_file(&socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            UnixListener::bind(&socket)
        };
        let listener = listen().map_err(|source| Error::Listen { path: socket.clone(), source })?;
        let identity = Identity::of(&socket);
        let closing = watch::Sender::new(false);
        let open = Arc::new(watch::Sender::new(0));
        let readers = open.subscribe();
        let handler = Handler { service, closing: closing.subscribe(), readers: open };
        let mut signal = closing.subscribe();
        let serving = tonic::transport::Server::builder()
            .add_service(DevicePluginServer::new(handler))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async move { closed(&mut signal).await });
        Ok(Self { socket, identity, closing, readers, task: tokio::spawn(serving) })
    }

    /// How many are reading the list.
    pub(super) fn readers(&self) -> watch::Receiver<usize> {
        self.readers.clone()
    }

    /// Whether the path still leads here.
    pub(super) fn is_reachable(&self) -> bool {
        self.identity.is_some() && Identity::of(&self.socket) == self.identity
    }

    /// Sends what is still to be sent, ends the lists, waits for the kubelet to hang up, removes the socket.
    pub(super) async fn stop(mut self) {
        self.closing.send_replace(true);
        if tokio::time::timeout(CLOSE_WITHIN, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!(socket = %self.socket.display(), "the kubelet did not hang up within {}s: closed without it", CLOSE_WITHIN.as_secs());
        }
        if self.is_reachable()
            && let Err(error) = fs::remove_file(&self.socket)
        {
            tracing::debug!(socket = %self.socket.display(), %error, "the socket stays");
        }
    }
}

async fn closed(closing: &mut watch::Receiver<bool>) {
    // An error means that the server is gone: closed, too.
    let _ = closing.wait_for(|closing| *closing).await;
}

struct Handler {
    service: Service,
    closing: watch::Receiver<bool>,
    readers: Arc<watch::Sender<usize>>,
}

impl Handler {
    fn offered(&self) -> Result<Vec<Device>, Status> {
        match &*self.service.listing.borrow() {
            Listing::Offered(devices) => Ok(devices.clone()),
            Listing::Withdrawn => Err(Status::failed_precondition(format!(
                "{}: not offered by this node any more; delete the pod so that it is scheduled again",
                self.service.resource
            ))),
        }
    }

    fn grants(&self, devices: &[Device], request: &proto::AllocateRequest) -> Result<Vec<Grant>, Status> {
        let Service { resource, iommufd, .. } = &self.service;
        let one = |container: &proto::ContainerAllocateRequest| {
            allocate(resource, devices, *iommufd, &container.device_ids)
                .map_err(|refusal| Status::failed_precondition(refusal.to_string()))
        };
        request.container_requests.iter().map(one).collect()
    }

    /// Asks the host, not the list: between the list and now a driver or a group may have changed.
    async fn objections<'a>(
        &self,
        offered: &[Device],
        ids: impl Iterator<Item = &'a String>,
    ) -> Result<BTreeMap<String, String>, Status> {
        let recheck = Arc::clone(&self.service.recheck);
        let asked: Vec<Device> = ids.filter_map(|id| find(offered, id).cloned()).collect();
        let looking = tokio::task::spawn_blocking(move || recheck(&asked));
        let late = |_| {
            Status::deadline_exceeded(format!(
                "{}: the host did not answer within {}s about the requested devices; see the kernel log of this node",
                self.service.resource,
                RECHECK_WITHIN.as_secs()
            ))
        };
        let answer = tokio::time::timeout(RECHECK_WITHIN, looking).await.map_err(late)?;
        answer.map_err(|error| Status::internal(format!("{}: {error}", self.service.resource)))
    }

    async fn recheck(&self, offered: &[Device], request: &proto::AllocateRequest) -> Result<(), Status> {
        let ids = request.container_requests.iter().flat_map(|container| &container.device_ids);
        match self.objections(offered, ids).await?.pop_first() {
            None => Ok(()),
            Some((id, why)) => {
                Err(Status::failed_precondition(format!("{}: device {id}: {why}", self.service.resource)))
            }
        }
    }
}

type Lists = Pin<Box<dyn Stream<Item = Result<proto::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Handler {
    async fn get_device_plugin_options(
        &self,
        _: Request<proto::Empty>,
    ) -> Result<Response<proto::DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    type ListAndWatchStream = Lists;

    async fn list_and_watch(&self, _: Request<proto::Empty>) -> Result<Response<Lists>, Status> {
        let reader = Reader {
            listing: self.service.listing.clone(),
            closing: self.closing.clone(),
            first: true,
            _open: Open::new(Arc::clone(&self.readers)),
        };
        let lists = futures::stream::unfold(reader, |mut reader| async move {
            let list = reader.next().await?;
            Some((Ok(list), reader))
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<proto::PreferredAllocationRequest>,
    ) -> Result<Response<proto::PreferredAllocationResponse>, Status> {
        let devices = self.offered()?;
        let requests = request.into_inner().container_requests;
        let ids = requests.iter().flat_map(|container| &container.available_device_ids);
        // What would be refused is not recommended. This is a hint: a host that does not answer leaves it less good.
        let refused = self.objections(&devices, ids).await.unwrap_or_default();
        let one = |container: proto::ContainerPreferredAllocationRequest| {
            let size = usize::try_from(container.allocation_size).unwrap_or(0);
            let (mut available, must) = (container.available_device_ids, &container.must_include_device_ids);
            available.retain(|id| !refused.contains_key(id));
            proto::ContainerPreferredAllocationResponse { device_ids: prefer(&devices, &available, must, size) }
        };
        let container_responses = requests.into_iter().map(one).collect();
        Ok(Response::new(proto::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<proto::AllocateRequest>,
    ) -> Result<Response<proto::AllocateResponse>, Status> {
        let request = request.into_inner();
        // First what the list alone refuses, so that the host is asked only about devices of ours; again afterwards,
        // because the list may have changed while the host was asked.
        let granted = async {
            let offered = self.offered()?;
            self.grants(&offered, &request)?;
            self.recheck(&offered, &request).await?;
            self.grants(&self.offered()?, &request)
        };
        let resource = &self.service.resource;
        match granted.await {
            Ok(grants) => {
                for grant in &grants {
                    tracing::info!(%resource, devices = grant.env_value, "allocated");
                }
                let container_responses = grants.into_iter().map(container_response).collect();
                Ok(Response::new(proto::AllocateResponse { container_responses }))
            }
            Err(refusal) => {
                tracing::warn!(%resource, reason = refusal.message(), "refused to allocate");
                Err(refusal)
            }
        }
    }

    async fn pre_start_container(
        &self,
        _: Request<proto::PreStartContainerRequest>,
    ) -> Result<Response<proto::PreStartContainerResponse>, Status> {
        // Not asked for in the options; an answer costs nothing.
        Ok(Response::new(proto::PreStartContainerResponse {}))
    }
}

/// What a plugin tells the kubelet about itself.
pub(super) fn options() -> proto::DevicePluginOptions {
    proto::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// Counts one open list for as long as it lives.
struct Open(Arc<watch::Sender<usize>>);

impl Open {
    fn new(count: Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// One `ListAndWatch` call.
struct Reader {
    listing: watch::Receiver<Listing>,
    closing: watch::Receiver<bool>,
    first: bool,
    _open: Open,
}

impl Reader {
    /// The next list; `None` when the server closes, but never before the newest list was handed out.
    async fn next(&mut self) -> Option<proto::ListAndWatchResponse> {
        if !std::mem::replace(&mut self.first, false) {
            tokio::select! {
                biased;
                changed = self.listing.changed() => changed.ok()?,
                () = closed(&mut self.closing) => return None,
            }
        }
        let devices = match &*self.listing.borrow_and_update() {
            Listing::Offered(devices) => devices.iter().map(wire_device).collect(),
            Listing::Withdrawn => Vec::new(),
        };
        Some(proto::ListAndWatchResponse { devices })
    }
}

fn wire_device(device: &Device) -> proto::Device {
    let node = |node| proto::TopologyInfo { nodes: vec![proto::NumaNode { id: i64::from(node) }] };
    proto::Device {
        id: device.id.clone(),
        health: device.health.as_str().to_owned(),
        topology: device.numa_node.map(node),
    }
}

fn container_response(grant: Grant) -> proto::ContainerAllocateResponse {
    let spec = |node: PathBuf| {
        let path = node.to_string_lossy().into_owned();
        proto::DeviceSpec { container_path: path.clone(), host_path: path, permissions: "mrw".to_owned() }
    };
    proto::ContainerAllocateResponse {
        envs: HashMap::from([(grant.env_name, grant.env_value)]),
        devices: grant.nodes.into_iter().map(spec).collect(),
        ..proto::ContainerAllocateResponse::default()
    }
}
