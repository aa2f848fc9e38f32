//! vGPUs that a node does not have, and could. Pure.

use crds::{
    WorkloadMode, labels,
    v1alpha1::{GPUNode, VgpuProgress},
};
use kube::ResourceExt;

use super::supply::{Standing, agent, mode};
use crate::operator::vgpu::{VgpuType, makes};

/// The vGPU type of a resource: `A10-4Q` of `nvidia.com/NVIDIA_A10-4Q`.
pub fn kind(resource: &str) -> Option<VgpuType> {
    resource.strip_prefix("nvidia.com/")?.rsplit('_').next()?.parse().ok()
}

/// Whether any node could have vGPUs of this name.
pub fn is_known(nodes: &[GPUNode], resource: &str) -> bool {
    nodes.iter().any(|node| could_have(node, resource).is_some())
}

/// Why a node that could have vGPUs of this name has none; `None`: it could not, or it is not known.
pub fn could_have(node: &GPUNode, resource: &str) -> Option<Standing> {
    let kind = kind(resource)?;
    let kind = kind.as_str();
    let agent = agent(node)?;
    let name = node.name_any();
    if mode(node) != Some(WorkloadMode::VmVgpu) {
        agent.gpus.iter().find(|gpu| makes(gpu, kind))?;
        return Some(Standing::OtherMode(format!(
            "{name} has a GPU for it in mode {}: kubectl label --overwrite node {name} {}={} {}={kind}",
            mode(node).map_or("none", WorkloadMode::as_str),
            labels::WORKLOAD_CONFIG,
            WorkloadMode::VmVgpu,
            labels::VGPU_CONFIG,
        )));
    }
    let layout = node.spec.vgpu.as_ref();
    let wanted = layout.filter(|layout| layout.gpus.iter().any(|gpu| gpu.instances.iter().any(|i| i.kind == kind)));
    if let Some(layout) = wanted {
        let state = agent.vgpu.as_ref().filter(|state| state.config == layout.name);
        let message = state.map_or("", |state| state.message.as_str());
        let layout = &layout.name;
        return Some(match state.map(|state| state.state) {
            Some(VgpuProgress::Failed) => {
                Standing::LayoutFailed(format!("{name}: vGPU layout {layout} failed: {message}"))
            }
            Some(VgpuProgress::Pending | VgpuProgress::Success) | None => {
                Standing::InTransition(format!("{name} is making vGPU layout {layout}: {message}"))
            }
        });
    }
    let lists = |gpu: &&crds::v1alpha1::GPUStatus| {
        let listed = gpu.vgpu.iter().flat_map(|vgpu| &vgpu.types).any(|listed| listed.name == kind);
        listed || makes(gpu, kind)
    };
    let gpu = agent.gpus.iter().find(lists)?;
    let now = layout.map_or("none", |layout| layout.name.as_str());
    Some(Standing::OtherLayout(format!(
        "{name} has vGPU layout {now}, and GPU {} could have it: kubectl label --overwrite node {name} {}=LAYOUT, with a layout that has {kind}",
        gpu.address,
        labels::VGPU_CONFIG,
    )))
}
