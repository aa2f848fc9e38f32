//! A named layout and a node's GPUs → what each GPU is cut into. Pure.

use crds::v1alpha1::{GPUStatus, GPUVgpus, VgpuCount, VgpuFramework, VgpuLayout};

use super::{
    VgpuType,
    config::{Config, Devices, Entry},
};
use crate::operator::spelling::nearest;

/// Types or layouts in one message.
const NAMED: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub layout: VgpuLayout,
    /// What of the layout has no effect on this node, a sentence each.
    pub notes: Vec<String>,
}

/// Why a node cannot be given a layout: names the layout, the GPU, and the next step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    #[error("there is no vGPU layout {name}: {hint}")]
    NoLayout { name: String, hint: String },
    #[error(
        "vGPU layout {layout} is for other GPUs: its entries name {filters}, and this node has {gpus}; choose another layout, or add an entry for them"
    )]
    NothingClaimed { layout: String, filters: String, gpus: String },
    #[error(
        "vGPU layout {layout} claims GPU {gpu} twice, by the entries in line {first} and line {second}: let their device-filter or devices tell them apart"
    )]
    ClaimedTwice { layout: String, gpu: String, first: u64, second: u64 },
    #[error("vGPU layout {layout}, line {line}: GPU {gpu} has no vGPU type {kind}: {hint}")]
    UnknownType { layout: String, line: u64, gpu: String, kind: String, hint: String },
}

impl Unresolved {
    /// One CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoLayout { .. } => "VGPUConfigUnknown",
            Self::NothingClaimed { .. } => "VGPUConfigMatchesNoGPU",
            Self::ClaimedTwice { .. } => "VGPUConfigAmbiguous",
            Self::UnknownType { .. } => "VGPUTypeUnknown",
        }
    }
}

pub fn resolve(config: &Config, name: &str, gpus: &[GPUStatus]) -> Result<Resolved, Unresolved> {
    let entries = config.layout(name).ok_or_else(|| no_layout(config, name))?;
    let mut gpus: Vec<&GPUStatus> = gpus.iter().collect();
    gpus.sort_by_key(|gpu| place(&gpu.address));
    let mut layout = VgpuLayout { name: name.to_owned(), gpus: Vec::new() };
    for (index, gpu) in gpus.iter().enumerate() {
        let mut claims = entries.iter().filter(|entry| claims(entry, index, gpu));
        let Some(entry) = claims.next() else { continue };
        if let Some(other) = claims.next() {
            let (layout, gpu) = (name.to_owned(), gpu.address.clone());
            return Err(Unresolved::ClaimedTwice { layout, gpu, first: entry.line, second: other.line });
        }
        check_types(name, entry, gpu)?;
        let count = |(kind, count): &(VgpuType, u32)| VgpuCount {
            kind: kind.to_string(),
            count: i32::try_from(*count).unwrap_or(i32::MAX),
        };
        let instances = entry.instances.iter().map(count).collect();
        layout.gpus.push(GPUVgpus { address: gpu.address.clone(), instances });
    }
    match layout.gpus.is_empty() {
        true => Err(nothing_claimed(name, entries, &gpus)),
        false => Ok(Resolved { layout, notes: notes(entries, &gpus) }),
    }
}

/// By number: a domain may have more digits than another.
fn place(address: &str) -> (u32, &str) {
    let (domain, rest) = address.split_once(':').unwrap_or(("", address));
    (u32::from_str_radix(domain, 16).unwrap_or(u32::MAX), rest)
}

fn claims(entry: &Entry, index: usize, gpu: &GPUStatus) -> bool {
    let there = match &entry.devices {
        Devices::All => true,
        Devices::At(places) => places.contains(&index),
    };
    there && is_model(entry, gpu)
}

fn is_model(entry: &Entry, gpu: &GPUStatus) -> bool {
    entry.filters.is_empty() || entry.filters.iter().any(|filter| filter.matches(gpu))
}

