//! Where vGPU layouts are.

use crds::v1::ClusterPolicySpec;

use super::{Facts, Problem, Wish, given, stack::has_key};
use crate::operator::vgpu::{KEY, LayoutSource, USUAL};

/// `None`: the user has said that vGPUs are not ours to make.
pub(super) fn source(spec: &ClusterPolicySpec) -> Option<LayoutSource> {
    let manager = &spec.vgpu_device_manager;
    let wanted = spec.sandbox_workloads.is_enabled() && manager.component.is_enabled(true);
    wanted.then(|| LayoutSource {
        config_map: given(manager.config.name.as_deref()).map(str::to_owned),
        default: given(Some(&manager.config.default)).unwrap_or(USUAL).to_owned(),
    })
}

/// A ConfigMap that is missing is a problem of the policy; what is wrong in it is told on the nodes that it concerns.
pub(super) fn layouts(spec: &ClusterPolicySpec, facts: &Facts, problems: &mut Vec<Problem>) -> Wish<LayoutSource> {
    let Some(source) = source(spec) else { return Wish::NotWanted };
    let missing = source.config_map.as_deref().map(|name| has_key("vgpuDeviceManager.config.name", name, KEY, facts));
    problems.extend(missing.and_then(Result::err));
    Wish::Wanted(Box::new(source))
}
