//! KubeVirt's version and configuration. Pure.
//!
//! Fields as of KubeVirt 1.6 to 1.9 (`staging/src/kubevirt.io/api/core/v1/types.go`).

use crds::WorkloadMode;
use k8s_openapi::api::core::v1::Node;
use kube::{ResourceExt, api::DynamicObject};
use serde_json::Value;

use super::{Finding, Severity, Verdict, facts::Facts};
use crate::operator::kubevirt::{Dialect, Permitted};

const OLDEST: (u32, u32) = (1, 6);

/// The object, its version, and a name for it; else the verdict of a check that has nothing to look at.
fn object(facts: &Facts) -> Result<(&DynamicObject, String), Verdict> {
    match &facts.kubevirt {
        Ok(Some(object)) => {
            Ok((object, format!("KubeVirt {}/{}", object.namespace().unwrap_or_default(), object.name_any())))
        }
        Ok(None) => Err(Verdict::skipped("there is no KubeVirt: GPUs are for containers only")),
        Err(why) => Err(Verdict::skipped(why)),
    }
}

/// Where the configuration is to be changed: HyperConverged puts back what others write into KubeVirt.
fn keeper(facts: &Facts, kubevirt: &str) -> String {
    match &facts.hyperconverged {
        Ok(Some((_, object))) => {
            format!("HyperConverged {}/{}", object.namespace().unwrap_or_default(), object.name_any())
        }
        Ok(None) | Err(_) => kubevirt.to_owned(),
    }
}

