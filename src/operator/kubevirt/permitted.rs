//! What an object permits now, parsed once. Pure.

use std::{collections::BTreeSet, fmt};

use crds::labels;
use kube::{ResourceExt, api::DynamicObject};
use serde_json::{Value, json};

use super::dialect::{Dialect, List, Place};

/// What an entry of a list selects by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    pub list: List,
    text: String,
}

impl Selector {
    /// Vendor and device id in upper case, as in `10DE:1EB8`: KubeVirt compares them without regard to case.
    pub fn pci(text: &str) -> Self {
        Self { list: List::Pci, text: text.trim().to_ascii_uppercase() }
    }

    /// Name of a type, as in `NVIDIA A10-4Q`: to KubeVirt a space and `_` are the same.
    pub fn mediated(text: &str) -> Self {
        Self { list: List::Mediated, text: text.trim().replace('_', " ") }
    }

    fn of(list: List, text: &str) -> Self {
        match list {
            List::Pci => Self::pci(text),
            List::Mediated => Self::mediated(text),
        }
    }

    /// As our annotation has it: names of types have no colon.
    fn marked(text: &str) -> Self {
        if text.contains(':') { Self::pci(text) } else { Self::mediated(text) }
    }

    /// The part of a type's name that is the same everywhere: `A10-4Q` of `NVIDIA A10-4Q`.
    pub fn kind(&self) -> &str {
        self.text.rsplit(' ').next().unwrap_or(&self.text)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What is selected, and the resource that it is offered under.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    pub selector: Selector,
    pub resource: String,
}

impl Device {
    pub fn new(selector: Selector, resource: &str) -> Self {
        Self { selector, resource: resource.to_owned() }
    }

    /// The entry that permits it, and leaves it to our device plugin.
    pub fn entry(&self, dialect: Dialect) -> Value {
        json!({
            dialect.selector_key(self.selector.list): self.selector.text,
            "resourceName": self.resource,
            "externalResourceProvider": true,
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.selector, self.resource)
    }
}

/// One entry of a list that entries of ours go into.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub device: Device,
    /// Whether KubeVirt leaves the resource to another device plugin.
    pub external: bool,
    /// `HyperConverged` only: the entry is kept and does not count.
    pub disabled: bool,
    /// As it was read: what we do not know is written back.
    pub raw: Value,
}

impl Entry {
    pub fn counts(&self) -> bool {
        self.external && !self.disabled
    }
}

/// An entry of another list (`usb` …): only its resource matters here.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    pub list: String,
    pub resource: String,
    pub external: bool,
    pub raw: Value,
}

/// A setting that stands where nobody reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misplaced {
    pub at: String,
    pub belongs: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Permitted {
    pub place: Place,
    /// The whole field is missing: KubeVirt checks nothing, and every device passes.
    pub unset: bool,
    pub entries: Vec<Entry>,
    pub others: Vec<Other>,
    /// Entries that we have made.
    pub marks: BTreeSet<Device>,
    /// The field was unset before our first entry.
    pub was_unset: bool,
    pub misplaced: Vec<Misplaced>,
}

#[derive(Debug, thiserror::Error)]
#[error("{place}: {at} is not what this version understands: write it as KubeVirt's API documents it")]
pub struct Unreadable {
    pub place: Place,
    pub at: String,
}

