//! What a node's GPUs are like as a whole, as conditions of its `GPUNode`: True is good.

use crds::{
    WorkloadMode,
    conditions::Verdict,
    v1alpha1::{GPUStatus, Severity},
};
use vfio::{Gpu, Inventory, PciAddress, iommu::Acs};

use super::{device_plugin::States, health::Ailments, offer::leader, translate::Report};

pub fn verdicts(report: &Report<'_>, gpus: &[GPUStatus]) -> Vec<Verdict> {
    let inventory = &report.observation.inventory;
    let mut verdicts = vec![
        iommu(inventory),
        modes(gpus),
        observed(report),
        registered(report.plugins),
        healthy(&report.offered.ailments),
        groups(inventory),
        fabric(inventory, gpus.iter().any(|gpu| gpu.mode == Some(WorkloadMode::VmPassthrough))),
    ];
    verdicts.extend(report.container.verdicts(report.wish));
    verdicts
}

fn iommu(inventory: &Inventory) -> Verdict {
    match inventory.facts.iommu {
        true => Verdict::yes("IommuEnabled", "Enabled", "devices have IOMMU groups"),
        false => Verdict::no(
            "IommuEnabled",
            "IommuOff",
            "no device has an IOMMU group: enable VT-d or AMD-Vi in firmware and boot with intel_iommu=on or amd_iommu=on; until then no GPU can go to a VM",
        ),
    }
}

fn modes(gpus: &[GPUStatus]) -> Verdict {
    let refused: Vec<&str> = gpus.iter().filter_map(|gpu| gpu.refusal.as_ref()).map(|r| r.message.as_str()).collect();
    match refused.is_empty() {
        true => Verdict::yes("ModesReached", "Reached", "every GPU is in the mode asked for, or none is asked for"),
        false => Verdict::no("ModesReached", "Refused", refused.join("; ")),
    }
}

fn observed(report: &Report<'_>) -> Verdict {
    let observation = report.observation;
    let errors = observation.inventory.errors.iter().map(ToString::to_string);
    let errors: Vec<String> = errors.chain(observation.complaints.iter().cloned()).collect();
    match errors.is_empty() {
        true => Verdict::yes("Observed", "Complete", "every PCI function could be read"),
        false => Verdict::no("Observed", "Incomplete", errors.join("; ")),
    }
}

fn registered(plugins: &States) -> Verdict {
    let waiting: Vec<&str> = plugins.values().filter(|s| !s.registered).map(|s| s.message.as_str()).collect();
    match waiting.is_empty() {
        true => Verdict::yes("Registered", "Registered", "the kubelet knows every resource that is offered"),
        false => Verdict::no("Registered", "WaitingForKubelet", waiting.join("; ")),
    }
}

fn healthy(ailments: &Ailments) -> Verdict {
    let of = |severity: Severity| -> Vec<String> {
        let of_it = ailments.values().flatten().filter(|ailment| ailment.severity() == severity);
        of_it.map(ToString::to_string).collect()
    };
    let (unhealthy, degraded) = (of(Severity::Unhealthy), of(Severity::Degraded));
    match (unhealthy.is_empty(), degraded.is_empty()) {
        (false, _) => Verdict::no("GPUsHealthy", "Unhealthy", [unhealthy, degraded].concat().join("; ")),
        (true, false) => Verdict::yes("GPUsHealthy", "Degraded", degraded.join("; ")),
        (true, true) => Verdict::yes("GPUsHealthy", "Healthy", "nothing is wrong with any GPU"),
    }
}

/// GPUs that share a group go to one VM, which can use one of them: the kubelet's unit is a device, and a VM gets as many
/// as it asks for.
fn groups(inventory: &Inventory) -> Verdict {
    let gpus = inventory.gpus();
    let shared = gpus.iter().filter(|gpu| !gpu.shares_group_with.is_empty() && leader(gpu).is_none());
    let shared: Vec<String> = shared.map(|gpu| together(inventory, gpu)).collect();
    match shared.is_empty() {
        true => Verdict::yes("GroupsSeparate", "Separate", "no two GPUs share an IOMMU group"),
        false => Verdict::no("GroupsSeparate", "SharedGroup", shared.join("; ")),
    }
}

