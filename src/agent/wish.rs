//! What is asked of the host, in the host library's terms.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    WorkloadMode,
    v1alpha1::{AgentFunction, GPUNodeSpec, Refusal},
};
use vfio::{Binding, Inventory, PciAddress, vgpu::Layout};

/// What is asked of the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wish {
    pub spec: GPUNodeSpec,
}

impl Wish {
    /// The mode of one GPU, if one is asked for.
    pub fn mode(&self, gpu: PciAddress) -> Option<WorkloadMode> {
        let address = gpu.to_string();
        self.spec.gpus.iter().find(|own| own.address == address).map(|own| own.mode).or(self.spec.mode)
    }

    /// The vGPUs that a GPU shall have; `None`: those that it has.
    pub fn vgpus(&self, gpu: PciAddress) -> Option<Layout> {
        let address = gpu.to_string();
        let counts =
            self.spec.vgpu.as_ref()?.gpus.iter().filter(|own| own.address == address).flat_map(|own| &own.instances);
        Some(counts.filter_map(|c| Some((c.kind.clone(), u32::try_from(c.count).ok()?))).collect())
    }

    pub fn has(&self, function: AgentFunction) -> bool {
        !self.spec.disabled.contains(&function)
    }
}

pub(super) fn addresses(inventory: &Inventory) -> impl Iterator<Item = PciAddress> + use<> {
    let gpus: BTreeSet<PciAddress> = inventory.gpus().iter().map(|gpu| gpu.primary.address).collect();
    gpus.into_iter()
}

pub(super) fn wanted(inventory: &Inventory, wish: &Wish) -> BTreeMap<PciAddress, Binding> {
    addresses(inventory).filter_map(|gpu| Some((gpu, binding(wish.mode(gpu)?)))).collect()
}

/// vGPUs are made by a driver of the host.
pub(super) fn binding(mode: WorkloadMode) -> Binding {
    match mode {
        WorkloadMode::Container | WorkloadMode::VmVgpu => Binding::Host,
        WorkloadMode::VmPassthrough => Binding::Vfio,
    }
}

pub(super) fn switched_off(gpu: PciAddress) -> Refusal {
    Refusal {
        reason: "VfioManagerDisabled".to_owned(),
        message: format!(
            "GPU {gpu} is left as it is: label {}vfio-manager=false switches binding off on this node; remove it",
            crds::labels::DEPLOY_PREFIX
        ),
    }
}
