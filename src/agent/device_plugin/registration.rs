//! Keeps one resource registered with the kubelet, whatever happens to its sockets.
//!
//! A *session* is one server, registered once: wait for `kubelet.sock`, serve, register, be read, until something ends
//! it. The kubelet (1.36, `devicemanager/plugin/v1beta1/server.go`) disconnects the newest connection of a resource when
//! an older one of the same resource ends; so a session is closed for good before the next one registers.

use std::{path::PathBuf, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::watch, time::Instant};
use tonic::transport::{Endpoint, Uri};

use super::{
    PluginState, States,
    backoff::Backoff,
    device::healthy,
    directory::{Directory, Identity, socket_name},
    names::ResourceName,
    proto::{self, registration_client::RegistrationClient},
    server::{self, Listing, Server, Service, options},
};

const API_VERSION: &str = "v1beta1";
/// The kubelet dials back within a `Register` call and gives that 10 s.
const REGISTER_WITHIN: Duration = Duration::from_secs(15);
/// The kubelet opens the list right after a `Register` call.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// Pauses between failed sessions.
pub(super) const RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));
/// A session that lasted this long was a good one: the next trouble starts with short pauses again.
const GOOD_AFTER: Duration = Duration::from_secs(60);

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Serve(#[from] server::Error),
    #[error("cannot reach the kubelet at {path}: {reason}; trying again, at once when that socket is re-created")]
    Unreachable { path: PathBuf, reason: String },
    #[error("the kubelet at {path} refused to register {resource}: {reason}; trying again")]
    Refused { path: PathBuf, resource: ResourceName, reason: String },
    #[error("the kubelet registered {resource} but did not ask for its devices within {}s; registering again", READ_WITHIN.as_secs())]
    NotRead { resource: ResourceName },
    #[error(
        "the kubelet stopped reading the devices of {resource}; registering again (if this repeats, another device plugin on this node serves the same name)"
    )]
    Closed { resource: ResourceName },
    #[error("the socket of {resource} was removed by someone; registering again")]
    SocketRemoved { resource: ResourceName },
}

/// How a session ends.
enum End {
    /// The agent stops.
    Stopped,
    /// The resource is not offered any more.
    Withdrawn,
    /// Another kubelet answers at `kubelet.sock`.
    Reborn,
    Failed(Error),
}

/// What ended a pause.
enum Woken {
    Late,
    /// Another kubelet answers at `kubelet.sock`.
    Reborn,
    Left,
}

/// One resource.
pub(super) struct Plugin {
    pub(super) service: Service,
    pub(super) directory: Directory,
    pub(super) changes: watch::Receiver<u64>,
    pub(super) states: Arc<watch::Sender<States>>,
    pub(super) retry: Backoff,
}

impl Plugin {
    /// Runs until the sender of the listing is dropped. Withdrawn, it waits for the next offer.
    pub(super) async fn run(self) {
        let mut backoff = self.retry.clone();
        while self.offered().await {
            let began = Instant::now();
            let end = self.session().await;
            if began.elapsed() >= GOOD_AFTER {
                backoff.reset();
            }
            match end {
                End::Stopped => break,
                End::Withdrawn | End::Reborn => backoff.reset(),
                End::Failed(_) => match self.pause(backoff.next()).await {
                    Woken::Late | Woken::Left => {}
                    // What went wrong with the one before says nothing about this one.
                    Woken::Reborn => backoff.reset(),
                },
            }
        }
        self.forget();
    }

    /// Waits for the resource to be offered; `false` when the agent stops.
    async fn offered(&self) -> bool {
        let mut listing = self.service.listing.clone();
        if *listing.borrow_and_update() == Listing::Withdrawn {
            self.forget();
        }
        listing.wait_for(|listing| *listing != Listing::Withdrawn).await.is_ok()
    }

    async fn session(&self) -> End {
        let end = self.try_session().await;
        match &end {
            End::Failed(error) => self.report(Some(error.to_string())),
            End::Reborn => self.report(Some("the kubelet was restarted; registering again".to_owned())),
            End::Stopped | End::Withdrawn => {}
        }
        end
    }

    async fn try_session(&self) -> End {
        let kubelet = match self.kubelet().await {
            Ok(kubelet) => kubelet,
            Err(end) => return end,
        };
        let socket = self.directory.socket(&self.endpoint());
        let server = match Server::start(socket, self.service.clone()) {
            Ok(server) => server,
            Err(error) => return End::Failed(error.into()),
        };
        let end = tokio::select! {
            biased;
            end = self.left() => end,
            end = self.disturbed(&server, kubelet) => end,
            error = self.registered(&server) => End::Failed(error),
        };
        server.stop().await;
        end
    }

    /// Waits for `kubelet.sock`.
    async fn kubelet(&self) -> Result<Identity, End> {
        let path = self.directory.kubelet_socket();
        let mut changes = self.changes.clone();
        loop {
            changes.borrow_and_update();
            if let Some(kubelet) = Identity::of(&path) {
                return Ok(kubelet);
            }
            self.report(Some(format!("waiting for the kubelet: {} does not exist", path.display())));
            tokio::select! {
                () = changed(&mut changes) => {}
                end = self.left() => return Err(end),
            }
        }
    }

