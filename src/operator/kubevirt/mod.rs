//! GPUs that nodes offer to VMs are kept in `permittedHostDevices` of HyperConverged, or else of KubeVirt.
//!
//! ```text
//! CRDs ──▶ find ──▶ KubeVirt | HyperConverged ──▶ permitted ─┐
//! GPUNodes ───────────────────────────────────▶ offers ──────┼─▶ decide ─▶ patch, condition, event
//! VMs (before the first entry) ───────────────▶ users ───────┘
//! ```
//!
//! The list is atomic: it is read, changed and written with a resource version. What others wrote stays as it is.
//!
//! Feature gates are left alone: `gpus` of a VM need none since KubeVirt 1.6 (its `featuregate/inactive.go` has `GPU` as GA);
//! `hostDevices` need the alpha gate `HostDevices`, and virt-api names it to whoever makes such a VM without it.
//! Where nodes make mediated devices, KubeVirt is told to make none: it would remove what it does not know ([`mediated`]).

pub mod crd;
mod decide;
mod dialect;
mod find;
mod mediated;
mod offers;
mod permitted;
#[cfg(test)]
mod tests;
mod users;
mod version;

use std::sync::{Arc, Mutex};

use crds::{
    conditions::Verdict,
    labels,
    v1alpha1::{GPUNode, KubeVirtMode},
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, Patch},
};
use serde_json::{Value, json};
use tokio::sync::Notify;

use self::{
    decide::{Change, Decision},
    dialect::Place,
    find::{Cr, Finder, Look},
    mediated::Mediated,
};
pub use self::{
    dialect::Dialect,
    find::permitted_now,
    offers::devices,
    permitted::{Device, Entry, Permitted},
};
use crate::cluster::{
    events::{Events, Notice},
    merges,
};

