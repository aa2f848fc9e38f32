//! The played agent's vGPUs: made as its `GPUNode` asks, never under a VM.

use std::collections::BTreeMap;

use crds::{
    WorkloadMode,
    v1alpha1::{
        Advertise, GPUNode, GPUStatus, GPUVgpus, ResourceStatus, VgpuFramework, VgpuInstance, VgpuProgress, VgpuState,
        VgpuStatus, VgpuTypeStatus,
    },
};

use super::Host;

/// A driver that makes vGPUs of these types.
#[derive(Clone, Copy, Debug)]
pub struct Maker {
    pub framework: VgpuFramework,
    pub types: &'static [&'static str],
}

pub(super) fn act(host: &mut Host, object: &GPUNode) {
    let Some(maker) = host.maker else { return };
    for gpu in &mut host.gpus {
        if gpu.mode != Some(WorkloadMode::VmVgpu) {
            gpu.vgpu = None;
            continue;
        }
        let types = maker.types.iter().map(|name| VgpuTypeStatus { name: (*name).to_owned(), available: 1 });
        let framework = maker.framework;
        let status = gpu.vgpu.get_or_insert_with(|| VgpuStatus { framework, ..VgpuStatus::default() });
        status.types = types.collect();
        if let Some(layout) = object.spec.vgpu.as_ref() {
            let wanted = layout.gpus.iter().find(|of| of.address == gpu.address);
            bring(status, wanted, &gpu.address);
        }
    }
}

/// Free ones that are too many go, those that are missing come.
fn bring(status: &mut VgpuStatus, wanted: Option<&GPUVgpus>, gpu: &str) {
    let mut missing: BTreeMap<&str, i32> =
        wanted.iter().flat_map(|of| &of.instances).map(|of| (of.kind.as_str(), of.count)).collect();
    status.instances.retain(|instance| {
        let fits = missing.get_mut(instance.kind.as_str()).filter(|count| **count > 0);
        let stays = fits.map(|count| *count -= 1).is_some();
        stays || !instance.holders.is_empty()
    });
    for (kind, count) in missing {
        for number in 0..count {
            let id = match status.framework {
                VgpuFramework::VendorVfio => format!("{}.{}", gpu.trim_end_matches(".0"), status.instances.len() + 1),
                VgpuFramework::Mdev | VgpuFramework::None => format!("{gpu}-{kind}-{number}"),
            };
            status.instances.push(VgpuInstance {
                parent: gpu.to_owned(),
                id,
                kind: kind.to_owned(),
                resource: Some(format!("nvidia.com/NVIDIA_{kind}")),
                holders: Vec::new(),
                vm: None,
            });
        }
    }
}

fn instances(gpus: &[GPUStatus]) -> impl Iterator<Item = &VgpuInstance> {
    gpus.iter().filter_map(|gpu| gpu.vgpu.as_ref()).flat_map(|vgpu| &vgpu.instances)
}

pub(super) fn resources(host: &Host, object: &GPUNode) -> Vec<ResourceStatus> {
    if object.spec.advertise != Advertise::Offered {
        return Vec::new();
    }
    let mut devices: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for instance in instances(&host.gpus) {
        devices.entry(instance.resource.as_deref().unwrap_or_default()).or_default().push(instance.id.clone());
    }
    let of = |(name, devices): (&str, Vec<String>)| ResourceStatus { name: name.to_owned(), devices, registered: true };
    devices.into_iter().map(of).collect()
}

pub(super) fn state(host: &Host, object: &GPUNode) -> Option<VgpuState> {
    let layout = object.spec.vgpu.as_ref()?;
    let wants = |instance: &VgpuInstance| {
        layout.gpus.iter().flat_map(|gpu| &gpu.instances).any(|wanted| wanted.kind == instance.kind)
    };
    let in_the_way = instances(&host.gpus).find(|instance| !wants(instance));
    let (state, message) = match (host.maker, in_the_way) {
        (None, _) => (VgpuProgress::Pending, "the host's driver makes no vGPUs".to_owned()),
        (Some(_), None) => (VgpuProgress::Success, String::new()),
        (Some(_), Some(instance)) => {
            let holder = instance.holders.first().map_or(0, |holder| holder.pid);
            (VgpuProgress::Failed, format!("vGPU {} is in use by pid {holder}: stop that VM", instance.id))
        }
    };
    Some(VgpuState { config: layout.name.clone(), state, message })
}
