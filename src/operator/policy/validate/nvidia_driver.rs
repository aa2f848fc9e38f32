//! Drivers that `NVIDIADriver` objects ask for, in place of the policy's own section.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    v1::{self, ClusterPolicySpec},
    v1alpha1::{DriverType, NVIDIADriver, NVIDIADriverSpec},
};
use k8s_openapi::api::core::v1::{NodeAffinity, PodSecurityContext, Toleration};
use kube::ResourceExt;

use super::{
    Driver, Drivers, Facts, GPUNodeFacts, NVIDIADrivers, Problem, Wish, driver, given,
    pools::{self, Pool},
};
use crate::operator::{
    host::kernel_in_name,
    owner::{Claim, Owner, owner, present},
};

/// What an `NVIDIADriver` says of its pods beyond the driver itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub owner: String,
    pub kind: DriverType,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// Beside that of GPU nodes.
    pub tolerations: Vec<Toleration>,
    pub priority_class: Option<String>,
    pub pod_security_context: Option<PodSecurityContext>,
    pub node_affinity: Option<NodeAffinity>,
}

/// What comes of one `NVIDIADriver`.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    pub name: String,
    /// Names of its `DaemonSets`.
    pub sets: Vec<String>,
    pub problem: Option<Problem>,
}

pub(super) fn drivers(facts: &Facts, problems: &mut Vec<Problem>) -> (Drivers<Driver>, Vec<Asked>) {
    let Some(found) = &facts.nvidia_drivers else {
        let kept = facts.live.iter().filter(|(_, live)| live.owner.is_some()).map(|(name, _)| name.clone()).collect();
        return (Drivers { wish: Wish::Unknown, kept }, Vec::new());
    };
    let claims = found.claims();
    let (mut wanted, mut asked) = (Vec::new(), Vec::new());
    for object in found.all.iter().filter(|object| object.metadata.deletion_timestamp.is_none()) {
        let name = object.name_any();
        let nodes = facts.nodes.iter().filter(|node| present(&node.labels, &claims) == Some(&name));
        let built = of_object(object, nodes, facts);
        let mut problem = contested(&name, &claims, facts);
        let mut sets = Vec::new();
        match built {
            Ok(drivers) => {
                sets.extend(drivers.iter().map(|driver| driver.pool.set.clone()));
                wanted.extend(drivers);
            }
            Err(error) => problem = Some(error),
        }
        problems.extend(problem.iter().map(|problem| Problem {
            reason: problem.reason,
            message: format!("NVIDIADriver {name}: {}", problem.message),
        }));
        asked.push(Asked { name, sets, problem });
    }
    let kept = kept(&asked, &wanted, found, facts);
    (Drivers { wish: Wish::Wanted(Box::new(wanted)), kept }, asked)
}

/// Removal needs proof: a set whose object cannot be followed stays, and so does one that a node still wants.
fn kept(asked: &[Asked], wanted: &[Driver], found: &NVIDIADrivers, facts: &Facts) -> Vec<String> {
    let names: BTreeSet<&String> = wanted.iter().map(|driver| &driver.pool.set).collect();
    let stays = |name: &String, live: &pools::LiveSet| {
        let Some(owner) = &live.owner else { return false };
        if names.contains(name) {
            return false;
        }
        let of = asked.iter().find(|asked| asked.name == *owner);
        found.undecodable.contains(owner)
            || of.is_some_and(|asked| live.wanted || (asked.problem.is_some() && asked.sets.is_empty()))
    };
    facts.live.iter().filter(|(name, live)| stays(name, live)).map(|(name, _)| name.clone()).collect()
}

/// Nodes that somebody else selects as well.
fn contested(name: &str, claims: &[Claim], facts: &Facts) -> Option<Problem> {
    let mut nodes = Vec::new();
    let mut others = BTreeSet::new();
    for node in &facts.nodes {
        if let Owner::Contested(all) = owner(&node.labels, claims)
            && all.contains(&name)
        {
            nodes.push(node.name.as_str());
            others.extend(all.into_iter().filter(|other| *other != name));
        }
    }
    (!nodes.is_empty()).then(|| Problem {
        reason: "ConflictingNodeSelector",
        message: format!(
            "node(s) {} are selected by NVIDIADriver {} too, and each keeps the driver that it has: let no two nodeSelectors match one node, and no two objects be the default",
            nodes.join(", "),
            others.into_iter().collect::<Vec<_>>().join(", ")
        ),
    })
}

