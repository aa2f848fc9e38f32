//! Rounds on described machines: what a real kernel answers is the lab ring's.

use crds::{
    WorkloadMode,
    v1alpha1::{AgentFunction, GPUNodeSpec},
};
use vfio::testing::{Fault, Machine, MemoryKernel};

use super::{super::pod_resources::Allocation, *};

struct Host {
    machine: Machine,
    manager: VfioManager<MemoryKernel>,
}

impl Host {
    fn of(machine: &str) -> Self {
        let machine = Machine::described(machine);
        let manager = VfioManager::with_kernel(machine.path(), machine.kernel(), "node-1").unwrap();
        Self { machine, manager }
    }

    fn round(&mut self, wish: &Wish) -> Observation {
        self.manager.round(wish, Ok(Allocations::new()))
    }
}

fn wish(mode: WorkloadMode) -> Wish {
    Wish { spec: GPUNodeSpec { mode: Some(mode), epoch: 1, ..GPUNodeSpec::default() } }
}

fn drivers(observation: &Observation) -> Vec<&str> {
    observation.inventory.gpus().iter().map(|gpu| gpu.primary.driver.as_deref().unwrap_or("none")).collect()
}

#[test]
fn every_gpu_of_a_machine_is_brought_to_vfio_in_one_round_and_back_in_another() {
    let mut host = Host::of("six-rtx-3090");
    let before: Vec<String> = drivers(&host.round(&Wish::default())).iter().map(|d| (*d).to_owned()).collect();
    let there = host.round(&wish(WorkloadMode::VmPassthrough));
    assert_eq!(drivers(&there), ["vfio-pci"; 6]);
    assert!(there.refusals.is_empty(), "{:?}", there.refusals);
    let back = host.round(&wish(WorkloadMode::Container));
    assert_eq!(drivers(&back), before);
}

#[test]
fn without_an_order_nothing_is_touched() {
    let mut host = Host::of("six-rtx-3090");
    let observation = host.round(&Wish::default());
    assert_eq!((observation.plan.len(), observation.worked), (0, None));
    assert!(host.manager.kernel.writes.is_empty());
}

#[test]
fn a_second_round_finds_nothing_to_do() {
    let mut host = Host::of("six-rtx-3090");
    host.round(&wish(WorkloadMode::VmPassthrough));
    let writes = host.manager.kernel.writes.len();
    assert_eq!(host.round(&wish(WorkloadMode::VmPassthrough)).plan, Vec::<String>::new());
    assert_eq!(host.manager.kernel.writes.len(), writes);
}

#[test]
fn a_gpu_that_a_pod_has_is_refused_and_the_others_are_served() {
    let mut host = Host::of("six-rtx-3090");
    let taken = host.round(&Wish::default()).inventory.gpus()[0].primary.address;
    let allocation = Allocation { pod: "vms/a".to_owned(), resource: "nvidia.com/X".to_owned() };
    let allocations: Allocations = [(taken.to_string(), vec![allocation])].into();
    let observation = host.manager.round(&wish(WorkloadMode::VmPassthrough), Ok(allocations));
    assert_eq!(observation.refusals.keys().collect::<Vec<_>>(), [&taken]);
    assert!(observation.refusals[&taken].message.contains("vms/a"), "{}", observation.refusals[&taken].message);
    assert_eq!(drivers(&observation)[1..], ["vfio-pci"; 5]);
}

#[test]
fn one_gpu_that_fails_keeps_no_other_from_being_served_and_is_tried_later() {
    let mut host = Host::of("six-rtx-3090");
    let broken = host.round(&Wish::default()).inventory.gpus()[0].primary.address;
    let path = format!("/sys/bus/pci/devices/{broken}/driver_override");
    host.manager.kernel.faults.insert(path.into(), Fault::Errno(5));
    let observation = host.round(&wish(WorkloadMode::VmPassthrough));
    assert_eq!(observation.refusals.keys().collect::<Vec<_>>(), [&broken]);
    assert_eq!(drivers(&observation)[1..], ["vfio-pci"; 5]);
    assert!(observation.again.is_some());
    let writes = host.manager.kernel.writes.len();
    assert!(host.round(&wish(WorkloadMode::VmPassthrough)).refusals.contains_key(&broken), "the reason stays");
    assert_eq!(host.manager.kernel.writes.len(), writes, "too early for the next try");
}

