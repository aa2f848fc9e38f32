//! What pods of all operands have in common.

use std::collections::BTreeMap;

use crds::labels;
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec, DaemonSetUpdateStrategy, RollingUpdateDaemonSet},
        core::v1::{
            ConfigMapVolumeSource, EnvVar, EnvVarSource, HostPathVolumeSource, KeyToPath, LocalObjectReference,
            ObjectFieldSelector, PodSpec, PodTemplateSpec, SELinuxOptions, SecurityContext, Volume, VolumeMount,
        },
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
};

use super::Installation;
use crate::operator::policy::validate::{Image, Rollout, Settings};

/// A DaemonSet's own part; the rest is the same for all.
pub(super) struct Operand<'a> {
    pub name: &'a str,
    /// `app.kubernetes.io/component`.
    pub component: &'a str,
    pub node_selector: BTreeMap<String, String>,
    pub rollout: Rollout,
    pub labels: &'a [(&'a str, &'a str)],
    pub annotations: BTreeMap<String, String>,
    pub pod: PodSpec,
}

/// The user's labels and annotations go on pods, under ours: `app` and `app.kubernetes.io/part-of` cannot be replaced.
pub(super) fn daemon_set(operand: Operand<'_>, settings: &Settings, installation: &Installation) -> DaemonSet {
    let mut own = own_labels(operand.name, operand.component, settings);
    own.extend(owned(operand.labels));
    let selector: BTreeMap<String, String> = [(labels::APP.to_owned(), operand.name.to_owned())].into();
    let mut pod_labels = settings.common.labels.clone();
    pod_labels.extend(own.clone());
    let mut annotations = operand.annotations;
    annotations.extend(settings.common.annotations.clone());
    let common = &settings.common;
    let pod = PodSpec {
        node_selector: Some(operand.node_selector).filter(|selector| !selector.is_empty()),
        tolerations: Some(common.tolerations.clone()),
        priority_class_name: Some(common.priority_class.clone()),
        security_context: operand.pod.security_context.or_else(|| common.pod_security_context.clone()),
        ..operand.pod
    };
    DaemonSet {
        metadata: ObjectMeta {
            name: Some(operand.name.to_owned()),
            namespace: Some(installation.namespace.clone()),
            labels: Some(own),
            ..ObjectMeta::default()
        },
        spec: Some(DaemonSetSpec {
            selector: LabelSelector { match_labels: Some(selector), ..LabelSelector::default() },
            update_strategy: Some(strategy(&operand.rollout)),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(pod_labels),
                    annotations: Some(annotations).filter(|a| !a.is_empty()),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod),
            },
            ..DaemonSetSpec::default()
        }),
        status: None,
    }
}

/// Two of the peer's operands are selected by what they are part of, too.
pub(super) fn part_of(set: &mut DaemonSet, what: &str) {
    let put = |labels: &mut Option<BTreeMap<String, String>>| {
        labels.get_or_insert_default().insert(labels::APP_PART_OF.to_owned(), what.to_owned());
    };
    put(&mut set.metadata.labels);
    if let Some(spec) = set.spec.as_mut() {
        put(&mut spec.selector.match_labels);
        put(&mut spec.template.metadata.get_or_insert_default().labels);
    }
}

/// One of the peer's operands is selected by the label `name`.
pub(super) fn by_name(set: &mut DaemonSet) {
    let name: BTreeMap<_, _> = [("name".to_owned(), set.metadata.name.clone().unwrap_or_default())].into();
    if let Some(spec) = set.spec.as_mut() {
        spec.selector.match_labels = Some(name.clone());
        spec.template.metadata.get_or_insert_default().labels.get_or_insert_default().extend(name);
    }
}

fn owned(pairs: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
}