/// Condition: VMs may have what the nodes offer.
pub const WIRED: &str = "KubeVirtWired";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "CRD {crd} serves no version that this program knows: permit the devices by hand, with GPUVirtConfig spec.kubevirt.mode Off"
    )]
    NotServed { crd: &'static str },
    #[error(
        "virtual machines cannot be listed, so it is not known which devices the first entry would make KubeVirt refuse"
    )]
    Users(#[source] Box<kube::Error>),
    #[error("{0} cannot be read")]
    Read(String, #[source] Box<kube::Error>),
    #[error("{0} cannot be written")]
    Write(String, #[source] Box<kube::Error>),
    #[error("{0} is being changed by others all the time")]
    Contended(String),
    #[error(transparent)]
    Unreadable(#[from] permitted::Unreadable),
}

/// What there is to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wired {
    /// KubeVirt's objects have not been listed yet: what was said before stays.
    NotYet,
    /// There is no KubeVirt, or it is none of our business.
    Nothing,
    Is(Verdict),
}

impl Wired {
    pub fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::Is(verdict) => Some(verdict),
            Self::NotYet | Self::Nothing => None,
        }
    }

    /// Condition types that nothing is said about any more.
    pub fn silenced(&self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[WIRED],
            Self::NotYet | Self::Is(_) => &[],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    NotYet,
    Done,
}

/// What the operator would change in an object for what these nodes offer, as a merge patch, and what it would say. Machines
/// that use other devices, which can keep it from a first entry, are not looked for.
pub fn wish(permitted: &Permitted, gpu_nodes: &[GPUNode]) -> (Verdict, Option<Value>) {
    let Decision { change, verdict } =
        decide::serve(permitted, &offers::offers(gpu_nodes, true), &[], KubeVirtMode::Manage);
    (verdict, change.map(|change| change.patch))
}

/// Writes that meet somebody else's, one after the other.
const ATTEMPTS: usize = 5;

pub struct Wiring {
    client: Client,
    events: Events,
    due: Arc<Notify>,
    finder: Finder,
    /// While machines stand in the way of the first entry.
    users: Mutex<Option<users::Watch>>,
    /// The last complaint, so that it becomes one event.
    told: Mutex<Option<Verdict>>,
}

impl Wiring {
    /// `due` is told of everything that may change what is written. And the work that keeps it.
    pub fn new(client: &Client, events: Events, due: &Arc<Notify>) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let (finder, work) = Finder::new(client, due);
        let wiring = Self {
            client: client.clone(),
            events,
            due: due.clone(),
            finder,
            users: Mutex::default(),
            told: Mutex::default(),
        };
        (wiring, work)
    }

    /// Permits what the nodes offer. `all_read`: no GPUNode is missing from `gpu_nodes` because it does not decode.
    pub async fn serve(&self, gpu_nodes: &[GPUNode], all_read: bool, mode: KubeVirtMode) -> Result<Wired, Error> {
        match mode {
            KubeVirtMode::Off => {
                self.finder.rest();
                self.watch_users(false);
                return Ok(Wired::Nothing);
            }
            KubeVirtMode::Manage | KubeVirtMode::Report => {}
        }
        let version;
        let cr = match self.finder.look().await? {
            Look::NotYet => return Ok(Wired::NotYet),
            Look::Seen { counts: None, .. } => return Ok(Wired::Nothing),
            Look::Seen { counts: Some(cr), all } => {
                version = version::of(&all);
                cr
            }
        };
        let offers = offers::offers(gpu_nodes, all_read);
        let decided = self
            .write(&cr, async |object| {
                let permitted = Permitted::read(cr.dialect, object)?;
                let users = match decide::asks_for_users(&permitted, &offers) {
                    true => users::list(&self.client).await.map_err(|source| Error::Users(Box::new(source)))?,
                    false => Vec::new(),
                };
                let decision = decide::serve(&permitted, &offers, &users, mode);
                let decision = Mediated::read(cr.dialect, cr.switch.as_ref(), object).serve(decision, &offers, mode);
                Ok(match version::objection(version.as_deref(), &offers) {
                    Some(problem) => mediated::objecting(decision, &problem),
                    None => decision,
                })
            })
            .await?;
        let Some(verdict) = decided else { return Ok(Wired::NotYet) };
        self.watch_users(verdict.reason == decide::WOULD_BREAK);
        self.tell(&verdict, &cr).await;
        Ok(Wired::Is(verdict))
    }

    /// Takes our entries out of every object that has some.
    pub async fn withdraw(&self, mode: KubeVirtMode) -> Result<Withdrawn, Error> {
        match mode {
            KubeVirtMode::Off => return Ok(Withdrawn::Done),
            KubeVirtMode::Manage | KubeVirtMode::Report => {}
        }
        let all = match self.finder.look().await? {
            Look::NotYet => return Ok(Withdrawn::NotYet),
            Look::Seen { all, .. } => all,
        };
        self.watch_users(false);
        let marks = [labels::PERMITTED_HOST_DEVICES, labels::MEDIATED_DEVICES_OFF];
        let ours = |cr: &&Cr| marks.iter().any(|mark| cr.object.annotations().contains_key(*mark));
        for cr in all.iter().filter(ours) {
            self.write(cr, async |object| {
                let decision = decide::withdraw(&Permitted::read(cr.dialect, object)?);
                Ok(Mediated::read(cr.dialect, cr.switch.as_ref(), object).withdraw(decision))
            })
            .await?;
        }
        Ok(Withdrawn::Done)
    }

    /// Decides on what is known, and again on what is there whenever somebody else was faster. `None`: it has gone.
    async fn write(
        &self,
        cr: &Cr,
        decide: impl AsyncFn(&DynamicObject) -> Result<Decision, Error>,
    ) -> Result<Option<Verdict>, Error> {
        let place = Place::of(cr.dialect, &cr.object);
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &place.namespace, &cr.dialect.resource());
        let mut object = DynamicObject::clone(&cr.object);
        let mut tried = false;
        for _ in 0..ATTEMPTS {
            let Decision { change, verdict } = decide(&object).await?;
            let Some(change) = change else { return Ok(Some(verdict)) };
            let patch = Patch::Merge(conditional(&change, &object));
            // An entry that lost a field on its way would be worse than none: what would come of it is asked first.
            if !tried && let Ok(live) = api.patch(&place.name, &merges().dry_run(), &patch).await {
                if decide(&live).await?.change.is_some() {
                    return Ok(Some(dropped(&place)));
                }
                tried = true;
            }
            match api.patch(&place.name, &merges(), &patch).await {
                Ok(live) => {
                    tracing::info!(%place, permitted = names(&change.permitted), withdrawn = names(&change.withdrawn), "written");
                    self.publish(&change, &place, &live).await;
                    let again = decide(&live).await?;
                    return Ok(Some(match again.change {
                        None => again.verdict,
                        Some(_) => dropped(&place),
                    }));
                }
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
                Err(source) => return Err(Error::Write(place.to_string(), Box::new(source))),
            }
            match api.get_opt(&place.name).await {
                Ok(Some(live)) => object = live,
                Ok(None) => return Ok(None),
                Err(source) => return Err(Error::Read(place.to_string(), Box::new(source))),
            }
        }
        Err(Error::Contended(place.to_string()))
    }

    fn watch_users(&self, wanted: bool) {
        let mut users = self.users.lock().expect("users lock should not be poisoned");
        match wanted {
            true if users.is_none() => *users = Some(users::Watch::start(&self.client, &self.due)),
            true => {}
            false => *users = None,
        }
    }

    async fn publish(&self, change: &Change, place: &Place, live: &DynamicObject) {
        let about = reference(place, live);
        if !change.permitted.is_empty() {
            let note = format!("{} now has {}", place.dialect.path().join("."), names(&change.permitted));
            self.events.publish(&Notice::normal("HostDevicesPermitted", "PermitHostDevices", note), &about).await;
        }
        if !change.withdrawn.is_empty() {
            let note = format!("{} no longer has {}", place.dialect.path().join("."), names(&change.withdrawn));
            self.events.publish(&Notice::normal("HostDevicesWithdrawn", "PermitHostDevices", note), &about).await;
        }
    }

    /// Once a complaint.
    async fn tell(&self, verdict: &Verdict, cr: &Cr) {
        let news = {
            let mut told = self.told.lock().expect("told lock should not be poisoned");
            let news = !verdict.holds && told.as_ref() != Some(verdict);
            *told = Some(verdict.clone());
            news
        };
        if news {
            let about = reference(&Place::of(cr.dialect, &cr.object), &cr.object);
            let notice = Notice::warning(verdict.reason, "PermitHostDevices", verdict.message.clone());
            self.events.publish(&notice, &about).await;
        }
    }
}

/// The patch, good only for the object that was looked at.
fn conditional(change: &Change, object: &DynamicObject) -> Value {
    let mut patch = change.patch.clone();
    patch["metadata"]["uid"] = json!(object.uid());
    patch["metadata"]["resourceVersion"] = json!(object.resource_version());
    patch
}

fn names(devices: &[Device]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn dropped(place: &Place) -> Verdict {
    Verdict::no(
        WIRED,
        "FieldsDropped",
        format!(
            "{place} does not keep {} as it is written (pciHostDevices, mediatedDevices): its CRD is too old, or something else resets it; see who writes it with kubectl get --show-managed-fields",
            place.dialect.path().join(".")
        ),
    )
}

fn reference(place: &Place, object: &DynamicObject) -> ObjectReference {
    let gvk = place.dialect.gvk();
    ObjectReference {
        api_version: Some(gvk.api_version()),
        kind: Some(gvk.kind),
        namespace: Some(place.namespace.clone()),
        name: Some(place.name.clone()),
        uid: object.uid(),
        ..ObjectReference::default()
    }
}
