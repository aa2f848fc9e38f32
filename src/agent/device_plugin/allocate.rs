//! What one container gets for the devices that the kubelet chose. Pure: each container's answer comes from its own
//! request alone.

use std::{collections::BTreeSet, path::PathBuf};

use super::{
    device::{Device, Health, Share, is_cdev},
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
    #[error("{resource}: device {id} shares IOMMU group {group} with {}, which the request leaves out; request the whole group ({size} devices) in one container", missing.join(", "))]
    SplitGroup { resource: ResourceName, id: String, group: u32, missing: Vec<String>, size: usize },
    #[error(
        "{resource}: device {id} shares IOMMU group {group} with {other}, which is offered as {other_resource}; the group cannot be given as one, move one of the two to another slot"
    )]
    MixedGroup { resource: ResourceName, id: String, group: u32, other: String, other_resource: ResourceName },
}

/// Answers one container's request.
///
/// `iommufd`: the host has `/dev/iommu`. Without it, VFIO character devices are of no use and are left out.
pub(super) fn allocate(
    resource: &ResourceName,
    share: &Share,
    iommufd: bool,
    ids: &[String],
) -> Result<Grant, Refusal> {
    let chosen = choose(resource, share, ids)?;
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
    Ok(Grant { env_name: env_name(resource, EnvPrefix::Pci), env_value: ids.join(","), nodes: nodes.list })
}

fn choose<'a>(resource: &ResourceName, share: &'a Share, ids: &[String]) -> Result<Vec<&'a Device>, Refusal> {
    if ids.is_empty() {
        return Err(Refusal::Nothing { resource: resource.clone() });
    }
    let mut requested: BTreeSet<&str> = BTreeSet::new();
    let mut chosen = Vec::with_capacity(ids.len());
    for id in ids {
        let found = share.find(id);
        let device = found.ok_or_else(|| Refusal::Unknown { resource: resource.clone(), id: id.clone() })?;
        if !requested.insert(id) {
            return Err(Refusal::Repeated { resource: resource.clone(), id: id.clone() });
        }
        match device.health {
            Health::Healthy => chosen.push(device),
            Health::Unhealthy => return Err(Refusal::Unhealthy { resource: resource.clone(), id: id.clone() }),
        }
    }
    chosen.iter().try_for_each(|device| whole_group(resource, share, &requested, device))?;
    Ok(chosen)
}

