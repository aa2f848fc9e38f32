//! What may be handed out, under which name, and what is counted and withheld. Pure.

use std::path::PathBuf;

use crds::{
    WorkloadMode,
    v1alpha1::{Advertise, AgentFunction},
};
use vfio::{Function, Gpu, Inventory};

use super::{
    device_plugin::{Device, Health, Offer, ResourceName, names},
    translate::shown,
    vfio_manager::Observation,
    wish::Wish,
};

/// GPUs that are asked to be in passthrough, and are.
pub fn offer(wish: &Wish, observation: &Observation) -> Offer {
    let mut offer = Offer::new();
    if wish.spec.advertise == Advertise::Withdrawn || !wish.has(AgentFunction::SandboxDevicePlugin) {
        return offer;
    }
    for gpu in observation.inventory.gpus() {
        let asked = wish.mode(gpu.primary.address) == Some(WorkloadMode::VmPassthrough);
        if !asked || shown(&observation.inventory, &gpu) != Some(WorkloadMode::VmPassthrough) {
            continue;
        }
        match resource_name(wish, gpu.primary) {
            Ok(name) => {
                let withheld = withheld(&gpu, &name, observation);
                offer.entry(name).or_default().push(device(&observation.inventory, &gpu, withheld.as_deref()));
            }
            Err(error) => tracing::warn!(gpu = %gpu.primary.address, %error, "GPU is not offered"),
        }
    }
    offer
}

/// The user's name for the device id, or the one that NVIDIA's rule makes.
pub fn resource_name(wish: &Wish, primary: &Function) -> Result<ResourceName, names::Error> {
    let id = format!("{:04x}:{:04x}", primary.vendor, primary.device);
    match wish.spec.aliases.iter().find(|alias| alias.selector == id) {
        Some(alias) => alias.name.parse(),
        None => names::resource_name(primary.vendor, primary.device),
    }
}

/// Why a GPU that is in its mode must not be given to a pod: somebody has it who did not get it under this name.
pub fn withheld(gpu: &Gpu<'_>, name: &ResourceName, observation: &Observation) -> Option<String> {
    let address = gpu.primary.address;
    let mut given = observation.allocations.get(&address.to_string()).into_iter().flatten();
    if let Some(other) = given.clone().find(|allocation| allocation.resource != name.as_str()) {
        return Some(format!("pod {} has it as {}: not given out as {name} until it ends", other.pod, other.resource));
    }
    let opened = observation.holders.get(&address).into_iter().flatten().find(|holder| holder.pid > 0);
    match (opened, given.next()) {
        (Some(holder), None) => {
            Some(format!("{holder}, which the kubelet did not give it to: not given out until it ends"))
        }
        (Some(_) | None, _) => None,
    }
}

fn device(inventory: &Inventory, gpu: &Gpu<'_>, withheld: Option<&str>) -> Device {
    let members = std::iter::once(gpu.primary).chain(gpu.companions.iter().copied());
    let mut nodes: Vec<PathBuf> =
        gpu.group.map(|group| PathBuf::from(format!("/dev/vfio/{group}"))).into_iter().collect();
    nodes.extend(
        members.filter_map(|f| f.vfio_dev.as_ref()).map(|name| PathBuf::from(format!("/dev/vfio/devices/{name}"))),
    );
    Device {
        id: gpu.primary.address.to_string(),
        health: if withheld.is_some() { Health::Unhealthy } else { Health::Healthy },
        numa_node: gpu.primary.numa_node,
        nodes,
        group: gpu.group,
        path: inventory.path(gpu.primary.address).iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUNodeSpec, ResourceAlias};
    use vfio::{Holder, PciAddress, observe, testing::Machine};

    use super::{super::pod_resources::Allocation, *};

    const T4: &str = "nvidia.com/TU104GL_TESLA_T4";

    /// Eight T4 on vfio-pci, asked to be there.
    fn world() -> (Wish, Observation, PciAddress) {
        let machine = Machine::described("eight-t4");
        let inventory = observe(&machine);
        let first = inventory.gpus()[0].primary.address;
        let spec = GPUNodeSpec {
            mode: Some(WorkloadMode::VmPassthrough),
            advertise: Advertise::Offered,
            ..GPUNodeSpec::default()
        };
        (Wish { spec }, Observation { inventory, ..Observation::default() }, first)
    }

    fn qemu() -> Holder {
        Holder { pid: 4711, command: "qemu".to_owned(), path: PathBuf::from("/dev/vfio/1"), pod: None }
    }

    fn allocation(resource: &str) -> Allocation {
        Allocation { pod: "vms/a".to_owned(), resource: resource.to_owned() }
    }

    fn healthy(offer: &Offer) -> usize {
        offer.values().flatten().filter(|device| device.health == Health::Healthy).count()
    }

    #[test]
    fn all_are_offered_under_one_name() {
        let (wish, observation, _) = world();
        let offer = offer(&wish, &observation);
        assert_eq!(offer.keys().map(ResourceName::as_str).collect::<Vec<_>>(), [T4]);
        assert_eq!(healthy(&offer), 8);
    }

    #[test]
    fn what_is_withdrawn_or_switched_off_is_not_offered() {
        let (mut wish, observation, _) = world();
        wish.spec.disabled = vec![AgentFunction::SandboxDevicePlugin];
        assert!(offer(&wish, &observation).is_empty());
        wish.spec.disabled.clear();
        wish.spec.advertise = Advertise::Withdrawn;
        assert!(offer(&wish, &observation).is_empty());
    }

    #[test]
    fn a_vm_that_got_its_gpu_from_the_kubelet_keeps_it_healthy() {
        let (wish, mut observation, gpu) = world();
        observation.holders.insert(gpu, vec![qemu()]);
        observation.allocations.insert(gpu.to_string(), vec![allocation(T4)]);
        assert_eq!(healthy(&offer(&wish, &observation)), 8);
    }

    #[test]
    fn a_gpu_that_somebody_opened_without_the_kubelet_is_counted_and_not_given_out() {
        let (wish, mut observation, gpu) = world();
        observation.holders.insert(gpu, vec![qemu()]);
        let offer = offer(&wish, &observation);
        assert_eq!((offer.values().flatten().count(), healthy(&offer)), (8, 7));
    }

    #[test]
    fn a_renamed_gpu_is_not_given_out_twice() {
        let (mut wish, mut observation, gpu) = world();
        wish.spec.aliases = vec![ResourceAlias { selector: "10de:1eb8".to_owned(), name: "nvidia.com/T4".to_owned() }];
        observation.allocations.insert(gpu.to_string(), vec![allocation(T4)]);
        let offer = offer(&wish, &observation);
        assert_eq!(offer.keys().map(ResourceName::as_str).collect::<Vec<_>>(), ["nvidia.com/T4"]);
        assert_eq!(healthy(&offer), 7);
    }

    #[test]
    fn a_reserved_alias_is_no_offer() {
        let (mut wish, observation, _) = world();
        wish.spec.aliases = vec![ResourceAlias { selector: "10de:1eb8".to_owned(), name: "nvidia.com/gpu".to_owned() }];
        assert!(offer(&wish, &observation).is_empty());
    }
}
