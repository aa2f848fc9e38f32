//! Operands of nodes whose GPUs go to virtual machines, beside the agent.

use crds::v1::{CcMode, ClusterPolicySpec, SandboxMode};

use super::{
    Drivers, Facts, Problem, Wish, container,
    container::Container,
    driver::{Files, kernel_modules},
    pools::{self, Pool},
    stack::wish,
};

/// Name of the vGPU host driver's first `DaemonSet`, and what those of further pools begin with.
pub const VGPU_MANAGER: &str = "nvidia-vgpu-manager-daemonset";

#[derive(Clone, Debug, PartialEq)]
pub struct Sandboxed {
    pub vgpu_managers: Drivers<VgpuManager>,
    /// Offers to Kata containers what the agent has bound.
    pub kata_plugin: Wish<Container>,
    pub cc_manager: Wish<CcManager>,
}

/// The host driver that slices GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct VgpuManager {
    pub pool: Pool,
    pub container: Container,
    pub files: Vec<Files>,
}

/// Switches confidential computing of GPUs on and off.
#[derive(Clone, Debug, PartialEq)]
pub struct CcManager {
    pub container: Container,
    pub default_mode: Option<&'static str>,
}

pub(super) fn sandboxed(spec: &ClusterPolicySpec, facts: &Facts, problems: &mut Vec<Problem>) -> Sandboxed {
    let sandbox = spec.sandbox_workloads.is_enabled();
    let kata = sandbox && spec.sandbox_workloads.mode == SandboxMode::Kata;
    let plugin = kata && spec.kata_sandbox_device_plugin.is_enabled(true);
    let cc_manager = kata && spec.cc_manager.component.is_enabled(false);
    Sandboxed {
        vgpu_managers: vgpu_managers(spec, sandbox, facts, problems),
        kata_plugin: wish(plugin, problems, || {
            let given = &spec.kata_sandbox_device_plugin.container;
            container::container("kataSandboxDevicePlugin", given, None, facts).map(Some)
        }),
        cc_manager: wish(cc_manager, problems, || {
            let container = container::container("ccManager", &spec.cc_manager.component.container, None, facts)?;
            let default_mode = spec.cc_manager.default_mode.map(|mode| match mode {
                CcMode::On => "on",
                CcMode::Off => "off",
                CcMode::Devtools => "devtools",
            });
            Ok(Some(CcManager { container, default_mode }))
        }),
    }
}

fn vgpu_managers(
    spec: &ClusterPolicySpec,
    sandbox: bool,
    facts: &Facts,
    problems: &mut Vec<Problem>,
) -> Drivers<VgpuManager> {
    let manager = &spec.vgpu_manager;
    if !sandbox || !manager.component.is_enabled(false) || spec.driver.use_nvidia_driver_crd.unwrap_or(false) {
        return Drivers { wish: Wish::NotWanted, kept: Vec::new() };
    }
    let of_pool = |pool: Pool| -> Result<VgpuManager, Problem> {
        let given = &manager.component.container;
        let name = manager.kernel_module_config.name.as_deref();
        Ok(VgpuManager {
            container: container::container("vgpuManager", given, Some(&pool.suffix()), facts)?,
            files: kernel_modules("vgpuManager.kernelModuleConfig.name", name, facts)?.into_iter().collect(),
            pool,
        })
    };
    let wanted = || {
        // Judged also while there is no node to run it on.
        container::container("vgpuManager", &manager.component.container, None, facts)?;
        let toolkit = spec.operator.use_ocp_driver_toolkit.unwrap_or(false);
        pools::for_building(VGPU_MANAGER, toolkit, facts)?.into_iter().map(of_pool).collect()
    };
    Drivers::of(VGPU_MANAGER, wanted(), |manager| &manager.pool, facts, problems)
}
