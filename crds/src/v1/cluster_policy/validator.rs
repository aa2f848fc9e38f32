//! The validator, and what each of its checks gets as environment.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Container, EnvVar};

/// It has no switch: the chain of checks is part of every node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Validator {
    #[serde(flatten)]
    pub container: Container,
    pub driver: ValidatorCheck,
    pub toolkit: ValidatorCheck,
    pub cuda: ValidatorCheck,
    pub plugin: ValidatorCheck,
    #[serde(rename = "vfioPCI")]
    pub vfio_pci: ValidatorCheck,
    pub vgpu_manager: ValidatorCheck,
    pub vgpu_devices: ValidatorCheck,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ValidatorCheck {
    pub env: Vec<EnvVar>,
}