fn whole_group(
    resource: &ResourceName,
    share: &Share,
    requested: &BTreeSet<&str>,
    device: &Device,
) -> Result<(), Refusal> {
    let Some(group) = device.group else { return Ok(()) };
    if let Some(other) = share.elsewhere.get(&group) {
        return Err(Refusal::MixedGroup {
            resource: resource.clone(),
            id: device.id.clone(),
            group,
            other: other.id.clone(),
            other_resource: other.resource.clone(),
        });
    }
    let members = || share.devices.iter().filter(|member| member.group == Some(group));
    let missing: Vec<String> =
        members().map(|member| &member.id).filter(|id| !requested.contains(id.as_str())).cloned().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let size = members().count();
    Err(Refusal::SplitGroup { resource: resource.clone(), id: device.id.clone(), group, missing, size })
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

    use super::{super::device::Elsewhere, *};

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
            group: Some(n),
            path: vec![],
        }
    }

    fn world() -> Share {
        Share { devices: (1..=4).map(gpu).collect(), ..Share::default() }
    }

    fn ids(numbers: &[u32]) -> Vec<String> {
        numbers.iter().map(|n| gpu(*n).id).collect()
    }

    fn request(share: &Share, numbers: &[u32]) -> Result<Grant, Refusal> {
        allocate(&t4(), share, true, &ids(numbers))
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
        let mut share = world();
        share.devices[1].nodes.pop();
        assert_eq!(paths(&request(&share, &[2]).unwrap()), ["/dev/vfio/vfio", "/dev/vfio/2"]);
    }

    #[test]
    fn a_whole_shared_group_is_given_with_its_node_once() {
        let mut share = world();
        share.devices[1].group = Some(1);
        share.devices[1].nodes = vec!["/dev/vfio/1".into(), "/dev/vfio/devices/vfio2".into()];
        let grant = request(&share, &[2, 1]).unwrap();
        assert_eq!(grant.env_value, "0000:02:00.0,0000:01:00.0");
        assert_eq!(
            paths(&grant),
            ["/dev/vfio/vfio", "/dev/vfio/1", "/dev/vfio/devices/vfio2", "/dev/vfio/devices/vfio1", "/dev/iommu"]
        );
    }

    #[test]
    fn a_request_that_splits_a_group_is_refused_with_the_missing_device_and_the_next_step() {
        let mut share = world();
        share.devices[1].group = Some(1);
        let refusal = request(&share, &[1, 3]).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "nvidia.com/TU104GL_TESLA_T4: device 0000:01:00.0 shares IOMMU group 1 with 0000:02:00.0, which the request \
             leaves out; request the whole group (2 devices) in one container"
        );
    }

    #[test]
    fn a_group_that_reaches_into_another_resource_is_refused() {
        let mut share = world();
        let a10: ResourceName = "nvidia.com/GA102GL_A10".parse().unwrap();
        share.elsewhere.insert(2, Elsewhere { resource: a10.clone(), id: "0000:09:00.0".into() });
        let (id, other) = ("0000:02:00.0".to_owned(), "0000:09:00.0".to_owned());
        assert_eq!(
            request(&share, &[2]),
            Err(Refusal::MixedGroup { resource: t4(), id, group: 2, other, other_resource: a10 })
        );
        assert!(request(&share, &[1]).is_ok());
    }

    #[test]
    fn an_unknown_device_is_refused() {
        let id = "0000:09:00.0".to_owned();
        assert_eq!(request(&world(), &[1, 9]), Err(Refusal::Unknown { resource: t4(), id }));
    }

    #[test]
    fn an_unhealthy_device_is_refused() {
        let mut share = world();
        share.devices[1].health = Health::Unhealthy;
        let id = "0000:02:00.0".to_owned();
        assert_eq!(request(&share, &[1, 2]), Err(Refusal::Unhealthy { resource: t4(), id }));
        assert!(request(&share, &[1]).is_ok());
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
        let mut share = world();
        share.devices[1].nodes.remove(0);
        let id = "0000:02:00.0".to_owned();
        assert_eq!(allocate(&t4(), &share, false, &ids(&[2])), Err(Refusal::NoNode { resource: t4(), id }));
        assert!(allocate(&t4(), &share, true, &ids(&[2])).is_ok());
    }

    /// Up to eight devices in up to eight groups.
    fn shares() -> impl Strategy<Value = Share> {
        prop::collection::vec(1_u32..=8, 1..=8).prop_map(|groups| {
            let devices = groups.iter().zip(1..).map(|(group, n)| Device { group: Some(*group), ..gpu(n) });
            Share { devices: devices.collect(), ..Share::default() }
        })
    }

    proptest! {
        #[test]
        fn a_grant_holds_exactly_the_request_and_never_part_of_a_group(
            share in shares(),
            order in Just((0_usize..8).collect::<Vec<_>>()).prop_shuffle(),
            size in 1_usize..=8,
        ) {
            let ids: Vec<String> =
                order.iter().filter_map(|i| share.devices.get(*i)).take(size).map(|d| d.id.clone()).collect();
            let taken = |device: &Device| ids.contains(&device.id);
            let splits = share.devices.iter().any(|a| {
                taken(a) && share.devices.iter().any(|b| a.group == b.group && !taken(b))
            });
            match allocate(&t4(), &share, true, &ids) {
                Ok(grant) => {
                    prop_assert!(!splits);
                    prop_assert_eq!(&grant.env_value, &ids.join(","));
                    let distinct: BTreeSet<&PathBuf> = grant.nodes.iter().collect();
                    prop_assert_eq!(distinct.len(), grant.nodes.len());
                    for device in &share.devices {
                        for node in &device.nodes {
                            prop_assert_eq!(grant.nodes.contains(node), taken(device));
                        }
                    }
                    prop_assert_eq!(Ok(grant), allocate(&t4(), &share, true, &ids));
                }
                Err(refusal) => prop_assert!(splits, "{}", refusal),
            }
        }
    }
}