/// Labels that say whose an object is.
pub(super) fn own_labels(app: &str, component: &str, settings: &Settings) -> BTreeMap<String, String> {
    [
        (labels::APP, app),
        (labels::APP_COMPONENT, component),
        (labels::APP_MANAGED_BY, "gpuvirt"),
        (labels::APP_PART_OF, "gpuvirt"),
        (labels::POLICY, &settings.policy),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect()
}

fn strategy(rollout: &Rollout) -> DaemonSetUpdateStrategy {
    match rollout {
        Rollout::OnDelete => DaemonSetUpdateStrategy { type_: Some("OnDelete".to_owned()), rolling_update: None },
        Rollout::Rolling { max_unavailable } => DaemonSetUpdateStrategy {
            type_: Some("RollingUpdate".to_owned()),
            rolling_update: Some(RollingUpdateDaemonSet {
                max_unavailable: Some(max_unavailable.clone()),
                max_surge: None,
            }),
        },
    }
}

pub(super) fn env(name: &str, value: impl Into<String>) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.into()), value_from: None }
}

pub(super) fn env_from_field(name: &str, path: &str) -> EnvVar {
    let field = ObjectFieldSelector { field_path: path.to_owned(), ..ObjectFieldSelector::default() };
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
    }
}

/// What the user gives wins over what the operand sets, in its place.
pub(super) fn override_env(own: &mut Vec<EnvVar>, given: &[EnvVar]) {
    for entry in given {
        match own.iter_mut().find(|known| known.name == entry.name) {
            Some(known) => known.clone_from(entry),
            None => own.push(entry.clone()),
        }
    }
}

/// Of all images of a pod, each secret once.
pub(super) fn pull_secrets<'a>(images: impl IntoIterator<Item = &'a Image>) -> Option<Vec<LocalObjectReference>> {
    let mut secrets: Vec<LocalObjectReference> = Vec::new();
    for name in images.into_iter().flat_map(|image| &image.pull_secrets) {
        if secrets.iter().all(|known| known.name != *name) {
            secrets.push(LocalObjectReference { name: name.clone() });
        }
    }
    Some(secrets).filter(|secrets| !secrets.is_empty())
}

/// `kind` as in `Directory`, `DirectoryOrCreate`; `None` takes what is there.
pub(super) fn host_path(name: &str, path: &str, kind: Option<&str>) -> Volume {
    Volume {
        name: name.to_owned(),
        host_path: Some(HostPathVolumeSource { path: path.to_owned(), type_: kind.map(str::to_owned) }),
        ..Volume::default()
    }
}

pub(super) fn mount(volume: &str, path: &str, propagation: Option<&str>) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        mount_propagation: propagation.map(str::to_owned),
        ..VolumeMount::default()
    }
}

pub(super) fn read_only(mount: VolumeMount) -> VolumeMount {
    VolumeMount { read_only: Some(true), ..mount }
}

/// One file of a volume.
pub(super) fn sub_path(mount: VolumeMount, file: &str) -> VolumeMount {
    VolumeMount { sub_path: Some(file.to_owned()), ..mount }
}

/// `items`: key and file, all keys when empty.
pub(super) fn config_map(volume: &str, name: &str, mode: Option<i32>, items: &[(&str, &str)]) -> Volume {
    let items =
        items.iter().map(|(key, path)| KeyToPath { key: (*key).to_owned(), path: (*path).to_owned(), mode: None });
    Volume {
        name: volume.to_owned(),
        config_map: Some(ConfigMapVolumeSource {
            name: name.to_owned(),
            default_mode: mode,
            items: Some(items.collect::<Vec<_>>()).filter(|items| !items.is_empty()),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    }
}

pub(super) fn privileged_s0() -> SecurityContext {
    SecurityContext {
        se_linux_options: Some(SELinuxOptions { level: Some("s0".to_owned()), ..SELinuxOptions::default() }),
        ..privileged()
    }
}

pub(super) fn privileged() -> SecurityContext {
    SecurityContext { privileged: Some(true), ..SecurityContext::default() }
}
