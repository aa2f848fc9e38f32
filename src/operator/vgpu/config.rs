//! Files of NVIDIA's vgpu-device-manager, version v1: named layouts. Pure.
//!
//! Strict: what is not understood is refused with its line and column, never ignored.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};
use serde_saphyr::Spanned;

use super::{
    filter::{Filter, NotAFilter},
    kind::{Backing, NotAType, VgpuType},
};

/// Layouts by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config(BTreeMap<String, Vec<Entry>>);

impl Config {
    pub fn layout(&self, name: &str) -> Option<&[Entry]> {
        self.0.get(name).map(Vec::as_slice)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// What some GPUs are to be cut into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins.
    pub line: u64,
    /// Any of these; without one, every GPU.
    pub filters: Vec<Filter>,
    pub devices: Devices,
    /// How many of each on one GPU, by name, none of them zero. Empty: no vGPU at all.
    pub instances: Vec<(VgpuType, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    All,
    /// Places in the order of addresses, among all GPUs of the node.
    At(Vec<usize>),
}

/// Where a file is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {wrong}")]
pub struct Fault {
    pub line: u64,
    pub column: u64,
    pub wrong: Wrong,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// No YAML, or not of this shape; the reader's words.
    #[error("{0}")]
    Shape(String),
    #[error("version {0} is not known: write version: v1")]
    Version(String),
    #[error("vgpu-configs is empty: name at least one layout, or leave the field out")]
    NoConfigs,
    #[error("layout {0} has no entry: write one, with vgpu-devices: {{}} for GPUs without vGPUs")]
    NoEntries(String),
    #[error("device-filter {0:?} {1}")]
    Filter(String, NotAFilter),
    #[error("devices is {0:?}: write all, or a list of places such as [0, 1]")]
    Devices(String),
    #[error("devices names GPU {0} twice: remove one")]
    Twice(usize),
    #[error("devices is an empty list: name a GPU, or write all")]
    NoDevices,
    #[error("{0:?} {1}")]
    Type(String, NotAType),
    #[error("{kind}: {count} is no number of vGPUs: write 1 or more")]
    Count { kind: String, count: i64 },
    #[error("every count is 0: write vgpu-devices: {{}} for GPUs without vGPUs")]
    AllZero,
    #[error(
        "{time} is time-sliced and {mig} needs MIG, which one GPU cannot have at a time: put them into two layouts"
    )]
    Mixed { time: VgpuType, mig: VgpuType },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    version: Spanned<String>,
    vgpu_configs: Option<Spanned<BTreeMap<String, RawLayout>>>,
}

type RawLayout = Spanned<Vec<Spanned<RawEntry>>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawEntry {
    device_filter: Option<Spanned<Filters>>,
    devices: Spanned<RawDevices>,
    vgpu_devices: Spanned<BTreeMap<String, Spanned<i64>>>,
}

enum Filters {
    One(String),
    Many(Vec<Spanned<String>>),
}

enum RawDevices {
    Word(String),
    At(Vec<Spanned<usize>>),
}

impl Config {
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let file: File = serde_saphyr::from_str(text).map_err(|error| shape(&error))?;
        if file.version.value != "v1" {
            return Err(at(&file.version, Wrong::Version(file.version.value.clone())));
        }
        let Some(configs) = file.vgpu_configs else { return Ok(Self::default()) };
        if configs.value.is_empty() {
            return Err(at(&configs, Wrong::NoConfigs));
        }
        let layouts = configs.value.into_iter().map(|(name, entries)| {
            if entries.value.is_empty() {
                return Err(at(&entries, Wrong::NoEntries(name)));
            }
            Ok((name, entries.value.iter().map(entry).collect::<Result<_, Fault>>()?))
        });
        Ok(Self(layouts.collect::<Result<_, Fault>>()?))
    }
}

