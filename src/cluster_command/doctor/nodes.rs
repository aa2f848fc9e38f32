//! What agents say of their hosts. Pure.

use crds::{
    WorkloadMode,
    v1alpha1::{AgentStatus, GPUNode},
};
use kube::ResourceExt;

use super::{
    Finding, Severity, Verdict,
    facts::{Facts, Seen},
};
use crate::cluster_command::report::{Level, report};

type Agents<'a> = Vec<(String, &'a GPUNode, &'a AgentStatus)>;

fn agents(facts: &Facts) -> Seen<Agents<'_>> {
    let fleet = facts.fleet()?;
    let with = |node: &'_ GPUNode| node.status.as_ref().and_then(|status| status.agent.as_ref()).is_some();
    if !fleet.gpu_nodes.iter().any(with) {
        return Err("no agent has reported a GPU".to_owned());
    }
    let of = |node| -> Option<(String, &GPUNode, &AgentStatus)> {
        let node: &GPUNode = node;
        Some((format!("node {}", node.name_any()), node, node.status.as_ref()?.agent.as_ref()?))
    };
    Ok(fleet.gpu_nodes.iter().filter_map(of).collect())
}

/// The mode that is asked for.
fn wanted(node: &GPUNode) -> WorkloadMode {
    let operator = node.status.as_ref().and_then(|status| status.operator.as_ref());
    operator.and_then(|operator| operator.desired).or(node.spec.mode).unwrap_or_default()
}

pub fn iommu(facts: &Facts) -> Verdict {
    let agents = match agents(facts) {
        Ok(agents) => agents,
        Err(why) => return Verdict::skipped(why),
    };
    let off = agents.iter().filter(|(_, _, agent)| !agent.host.iommu);
    let findings = off.map(|(name, node, agent)| {
        let argument = match agent.host.architecture.as_str() {
            "aarch64" => "the SMMU in the firmware",
            _ => "VT-d or AMD-Vi in the firmware, and intel_iommu=on or amd_iommu=on on the kernel's command line",
        };
        let (severity, what) = match wanted(node) {
            WorkloadMode::VmPassthrough => (Severity::Error, "is to hand GPUs to VMs"),
            WorkloadMode::VmVgpu => (Severity::Warning, "is to have vGPUs, which need it on SR-IOV boards"),
            WorkloadMode::Container => (Severity::Advice, "serves containers, and could not hand GPUs to VMs"),
        };
        Finding::new(severity, &**name, format!("its IOMMU is off, and it {what}"), argument)
    });
    Verdict::of(findings.collect(), format!("on, on {} node(s)", agents.len()))
}

/// What stands in the way of modes, and GPUs that can only be had together.
pub fn groups(facts: &Facts) -> Verdict {
    let agents = match agents(facts) {
        Ok(agents) => agents,
        Err(why) => return Verdict::skipped(why),
    };
    let mut findings = Vec::new();
    for (name, node, agent) in &agents {
        let shared = agent.conditions.iter().find(|c| c.type_ == "GroupsSeparate" && c.status == "False");
        if let Some(shared) = shared {
            let fix = "ACS in the firmware, or another slot; as it is, a VM gets them together";
            findings.push(Finding::new(Severity::Warning, &**name, shared.message.clone(), fix));
        }
        for gpu in &agent.gpus {
            let now =
                gpu.obstacles.iter().filter(|obstacle| obstacle.mode == wanted(node) && obstacle.reason != "IommuOff");
            findings.extend(now.map(|obstacle| {
                let fix = format!("what {} means: docs/troubleshooting.md#a-gpu-is-refused", obstacle.reason);
                let seen = format!("{} cannot be in mode {}: {}", gpu.address, obstacle.mode, obstacle.message);
                Finding::new(Severity::Error, &**name, seen, fix)
            }));
        }
    }
    let gpus: usize = agents.iter().map(|(_, _, agent)| agent.gpus.len()).sum();
    Verdict::of(findings, format!("{gpus} GPUs can be had one by one, in the modes asked for"))
}

/// Words of the kernel, of modprobe and of NVIDIA's installer when a module's signature is not trusted.
const UNSIGNED: [&str; 5] =
    ["key was rejected", "required key not available", "lockdown", "secure boot", "module verification failed"];