fn of_object<'a>(
    object: &NVIDIADriver,
    nodes: impl Iterator<Item = &'a GPUNodeFacts>,
    facts: &Facts,
) -> Result<Vec<Driver>, Problem> {
    let spec = as_policy(&object.spec);
    // As the object names its fields.
    let renamed = |problem: Problem| Problem { message: problem.message.replace("spec.driver", "spec"), ..problem };
    driver::check(&spec, facts).map_err(renamed)?;
    let precompiled = object.spec.use_precompiled.unwrap_or(false);
    let pools: BTreeSet<Pool> = nodes
        .filter(|node| !precompiled || !node.host.kernel.is_empty())
        .map(|node| pool(object, node, precompiled))
        .collect();
    let of_pool = |pool: Pool| {
        let driver = driver::of_pool(&spec, pool, facts).map_err(renamed)?;
        Ok(Driver { placement: Some(placement(object)), ..driver })
    };
    pools.into_iter().map(of_pool).collect()
}

/// Named as the peer names them: by type and pool, and told apart by a hash.
fn pool(object: &NVIDIADriver, node: &GPUNodeFacts, precompiled: bool) -> Pool {
    let base = match object.spec.driver_type {
        DriverType::Gpu => "nvidia-gpu-driver",
        DriverType::Vgpu => "nvidia-vgpu-driver",
        DriverType::VgpuHostManager => "nvidia-vgpu-manager",
    };
    let os = node.host.tag();
    let kernel = precompiled.then(|| node.host.kernel.clone());
    let named = match &kernel {
        Some(kernel) => format!("{base}-{os}-{}", kernel_in_name(kernel)),
        None => format!("{base}-{os}"),
    };
    let whole = format!("{} {named} {}", object.uid().unwrap_or_default(), kernel.as_deref().unwrap_or_default());
    let short: String = named.chars().take(54).collect();
    Pool { set: format!("{}-{:08x}", short.trim_end_matches(['-', '.']), fnv1a(whole.as_bytes())), os, kernel }
}

/// FNV-1a, 32 bit: the same in every build.
pub fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

fn placement(object: &NVIDIADriver) -> Placement {
    let spec = &object.spec;
    Placement {
        owner: object.name_any(),
        kind: spec.driver_type,
        labels: spec.labels.clone(),
        annotations: spec.annotations.clone(),
        tolerations: spec.tolerations.clone(),
        priority_class: given(spec.priority_class_name.as_deref()).map(str::to_owned),
        pod_security_context: spec.pod_security_context.clone(),
        node_affinity: spec.node_affinity.clone(),
    }
}

/// The same wishes in the words of a policy, which are judged in one place.
fn as_policy(spec: &NVIDIADriverSpec) -> ClusterPolicySpec {
    let licensing = &spec.licensing_config;
    ClusterPolicySpec {
        driver: v1::Driver {
            component: v1::Component { enabled: Some(true), container: spec.container.clone() },
            kernel_module_type: spec.kernel_module_type,
            use_open_kernel_modules: spec.use_open_kernel_modules,
            use_precompiled: spec.use_precompiled,
            gpu_direct_rdma: spec.rdma.clone(),
            startup_probe: spec.startup_probe.clone(),
            liveness_probe: spec.liveness_probe.clone(),
            readiness_probe: spec.readiness_probe.clone(),
            repo_config: v1::RepoConfig { config_map_name: spec.repo_config.name.clone() },
            cert_config: spec.cert_config.clone(),
            licensing_config: v1::LicensingConfig {
                config_map_name: licensing.name.clone(),
                secret_name: licensing.secret_name.clone(),
                nls_enabled: licensing.nls_enabled,
            },
            virtual_topology: v1::VirtualTopology { config: spec.virtual_topology_config.name.clone() },
            kernel_module_config: spec.kernel_module_config.clone(),
            secret_env: spec.secret_env.clone(),
            ..v1::Driver::default()
        },
        gds: spec.gds.clone(),
        gdrcopy: spec.gdrcopy.clone(),
        ..ClusterPolicySpec::default()
    }
}
