//! The workload mode: who drives a GPU, and so which operands a node needs.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Values of the node label `nvidia.com/gpu.workload.config`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadMode {
    /// The NVIDIA kernel driver and the container stack; pods request `nvidia.com/gpu`.
    #[default]
    Container,
    /// `vfio-pci` has the whole GPU; a VM requests `nvidia.com/<MODEL>`.
    VmPassthrough,
    /// The NVIDIA vGPU host driver slices the GPU; a VM requests `nvidia.com/<vGPU type>`.
    VmVgpu,
}

impl WorkloadMode {
    pub const ALL: [Self; 3] = [Self::Container, Self::VmPassthrough, Self::VmVgpu];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::VmPassthrough => "vm-passthrough",
            Self::VmVgpu => "vm-vgpu",
        }
    }
}

/// Not derived: without a description of its own, each field that has this type keeps its own.
impl JsonSchema for WorkloadMode {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "WorkloadMode".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": Self::ALL })
    }
}

impl fmt::Display for WorkloadMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text is none of the three modes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownMode(pub String);

impl fmt::Display for UnknownMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown workload mode {:?}: use container, vm-passthrough or vm-vgpu", self.0)
    }
}

impl std::error::Error for UnknownMode {}

impl FromStr for WorkloadMode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text).ok_or_else(|| UnknownMode(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_read_and_written_as_the_label_value() {
        for mode in WorkloadMode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.as_str());
        }
    }

    #[test]
    fn an_unknown_mode_is_refused_with_the_text_and_the_choices() {
        let refused = "vm-passtrough".parse::<WorkloadMode>().unwrap_err();
        assert_eq!(
            refused.to_string(),
            "unknown workload mode \"vm-passtrough\": use container, vm-passthrough or vm-vgpu"
        );
    }
}