/// Types that a driver lists whatever is made of the GPU already; `None` while that is not known.
fn known_types(gpu: &GPUStatus) -> Option<Vec<&str>> {
    let vgpu = gpu.vgpu.as_ref()?;
    let complete = match vgpu.framework {
        VgpuFramework::None => false,
        VgpuFramework::Mdev => true,
        // The kernel leaves out what does not fit beside those that exist.
        VgpuFramework::VendorVfio => vgpu.instances.is_empty(),
    };
    (complete && !vgpu.types.is_empty()).then(|| vgpu.types.iter().map(|kind| kind.name.as_str()).collect())
}

fn check_types(layout: &str, entry: &Entry, gpu: &GPUStatus) -> Result<(), Unresolved> {
    let Some(known) = known_types(gpu) else { return Ok(()) };
    // A GPU lists the types of its MIG mode only, and the agent changes that mode.
    let alike = |name: &str, kind: &VgpuType| name.parse::<VgpuType>().is_ok_and(|of| of.backing() == kind.backing());
    let lists = |kind: &VgpuType| known.iter().any(|name| alike(name, kind));
    let unknown = |kind: &VgpuType| !known.contains(&kind.as_str()) && lists(kind);
    let Some((kind, _)) = entry.instances.iter().find(|(kind, _)| unknown(kind)) else {
        return Ok(());
    };
    let listed = some(&known);
    let hint = match nearest(kind.as_str(), known.iter().copied()) {
        Some(meant) => format!("did you mean {meant}? Its driver lists {listed}"),
        None => format!("its driver lists {listed}"),
    };
    Err(Unresolved::UnknownType {
        layout: layout.to_owned(),
        line: entry.line,
        gpu: described(gpu),
        kind: kind.to_string(),
        hint,
    })
}

fn described(gpu: &GPUStatus) -> String {
    match gpu.product.as_str() {
        "" => format!("{} ({})", gpu.address, gpu.id),
        product => format!("{} ({product})", gpu.address),
    }
}

fn no_layout(config: &Config, name: &str) -> Unresolved {
    let names: Vec<&str> = config.names().collect();
    let hint = match (nearest(name, names.iter().copied()), names.is_empty()) {
        (Some(meant), _) => format!("did you mean {meant}?"),
        (None, true) => "the file has none".to_owned(),
        (None, false) => format!("there are {}", some(&names)),
    };
    Unresolved::NoLayout { name: name.to_owned(), hint }
}

fn nothing_claimed(name: &str, entries: &[Entry], gpus: &[&GPUStatus]) -> Unresolved {
    let wanted = entries.iter().flat_map(|entry| {
        let places = match &entry.devices {
            Devices::All => String::new(),
            Devices::At(places) => format!("place {places:?}"),
        };
        let filters = entry.filters.iter().map(ToString::to_string);
        filters.chain([places]).filter(|words| !words.is_empty())
    });
    let wanted: Vec<String> = wanted.collect();
    let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let has = gpus.iter().map(|gpu| {
        let subsystem = gpu.subsystem.as_deref().map(|id| format!(", subsystem {id}")).unwrap_or_default();
        format!("{} ({}{subsystem})", gpu.address, gpu.id)
    });
    let has: Vec<String> = has.collect();
    let has: Vec<&str> = has.iter().map(String::as_str).collect();
    Unresolved::NothingClaimed { layout: name.to_owned(), filters: some(&wanted), gpus: some(&has) }
}

/// One layout may serve nodes with fewer GPUs than it has places for; it is said all the same.
fn notes(entries: &[Entry], gpus: &[&GPUStatus]) -> Vec<String> {
    let beyond = |entry: &Entry| match &entry.devices {
        Devices::All => None,
        Devices::At(places) => places.iter().find(|place| **place >= gpus.len()).copied(),
    };
    let concerns = |entry: &&Entry| gpus.iter().any(|gpu| is_model(entry, gpu));
    let note = |entry: &Entry| {
        let place = beyond(entry)?;
        let line = entry.line;
        Some(format!("line {line} names GPU {place}, and this node has {}, counted from 0", gpus.len()))
    };
    entries.iter().filter(concerns).filter_map(note).collect()
}

fn some(names: &[&str]) -> String {
    let more = names.len().saturating_sub(NAMED);
    let first = names[..names.len().min(NAMED)].join(", ");
    if more > 0 { format!("{first} and {more} more") } else { first }
}
