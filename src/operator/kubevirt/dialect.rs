//! The two objects that `permittedHostDevices` can be written in, and how each of them spells it.

use std::fmt;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
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

    /// Newest first: `HyperConverged` warns whoever asks for the older one since 1.19.
    pub fn dialects(self) -> &'static [Dialect] {
        match self {
            Self::KubeVirt => &[Dialect::KubeVirt],
            Self::HyperConverged => &[Dialect::HyperConvergedV1, Dialect::HyperConvergedV1Beta1],
        }
    }

    /// Of the versions that are served the stored one: nothing is converted on its way, so it works while the webhook
    /// that converts is away, and no field is lost that the other version does not have. Else the newest.
    pub fn dialect(self, crd: &CustomResourceDefinition) -> Option<Dialect> {
        let version = |dialect: &Dialect| {
            let version = dialect.gvk().version;
            crd.spec.versions.iter().find(move |served| served.served && served.name == version)
        };
        let served = || self.dialects().iter().filter(|dialect| version(dialect).is_some());
        let stored = served().find(|dialect| version(dialect).is_some_and(|version| version.storage));
        stored.or_else(|| served().next()).copied()
    }
}

/// A version of a kind: where the field is, and what its keys are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `kubevirt.io/v1`, KubeVirt 1.0 and later.
    KubeVirt,
    /// `hco.kubevirt.io/v1beta1`: the only one up to HyperConverged 1.17, and the stored one in 1.18.
    HyperConvergedV1Beta1,
    /// `hco.kubevirt.io/v1`, which moved the field below `virtualization`: served since 1.18, stored since 1.19.
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

    /// Key of what an entry of a list selects by.
    pub fn selector_key(self, list: List) -> &'static str {
        match (list, self.kind()) {
            (List::Pci, Kind::KubeVirt) => "pciVendorSelector",
            (List::Pci, Kind::HyperConverged) => "pciDeviceSelector",
            (List::Mediated, _) => "mdevNameSelector",
        }
    }
}

/// A list of `permittedHostDevices` that entries of ours go into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum List {
    /// By vendor and device id.
    Pci,
    /// By the name of a mediated device's type.
    Mediated,
}

impl List {
    pub const ALL: [Self; 2] = [Self::Pci, Self::Mediated];

    pub fn key(self) -> &'static str {
        match self {
            Self::Pci => "pciHostDevices",
            Self::Mediated => "mediatedDevices",
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

    /// Where a list is, as in `spec.configuration.permittedHostDevices.pciHostDevices`.
    pub fn list(&self, list: List) -> String {
        format!("{}.{}", self.dialect.path().join("."), list.key())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.dialect.gvk().kind, self.namespace, self.name)
    }
}
