//! What was done to GPUs for the sake of vGPUs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Journal, JournalError};
use crate::address::PciAddress;
use crate::function::{Function, Ids};
use crate::inventory::Inventory;
use crate::vgpu::{TypeNames, listed_names};

/// vGPUs and virtual functions, since boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Vgpus {
    /// Numbers of the vendor's own framework, with the names that were listed with them.
    types: TypeNames,
    made: BTreeMap<PciAddress, Made>,
}

impl Vgpus {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "what was made is independent of the rest, and a field in a file")]
struct Made {
    ids: Ids,
    /// Its virtual functions were made from here.
    vfs: bool,
    /// Its driver cannot make them.
    stub: bool,
    /// vGPUs were made from here.
    vgpus: bool,
    /// MIG mode or GPU instances came from here.
    #[serde(default)]
    mig: bool,
}

impl Journal {
    /// Names of types by number, as far as they were listed since boot.
    pub fn vgpu_types(&self) -> &TypeNames {
        &self.state.vgpus.types
    }

    /// Remembers what is listed now: a function that is a vGPU lists nothing.
    pub fn learn_vgpu_types(&mut self, inventory: &Inventory) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        state.vgpus.types.extend(listed_names(inventory));
        self.save(state)
    }

    /// Whether anything of its vGPUs was made from here; `Some(true)`: its virtual functions, too.
    pub(crate) fn vgpus_made(&self, gpu: &Function) -> Option<bool> {
        self.made(gpu).filter(|made| made.vfs || made.vgpus).map(|made| made.vfs)
    }

    /// Whether its driver has refused to make virtual functions.
    pub(crate) fn needs_stub(&self, gpu: &Function) -> bool {
        self.made(gpu).is_some_and(|made| made.stub)
    }

    /// Whether its MIG mode, or a GPU instance, came from here.
    pub fn mig_made(&self, gpu: &Function) -> bool {
        self.made(gpu).is_some_and(|made| made.mig)
    }

    fn made(&self, gpu: &Function) -> Option<&Made> {
        self.state.vgpus.made.get(&gpu.address).filter(|made| made.ids == gpu.ids())
    }

    pub(crate) fn note_vfs(&mut self, gpu: &Function, vfs: bool) -> Result<(), JournalError> {
        self.note(gpu, |made| made.vfs = vfs)
    }

    pub(crate) fn note_stub(&mut self, gpu: &Function) -> Result<(), JournalError> {
        self.note(gpu, |made| made.stub = true)
    }

    pub(crate) fn note_vgpus(&mut self, gpu: &Function, vgpus: bool) -> Result<(), JournalError> {
        self.note(gpu, |made| made.vgpus = vgpus)
    }

    pub(crate) fn note_mig(&mut self, gpu: &Function, mig: bool) -> Result<(), JournalError> {
        self.note(gpu, |made| made.mig = mig)
    }

    fn note(&mut self, gpu: &Function, change: impl FnOnce(&mut Made)) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        let mut made = self.made(gpu).cloned();
        let made_now = made.get_or_insert(Made { ids: gpu.ids(), vfs: false, stub: false, vgpus: false, mig: false });
        change(made_now);
        state.vgpus.made.insert(gpu.address, made_now.clone());
        self.save(state)
    }
}
