//! What one container gets for the devices that the kubelet chose. Pure: each container's answer comes from its own
//! request alone.

use std::{collections::BTreeSet, path::PathBuf};

use super::{
    device::{Device, Health, find, is_cdev},
    names::{EnvPrefix, ResourceName, env_name},
};

/// Container node of the legacy VFIO API, needed with every group node.
const VFIO: &str = "/dev/vfio/vfio";
/// iommufd, needed with every VFIO character device.
const IOMMU: &str = "/dev/iommu";

/// The environment variable and the device nodes (host path = container path, permissions `mrw`) of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) env_name: String,
    /// The requested ids in the order of the request, joined by `,`: virt-launcher takes them by position.
    pub(super) env_value: String,
    pub(super) nodes: Vec<PathBuf>,
}

/// Why a container does not get what the kubelet chose for it. The text ends up in the pod's status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{resource}: the request names no device; restart the kubelet if this repeats")]
    Nothing { resource: ResourceName },
    #[error("{resource}: device {id} is not offered any more; delete the pod so that it is scheduled again")]
    Unknown { resource: ResourceName, id: String },
    #[error("{resource}: device {id} is named twice in one request; restart the kubelet if this repeats")]
    Repeated { resource: ResourceName, id: String },
    #[error(
        "{resource}: device {id} is unhealthy; see the GPUNode of this node for the reason, then delete the pod so that it is scheduled again"
    )]
    Unhealthy { resource: ResourceName, id: String },
    #[error(
        "{resource}: device {id} has no device node under /dev/vfio that this host can use; see the GPUNode of this node for its driver and IOMMU group"
    )]
    NoNode { resource: ResourceName, id: String },
    #[error(
        "{resource}: device {id} shares its IOMMU group with {offered} and goes where that one goes: a group is not split; delete the pod so that it is scheduled again"
    )]
    SplitGroup { resource: ResourceName, id: String, offered: String },
}

/// Answers one container's request.
///
/// `iommufd`: the host has `/dev/iommu`. Without it, VFIO character devices are of no use and are left out.
pub(super) fn allocate(
    resource: &ResourceName,
    devices: &[Device],
    iommufd: bool,
    ids: &[String],
) -> Result<Grant, Refusal> {
    let chosen = choose(resource, devices, ids)?;
    let mut nodes = Nodes::default();
    nodes.add(VFIO.into());
    for device in &chosen {
        let mut usable = device.nodes.iter().filter(|node| iommufd || !is_cdev(node)).peekable();
        if usable.peek().is_none() {
            return Err(Refusal::NoNode { resource: resource.clone(), id: device.id.clone() });
        }
        usable.for_each(|node| nodes.add(node.clone()));
    }
    if nodes.list.iter().any(|node| is_cdev(node)) {
        nodes.add(IOMMU.into());
    }
    let given: BTreeSet<&String> = chosen.iter().flat_map(|device| device.others.iter().chain([&device.id])).collect();
    let whole = chosen
        .iter()
        .filter_map(|device| device.egm.as_ref())
        .filter(|egm| egm.gpus.iter().all(|gpu| given.contains(gpu)));
    whole.for_each(|egm| nodes.add(egm.node.clone()));
    let mediated = chosen.iter().any(|device| device.partition.as_ref().is_some_and(|part| part.mediated));
    let prefix = if mediated { EnvPrefix::Mdev } else { EnvPrefix::Pci };
    Ok(Grant { env_name: env_name(resource, prefix), env_value: ids.join(","), nodes: nodes.list })
}

fn choose<'a>(resource: &ResourceName, devices: &'a [Device], ids: &[String]) -> Result<Vec<&'a Device>, Refusal> {
    if ids.is_empty() {
        return Err(Refusal::Nothing { resource: resource.clone() });
    }
    let mut requested: BTreeSet<&str> = BTreeSet::new();
    let mut chosen = Vec::with_capacity(ids.len());
    for id in ids {
        let device = find(devices, id).ok_or_else(|| absent(resource, devices, id))?;
        if !requested.insert(id) {
            return Err(Refusal::Repeated { resource: resource.clone(), id: id.clone() });
        }
        match device.health {
            Health::Healthy => chosen.push(device),
            Health::Unhealthy => return Err(Refusal::Unhealthy { resource: resource.clone(), id: id.clone() }),
        }
    }
    Ok(chosen)
}

