//! The two objects that `permittedHostDevices` can be written in, and how each of them spells it.

use std::fmt;

use kube::{
    ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};

/// Whose operator reads the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    KubeVirt,
    /// Where it exists it owns the KubeVirt object and puts back what others change there.
    HyperConverged,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::KubeVirt, Self::HyperConverged];

    pub fn crd(self) -> &'static str {
        match self {
            Self::KubeVirt => "kubevirts.kubevirt.io",
            Self::HyperConverged => "hyperconvergeds.hco.kubevirt.io",
        }
    }

    /// Most wanted first.
    pub fn dialects(self) -> &'static [Dialect] {
        match self {
            Self::KubeVirt => &[Dialect::KubeVirt],
            Self::HyperConverged => &[Dialect::HyperConvergedV1Beta1, Dialect::HyperConvergedV1],
        }
    }
}

/// A version of a kind: where the field is, and what its keys are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `kubevirt.io/v1`, KubeVirt 1.0 and later.
    KubeVirt,
    /// `hco.kubevirt.io/v1beta1`.
    HyperConvergedV1Beta1,
    /// `hco.kubevirt.io/v1`, which moved the field below `virtualization`.
    HyperConvergedV1,
}

impl Dialect {
    pub const ALL: [Self; 3] = [Self::KubeVirt, Self::HyperConvergedV1Beta1, Self::HyperConvergedV1];

    pub fn kind(self) -> Kind {
        match self {
            Self::KubeVirt => Kind::KubeVirt,
            Self::HyperConvergedV1Beta1 | Self::HyperConvergedV1 => Kind::HyperConverged,
        }
    }

    pub fn gvk(self) -> GroupVersionKind {
        match self {
            Self::KubeVirt => GroupVersionKind::gvk("kubevirt.io", "v1", "KubeVirt"),
            Self::HyperConvergedV1Beta1 => GroupVersionKind::gvk("hco.kubevirt.io", "v1beta1", "HyperConverged"),
            Self::HyperConvergedV1 => GroupVersionKind::gvk("hco.kubevirt.io", "v1", "HyperConverged"),
        }
    }

    pub fn resource(self) -> ApiResource {
        ApiResource::from_gvk(&self.gvk())
    }

    /// Keys that lead to `permittedHostDevices`.
    pub fn path(self) -> &'static [&'static str] {
        match self {
            Self::KubeVirt => &["spec", "configuration", "permittedHostDevices"],
            Self::HyperConvergedV1Beta1 => &["spec", "permittedHostDevices"],
            Self::HyperConvergedV1 => &["spec", "virtualization", "permittedHostDevices"],
        }
    }

    /// Key of the vendor and device id in an entry of `pciHostDevices`.
    pub fn selector_key(self) -> &'static str {
        match self.kind() {
            Kind::KubeVirt => "pciVendorSelector",
            Kind::HyperConverged => "pciDeviceSelector",
        }
    }
}

/// One object, for messages: `KubeVirt kubevirt/kubevirt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub dialect: Dialect,
    pub namespace: String,
    pub name: String,
}

impl Place {
    pub fn of(dialect: Dialect, object: &DynamicObject) -> Self {
        Self { dialect, namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
    }

    /// The list that entries go into, as in `spec.configuration.permittedHostDevices.pciHostDevices`.
    pub fn list(&self) -> String {
        format!("{}.pciHostDevices", self.dialect.path().join("."))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.dialect.gvk().kind, self.namespace, self.name)
    }
}