impl Permitted {
    pub fn read(dialect: Dialect, object: &DynamicObject) -> Result<Self, Unreadable> {
        let place = Place::of(dialect, object);
        let unreadable = |at: String| Unreadable { place: place.clone(), at };
        let field = at(&object.data, dialect.path()).filter(|value| !value.is_null());
        let mut entries = Vec::new();
        let mut others = Vec::new();
        for (key, listed) in field.and_then(Value::as_object).into_iter().flatten() {
            let list = List::ALL.into_iter().find(|list| list.key() == key);
            // What cannot be read would be lost by writing the list.
            if let Some(list) = list.filter(|_| !listed.is_null() && !listed.is_array()) {
                return Err(unreadable(place.list(list)));
            }
            for (index, raw) in listed.as_array().into_iter().flatten().enumerate() {
                let text = |key: &str| raw.get(key).and_then(Value::as_str);
                let flag = |key: &str| raw.get(key).and_then(Value::as_bool).unwrap_or(false);
                let external = flag("externalResourceProvider");
                let resource = text("resourceName");
                let Some(list) = list else {
                    let Some(resource) = resource.map(str::to_owned) else { continue };
                    others.push(Other { list: key.clone(), resource, external, raw: raw.clone() });
                    continue;
                };
                let selector = dialect.selector_key(list);
                let missing = |key: &str| unreadable(format!("{}[{index}].{key}", place.list(list)));
                let resource = resource.ok_or_else(|| missing("resourceName"))?;
                let selector = Selector::of(list, text(selector).ok_or_else(|| missing(selector))?);
                let device = Device::new(selector, resource);
                entries.push(Entry { device, external, disabled: flag("disabled"), raw: raw.clone() });
            }
        }
        let annotations = object.annotations();
        let marks = annotations.get(labels::PERMITTED_HOST_DEVICES).map(|text| marks(text)).unwrap_or_default();
        Ok(Self {
            unset: field.is_none(),
            was_unset: annotations.get(labels::PERMITTED_WAS_UNSET).is_some_and(|value| value == "true"),
            misplaced: misplaced(dialect, object),
            place,
            entries,
            others,
            marks,
        })
    }
}

fn marks(text: &str) -> BTreeSet<Device> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(selector, resource)| Device::new(Selector::marked(selector), resource.trim())).collect()
}

fn at<'a>(value: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(value, |value, key| value.get(key))
}

/// Keys of `mediatedDevicesConfiguration` that people put beside the lists.
const MEDIATED: [&str; 4] =
    ["mediatedDevicesConfiguration", "mediatedDeviceTypes", "mediatedDevicesTypes", "nodeMediatedDeviceTypes"];

/// In the object, and in what `kubectl apply` was given: the API server drops fields that the schema does not have.
fn misplaced(dialect: Dialect, object: &DynamicObject) -> Vec<Misplaced> {
    let applied = object.annotations().get("kubectl.kubernetes.io/last-applied-configuration");
    let applied: Option<Value> = applied.and_then(|text| serde_json::from_str(text).ok());
    // Another version of the object has the field elsewhere.
    let own = dialect.gvk().api_version();
    let applied = applied.filter(|applied| applied.get("apiVersion").and_then(Value::as_str) == Some(own.as_str()));
    let mut found = Vec::new();
    for (wrong, belongs) in wrong_places(dialect) {
        let here = at(&object.data, &wrong).is_some();
        let was_applied = || applied.as_ref().is_some_and(|applied| at(applied, &wrong).is_some());
        let settled = || at(&object.data, &belongs).is_some();
        if here || (was_applied() && !settled()) {
            found.push(Misplaced { at: wrong.join("."), belongs: belongs.join(".") });
        }
    }
    found
}

type Path = Vec<&'static str>;

fn wrong_places(dialect: Dialect) -> Vec<(Path, Path)> {
    let own = dialect.path();
    let above = &own[..own.len() - 1];
    let below = |path: &[&'static str], key: &'static str| [path, &[key]].concat();
    let foreign = Dialect::ALL.into_iter().map(Dialect::path).filter(|path| *path != own);
    let mut places: Vec<(Path, Path)> = foreign.map(|path| (path.to_vec(), own.to_vec())).collect();
    for list in ["pciHostDevices", "mediatedDevices"] {
        places.push((below(above, list), below(own, list)));
    }
    for key in MEDIATED {
        places.push((below(own, key), below(above, "mediatedDevicesConfiguration")));
    }
    places
}
