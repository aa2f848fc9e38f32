//! What is wrong with GPUs. Pure, but for the memory of what counters said before.
//!
//! Nodes and drivers tell of themselves (inotify, uevents). A function that fell off the bus, a counter that grew and a
//! link that lost lanes do not: they are looked at every [`GLANCE`], by reading files of sysfs only.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crds::v1alpha1::{self, Severity};
use vfio::{Aer, Function, Gpu, Inventory, Link, LinkState, PciAddress, Presence, function::Ids};

/// Between two looks at what makes no event.
pub const GLANCE: Duration = Duration::from_secs(30);
/// How long a fatal error is remembered against a GPU: they come in series, and the next one takes a VM down.
const AFTER_FATAL: Duration = Duration::from_secs(600);
/// So many looks at a GPU in use, none of them at full speed: then it is not for want of work.
const SLOW_LOOKS: u32 = 20;
/// First kernel that says how a function can be reset, or shows by the file's absence that it cannot be.
const SAYS_RESET: (u32, u32) = (5, 15);

/// What is wrong with a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ailment {
    #[error("GPU {gpu} is gone from the PCI bus; it is counted until the node's order or the agent changes")]
    Vanished { gpu: PciAddress },
    #[error("GPU {gpu} is not as it was offered: {how}")]
    Changed { gpu: PciAddress, how: String },
    /// Also how a reset that failed after a VM's end shows: besides this it is a line in the kernel's log only. While a
    /// reset is going on the kernel holds the question back (`pci_cfg_access_lock`), so that it is no false alarm.
    #[error(
        "GPU {gpu} reads as all ones: it has fallen off the bus, or did not come back from a reset; see the kernel's log for {gpu}, then power-cycle the node"
    )]
    FellOff { gpu: PciAddress },
    #[error(
        "GPU {gpu} does not let itself be read: its lock is held or its driver waits for it, as in a reset that does not end; see the kernel's log for {gpu}"
    )]
    Silent { gpu: PciAddress },
    #[error(
        "GPU {gpu}: /dev/vfio/{group} is not there, so no VM can open it; see what removes device nodes on this node"
    )]
    NoGroupNode { gpu: PciAddress, group: u32 },
    #[error(
        "GPU {gpu}: /dev/vfio/devices/{name} is not there, so no VM can be given it; see what removes device nodes on this node"
    )]
    NoDeviceNode { gpu: PciAddress, name: String },
    #[error(
        "GPU {gpu} has reported {count} fatal errors of the PCIe bus; it is given out again {} minutes after the last one; see the kernel's log for {gpu}",
        AFTER_FATAL.as_secs() / 60
    )]
    FatalErrors { gpu: PciAddress, count: u64 },
    #[error(
        "GPU {gpu} has reported {count} errors of the PCIe bus that lost a transaction since the agent started; look at its slot, riser and cable"
    )]
    NonfatalErrors { gpu: PciAddress, count: u64 },
    #[error("GPU {gpu} runs at {current} and could at {maximum}: look at its slot, riser and contacts")]
    FewerLanes { gpu: PciAddress, current: LinkState, maximum: LinkState },
    #[error(
        "GPU {gpu} was never seen faster than {current} while in use and could run at {maximum}: look at its slot's settings"
    )]
    SlowLink { gpu: PciAddress, current: LinkState, maximum: LinkState },
    #[error(
        "GPU {gpu} sleeps in D3cold, and asking whether it still answers would wake it; if VMs do not start with it, write 0 to its d3cold_allowed"
    )]
    Asleep { gpu: PciAddress },
    #[error("GPU {gpu}: the kernel knows no way to reset it: the next VM finds it as the last one left it")]
    NoReset { gpu: PciAddress },
}

pub type Ailments = BTreeMap<PciAddress, Vec<Ailment>>;

