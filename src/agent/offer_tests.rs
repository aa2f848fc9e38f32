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
    Holder { pid: 4711, command: "qemu".to_owned(), path: PathBuf::from("/dev/vfio/1"), pod: None, vm: None }
}

fn allocation(resource: &str) -> Allocation {
    Allocation { pod: "vms/a".to_owned(), resource: resource.to_owned() }
}

fn offered(wish: &Wish, observation: &Observation) -> Offer {
    offer(wish, observation, &Offer::new()).offer
}

fn healthy(offer: &Offer) -> usize {
    offer.values().flatten().filter(|device| device.health == Health::Healthy).count()
}

#[test]
fn all_are_offered_under_one_name() {
    let (wish, observation, _) = world();
    let offer = offered(&wish, &observation);
    assert_eq!(offer.keys().map(ResourceName::as_str).collect::<Vec<_>>(), [T4]);
    assert_eq!(healthy(&offer), 8);
}

#[test]
fn what_is_withdrawn_or_switched_off_is_not_offered() {
    let (mut wish, observation, _) = world();
    wish.spec.disabled = vec![AgentFunction::SandboxDevicePlugin];
    assert!(offered(&wish, &observation).is_empty());
    wish.spec.disabled.clear();
    wish.spec.advertise = Advertise::Withdrawn;
    assert!(offered(&wish, &observation).is_empty());
}

#[test]
fn a_vm_that_got_its_gpu_from_the_kubelet_keeps_it_healthy() {
    let (wish, mut observation, gpu) = world();
    observation.holders.insert(gpu, vec![qemu()]);
    observation.allocations.insert(gpu.to_string(), vec![allocation(T4)]);
    assert_eq!(healthy(&offered(&wish, &observation)), 8);
}

#[test]
fn a_gpu_that_somebody_opened_without_the_kubelet_is_counted_and_not_given_out() {
    let (wish, mut observation, gpu) = world();
    observation.holders.insert(gpu, vec![qemu()]);
    let offer = offered(&wish, &observation);
    assert_eq!((offer.values().flatten().count(), healthy(&offer)), (8, 7));
}

#[test]
fn a_renamed_gpu_is_not_given_out_twice() {
    let (mut wish, mut observation, gpu) = world();
    wish.spec.aliases = vec![ResourceAlias { selector: "10de:1eb8".to_owned(), name: "nvidia.com/T4".to_owned() }];
    observation.allocations.insert(gpu.to_string(), vec![allocation(T4)]);
    let offer = offered(&wish, &observation);
    assert_eq!(offer.keys().map(ResourceName::as_str).collect::<Vec<_>>(), ["nvidia.com/T4"]);
    assert_eq!(healthy(&offer), 7);
}

#[test]
fn a_reserved_alias_is_no_offer_and_says_so() {
    let (mut wish, observation, gpu) = world();
    wish.spec.aliases = vec![ResourceAlias { selector: "10de:1eb8".to_owned(), name: "nvidia.com/gpu".to_owned() }];
    let offered = offer(&wish, &observation, &Offer::new());
    assert!(offered.offer.is_empty());
    assert!(offered.withheld[&gpu].contains("nvidia.com/gpu"), "{:?}", offered.withheld);
}

#[test]
fn an_unfit_gpu_is_counted_and_not_given_out_and_says_why() {
    let (wish, mut observation, gpu) = world();
    observation.ailments.insert(gpu, vec![Ailment::FellOff { gpu }]);
    let offered = offer(&wish, &observation, &Offer::new());
    assert_eq!((offered.offer.values().flatten().count(), healthy(&offered.offer)), (8, 7));
    assert!(offered.withheld[&gpu].contains("all ones"), "{:?}", offered.withheld);
}

#[test]
fn a_degraded_gpu_is_given_out() {
    let (wish, mut observation, gpu) = world();
    observation.ailments.insert(gpu, vec![Ailment::Asleep { gpu }]);
    assert_eq!(healthy(&offered(&wish, &observation)), 8);
}