fn together(inventory: &Inventory, gpu: &Gpu<'_>) -> String {
    let first = gpu.primary.address;
    let others: Vec<String> = gpu.shares_group_with.iter().map(ToString::to_string).collect();
    let others = others.join(", ");
    let group = gpu.group.map(|group| group.to_string()).unwrap_or_default();
    let (port, step) = match shared_port(inventory, gpu) {
        None => (String::new(), "put them into slots of different root ports".to_owned()),
        Some(port) => {
            let step = match inventory.functions.get(&port).and_then(|function| function.acs) {
                Some(Acs::Off) => format!("enable ACS of {port} in the firmware's setup"),
                Some(Acs::Missing | Acs::On) | None => format!("move all but one to slots that are not behind {port}"),
            };
            (format!(" behind port {port}"), step)
        }
    };
    format!(
        "GPUs {first}, {others} share IOMMU group {group}{port}: they are offered as one, {first}, and whoever gets it leaves {others} idle; to use each, {step}"
    )
}

/// The lowest port that is above all GPUs of the group.
fn shared_port(inventory: &Inventory, gpu: &Gpu<'_>) -> Option<PciAddress> {
    let mut shared = inventory.path(gpu.primary.address);
    for other in &gpu.shares_group_with {
        let path = inventory.path(*other);
        shared.retain(|port| path.contains(port));
    }
    shared.pop()
}

/// Class of `NVSwitch`es, "other bridge".
const NVSWITCH: u32 = 0x0680;

fn fabric(inventory: &Inventory, for_vms: bool) -> Verdict {
    let switches = inventory.functions.values();
    let switches = switches.filter(|f| f.vendor == vfio::function::NVIDIA && f.class >> 8 == NVSWITCH);
    let switches: Vec<String> = switches.map(|function| function.address.to_string()).collect();
    match (switches.is_empty(), for_vms) {
        (true, _) => Verdict::yes("FabricReady", "NoNVSwitch", "the GPUs are joined by no NVSwitch"),
        (false, false) => Verdict::yes("FabricReady", "OnHost", "the NVSwitches serve the host, where every GPU is"),
        // Which GPUs may talk to each other is up to the fabric manager, which has to be told for each VM's set of them.
        (false, true) => Verdict::no(
            "FabricReady",
            "PartitionsUnmanaged",
            format!(
                "the GPUs are joined by NVSwitches ({}), and gpuvirt activates no partition of them for a VM: nvidia-smi in the guest lists its GPUs, and CUDA fails with error 802 (system not yet initialized) until the host's fabric manager, in shared NVSwitch mode, has activated the partition of exactly these GPUs; a VM with one GPU runs without, if its guest loads the driver with NVreg_NvLinkDisable=1",
                switches.join(", ")
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use vfio::{observe, testing::Machine};

    use super::{super::health::Ailment, *};

    #[test]
    fn gpus_that_share_a_group_are_named_with_their_port_and_what_to_do() {
        let verdict = groups(&observe(&Machine::described("twins")));
        assert_eq!((verdict.holds, verdict.reason), (false, "SharedGroup"));
        for part in ["0000:03:00.0", "0000:04:00.0", "group 7", "0000:02:00.0"] {
            assert!(verdict.message.contains(part), "{part}: {}", verdict.message);
        }
        assert!(groups(&observe(&Machine::described("eight-t4"))).holds);
    }

    #[test]
    fn a_machine_with_nvswitches_says_what_a_guest_will_see() {
        let inventory = observe(&Machine::described("eight-h200"));
        assert!(fabric(&inventory, false).holds, "containers have the host's fabric");
        let verdict = fabric(&inventory, true);
        assert_eq!((verdict.holds, verdict.reason), (false, "PartitionsUnmanaged"));
        assert!(verdict.message.contains("0000:05:00.0") && verdict.message.contains("802"), "{}", verdict.message);
        assert!(fabric(&observe(&Machine::described("eight-t4")), true).holds);
    }

    #[test]
    fn a_degraded_gpu_is_reported_and_leaves_the_node_healthy() {
        let gpu: PciAddress = "0000:18:00.0".parse().unwrap();
        assert_eq!(healthy(&Ailments::new()).reason, "Healthy");
        let degraded = healthy(&[(gpu, vec![Ailment::Asleep { gpu }])].into());
        assert_eq!((degraded.holds, degraded.reason), (true, "Degraded"));
        let worse = healthy(&[(gpu, vec![Ailment::Asleep { gpu }, Ailment::FellOff { gpu }])].into());
        assert_eq!((worse.holds, worse.reason), (false, "Unhealthy"));
        assert!(worse.message.starts_with("GPU 0000:18:00.0 reads as all ones"), "{}", worse.message);
    }
}
