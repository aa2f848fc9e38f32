//! What the functions of a GPU could become, as the kernel lists it, and as it will be when some are free.

use std::collections::{BTreeMap, BTreeSet};

use super::VgpuParent;
use super::instances::{TypeNames, parents, vgpus};
use super::plan::VgpuStep;
use super::types::{family, kind};
use super::uuid;
use crate::address::PciAddress;
use crate::inventory::Inventory;

/// What is written to make a vGPU of a type.
#[derive(Clone, Debug)]
enum Number {
    Mdev(String),
    Vendor(u32),
}

#[derive(Debug)]
struct Slot {
    parent: PciAddress,
    /// A virtual function becomes one vGPU; a GPU without them has many.
    single: bool,
    /// Type → what is written, and how often the kernel would take it.
    types: BTreeMap<String, (Number, u32)>,
    /// It is being freed: what it will take is not listed yet.
    expected: bool,
}

/// See the module. Functions are taken in the order of their numbers.
#[derive(Debug)]
pub(super) struct Offers {
    slots: Vec<Slot>,
    /// All types that are known of this GPU.
    kinds: BTreeMap<String, Number>,
    /// Those of them that the kernel would make one of now.
    creatable: BTreeSet<String>,
    /// Mediated devices: most instances of a type, where the driver says it.
    most: BTreeMap<String, u32>,
    /// Whether `kinds` has all that there are.
    complete: bool,
}

impl Offers {
    pub fn of(inventory: &Inventory, gpu: PciAddress, names: &TypeNames) -> Self {
        let mut offers = Self {
            slots: Vec::new(),
            kinds: BTreeMap::new(),
            creatable: BTreeSet::new(),
            most: BTreeMap::new(),
            complete: false,
        };
        for function in parents(inventory, gpu) {
            let mut types = BTreeMap::new();
            match &function.vgpu {
                Some(VgpuParent::Mdev { types: all }) => {
                    offers.complete = true;
                    for one in all {
                        let name = kind(one.name()).to_owned();
                        offers.most.extend(one.max_instances().map(|most| (name.clone(), most)));
                        types.insert(name, (Number::Mdev(one.id.clone()), one.available_instances));
                    }
                }
                Some(VgpuParent::VendorVfio { current, creatable }) => {
                    let free = u32::from(current.is_none());
                    types.extend(
                        creatable.iter().map(|one| (kind(&one.name).to_owned(), (Number::Vendor(one.id), free))),
                    );
                }
                None => continue,
            }
            for (kind, (number, available)) in &types {
                offers.kinds.insert(kind.clone(), number.clone());
                if *available > 0 {
                    offers.creatable.insert(kind.clone());
                }
            }
            offers.slots.push(Slot { parent: function.address, single: function.is_vf(), types, expected: false });
        }
        if !offers.complete && offers.kinds.is_empty() {
            // Full: nothing is listed, and what was listed before is all that is known.
            // Of this board: those of the host's others are among them.
            let there: BTreeSet<String> = vgpus(inventory, gpu, names)
                .iter()
                .filter_map(|vgpu| family(vgpu.kind()?).map(str::to_owned))
                .collect();
            let own = names.iter().filter(|(_, name)| family(kind(name)).is_none_or(|board| there.contains(board)));
            offers.kinds.extend(own.map(|(id, name)| (kind(name).to_owned(), Number::Vendor(*id))));
        }
        offers
    }

    pub fn kinds(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    pub fn creatable(&self) -> impl Iterator<Item = &str> {
        self.creatable.iter().map(String::as_str)
    }

    pub fn known(&self, kind: &str) -> bool {
        self.kinds.contains_key(kind)
    }

    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The vendor's list is empty while a function is a vGPU, so that a type that it will offer may be on nobody's list.
    pub fn may_come(&self, kind: &str) -> bool {
        !self.complete || self.known(kind)
    }

    pub fn most(&self, kind: &str) -> Option<u32> {
        self.most.get(kind).copied()
    }

    /// A vGPU of this function will be gone.
    pub fn freed(&mut self, parent: PciAddress) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.parent == parent) {
            slot.expected = true;
        }
    }

    /// The step that makes one more on the first function that has a place for it, which is counted as taken.
    pub fn take(&mut self, kind: &str, node: &str, uuids: &mut BTreeSet<String>) -> Option<VgpuStep> {
        let known = self.kinds.get(kind)?;
        let has = |slot: &&mut Slot| slot.expected || slot.types.get(kind).is_some_and(|(_, count)| *count > 0);
        let slot = self.slots.iter_mut().find(has)?;
        let number = slot.types.get(kind).map_or(known, |(number, _)| number);
        let step = match number.clone() {
            Number::Mdev(type_id) => VgpuStep::CreateMdev {
                uuid: uuid::next(node, slot.parent, kind, uuids),
                parent: slot.parent,
                type_id,
                kind: kind.to_owned(),
            },
            Number::Vendor(type_id) => VgpuStep::SetType { vf: slot.parent, type_id, kind: kind.to_owned() },
        };
        if slot.single {
            slot.expected = false;
            slot.types.clear();
        } else if let Some((_, count)) = slot.types.get_mut(kind) {
            *count = count.saturating_sub(1);
        }
        Some(step)
    }
}
