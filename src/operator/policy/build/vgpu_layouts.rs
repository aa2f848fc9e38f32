//! The vGPU layouts that nodes choose from while the policy names no ConfigMap: for a person to read, and to copy.

use k8s_openapi::api::core::v1::ConfigMap;

use super::{Installation, stack};
use crate::operator::{
    policy::validate::Settings,
    vgpu::{KEY, OURS, default_yaml},
};

/// Users know it by the operand that had it.
const COMPONENT: &str = "nvidia-vgpu-device-manager";

pub(super) fn config_map(settings: &Settings, installation: &Installation) -> ConfigMap {
    stack::config_map(OURS, COMPONENT, [(KEY.to_owned(), default_yaml())].into(), settings, installation)
}