fn shape(error: &serde_saphyr::Error) -> Fault {
    let (line, column) = error.location().map_or((1, 1), |location| (location.line(), location.column()));
    let words = error.without_snippet().to_string();
    // It says the place again, in its own way.
    let words = words.split(&format!(" at line {line}")).next().unwrap_or(&words).to_owned();
    Fault { line, column, wrong: Wrong::Shape(words) }
}

fn at<T>(place: &Spanned<T>, wrong: Wrong) -> Fault {
    Fault { line: place.referenced.line(), column: place.referenced.column(), wrong }
}

fn entry(raw: &Spanned<RawEntry>) -> Result<Entry, Fault> {
    let RawEntry { device_filter, devices, vgpu_devices } = &raw.value;
    Ok(Entry {
        line: raw.referenced.line(),
        filters: device_filter.as_ref().map(filters).transpose()?.unwrap_or_default(),
        devices: self::devices(devices)?,
        instances: instances(vgpu_devices)?,
    })
}

fn filters(raw: &Spanned<Filters>) -> Result<Vec<Filter>, Fault> {
    match &raw.value {
        Filters::One(text) => Ok(vec![filter(text, raw)?]),
        Filters::Many(texts) => texts.iter().map(|text| filter(&text.value, text)).collect(),
    }
}

fn filter<T>(text: &str, place: &Spanned<T>) -> Result<Filter, Fault> {
    text.parse().map_err(|error| at(place, Wrong::Filter(text.to_owned(), error)))
}

fn devices(raw: &Spanned<RawDevices>) -> Result<Devices, Fault> {
    let places = match &raw.value {
        RawDevices::Word(word) if word == "all" => return Ok(Devices::All),
        RawDevices::Word(word) => return Err(at(raw, Wrong::Devices(word.clone()))),
        RawDevices::At(places) => places,
    };
    if places.is_empty() {
        return Err(at(raw, Wrong::NoDevices));
    }
    let mut known = Vec::new();
    for place in places {
        if known.contains(&place.value) {
            return Err(at(place, Wrong::Twice(place.value)));
        }
        known.push(place.value);
    }
    Ok(Devices::At(known))
}

fn instances(raw: &Spanned<BTreeMap<String, Spanned<i64>>>) -> Result<Vec<(VgpuType, u32)>, Fault> {
    let mut instances = Vec::new();
    for (name, count) in &raw.value {
        let kind: VgpuType = name.parse().map_err(|error| at(count, Wrong::Type(name.clone(), error)))?;
        let number = u32::try_from(count.value)
            .map_err(|_negative| at(count, Wrong::Count { kind: name.clone(), count: count.value }))?;
        instances.push((kind, number));
    }
    let of = |backing: Backing| instances.iter().map(|(kind, _)| kind).find(|kind| kind.backing() == backing).cloned();
    if let (Some(time), Some(mig)) = (of(Backing::Time), of(Backing::Mig)) {
        return Err(at(raw, Wrong::Mixed { time, mig }));
    }
    let given = !instances.is_empty();
    instances.retain(|(_, number)| *number > 0);
    match given && instances.is_empty() {
        true => Err(at(raw, Wrong::AllZero)),
        false => Ok(instances),
    }
}

impl<'de> Deserialize<'de> for Filters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;
        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Filters;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a device id such as \"0x25B610DE\", or a list of them")
            }

            fn visit_str<E>(self, text: &str) -> Result<Filters, E> {
                Ok(Filters::One(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Filters, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                Ok(Filters::Many(texts))
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

impl<'de> Deserialize<'de> for RawDevices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AllOrSome;
        impl<'de> Visitor<'de> for AllOrSome {
            type Value = RawDevices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("all, or a list of places such as [0, 1]")
            }

            fn visit_str<E>(self, text: &str) -> Result<RawDevices, E> {
                Ok(RawDevices::Word(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawDevices, A::Error> {
                let mut places = Vec::new();
                while let Some(place) = list.next_element()? {
                    places.push(place);
                }
                Ok(RawDevices::At(places))
            }
        }
        deserializer.deserialize_any(AllOrSome)
    }
}
