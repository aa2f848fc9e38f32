//! Reading and writing `GPUTransition` objects, by what was written last where the watch is behind.

use std::borrow::Cow;

use crds::v1alpha1::{GPUTransition, GPUTransitionStatus};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PostParams, Preconditions},
    core::error_boundary::InvalidObject,
    runtime::reflector::{ObjectRef, Store},
};
use serde_json::json;

use super::plan::Plan;
use crate::{
    cluster::{gone, merges},
    operator::{latest::Latest, world::Guarded},
};

#[derive(Debug, thiserror::Error)]
#[error("GPUTransition {name} cannot be written")]
pub struct Error {
    name: String,
    source: Box<kube::Error>,
}

pub struct Objects {
    api: Api<GPUTransition>,
    watched: Store<Guarded<GPUTransition>>,
    latest: Latest<GPUTransition>,
}

impl Objects {
    pub fn new(client: &Client, watched: Store<Guarded<GPUTransition>>) -> Self {
        Self { api: Api::all(client.clone()), watched, latest: Latest::default() }
    }

    pub fn for_each(&self, mut see: impl FnMut(&GPUTransition)) {
        self.watched.state().iter().filter_map(|guarded| guarded.0.as_ref().ok()).for_each(&mut see);
    }

    pub fn get(&self, name: &str) -> Result<Option<GPUTransition>, Box<InvalidObject>> {
        let guarded = self.watched.get(&ObjectRef::new(name));
        match guarded.as_deref().map(|guarded| &guarded.0) {
            None => Ok(self.latest.of(name, None).map(Cow::into_owned)),
            Some(Ok(object)) => Ok(self.latest.of(name, Some(object)).map(Cow::into_owned)),
            Some(Err(invalid)) => Err(Box::new(invalid.clone())),
        }
    }

    /// `None`: it is there already, and its own event brings the next look.
    pub async fn create(&self, object: &GPUTransition) -> Result<Option<GPUTransition>, Error> {
        let done = self.api.create(&PostParams::default(), object).await;
        self.written(&object.name_any(), done)
    }

    /// A new plan voids the approval of the old one in the same write. `None` as in [`Self::write`].
    pub async fn plan_anew(&self, object: &GPUTransition, plan: &Plan) -> Result<Option<GPUTransition>, Error> {
        let patch = json!({"metadata": same(object), "spec": {"planHash": plan.hash, "approved": null}});
        let name = object.name_any();
        let done = self.api.patch(&name, &merges(), &Patch::Merge(&patch)).await;
        self.written(&name, done)
    }

    /// `None`: somebody wrote it meanwhile, and its own event brings the next look.
    pub async fn write(
        &self,
        object: &GPUTransition,
        status: &GPUTransitionStatus,
    ) -> Result<Option<GPUTransition>, Error> {
        let mut status = json!(status);
        // In a merge only what is null goes away.
        if let Some(fields) = status.as_object_mut() {
            fields.entry("deadline").or_insert(serde_json::Value::Null);
        }
        let name = object.name_any();
        let patch = json!({"metadata": same(object), "status": status});
        let done = self.api.patch_status(&name, &merges(), &Patch::Merge(&patch)).await;
        self.written(&name, done)
    }

    pub async fn delete(&self, object: &GPUTransition) -> Result<(), Error> {
        let name = object.name_any();
        let same = Preconditions { uid: object.uid(), resource_version: None };
        match self.api.delete(&name, &DeleteParams::default().preconditions(same)).await {
            Ok(_) => self.latest.deleted(object),
            Err(error) if gone(&error) => self.latest.forget(&name),
            Err(source) => return Err(Error { name, source: Box::new(source) }),
        }
        Ok(())
    }

    fn written(&self, name: &str, done: kube::Result<GPUTransition>) -> Result<Option<GPUTransition>, Error> {
        match done {
            Ok(object) => {
                self.latest.written(object.clone());
                Ok(Some(object))
            }
            Err(error) if gone(&error) => {
                self.latest.forget(name);
                Ok(None)
            }
            Err(source) => Err(Error { name: name.to_owned(), source: Box::new(source) }),
        }
    }
}

fn same(object: &GPUTransition) -> serde_json::Value {
    json!({"uid": object.uid(), "resourceVersion": object.resource_version()})
}
