//! The kubelet's side of the device plugin API: registers whoever asks, dials back, reads the list.
//!
//! It runs in a runtime of its own so that it can die as a process does: all connections at once, its socket left behind.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint, Uri},
};

use super::super::proto::{
    self, Device, DevicePluginOptions, Empty, RegisterRequest,
    device_plugin_client::DevicePluginClient,
    registration_server::{Registration, RegistrationServer},
};

/// What the kubelet knows of one resource.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Seen {
    pub(super) request: RegisterRequest,
    /// What the plugin says for itself when it is dialled.
    pub(super) options: Option<DevicePluginOptions>,
    pub(super) registrations: usize,
    /// The list is open.
    pub(super) connected: bool,
    /// Every list that was read, of all connections.
    pub(super) lists: Vec<Vec<Device>>,
}

impl Seen {
    /// A list was read, and none is open now.
    pub(super) fn is_closed(&self) -> bool {
        !self.lists.is_empty() && !self.connected
    }

    /// Ids of the newest list.
    pub(super) fn ids(&self) -> Vec<&str> {
        self.lists.last().map(|list| list.iter().map(|device| device.id.as_str()).collect()).unwrap_or_default()
    }
}

type World = BTreeMap<String, Seen>;

/// What a slow kubelet is not yet at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    Nothing,
    /// It has not answered `Register`.
    Answer,
    /// It has not opened the list.
    List,
    /// It refuses to register anything so many times.
    Refuses(u32),
}

pub(super) struct FakeKubelet {
    runtime: Option<tokio::runtime::Runtime>,
    world: watch::Receiver<World>,
    hang_up: watch::Sender<u32>,
    held: Arc<watch::Sender<Held>>,
    dir: PathBuf,
}

impl FakeKubelet {
    /// Starts as the real one does (`devicemanager/plugin/v1beta1/server.go`): sockets wiped, then its own created.
    pub(super) fn start(dir: &Path) -> Self {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            // The plugins remove theirs at the same time.
            let _ = std::fs::remove_file(entry.path());
        }
        Self::start_without_wiping(dir)
    }

    pub(super) fn start_without_wiping(dir: &Path) -> Self {
        Self::start_slow(dir, Held::Nothing)
    }

    /// One that takes its time until [`FakeKubelet::let_go`].
    pub(super) fn start_slow(dir: &Path, held: Held) -> Self {
        let socket = dir.join("kubelet.sock");
        let _ = std::fs::remove_file(&socket);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let world = Arc::new(watch::Sender::new(World::new()));
        let receiver = world.subscribe();
        let hang_up = watch::Sender::new(0);
        let held = Arc::new(watch::Sender::new(held));
        let service = Registry { dir: dir.to_owned(), world, hang_up: hang_up.subscribe(), held: held.clone() };
        let listener = {
            let _in_runtime = runtime.enter();
            UnixListener::bind(&socket).unwrap()
        };
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(RegistrationServer::new(service))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        Self { runtime: Some(runtime), world: receiver, hang_up, held, dir: dir.to_owned() }
    }

    /// Dies, and is dead when this returns. Its socket stays, with nobody behind it.
    pub(super) fn kill(mut self) {
        let runtime = self.runtime.take().unwrap();
        // On a thread of its own: ending a runtime blocks, which async code must not.
        std::thread::spawn(move || runtime.shutdown_timeout(super::PATIENCE)).join().unwrap();
    }

    /// Closes every plugin's list, as the real one does when another plugin takes a name over.
    pub(super) fn hang_up(&self) {
        self.hang_up.send_modify(|times| *times += 1);
    }

    pub(super) fn let_go(&self) {
        self.held.send_replace(Held::Nothing);
    }

    pub(super) fn seen(&self, resource: &str) -> Seen {
        self.world.borrow().get(resource).cloned().unwrap_or_default()
    }

    /// Waits until a resource is as described.
    pub(super) async fn until(&self, resource: &str, what: &str, is: impl Fn(&Seen) -> bool) -> Seen {
        let mut world = self.world.clone();
        let waiting = world.wait_for(|world| world.get(resource).is_some_and(&is));
        let found = tokio::time::timeout(super::PATIENCE, waiting).await.map(|world| world.unwrap()[resource].clone());
        found.unwrap_or_else(|_| panic!("{resource}: never saw {what}, but {:#?}", self.seen(resource)))
    }

    /// A connection to a plugin by the endpoint it registered.
    pub(super) async fn plugin(&self, resource: &str) -> DevicePluginClient<Channel> {
        dial(self.dir.join(self.seen(resource).request.endpoint)).await.unwrap()
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Registry {
    dir: PathBuf,
    world: Arc<watch::Sender<World>>,
    hang_up: watch::Receiver<u32>,
    held: Arc<watch::Sender<Held>>,
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let refuse = |held: &mut Held| match held {
            Held::Refuses(times @ 1..) => {
                *times -= 1;
                true
            }
            Held::Refuses(0) | Held::Nothing | Held::Answer | Held::List => false,
        };
        if self.held.send_if_modified(refuse) {
            return Err(Status::unavailable("not yet"));
        }
        let unavailable = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        let mut plugin = dial(self.dir.join(&request.endpoint)).await.map_err(unavailable)?;
        let options = plugin.get_device_plugin_options(Empty {}).await?.into_inner();
        let resource = request.resource_name.clone();
        let world = Arc::clone(&self.world);
        let change = move |change: &dyn Fn(&mut Seen)| {
            world.send_modify(|world| change(world.entry(resource.clone()).or_default()));
        };
        change(&|seen| {
            seen.request = request.clone();
            seen.options = Some(options);
            seen.registrations += 1;
        });
        let mut hang_up = self.hang_up.clone();
        hang_up.mark_unchanged();
        let mut held = self.held.subscribe();
        tokio::spawn(async move {
            let _ = held.wait_for(|held| *held != Held::List).await;
            let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
            loop {
                let list = tokio::select! {
                    list = lists.message() => list,
                    _ = hang_up.changed() => Ok(None),
                };
                let Ok(Some(proto::ListAndWatchResponse { devices })) = list else { break };
                change(&|seen| {
                    seen.connected = true;
                    seen.lists.push(devices.clone());
                });
            }
            drop((lists, plugin));
            change(&|seen| seen.connected = false);
        });
        let _ = self.held.subscribe().wait_for(|held| *held != Held::Answer).await;
        Ok(Response::new(Empty {}))
    }
}

async fn dial(socket: PathBuf) -> Result<DevicePluginClient<Channel>, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let plugin = Endpoint::from_static("http://localhost");
    Ok(DevicePluginClient::new(plugin.connect_with_connector(connector).await?))
}