impl Ailment {
    /// One CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Vanished { .. } => "Vanished",
            Self::Changed { .. } => "Changed",
            Self::FellOff { .. } => "FellOff",
            Self::Silent { .. } => "Silent",
            Self::NoGroupNode { .. } => "NoGroupNode",
            Self::NoDeviceNode { .. } => "NoDeviceNode",
            Self::FatalErrors { .. } => "FatalErrors",
            Self::NonfatalErrors { .. } => "NonfatalErrors",
            Self::FewerLanes { .. } => "FewerLanes",
            Self::SlowLink { .. } => "SlowLink",
            Self::Asleep { .. } => "Asleep",
            Self::NoReset { .. } => "NoReset",
        }
    }

    /// Only what would fail a VM makes a GPU unhealthy. A slow one serves, and taking it away would leave its owner with
    /// less than that; a sleeping one has to be woken by its VM to know better.
    pub fn severity(&self) -> Severity {
        match self {
            Self::Vanished { .. }
            | Self::Changed { .. }
            | Self::FellOff { .. }
            | Self::Silent { .. }
            | Self::NoGroupNode { .. }
            | Self::NoDeviceNode { .. }
            | Self::FatalErrors { .. } => Severity::Unhealthy,
            Self::NonfatalErrors { .. }
            | Self::FewerLanes { .. }
            | Self::SlowLink { .. }
            | Self::Asleep { .. }
            | Self::NoReset { .. } => Severity::Degraded,
        }
    }

    /// Whether it may be over in a moment, so that the next look should come soon.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Silent { .. })
    }

    pub fn told(&self) -> v1alpha1::Ailment {
        v1alpha1::Ailment { reason: self.reason().to_owned(), severity: self.severity(), message: self.to_string() }
    }
}

/// How each GPU is doing on the bus.
pub type Bus = BTreeMap<PciAddress, OnBus>;

/// What of a GPU changes without an event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnBus {
    pub link: Option<Link>,
    pub aer: Option<Aer>,
    pub power_state: Option<String>,
}

pub fn bus(inventory: &Inventory) -> Bus {
    let of = |f: &Function| OnBus { link: f.link, aer: f.aer, power_state: f.power_state.clone() };
    inventory.gpus().iter().map(|gpu| (gpu.primary.address, of(gpu.primary))).collect()
}

/// Why a GPU must not be given out, if it must not.
pub fn unfit(ailments: &[Ailment]) -> Option<&Ailment> {
    ailments.iter().find(|ailment| ailment.severity() == Severity::Unhealthy)
}

/// What one look shows.
pub fn at_sight(inventory: &Inventory, gpu: &Gpu<'_>) -> Vec<Ailment> {
    let (primary, address) = (gpu.primary, gpu.primary.address);
    let fell_off = primary.presence == Some(Presence::FellOff);
    let mut found = Vec::new();
    if fell_off {
        found.push(Ailment::FellOff { gpu: address });
    }
    if primary.on_vfio() {
        found.extend(missing_nodes(inventory, gpu));
    }
    if primary.late {
        found.push(Ailment::Silent { gpu: address });
        // The rest was not read.
        return found;
    }
    if primary.power_state.as_deref() == Some("D3cold") {
        found.push(Ailment::Asleep { gpu: address });
    }
    if let Some(link) = primary.link.filter(|link| !fell_off && link.current.width < link.maximum.width) {
        found.push(Ailment::FewerLanes { gpu: address, current: link.current, maximum: link.maximum });
    }
    if primary.reset_methods.is_empty() && inventory.facts.kernel_version() >= Some(SAYS_RESET) {
        found.push(Ailment::NoReset { gpu: address });
    }
    found
}

/// `KubeVirt` before 1.9 opens the group, and a container with a device node that is not there does not start.
fn missing_nodes(inventory: &Inventory, gpu: &Gpu<'_>) -> Vec<Ailment> {
    let address = gpu.primary.address;
    let facts = &inventory.facts;
    let group = gpu.group.filter(|group| !facts.vfio_groups.contains(group));
    let functions = std::iter::once(gpu.primary).chain(gpu.companions.iter().copied());
    let devices = functions.filter_map(|function| function.vfio_dev.clone());
    let devices = devices.filter(|name| facts.iommufd && !facts.vfio_devices.contains(name));
    let group = group.map(|group| Ailment::NoGroupNode { gpu: address, group });
    group.into_iter().chain(devices.map(|name| Ailment::NoDeviceNode { gpu: address, name })).collect()
}