/// A kubelet can ask for what was in an older list: a GPU that shares a group now may have had one for itself then.
fn absent(resource: &ResourceName, devices: &[Device], id: &str) -> Refusal {
    let (resource, id) = (resource.clone(), id.to_owned());
    match devices.iter().find(|device| device.others.contains(&id)) {
        Some(device) => Refusal::SplitGroup { resource, id, offered: device.id.clone() },
        None => Refusal::Unknown { resource, id },
    }
}

/// Device nodes in the order they were added, each once: the kubelet refuses nothing, but runtimes refuse repeats.
#[derive(Default)]
struct Nodes {
    list: Vec<PathBuf>,
    seen: BTreeSet<PathBuf>,
}

impl Nodes {
    fn add(&mut self, node: PathBuf) {
        if self.seen.insert(node.clone()) {
            self.list.push(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::device::Egm, *};

    fn t4() -> ResourceName {
        "nvidia.com/TU104GL_TESLA_T4".parse().unwrap()
    }

    /// Device `n` alone in group `n`, with a group node and a character device.
    fn gpu(n: u32) -> Device {
        Device {
            id: format!("0000:{n:02x}:00.0"),
            health: Health::Healthy,
            numa_node: Some(0),
            nodes: vec![format!("/dev/vfio/{n}").into(), format!("/dev/vfio/devices/vfio{n}").into()],
            others: vec![],
            path: vec![],
            egm: None,
            partition: None,
        }
    }

    fn world() -> Vec<Device> {
        (1..=4).map(gpu).collect()
    }

    fn ids(numbers: &[u32]) -> Vec<String> {
        numbers.iter().map(|n| gpu(*n).id).collect()
    }

    fn request(devices: &[Device], numbers: &[u32]) -> Result<Grant, Refusal> {
        allocate(&t4(), devices, true, &ids(numbers))
    }

    fn paths(grant: &Grant) -> Vec<&str> {
        grant.nodes.iter().map(|node| node.to_str().unwrap()).collect()
    }

    #[test]
    fn the_environment_holds_the_requested_addresses_in_order() {
        let grant = request(&world(), &[3, 1]).unwrap();
        assert_eq!(grant.env_name, "PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4");
        assert_eq!(grant.env_value, "0000:03:00.0,0000:01:00.0");
    }

    #[test]
    fn the_container_gets_the_nodes_of_its_devices_and_no_others() {
        let grant = request(&world(), &[3, 1]).unwrap();
        assert_eq!(
            paths(&grant),
            [
                "/dev/vfio/vfio",
                "/dev/vfio/3",
                "/dev/vfio/devices/vfio3",
                "/dev/vfio/1",
                "/dev/vfio/devices/vfio1",
                "/dev/iommu"
            ]
        );
    }

    #[test]
    fn a_host_without_iommufd_gives_group_nodes_only() {
        let grant = allocate(&t4(), &world(), false, &ids(&[2])).unwrap();
        assert_eq!(paths(&grant), ["/dev/vfio/vfio", "/dev/vfio/2"]);
    }

    #[test]
    fn iommufd_is_not_given_for_devices_without_a_character_device() {
        let mut devices = world();
        devices[1].nodes.pop();
        assert_eq!(paths(&request(&devices, &[2]).unwrap()), ["/dev/vfio/vfio", "/dev/vfio/2"]);
    }

    #[test]
    fn a_gpu_that_goes_along_with_its_group_is_refused_on_its_own_and_the_offered_one_is_named() {
        let mut devices = world();
        devices[0].others = vec!["0000:09:00.0".to_owned()];
        let refusal = request(&devices, &[1, 9]).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "nvidia.com/TU104GL_TESLA_T4: device 0000:09:00.0 shares its IOMMU group with 0000:01:00.0 and goes where that \
             one goes: a group is not split; delete the pod so that it is scheduled again"
        );
        assert_eq!(request(&devices, &[1]).unwrap().env_value, "0000:01:00.0");
    }

    /// 1 and 2 share memory; 3 has some of its own with 9, which goes along with it.
    fn grace() -> Vec<Device> {
        let mut devices = world();
        let egm = |n: u32, gpus: &[u32]| Some(Egm { node: format!("/dev/egm{n}").into(), gpus: ids(gpus) });
        devices[0].egm = egm(0, &[1, 2]);
        devices[1].egm = egm(0, &[1, 2]);
        devices[2].egm = egm(1, &[3, 9]);
        devices[2].others = ids(&[9]);
        devices
    }

    fn egm_of(numbers: &[u32]) -> Vec<String> {
        let grant = request(&grace(), numbers).unwrap();
        paths(&grant).into_iter().filter(|path| path.starts_with("/dev/egm")).map(str::to_owned).collect()
    }

    #[test]
    fn shared_memory_is_given_once_to_who_has_all_of_its_gpus() {
        assert_eq!(egm_of(&[2, 1]), ["/dev/egm0"]);
        assert_eq!(egm_of(&[3]), ["/dev/egm1"]);
        assert_eq!(egm_of(&[1, 2, 3, 4]), ["/dev/egm0", "/dev/egm1"]);
    }

    #[test]
    fn shared_memory_is_not_given_with_some_of_its_gpus() {
        assert_eq!(egm_of(&[1]), [] as [String; 0]);
        assert_eq!(egm_of(&[2, 4]), [] as [String; 0]);
    }

    #[test]
    fn mediated_devices_are_told_in_their_own_variable_and_virtual_functions_as_pci_devices() {
        let vgpu = |id: &str, group: u32, mediated: bool| Device {
            id: id.to_owned(),
            nodes: vec![format!("/dev/vfio/{group}").into()],
            partition: Some(super::super::device::Partition { gpu: "0000:08:00.0".to_owned(), mediated }),
            ..gpu(1)
        };
        let uuids = ["c728e022-f16f-434b-ad2c-9665ee634d3d", "3deab9a4-200a-4c54-99b1-5eb0722d1d81"];
        let devices = [vgpu(uuids[0], 106, true), vgpu(uuids[1], 107, true)];
        let a10: ResourceName = "nvidia.com/NVIDIA_A10-4Q".parse().unwrap();
        let grant = allocate(&a10, &devices, true, &[uuids[1].to_owned(), uuids[0].to_owned()]).unwrap();
        assert_eq!(grant.env_name, "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-4Q");
        assert_eq!(grant.env_value, format!("{},{}", uuids[1], uuids[0]));
        assert_eq!(paths(&grant), ["/dev/vfio/vfio", "/dev/vfio/107", "/dev/vfio/106"], "no other group is reachable");
        let l40s: ResourceName = "nvidia.com/NVIDIA_L40S-24Q".parse().unwrap();
        let grant = allocate(&l40s, &[vgpu("0000:26:00.4", 120, false)], true, &["0000:26:00.4".to_owned()]).unwrap();
        assert_eq!(
            (grant.env_name.as_str(), grant.env_value.as_str()),
            ("PCI_RESOURCE_NVIDIA_COM_NVIDIA_L40S-24Q", "0000:26:00.4")
        );
    }

    #[test]
    fn an_unknown_device_is_refused() {
        let id = "0000:09:00.0".to_owned();
        assert_eq!(request(&world(), &[1, 9]), Err(Refusal::Unknown { resource: t4(), id }));
    }

    #[test]
    fn an_unhealthy_device_is_refused() {
        let mut devices = world();
        devices[1].health = Health::Unhealthy;
        let id = "0000:02:00.0".to_owned();
        assert_eq!(request(&devices, &[1, 2]), Err(Refusal::Unhealthy { resource: t4(), id }));
        assert!(request(&devices, &[1]).is_ok());
    }

    #[test]
    fn a_repeated_device_is_refused() {
        let id = "0000:01:00.0".to_owned();
        assert_eq!(request(&world(), &[1, 2, 1]), Err(Refusal::Repeated { resource: t4(), id }));
    }

    #[test]
    fn an_empty_request_is_refused() {
        assert_eq!(request(&world(), &[]), Err(Refusal::Nothing { resource: t4() }));
    }

    #[test]
    fn a_device_without_a_usable_node_is_refused() {
        let mut devices = world();
        devices[1].nodes.remove(0);
        let id = "0000:02:00.0".to_owned();
        assert_eq!(allocate(&t4(), &devices, false, &ids(&[2])), Err(Refusal::NoNode { resource: t4(), id }));
        assert!(allocate(&t4(), &devices, true, &ids(&[2])).is_ok());
    }

    proptest! {
        #[test]
        fn a_grant_holds_exactly_the_request(
            order in Just((1_u32..=4).collect::<Vec<_>>()).prop_shuffle(),
            size in 1_usize..=4,
        ) {
            let (devices, ids) = (world(), ids(&order[..size]));
            let grant = allocate(&t4(), &devices, true, &ids).unwrap();
            prop_assert_eq!(&grant.env_value, &ids.join(","));
            let distinct: BTreeSet<&PathBuf> = grant.nodes.iter().collect();
            prop_assert_eq!(distinct.len(), grant.nodes.len());
            for device in &devices {
                for node in &device.nodes {
                    prop_assert_eq!(grant.nodes.contains(node), ids.contains(&device.id));
                }
            }
        }
    }
}