/// Modules that cannot be loaded: Secure Boot is the usual cause.
pub fn modules(facts: &Facts) -> Verdict {
    let (fleet, agents) = match (facts.fleet(), agents(facts)) {
        (Ok(fleet), Ok(agents)) => (fleet, agents),
        (Err(why), _) | (_, Err(why)) => return Verdict::skipped(why),
    };
    let mut said: Vec<(String, String)> = Vec::new();
    for (name, _, agent) in &agents {
        let refusals = agent.gpus.iter().filter_map(|gpu| gpu.refusal.as_ref());
        let modules = refusals.filter(|refusal| ["ModuleNotLoaded", "NoVfioDriver"].contains(&&*refusal.reason));
        said.extend(modules.map(|refusal| (name.clone(), refusal.message.clone())));
    }
    let config = fleet.config.as_ref().and_then(|config| config.status.as_ref());
    for failing in config.into_iter().flat_map(|status| &status.operands).filter_map(|operand| operand.failing.as_ref())
    {
        let told = failing.message.to_lowercase();
        if UNSIGNED.iter().any(|words| told.contains(words)) {
            said.push((format!("node {}", failing.node), format!("pod {}: {}", failing.pod, failing.message)));
        }
    }
    let findings = said.into_iter().map(|(object, message)| {
        let told = message.to_lowercase();
        let fix = match UNSIGNED.iter().any(|words| told.contains(words)) {
            true => "Secure Boot trusts no key of that module: enrol it (mokutil --import), use precompiled signed drivers (driver.usePrecompiled), or switch Secure Boot off",
            false => "the module of that kernel, and what forbids it in modprobe.d; mokutil --sb-state tells whether Secure Boot is on",
        };
        Finding::new(Severity::Error, object, message, fix)
    });
    Verdict::of(findings.collect(), "no module of a GPU's driver is refused by a kernel (Secure Boot)")
}

pub fn health(facts: &Facts) -> Verdict {
    let agents = match agents(facts) {
        Ok(agents) => agents,
        Err(why) => return Verdict::skipped(why),
    };
    let mut findings = Vec::new();
    for (name, _, agent) in &agents {
        for ailment in agent.gpus.iter().flat_map(|gpu| &gpu.ailments) {
            let severity = match ailment.severity {
                crds::v1alpha1::Severity::Unhealthy => Severity::Error,
                crds::v1alpha1::Severity::Degraded => Severity::Warning,
            };
            let fix = format!("what {} means: docs/troubleshooting.md#health", ailment.reason);
            findings.push(Finding::new(severity, &**name, ailment.message.clone(), fix));
        }
        for error in &agent.errors {
            findings.push(Finding::new(
                Severity::Warning,
                &**name,
                error.clone(),
                "its kernel log; dmesg | grep -i pci",
            ));
        }
    }
    Verdict::of(findings, "nothing is wrong with any GPU")
}

pub fn ready(facts: &Facts) -> Verdict {
    let fleet = match facts.fleet() {
        Ok(fleet) => fleet,
        Err(why) => return Verdict::skipped(why),
    };
    let nodes = report(fleet).nodes;
    let findings = nodes.iter().filter(|node| !node.ready).map(|node| {
        let severity = if node.is_changing() { Severity::Warning } else { Severity::Error };
        let first = node.concerns.first();
        let seen = first.map_or_else(
            || "the operator has not looked at it".to_owned(),
            |concern| format!("{}: {}", concern.reason, concern.message),
        );
        let severity =
            if first.is_some_and(|concern| concern.level == Level::Info) { Severity::Advice } else { severity };
        let fix = format!("kubectl gpuvirt explain node {}", node.name);
        Finding::new(severity, format!("node {}", node.name), seen, fix)
    });
    Verdict::of(findings.collect(), format!("{} GPU node(s) serve their modes", nodes.len()))
}

/// What agents offer against what kubelets have.
pub fn advertised(facts: &Facts) -> Verdict {
    let fleet = match facts.fleet() {
        Ok(fleet) => fleet,
        Err(why) => return Verdict::skipped(why),
    };
    let nodes = report(fleet).nodes;
    let differing = nodes.iter().flat_map(|node| node.offers.iter().map(move |offer| (node, offer)));
    let findings = differing.filter_map(|(node, offer)| {
        let allocatable = offer.allocatable.filter(|allocatable| *allocatable != offer.count)?;
        let seen = format!("{} {} are offered, and {allocatable} are allocatable", offer.count, offer.name);
        // Unhealthy ones are counted in capacity and not in allocatable.
        let unhealthy = i64::try_from(node.gpus.unhealthy).unwrap_or(0);
        (offer.count - allocatable != unhealthy).then(|| {
            let fix = "the kubelet takes some seconds; then its log (journalctl -u kubelet), and other device plugins";
            Finding::new(Severity::Warning, format!("node {}", node.name), seen, fix)
        })
    });
    Verdict::of(findings.collect(), "kubelets have what agents offer")
}
