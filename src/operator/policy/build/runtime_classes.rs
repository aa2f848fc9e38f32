//! The names by which pods ask for NVIDIA's runtime.

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::core::ObjectMeta;

use super::pod::own_labels;
use crate::operator::policy::validate::{Cdi, Settings};

pub(super) fn runtime_classes(settings: &Settings) -> Vec<RuntimeClass> {
    let nvidia = settings.stack.runtime_class.as_str();
    let names: &[&str] = match settings.stack.cdi {
        Cdi::Off => &[nvidia],
        Cdi::On => &[nvidia, "nvidia-cdi", "nvidia-legacy"],
        Cdi::OnByNri => &[],
    };
    names.iter().map(|name| runtime_class(name, settings)).collect()
}

fn runtime_class(name: &str, settings: &Settings) -> RuntimeClass {
    RuntimeClass {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(own_labels("nvidia-runtime-class", "runtime-class", settings)),
            ..ObjectMeta::default()
        },
        handler: name.to_owned(),
        ..RuntimeClass::default()
    }
}
