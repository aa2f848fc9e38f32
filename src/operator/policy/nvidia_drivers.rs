//! `NVIDIADriver` objects: watched where their kind is served, and told what became of them.

use std::sync::{Arc, Mutex};

use crds::{
    conditions::{Verdict, merge},
    v1alpha1::{DriverState, NVIDIADriver, NVIDIADriverStatus},
};
use futures::future::BoxFuture;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::Patch,
    runtime::{reflector::Store, watcher},
};
use serde_json::json;
use tokio::{sync::Notify, task::AbortHandle};

use super::{
    Context, Error,
    status::{ERROR, Judgement, READY},
    validate::{Asked, NVIDIADrivers, Problem},
};
use crate::{
    cluster::{gone, merges},
    operator::{
        kubevirt::crd::{Crd, Served},
        world::{Guarded, filled, follow},
    },
};

const CRD: &str = "nvidiadrivers.nvidia.com";

pub struct Watched {
    client: Client,
    crd: Crd,
    due: Arc<Notify>,
    objects: Mutex<Option<(Store<Guarded<NVIDIADriver>>, AbortHandle)>>,
}

pub enum Listed {
    NotYet,
    /// The cluster does not have the type.
    Absent,
    All(NVIDIADrivers),
}

impl Listed {
    pub fn known(&self) -> Option<NVIDIADrivers> {
        match self {
            Self::NotYet => None,
            Self::Absent => Some(NVIDIADrivers::default()),
            Self::All(drivers) => Some(drivers.clone()),
        }
    }

    /// A policy that leaves drivers to objects of a type that is not there.
    pub fn problem(&self, used: bool) -> Option<Problem> {
        match self {
            Self::Absent if used => Some(Problem {
                reason: "NVIDIADriverNotServed",
                message: format!(
                    "spec.driver.useNvidiaDriverCRD: the cluster has no CRD {CRD}: apply the chart's crds folder, or set the field to false"
                ),
            }),
            Self::NotYet | Self::Absent | Self::All(_) => None,
        }
    }
}

impl Watched {
    /// And the work that knows whether the type is there.
    pub fn new(client: &Client, due: &Arc<Notify>) -> (Self, BoxFuture<'static, ()>) {
        let touched = due.clone();
        let (crd, work) = Crd::new(client, CRD, move || touched.notify_one());
        (Self { client: client.clone(), crd, due: due.clone(), objects: Mutex::default() }, work)
    }

    /// Whether it is known if the cluster has the type.
    pub fn known(&self) -> bool {
        self.crd.absent().is_some()
    }

    pub(super) async fn list(&self) -> Result<Listed, Error> {
        let watching = self.objects.lock().expect("drivers lock should not be poisoned").is_some();
        // Asked for once: from then on its watch tells.
        let served = match (watching, self.crd.absent()) {
            (true, Some(false)) => None,
            (_, _) => Some(self.crd.served().await?),
        };
        let mut objects = self.objects.lock().expect("drivers lock should not be poisoned");
        match served {
            Some(Served::NotYet) => return Ok(Listed::NotYet),
            Some(Served::Absent) => {
                if let Some((_, task)) = objects.take() {
                    task.abort();
                }
                return Ok(Listed::Absent);
            }
            Some(Served::Here(_)) | None => {}
        }
        let (store, _) = objects.get_or_insert_with(|| {
            let due = self.due.clone();
            let all = Api::<Guarded<NVIDIADriver>>::all(self.client.clone());
            let (store, work) = follow(all, watcher::Config::default(), move |_| due.notify_one());
            (store, tokio::spawn(work).abort_handle())
        });
        if !filled(store) {
            return Ok(Listed::NotYet);
        }
        let mut drivers = NVIDIADrivers::default();
        for guarded in store.state() {
            match &guarded.0 {
                Ok(driver) => drivers.all.push(driver.clone()),
                Err(invalid) => {
                    let name = invalid.metadata.name.clone().unwrap_or_default();
                    tracing::warn!(name, error = invalid.error, "NVIDIADriver does not decode: its driver stays");
                    drivers.undecodable.push(name);
                }
            }
        }
        drivers.all.sort_by_key(ResourceExt::name_any);
        drivers.undecodable.sort();
        Ok(Listed::All(drivers))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let objects = self.objects.get_mut().expect("drivers lock should not be poisoned");
        if let Some((_, task)) = objects.take() {
            task.abort();
        }
    }
}

/// `used`: the policy leaves drivers to these objects.
pub(super) async fn write_statuses(
    context: &Context,
    listed: &Listed,
    used: bool,
    asked: &[Asked],
    judgement: &Judgement,
) -> Result<(), Error> {
    let Listed::All(drivers) = listed else { return Ok(()) };
    for driver in drivers.all.iter().filter(|driver| driver.metadata.deletion_timestamp.is_none()) {
        let asked = asked.iter().find(|asked| asked.name == driver.name_any()).filter(|_| used);
        let (state, ready) = verdict(asked, judgement);
        let error = match ready.holds || state == DriverState::Disabled {
            true => Verdict::no(ERROR, ready.reason, ""),
            false => Verdict::yes(ERROR, ready.reason, ready.message.clone()),
        };
        let old = driver.status.clone().unwrap_or_default();
        let now = Time(Timestamp::now());
        let status = NVIDIADriverStatus {
            state: Some(state),
            namespace: Some(context.installation.namespace.clone()),
            conditions: merge(&old.conditions, &[ready, error], driver.metadata.generation, &now),
        };
        if driver.status.as_ref() == Some(&status) {
            continue;
        }
        let api: Api<Guarded<NVIDIADriver>> = Api::all(context.client.clone());
        let patch = json!({"metadata": {"uid": driver.uid()}, "status": status});
        let name = driver.name_any();
        match api.patch_status(&name, &merges(), &Patch::Merge(&patch)).await {
            Ok(_) => {}
            Err(error) if gone(&error) => {}
            Err(source) => return Err(Error::Status { kind: "NVIDIADriver", name, source: Box::new(source) }),
        }
    }
    Ok(())
}

fn verdict(asked: Option<&Asked>, judgement: &Judgement) -> (DriverState, Verdict) {
    let Some(asked) = asked else {
        let how = "the ClusterPolicy brings the driver itself: set its spec.driver.useNvidiaDriverCRD to true";
        return (DriverState::Disabled, Verdict::no(READY, "NotUsed", how));
    };
    if let Some(problem) = &asked.problem {
        return (DriverState::NotReady, Verdict::no(READY, problem.reason, problem.message.clone()));
    }
    let waiting = judgement.operands.iter().filter(|operand| asked.sets.contains(&operand.name));
    let waiting: Vec<&str> = waiting.filter(|o| !o.reason.is_empty()).map(|o| o.message.as_str()).collect();
    match (waiting.is_empty(), asked.sets.is_empty()) {
        (false, _) => (DriverState::NotReady, Verdict::no(READY, "DriverNotReady", waiting.join("; "))),
        (true, true) => (DriverState::Ready, Verdict::yes(READY, "NoGPUNodes", "no GPU node belongs to it")),
        (true, false) => (DriverState::Ready, Verdict::yes(READY, "Reconciled", "its nodes have the driver")),
    }
}
