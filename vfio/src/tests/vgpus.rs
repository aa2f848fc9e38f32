//! vGPUs on described boards: planned, made, and read again after each step.

use std::collections::BTreeMap;

use crate::address::PciAddress;
use crate::holders::holders;
use crate::inventory::observe;
use crate::journal::Journal;
use crate::testing::{Machine, MemoryKernel, MemoryLibrary};
use crate::vgpu::{
    ApplyError, Asked, Layout, Library, LibraryFacts, Vgpu, VgpuRefusal, VgpuStep, VgpuWorld, View, apply, leave, plan,
    vgpu_holders, vgpus,
};

mod boards;
mod mig;
mod random;

pub(super) const NODE: &str = "node-1";

/// A machine with its kernel and its journal.
pub(super) struct Lab {
    pub machine: Machine,
    pub kernel: MemoryKernel,
    pub journal: Journal,
    pub library: MemoryLibrary,
}

type Applied = (Vec<VgpuStep>, Result<(), ApplyError>);

impl Lab {
    pub fn of(machine: Machine) -> Self {
        Self { kernel: machine.kernel(), library: machine.library(), machine, journal: Journal::in_memory() }
    }

    pub fn described(name: &str) -> Self {
        Self::of(Machine::described(name))
    }

    pub fn view(&self) -> View {
        look(&self.machine)
    }

    pub fn apply(&mut self, gpu: &str, layout: &Layout) -> Applied {
        let gpu = address(gpu);
        self.bring(gpu, |world| plan(world, gpu, layout))
    }

    pub fn leave(&mut self, gpu: &str) -> Applied {
        let gpu = address(gpu);
        self.bring(gpu, |world| leave(world, gpu, false))
    }

    fn bring(
        &mut self,
        gpu: PciAddress,
        plan: impl Fn(&VgpuWorld<'_>) -> Result<Vec<VgpuStep>, VgpuRefusal>,
    ) -> Applied {
        let mut facts = self.library.ask();
        let mut asked = Asked { library: &mut self.library, facts: &mut facts };
        let look = |_: &Journal| look(&self.machine);
        apply(gpu, NODE, &mut self.kernel, &mut self.journal, &mut asked, look, plan)
    }

    /// What one look tells.
    pub fn plan(&mut self, gpu: &str, layout: &Layout) -> Result<Vec<VgpuStep>, VgpuRefusal> {
        let (view, facts) = (self.view(), self.facts());
        self.journal.learn_vgpu_types(&view.inventory).unwrap();
        plan(&view.world(&facts, &self.journal, NODE), address(gpu), layout)
    }

    pub fn facts(&mut self) -> LibraryFacts {
        self.library.ask()
    }

    /// Those that exist.
    pub fn vgpus(&self, gpu: &str) -> Vec<Vgpu> {
        vgpus(&observe(&self.machine), address(gpu), self.journal.vgpu_types())
    }

    /// How many of each type exist.
    pub fn counts(&self, gpu: &str) -> Layout {
        let mut counts = Layout::new();
        for vgpu in self.vgpus(gpu) {
            *counts.entry(vgpu.kind().unwrap_or("unknown").to_owned()).or_default() += 1;
        }
        counts
    }

    /// A VM has it.
    pub fn hold(&self, vgpu: &Vgpu) {
        let node = format!("/dev/vfio/{}", vgpu.iommu_group.unwrap());
        let pid = 4000 + i32::try_from(vgpu.iommu_group.unwrap()).unwrap();
        self.machine.open_device(pid, "qemu-kvm", &node, Some("7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22"));
    }
}

fn look(machine: &Machine) -> View {
    let inventory = observe(machine);
    let gpu_holders = holders(machine, &inventory);
    View { holders: vgpu_holders(&inventory, &gpu_holders), gpu_holders, inventory }
}

pub(super) fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

pub(super) fn layout(counts: &[(&str, u32)]) -> Layout {
    counts.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect::<BTreeMap<_, _>>()
}