#[test]
fn an_order_of_an_older_epoch_is_refused() {
    let mut host = Host::of("six-rtx-3090");
    let mut newer = wish(WorkloadMode::VmPassthrough);
    newer.spec.epoch = 5;
    host.round(&newer);
    let stale = host.round(&wish(WorkloadMode::Container));
    assert!(stale.refusals.values().all(|refusal| refusal.reason == "StaleOrder"), "{:?}", stale.refusals);
    assert_eq!(drivers(&stale), ["vfio-pci"; 6]);
}

#[test]
fn a_switched_off_function_is_a_refusal_and_an_obstacle() {
    let mut host = Host::of("six-rtx-3090");
    let mut off = wish(WorkloadMode::VmPassthrough);
    off.spec.disabled = vec![AgentFunction::VfioManager];
    let observation = host.round(&off);
    assert!(observation.refusals.values().all(|refusal| refusal.reason == "VfioManagerDisabled"));
    let gpu = observation.inventory.gpus()[0].primary.address;
    assert!(observation.obstacles.contains_key(&(gpu, WorkloadMode::VmPassthrough)));
}

#[test]
fn the_mode_of_one_gpu_can_differ_from_the_nodes() {
    let mut host = Host::of("six-rtx-3090");
    let first = host.round(&Wish::default()).inventory.gpus()[0].primary.address;
    let mut mixed = wish(WorkloadMode::Container);
    mixed.spec.gpus = vec![crds::v1alpha1::GPUMode { address: first.to_string(), mode: WorkloadMode::VmPassthrough }];
    let observation = host.round(&mixed);
    assert_eq!(drivers(&observation)[0], "vfio-pci");
    assert!(!drivers(&observation)[1..].contains(&"vfio-pci"));
}

#[test]
fn a_machine_without_an_iommu_says_so_before_anything_is_asked() {
    let mut host = Host::of("six-rtx-3090");
    host.machine.remove("/sys/kernel/iommu_groups");
    for gpu in host.round(&Wish::default()).inventory.functions.keys() {
        host.machine.remove(&format!("/sys/bus/pci/devices/{gpu}/iommu_group"));
    }
    let observation = host.round(&Wish::default());
    let gpu = observation.inventory.gpus()[0].primary.address;
    assert_eq!(observation.obstacles[&(gpu, WorkloadMode::VmPassthrough)].reason, "IommuOff");
    assert!(!observation.obstacles.contains_key(&(gpu, WorkloadMode::Container)));
}

#[test]
fn a_damaged_journal_is_reported_and_not_fatal() {
    let machine = Machine::described("six-rtx-3090");
    machine.write("/run/gpuvirt/journal", "{");
    let mut manager = VfioManager::with_kernel(machine.path(), machine.kernel(), "node-1").unwrap();
    let observation = manager.round(&Wish::default(), Ok(Allocations::new()));
    assert!(observation.complaints.iter().any(|c| c.contains("/run/gpuvirt/journal")), "{:?}", observation.complaints);
}

#[test]
fn while_the_kubelet_does_not_answer_no_gpu_is_taken_from_anybody() {
    let mut host = Host::of("six-rtx-3090");
    host.round(&wish(WorkloadMode::VmPassthrough));
    let gpu = host.round(&wish(WorkloadMode::VmPassthrough)).inventory.gpus()[0].primary.address;
    let allocation = Allocation { pod: "vms/a".to_owned(), resource: "nvidia.com/X".to_owned() };
    let known: Allocations = [(gpu.to_string(), vec![allocation])].into();
    host.manager.round(&wish(WorkloadMode::VmPassthrough), Ok(known));
    let silent = host.manager.round(&wish(WorkloadMode::Container), Err("kubelet socket does not answer".to_owned()));
    assert_eq!(drivers(&silent), ["vfio-pci"; 6]);
    assert_eq!(silent.holders.keys().collect::<Vec<_>>(), [&gpu], "what it said last holds");
    assert!(silent.again.is_some(), "it is asked again soon");
    let other = silent.inventory.gpus()[1].primary.address;
    assert_eq!(silent.refusals[&other].reason, "AllocationsUnknown");
    assert_eq!(silent.obstacles[&(other, WorkloadMode::Container)].reason, "AllocationsUnknown");
}