/// What is remembered from look to look.
#[derive(Clone, Debug, Default)]
pub struct Watch(BTreeMap<PciAddress, Memory>);

#[derive(Clone, Debug)]
struct Memory {
    /// Another card in the same place is another one.
    ids: Ids,
    /// When the agent saw it first: what happened before is no news. And at the last look.
    counted: Option<(Aer, Aer)>,
    /// When the last fatal error was seen, and how many there had been.
    fatal: Option<(Instant, u64)>,
    /// Whether it could not be read at the last look.
    silent: bool,
    /// Looks at it while it was in use and below its speed; `None` once it was seen at full speed.
    slow: Option<u32>,
}

impl Watch {
    /// `in_use`: whether somebody has it open.
    pub fn examine(&mut self, inventory: &Inventory, in_use: impl Fn(PciAddress) -> bool, now: Instant) -> Ailments {
        let mut ailments = Ailments::new();
        for gpu in inventory.gpus() {
            let address = gpu.primary.address;
            let mut found = at_sight(inventory, &gpu);
            found.extend(self.since(&gpu, in_use(address), now));
            if self.is_at_work(&gpu, in_use(address)) {
                found.retain(|ailment| *ailment != Ailment::Silent { gpu: address });
            }
            if !found.is_empty() {
                ailments.insert(address, found);
            }
        }
        self.0.retain(|address, _| inventory.functions.contains_key(address));
        ailments
    }

    /// A VM that starts has its GPU reset, which holds the lock for a while: silence counts from the second look on.
    fn is_at_work(&mut self, gpu: &Gpu<'_>, in_use: bool) -> bool {
        let late = gpu.primary.late;
        let silent =
            self.0.get_mut(&gpu.primary.address).is_some_and(|memory| std::mem::replace(&mut memory.silent, late));
        late && in_use && !silent
    }

    fn since(&mut self, gpu: &Gpu<'_>, in_use: bool, now: Instant) -> Vec<Ailment> {
        let (primary, gpu) = (gpu.primary, gpu.primary.address);
        let new = || Memory { ids: primary.ids(), counted: None, fatal: None, silent: false, slow: Some(0) };
        let memory = self.0.entry(gpu).or_insert_with(new);
        if memory.ids != primary.ids() {
            *memory = new();
        }
        if let Some(counted) = primary.aer {
            let (first, last) = memory.counted.unwrap_or((counted, counted));
            if counted.fatal > last.fatal {
                memory.fatal = Some((now, counted.fatal.saturating_sub(first.fatal)));
            }
            memory.counted = Some((first, counted));
        }
        let mut found = Vec::new();
        if let Some((_, count)) = memory.fatal.filter(|(at, _)| now < *at + AFTER_FATAL) {
            found.push(Ailment::FatalErrors { gpu, count });
        }
        let nonfatal = memory.counted.map_or(0, |(first, last)| last.nonfatal.saturating_sub(first.nonfatal));
        if nonfatal > 0 {
            found.push(Ailment::NonfatalErrors { gpu, count: nonfatal });
        }
        if let (Some(link), Some(looks)) = (primary.link, memory.slow) {
            // An idle GPU lowers its speed to save power, so only one in use is judged by it.
            memory.slow = match link.current.speed.zip(link.maximum.speed) {
                Some((now, most)) if now >= most => None,
                Some(_) if in_use => Some(looks.saturating_add(1)),
                Some(_) | None => Some(looks),
            };
            if memory.slow >= Some(SLOW_LOOKS) {
                found.push(Ailment::SlowLink { gpu, current: link.current, maximum: link.maximum });
            }
        }
        found
    }
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
