//! `GPUVirtConfig` `default`: made where there is none, so that the report per operand and mode has a place.

use std::{collections::BTreeMap, sync::Mutex};

use crds::{
    conditions::Verdict,
    labels,
    v1alpha1::{CONFIG_NAME, GPUVirtConfig, GPUVirtConfigSpec},
};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::reflector::ObjectRef,
};
use serde_json::json;

use super::{
    Context, Error,
    status::{Judgement, config_status},
};
use crate::{
    cluster::gone,
    operator::{kubevirt::Wired, transition::windows::Windows},
};

/// The maintenance windows that could be read last: they count while those that are written cannot be.
#[derive(Debug, Default)]
pub struct LastWindows(Mutex<Option<Windows>>);

impl LastWindows {
    /// `decoded`: the object that they are from could be read at all.
    pub(super) fn settle(&self, windows: &mut Windows, decoded: bool) {
        let mut last = self.0.lock().expect("windows lock should not be poisoned");
        match windows {
            Windows::Always | Windows::During(_) if decoded => *last = Some(windows.clone()),
            Windows::Always | Windows::During(_) | Windows::Unknown => {
                *windows = last.clone().unwrap_or(Windows::Unknown);
            }
        }
    }
}

/// The report. An object that does not decode is a problem of its own and is left alone.
pub(super) async fn report(
    context: &Context,
    judgement: &Judgement,
    rollouts: &[Verdict],
    wired: &Wired,
) -> Result<(), Error> {
    // Its coming wakes the controller, and then it is written to.
    let Some(guarded) = context.world.configs.get(&ObjectRef::new(CONFIG_NAME)) else { return create(context).await };
    let Ok(config) = &guarded.0 else { return Ok(()) };
    let now = Time(Timestamp::now());
    let status = config_status(config.status.as_ref(), config.metadata.generation, judgement, rollouts, wired, &now);
    if config.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let api: Api<GPUVirtConfig> = Api::all(context.client.clone());
    let patch = json!({
        "apiVersion": GPUVirtConfig::api_version(&()),
        "kind": GPUVirtConfig::kind(&()),
        "metadata": {"name": CONFIG_NAME, "uid": config.uid()},
        "status": status,
    });
    let params = PatchParams::apply(labels::OPERATOR_MANAGER).force();
    match api.patch_status(CONFIG_NAME, &params, &Patch::Apply(&patch)).await {
        Ok(_) => Ok(()),
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(failed(source)),
    }
}

/// With every default, spelled out in no field: a later version's defaults are its own.
async fn create(context: &Context) -> Result<(), Error> {
    let made: BTreeMap<&str, &str> = [(labels::POLICY, CONFIG_NAME)].into();
    let mut object = json!({
        "apiVersion": GPUVirtConfig::api_version(&()),
        "kind": GPUVirtConfig::kind(&()),
        "metadata": {"name": CONFIG_NAME, "labels": made},
        "spec": {},
    });
    if let Some(release) = &context.release {
        // Without these helm would refuse to take it over once the chart's values have settings for it.
        object["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!("Helm");
        object["metadata"]["annotations"] = json!({
            "meta.helm.sh/release-name": release,
            "meta.helm.sh/release-namespace": context.installation.namespace,
        });
    }
    let object = serde_json::from_value(object).expect("this should be a GPUVirtConfig");
    let api: Api<GPUVirtConfig> = Api::all(context.client.clone());
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => {
            tracing::info!("GPUVirtConfig {CONFIG_NAME} created, with every default");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(source) => Err(failed(source)),
    }
}

/// At the end: an object that the operator has made and nobody has given a setting.
pub(super) async fn withdraw(context: &Context) -> Result<(), Error> {
    let Some(guarded) = context.world.configs.get(&ObjectRef::new(CONFIG_NAME)) else { return Ok(()) };
    let Ok(config) = &guarded.0 else { return Ok(()) };
    if !config.labels().contains_key(labels::POLICY) || config.spec != GPUVirtConfigSpec::default() {
        return Ok(());
    }
    let api: Api<GPUVirtConfig> = Api::all(context.client.clone());
    let same = Preconditions { uid: config.uid(), resource_version: config.resource_version() };
    match api.delete(CONFIG_NAME, &DeleteParams::default().preconditions(same)).await {
        Ok(_) => Ok(()),
        // Written meanwhile: the change wakes the controller again.
        Err(error) if gone(&error) => Ok(()),
        Err(source) => Err(failed(source)),
    }
}

fn failed(source: kube::Error) -> Error {
    Error::Status { kind: "GPUVirtConfig", name: CONFIG_NAME.to_owned(), source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_that_cannot_be_read_leave_those_before_them_in_force() {
        let last = LastWindows::default();
        let settled = |mut windows: Windows, decoded: bool| {
            last.settle(&mut windows, decoded);
            windows
        };
        assert_eq!(settled(Windows::Unknown, true), Windows::Unknown, "nothing was before: none opens");
        assert_eq!(settled(Windows::Always, false), Windows::Unknown, "an object that does not decode names none");
        let some = Windows::During(Vec::new());
        assert_eq!(settled(some.clone(), true), some);
        assert_eq!(settled(Windows::Unknown, true), some);
        assert_eq!(settled(Windows::Always, false), some);
        assert_eq!(settled(Windows::Always, true), Windows::Always, "they were taken away");
    }
}