#[test]
fn a_pod_of_the_container_stack_keeps_every_gpu_of_its_node_from_vms() {
    let mut host = Host::of("six-rtx-3090");
    let allocation = Allocation { pod: "ml/train".to_owned(), resource: "nvidia.com/gpu".to_owned() };
    let uuid: Allocations = [("GPU-5f6d".to_owned(), vec![allocation])].into();
    let observation = host.manager.round(&wish(WorkloadMode::VmPassthrough), Ok(uuid));
    assert_eq!(observation.refusals.len(), 6);
    assert!(observation.refusals.values().all(|refusal| refusal.message.contains("ml/train")));
}

#[test]
fn a_journal_that_cannot_be_written_is_known_before_anything_is_asked() {
    let mut host = Host::of("six-rtx-3090");
    host.machine.write("/run/gpuvirt", "a file where a folder should be");
    let observation = host.round(&Wish::default());
    let gpu = observation.inventory.gpus()[0].primary.address;
    assert_eq!(observation.obstacles[&(gpu, WorkloadMode::VmPassthrough)].reason, "JournalNotWritten");
}

#[test]
fn the_journal_is_written_for_changes_and_not_for_looks() {
    use std::os::unix::fs::MetadataExt;
    let mut host = Host::of("six-rtx-3090");
    let inode = |host: &Host| std::fs::metadata(host.machine.path().join("run/gpuvirt/journal")).unwrap().ino();
    host.round(&wish(WorkloadMode::VmPassthrough));
    let before = inode(&host);
    host.round(&wish(WorkloadMode::VmPassthrough));
    assert_eq!(inode(&host), before);
    host.round(&wish(WorkloadMode::Container));
    assert_ne!(inode(&host), before);
}

#[test]
fn a_journal_that_became_unwritable_stops_the_next_change_before_its_first_step() {
    let mut host = Host::of("six-rtx-3090");
    host.round(&Wish::default());
    std::fs::remove_dir_all(host.machine.path().join("run/gpuvirt")).unwrap();
    host.machine.write("/run/gpuvirt", "a file where a folder should be");
    let observation = host.round(&wish(WorkloadMode::VmPassthrough));
    assert!(observation.refusals.values().all(|refusal| refusal.reason == "JournalNotWritten"));
    assert_eq!((observation.refusals.len(), host.manager.kernel.writes.len()), (6, 0));
}

#[test]
fn a_glance_calls_for_a_round_when_health_or_what_pods_have_has_changed() {
    let mut host = Host::of("eight-t4");
    let gpu = host.round(&Wish::default()).inventory.gpus()[0].primary.address;
    let given = |id: &str| -> Result<Allocations, String> {
        let resource = "devices.kubevirt.io/kvm".to_owned();
        Ok([(id.to_owned(), vec![Allocation { pod: "vms/a".to_owned(), resource }])].into())
    };
    assert!(!host.manager.glance(&Ok(Allocations::new())));
    assert!(!host.manager.glance(&Err("kubelet is silent".to_owned())));
    assert!(!host.manager.glance(&given("kvm7")), "no GPU of ours");
    assert!(host.manager.glance(&given(&gpu.to_string())));
    host.machine.write(&format!("/sys/bus/pci/devices/{gpu}/config"), [0xff; 64]);
    assert!(host.manager.glance(&Ok(Allocations::new())));
    assert_eq!(host.round(&Wish::default()).ailments[&gpu][0].reason(), "FellOff");
    assert!(!host.manager.glance(&Ok(Allocations::new())), "the round has seen it");
}