    /// Registers and sees to it that the list is read. Returns when that is over.
    async fn registered(&self, server: &Server) -> Error {
        if let Err(error) = self.register().await {
            return error;
        }
        let resource = self.service.resource.clone();
        let mut readers = server.readers();
        match tokio::time::timeout(READ_WITHIN, readers.wait_for(|readers| *readers > 0)).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) | Err(_) => return Error::NotRead { resource },
        }
        let mut listing = self.service.listing.clone();
        loop {
            listing.borrow_and_update();
            self.report(None);
            tokio::select! {
                // An error means that the server is gone, and its readers with it.
                _ = readers.wait_for(|readers| *readers == 0) => return Error::Closed { resource },
                Ok(()) = listing.changed() => {}
            }
        }
    }

    async fn register(&self) -> Result<(), Error> {
        let path = self.directory.kubelet_socket();
        let unreachable = |reason: String| Error::Unreachable { path: path.clone(), reason };
        let calling = async {
            let target = path.clone();
            let connector = tower::service_fn(move |_: Uri| {
                let target = target.clone();
                async move { UnixStream::connect(target).await.map(TokioIo::new) }
            });
            // Only the connector decides where this goes; the kubelet wants a well-formed authority.
            let kubelet = Endpoint::from_static("http://localhost");
            let connecting = kubelet.connect_with_connector(connector);
            let channel = connecting.await.map_err(|error| unreachable(innermost(&error)))?;
            let request = proto::RegisterRequest {
                version: API_VERSION.to_owned(),
                endpoint: self.endpoint(),
                resource_name: self.service.resource.to_string(),
                options: Some(options()),
            };
            let answer = RegistrationClient::new(channel).register(request).await;
            answer.map(|_| ()).map_err(|status| Error::Refused {
                path: path.clone(),
                resource: self.service.resource.clone(),
                reason: status.message().to_owned(),
            })
        };
        let late = |_| unreachable(format!("no answer within {}s", REGISTER_WITHIN.as_secs()));
        tokio::time::timeout(REGISTER_WITHIN, calling).await.map_err(late)?
    }

    /// Waits for the resource to be withdrawn or the agent to stop.
    async fn left(&self) -> End {
        let mut listing = self.service.listing.clone();
        match listing.wait_for(|listing| *listing == Listing::Withdrawn).await {
            Ok(_) => End::Withdrawn,
            Err(_) => End::Stopped,
        }
    }

    /// Waits for a socket to change in a way that ends this session. While `kubelet.sock` is away there is nobody to
    /// register with, and a list that is still read is better than none.
    async fn disturbed(&self, server: &Server, kubelet: Identity) -> End {
        let mut changes = self.changes.clone();
        loop {
            changes.borrow_and_update();
            match Identity::of(&self.directory.kubelet_socket()) {
                Some(now) if now != kubelet => return End::Reborn,
                Some(_) if !server.is_reachable() => {
                    return End::Failed(Error::SocketRemoved { resource: self.service.resource.clone() });
                }
                Some(_) | None => changed(&mut changes).await,
            }
        }
    }

    /// Waits before the next attempt; not longer than until there is a new `kubelet.sock` or the offer ends.
    async fn pause(&self, time: Duration) -> Woken {
        let path = self.directory.kubelet_socket();
        let mut changes = self.changes.clone();
        changes.borrow_and_update();
        let before = Identity::of(&path);
        let reborn = async {
            while Identity::of(&path).is_none_or(|now| Some(now) == before) {
                changed(&mut changes).await;
            }
        };
        tokio::select! {
            () = tokio::time::sleep(time) => Woken::Late,
            () = reborn => Woken::Reborn,
            _ = self.left() => Woken::Left,
        }
    }

    fn endpoint(&self) -> String {
        socket_name(&self.service.resource)
    }

    /// Makes the state known: registered, or not and why. Says so in the log when it is news.
    fn report(&self, trouble: Option<String>) {
        let resource = &self.service.resource;
        let (devices, healthy) = match &*self.service.listing.borrow() {
            Listing::Offered(devices) => (devices.len(), healthy(devices)),
            Listing::Withdrawn => (0, 0),
        };
        let registered = trouble.is_none();
        let message = trouble.unwrap_or_else(|| "registered with the kubelet".to_owned());
        let state = PluginState { devices, healthy, registered, message };
        self.states.send_if_modified(|states| {
            let before = states.get(resource);
            if before == Some(&state) {
                return false;
            }
            let news = before.is_none_or(|before| before.message != state.message);
            match (registered, news) {
                (true, _) => tracing::info!(%resource, devices, healthy, "{}", state.message),
                (false, true) => tracing::warn!(%resource, "{}", state.message),
                (false, false) => {}
            }
            states.insert(resource.clone(), state);
            true
        });
    }

    fn forget(&self) {
        let resource = &self.service.resource;
        let known = self.states.send_if_modified(|states| states.remove(resource).is_some());
        if known {
            tracing::info!(%resource, "withdrawn from the kubelet");
        }
    }
}

/// Waits for word from the directory.
async fn changed(changes: &mut watch::Receiver<u64>) {
    if changes.changed().await.is_err() {
        // Nobody watches any more: the agent is stopping, which is seen elsewhere.
        std::future::pending::<()>().await;
    }
}

/// The outer errors of a transport say only that there was one.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