fn parsed(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

pub fn version(facts: &Facts) -> Verdict {
    let (object, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let text = |at: &str| object.data.pointer(at).and_then(Value::as_str).unwrap_or_default();
    let (version, phase) = (text("/status/observedKubeVirtVersion"), text("/status/phase"));
    let mut findings = Vec::new();
    if parsed(version).is_some_and(|found| found < OLDEST) {
        let fix = format!("upgrade it to {}.{} or newer", OLDEST.0, OLDEST.1);
        findings.push(Finding::new(Severity::Error, &*name, format!("version {version}"), fix));
    }
    let vgpus = facts.fleet().is_ok_and(|fleet| {
        let agents = fleet.gpu_nodes.iter().filter_map(|node| node.status.as_ref()?.agent.as_ref());
        let of = agents.flat_map(|agent| &agent.gpus).filter_map(|gpu| gpu.vgpu.as_ref());
        of.into_iter()
            .any(|vgpu| vgpu.framework == crds::v1alpha1::VgpuFramework::VendorVfio && !vgpu.instances.is_empty())
    });
    if vgpus && parsed(version).is_some_and(|found| found < (1, 9)) {
        let seen = format!("version {version} was not made for vGPUs that are virtual functions, and nodes have some");
        findings.push(Finding::new(Severity::Warning, &*name, seen, "upgrade it to 1.9 or newer"));
    }
    if !phase.is_empty() && phase != "Deployed" {
        let fix = format!("kubectl describe kubevirt -n {}", object.namespace().unwrap_or_default());
        findings.push(Finding::new(Severity::Warning, &*name, format!("it is {phase}"), fix));
    }
    let version = if version.is_empty() { "of unknown version" } else { version };
    Verdict::of(findings, format!("{version}, {}", if phase.is_empty() { "phase unknown" } else { phase }))
}

/// Entries for NVIDIA's devices that KubeVirt's own device plugin would serve.
pub fn permitted(facts: &Facts) -> Verdict {
    let (object, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let (dialect, object) = match &facts.hyperconverged {
        Ok(Some((dialect, object))) => (*dialect, object),
        Ok(None) | Err(_) => (Dialect::KubeVirt, object),
    };
    let keeper = keeper(facts, &name);
    let permitted = match Permitted::read(dialect, object) {
        Ok(permitted) => permitted,
        Err(error) => {
            let fix = format!("correct it: kubectl edit {}", dialect.gvk().kind.to_lowercase());
            return Verdict::one(Finding::new(Severity::Error, keeper, error.to_string(), fix));
        }
    };
    let ours =
        |entry: &&crate::operator::kubevirt::Entry| entry.device.to_string().starts_with("10DE:") && !entry.external;
    let mut findings: Vec<Finding> = permitted
        .entries
        .iter()
        .filter(ours)
        .map(|entry| {
            let seen = format!(
                "{} is permitted without externalResourceProvider: KubeVirt's own device plugin registers it as well, and the last to register wins",
                entry.device
            );
            Finding::new(Severity::Error, &*keeper, seen, "add externalResourceProvider: true to that entry")
        })
        .collect();
    let wired = facts.fleet().ok().and_then(|fleet| {
        let conditions = &fleet.policy()?.status.as_ref()?.conditions;
        conditions.iter().find(|condition| condition.type_ == crate::operator::kubevirt::WIRED).cloned()
    });
    if let Some(wired) = &wired
        && wired.status == "False"
    {
        let fix = format!("what {} means: docs/troubleshooting.md#kubevirt", wired.reason);
        findings.push(Finding::new(Severity::Error, &*keeper, format!("{}: {}", wired.reason, wired.message), fix));
    }
    let seen = match (&wired, permitted.unset) {
        (Some(wired), _) => wired.message.clone(),
        (None, true) => format!("{keeper} permits every device"),
        (None, false) => format!("{keeper} has {} entries, none in the way", permitted.entries.len()),
    };
    Verdict::of(findings, seen)
}

/// KubeVirt removes mediated devices that it does not know.
pub fn mediated(facts: &Facts) -> Verdict {
    let (_, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let at = |path: &str| facts.configuration().and_then(|configuration| configuration.pointer(path));
    let lists = ["mediatedDeviceTypes", "mediatedDevicesTypes", "nodeMediatedDeviceTypes"];
    let asked = lists.into_iter().find(|list| {
        let types = at(&format!("/mediatedDevicesConfiguration/{list}")).and_then(Value::as_array);
        types.is_some_and(|types| !types.is_empty())
    });
    let off = at("/mediatedDevicesConfiguration/enabled").and_then(Value::as_bool) == Some(false)
        || gates_of(facts).iter().any(|gate| gate == "DisableMDEVConfiguration");
    let nodes = facts.fleet().map_or(0, |fleet| {
        let wants = |node: &&crds::v1alpha1::GPUNode| node.spec.mode == Some(WorkloadMode::VmVgpu);
        fleet.gpu_nodes.iter().filter(wants).count()
    });
    match asked {
        Some(list) if !off => Verdict::one(Finding::new(
            if nodes > 0 { Severity::Error } else { Severity::Warning },
            keeper(facts, &name),
            format!(
                "mediatedDevicesConfiguration.{list} makes KubeVirt itself cut GPUs into vGPUs, and remove those of others; {nodes} node(s) of gpuvirt are in mode vm-vgpu"
            ),
            "choose layouts by the label nvidia.com/vgpu.config instead, and remove that list",
        )),
        Some(_) | None if off => Verdict::passed("KubeVirt makes no mediated devices"),
        Some(_) | None => Verdict::passed("KubeVirt is not asked for mediated devices"),
    }
}

fn gates_of(facts: &Facts) -> Vec<String> {
    let gates = facts.configuration().and_then(|c| c.pointer("/developerConfiguration/featureGates"));
    let names = gates.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    names.map(str::to_owned).collect()
}

/// `gpus` of a VM need no gate since 1.6, `hostDevices` do.
pub fn gates(facts: &Facts) -> Verdict {
    let (_, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let gates = gates_of(facts);
    if gates.iter().any(|gate| gate == "HostDevices") {
        return Verdict::passed("HostDevices is on: VMs may have GPUs as gpus and as hostDevices");
    }
    Verdict::one(Finding::new(
        Severity::Advice,
        keeper(facts, &name),
        "the gate HostDevices is off: VMs have GPUs by spec.domain.devices.gpus, and not by hostDevices",
        "ask for GPUs under gpus; or add HostDevices to developerConfiguration.featureGates",
    ))
}

/// A VM with a passthrough GPU cannot migrate, and a drain waits for it without end.
pub fn eviction(facts: &Facts) -> Verdict {
    let (_, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let default = facts.configuration().and_then(|c| c.pointer("/evictionStrategy")).and_then(Value::as_str);
    let mut findings = Vec::new();
    if default == Some("LiveMigrate") {
        findings.push(Finding::new(
            Severity::Warning,
            keeper(facts, &name),
            "evictionStrategy is LiveMigrate for every VM that has none of its own, and VMs with passthrough GPUs cannot migrate: kubectl drain waits for them without end",
            "evictionStrategy: LiveMigrateIfPossible, there or in each VM with a GPU",
        ));
    }
    for node in facts.fleet().into_iter().flat_map(|fleet| &fleet.gpu_nodes) {
        let conditions = node.status.as_ref().and_then(|status| status.operator.as_ref()).map(|o| &o.conditions);
        let blocked = conditions.into_iter().flatten().find(|c| c.type_ == "VMsDrainable" && c.status == "False");
        if let Some(blocked) = blocked {
            let fix = "evictionStrategy: LiveMigrateIfPossible or None in those VMs, or stop them before a drain";
            let object = format!("node {}", node.name_any());
            findings.push(Finding::new(Severity::Warning, object, blocked.message.clone(), fix));
        }
    }
    Verdict::of(findings, format!("{}; no VM with a GPU keeps a drain waiting", default.unwrap_or("no default")))
}

/// The kernel pins all memory of a VM with a device: it cannot be overcommitted.
pub fn memory(facts: &Facts) -> Verdict {
    let (object, name) = match object(facts) {
        Ok(found) => found,
        Err(verdict) => return verdict,
    };
    let at = |path: &str| facts.configuration().and_then(|configuration| configuration.pointer(path));
    let mut findings = Vec::new();
    let overcommit = at("/developerConfiguration/memoryOvercommit").and_then(Value::as_i64).unwrap_or(100);
    if overcommit > 100 {
        findings.push(Finding::new(
            Severity::Warning,
            keeper(facts, &name),
            format!(
                "memoryOvercommit is {overcommit}: VFIO pins all memory of a VM with a GPU, and nodes can run out of it"
            ),
            "in VMs with GPUs set resources.requests.memory to the guest's memory, or memoryOvercommit: 100",
        ));
    }
    let version = object.data.pointer("/status/observedKubeVirtVersion").and_then(Value::as_str).unwrap_or_default();
    if parsed(version).is_some_and(|found| found < (1, 8)) {
        findings.push(Finding::new(
            Severity::Advice,
            &*name,
            format!("{version} reckons 1 GiB for VFIO whatever the number of GPUs: big VMs with several may fail with VFIO_MAP_DMA: Cannot allocate memory (memlock)"),
            "KubeVirt 1.8 or newer, or additionalGuestMemoryOverheadRatio above 1 for such VMs",
        ));
    }
    if let (Ok(fleet), Ok(nodes)) = (facts.fleet(), &facts.nodes) {
        let bare: Vec<String> = fleet
            .gpu_nodes
            .iter()
            .filter(|node| node.spec.mode.is_some_and(|mode| mode != WorkloadMode::Container))
            .map(ResourceExt::name_any)
            .filter(|name| nodes.iter().find(|node| node.name_any() == *name).is_some_and(|node| !has_hugepages(node)))
            .collect();
        if !bare.is_empty() {
            findings.push(Finding::new(
                Severity::Advice,
                format!("node {}", bare.join(", ")),
                "no 1 GiB hugepages: a VM with a GPU has all its memory pinned when it starts, in 4 KiB pages, which takes long for big VMs",
                "default_hugepagesz=1G hugepages=N on the kernel's command line, and memory.hugepages.pageSize: 1Gi in the VM",
            ));
        }
    }
    Verdict::of(findings, "not overcommitted")
}

fn has_hugepages(node: &Node) -> bool {
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    allocatable.is_some_and(|all| all.get("hugepages-1Gi").is_some_and(|amount| amount.0 != "0"))
}