#[test]
fn a_gpu_that_is_lost_stays_in_the_capacity_until_it_is_back_or_not_asked_for() {
    let (mut wish, observation, gpu) = world();
    let before = offered(&wish, &observation);
    for (path, reason) in [("0000:18:00.0", "Vanished"), ("0000:18:00.0/driver", "Changed")] {
        let machine = Machine::described("eight-t4");
        machine.remove(&format!("/sys/bus/pci/devices/{path}"));
        let observation = Observation { inventory: observe(&machine), ..Observation::default() };
        let lost = offer(&wish, &observation, &before);
        assert_eq!((lost.offer.values().flatten().count(), healthy(&lost.offer)), (8, 7), "{path}");
        assert_eq!(lost.ailments[&gpu][0].reason(), reason);
        assert!(lost.withheld[&gpu].contains("0000:18:00.0"), "{:?}", lost.withheld);
        let again = offer(&wish, &observation, &lost.offer);
        assert_eq!(again.offer, lost.offer, "it stays so");
        let cold = offered(&wish, &observation);
        assert_eq!(cold.values().flatten().count(), 7, "what was not offered before is not counted");
    }
    let machine = Machine::described("eight-t4");
    machine.write("/sys/bus/pci/devices/0000:18:00.0/vendor", "rubbish\n");
    let unread = Observation { inventory: observe(&machine), ..Observation::default() };
    assert_eq!(offer(&wish, &unread, &before).ailments[&gpu][0].reason(), "Silent");
    let back = offer(&wish, &observation, &before);
    assert_eq!(healthy(&back.offer), 8);
    wish.spec.mode = Some(WorkloadMode::Container);
    assert!(offer(&wish, &observation, &before).offer.is_empty());
}

/// Two GPUs in one group, on vfio-pci.
fn twins() -> (Wish, Observation) {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/vfio/fixtures/twins.yaml")).unwrap();
    let bound =
        text.replace("driver: nvidia,", "driver: vfio-pci,").replace("driver: snd_hda_intel,", "driver: vfio-pci,");
    let (wish, _, _) = world();
    (wish, Observation { inventory: observe(&Machine::from_yaml(&bound)), ..Observation::default() })
}

#[test]
fn as_many_gpus_are_offered_as_there_are_groups_and_each_with_its_whole_group() {
    let (wish, observation) = twins();
    let offered = offer(&wish, &observation, &Offer::new());
    let devices: Vec<&Device> = offered.offer.values().flatten().collect();
    assert_eq!(devices.iter().map(|device| device.id.as_str()).collect::<Vec<_>>(), ["0000:03:00.0"]);
    assert_eq!(devices[0].others, ["0000:04:00.0"]);
    let nodes = observation.inventory.functions.values().filter_map(|function| function.vfio_dev.clone());
    let nodes: BTreeSet<PathBuf> = nodes.map(|name| format!("/dev/vfio/devices/{name}").into()).collect();
    assert_eq!(nodes.len(), 4);
    assert!(nodes.iter().all(|node| devices[0].nodes.contains(node)), "{:?}", devices[0].nodes);
    let other: PciAddress = "0000:04:00.0".parse().unwrap();
    assert!(offered.withheld[&other].contains("0000:03:00.0"), "{:?}", offered.withheld);
}

#[test]
fn a_group_is_as_well_as_the_worst_of_its_gpus() {
    let (wish, mut observation) = twins();
    let gpu: PciAddress = "0000:04:00.0".parse().unwrap();
    observation.ailments.insert(gpu, vec![Ailment::FellOff { gpu }]);
    assert_eq!(healthy(&offered(&wish, &observation)), 0);
}

#[test]
fn cards_of_two_ids_and_one_name_are_one_resource() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/vfio/fixtures/same-names.yaml")).unwrap();
    let bound = text.replace("driver: nvidia,", "driver: vfio-pci,");
    let (wish, _, _) = world();
    let observation = Observation { inventory: observe(&Machine::from_yaml(&bound)), ..Observation::default() };
    let offer = offered(&wish, &observation);
    let counts: Vec<_> = offer.iter().map(|(name, devices)| (name.as_str(), devices.len())).collect();
    assert_eq!(
        counts,
        [
            ("nvidia.com/3182", 1),
            ("nvidia.com/GV100GL_TESLA_V100_SXM2_16GB", 2),
            ("nvidia.com/TU102GL_QUADRO_RTX_6000_8000", 2),
        ]
    );
}

#[test]
fn a_device_knows_its_way_through_the_ports_and_the_memory_that_it_shares() {
    let (wish, _, _) = world();
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/vfio/fixtures/v100.yaml")).unwrap();
    let inventory = observe(&Machine::from_yaml(&text.replace("driver: nvidia,", "driver: vfio-pci,")));
    let gpus: BTreeSet<PciAddress> = inventory.gpus().iter().map(|gpu| gpu.primary.address).collect();
    let egm = [("/dev/egm0".into(), gpus)].into();
    let offer = offered(&wish, &Observation { inventory, egm, ..Observation::default() });
    for device in offer.values().flatten() {
        assert_eq!(device.path, ["0000:85:00.0", "0000:86:00.0"]);
        let egm = device.egm.as_ref().unwrap();
        assert_eq!((egm.node.to_str(), egm.gpus.len()), (Some("/dev/egm0"), 2));
    }
}
