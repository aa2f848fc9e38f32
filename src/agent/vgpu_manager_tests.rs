//! vGPUs in rounds, on described boards.

use crds::v1alpha1::{Advertise, GPUNodeSpec, GPUVgpus, VgpuCount, VgpuLayout};
use vfio::{
    testing::{Fault, Machine, MemoryKernel, MemoryLibrary},
    vgpu::{ActiveVgpu, MigMode, Silence, SilenceReason},
};

use super::{
    super::{
        device_plugin::{Health, Offer},
        offer::{Offered, offer},
        pod_resources::Allocation,
        vfio_manager::{Observation, VfioManager},
    },
    *,
};

const L40S: &str = "0000:26:00.0";
const A2: &str = "0000:08:00.0";
const Q24: &str = "nvidia.com/NVIDIA_L40S-24Q";

struct Host {
    machine: Machine,
    manager: VfioManager<MemoryKernel>,
    allocations: Allocations,
    offer: Offer,
}

fn fresh() -> Machine {
    Machine::from_yaml(
        r#"
kernel: 6.8.0-45-generic
os: ubuntu 24.04
drivers: [vfio-pci]
modules: [vfio-pci]
loaded: [nvidia, nvidia_vgpu_vfio]
functions:
  "0000:26:00.0":
    { ids: "10de:26b9 10de:1851", class: "030200", driver: nvidia, group: 47, numa: 0, vfs: 4, reset: flr, board: { framework: vendor, framebuffer: 48, vfs: 4, types: { 1152: NVIDIA L40S-8Q, 1155: NVIDIA L40S-24Q } } }
"#,
    )
}

impl Host {
    fn of(machine: Machine) -> Self {
        let manager = VfioManager::with_kernel(machine.path(), machine.kernel(), "node-1").unwrap();
        Self { machine, manager, allocations: Allocations::new(), offer: Offer::new() }
    }

    /// With the library of its driver.
    fn with_library(machine: Machine, library: MemoryLibrary) -> Self {
        let mut host = Self::of(machine);
        let manager = VfioManager::with_kernel(host.machine.path(), host.machine.kernel(), "node-1").unwrap();
        host.manager = manager.with_library(Box::new(library));
        host
    }

    fn round(&mut self, wish: &Wish) -> (Observation, Offered) {
        let observation = self.manager.round(wish, Ok(self.allocations.clone()));
        let offered = offer(wish, &observation, &self.offer);
        self.offer = offered.offer.clone();
        (observation, offered)
    }
}

fn wish(gpu: &str, counts: &[(&str, i32)]) -> Wish {
    let instances = counts.iter().map(|(kind, count)| VgpuCount { kind: (*kind).to_owned(), count: *count }).collect();
    let gpus = vec![GPUVgpus { address: gpu.to_owned(), instances }];
    let spec = GPUNodeSpec {
        mode: Some(WorkloadMode::VmVgpu),
        vgpu: Some(VgpuLayout { name: "test".to_owned(), gpus }),
        advertise: Advertise::Offered,
        epoch: 1,
        ..GPUNodeSpec::default()
    };
    Wish { spec }
}

fn mode(mode: WorkloadMode) -> Wish {
    Wish { spec: GPUNodeSpec { mode: Some(mode), advertise: Advertise::Offered, epoch: 1, ..GPUNodeSpec::default() } }
}

fn names(offered: &Offered) -> Vec<(&str, usize)> {
    offered.offer.iter().map(|(name, devices)| (name.as_str(), devices.len())).collect()
}

fn ids(offered: &Offered) -> Vec<String> {
    offered.offer.values().flatten().map(|device| device.id.clone()).collect()
}

#[test]
fn one_round_makes_the_layout_and_offers_it_with_each_ones_own_nodes() {
    let mut host = Host::of(fresh());
    let (observation, offered) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    assert_eq!(observation.vgpus.progress[&L40S.parse().unwrap()], Progress::Done);
    assert_eq!(names(&offered), [(Q24, 2)]);
    let devices = &offered.offer.values().next().unwrap();
    assert_eq!(devices[0].id, "0000:26:00.4");
    assert_eq!(devices[0].nodes.len(), 1);
    assert!(devices[0].nodes != devices[1].nodes, "{devices:?}");
    assert!(devices.iter().all(|device| device.health == Health::Healthy && device.numa_node == Some(0)));
    let (again, same) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    assert_eq!((again.plan.len(), same.offer), (0, offered.offer));
}

#[test]
fn a_vgpu_that_a_pod_has_stays_when_the_layout_changes_and_the_rest_changes() {
    let mut host = Host::of(Machine::described("a2-sriov"));
    let (before, _) = host.round(&mode(WorkloadMode::VmVgpu));
    let kept = &before.vgpus.gpus[&A2.parse().unwrap()].instances;
    let kept = kept.iter().find(|vgpu| vgpu.kind() == Some("A2-4Q")).unwrap().id.clone();
    let allocation = Allocation { pod: "vms/a".to_owned(), resource: "nvidia.com/NVIDIA_A2-4Q".to_owned() };
    host.allocations.insert(kept.clone(), vec![allocation]);
    let (observation, offered) = host.round(&wish(A2, &[("A2-4Q", 1), ("A2-4C", 2)]));
    assert_eq!(observation.vgpus.progress[&A2.parse().unwrap()], Progress::Done);
    assert!(ids(&offered).contains(&kept));
    assert_eq!(names(&offered), [("nvidia.com/NVIDIA_A2-4C", 2), ("nvidia.com/NVIDIA_A2-4Q", 1)]);
    // It has not opened it yet, and has it all the same.
    let (observation, _) = host.round(&wish(A2, &[("A2-4C", 3)]));
    let Progress::Failed(refusal) = &observation.vgpus.progress[&A2.parse().unwrap()] else { panic!("not refused") };
    assert_eq!(refusal.reason, "VgpuInUse");
    assert!(refusal.message.contains("vms/a") && refusal.message.contains(&kept), "{}", refusal.message);
}

#[test]
fn without_a_layout_what_exists_is_offered_and_left() {
    let mut host = Host::of(Machine::described("a2-sriov"));
    let (observation, offered) = host.round(&mode(WorkloadMode::VmVgpu));
    assert_eq!((observation.plan.len(), offered.offer.len()), (0, 3));
}

#[test]
fn nothing_is_offered_while_the_driver_is_awaited() {
    let mut host = Host::of(fresh());
    let mut awaited = fresh();
    awaited.remove("/sys/bus/pci/devices/0000:26:00.0/driver");
    std::mem::swap(&mut host.machine, &mut awaited);
    host.manager = VfioManager::with_kernel(host.machine.path(), host.machine.kernel(), "node-1").unwrap();
    let (observation, offered) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    assert!(matches!(observation.vgpus.progress[&L40S.parse().unwrap()], Progress::Pending(_)));
    assert!(offered.offer.is_empty() && observation.again.is_some());
}

#[test]
fn virtual_functions_that_are_lost_are_made_again_in_the_next_round() {
    let mut host = Host::of(fresh());
    let (_, before) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    let mut kernel = host.machine.kernel();
    kernel.write("/sys/bus/pci/devices/0000:26:00.0/sriov_numvfs".as_ref(), "0").unwrap();
    assert!(host.manager.glance(&Ok(Allocations::new())), "it is a reason to look");
    let (_, after) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    assert_eq!(ids(&after), ids(&before));
}

#[test]
fn what_the_kernel_refuses_is_told_and_tried_again_later() {
    let mut host = Host::of(fresh());
    let mut kernel = host.machine.kernel();
    kernel.faults.insert("/sys/bus/pci/devices/0000:26:00.0/sriov_numvfs".into(), Fault::Errno(16));
    host.manager = VfioManager::with_kernel(host.machine.path(), kernel, "node-1").unwrap();
    let (observation, _) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    let Progress::Failed(refusal) = &observation.vgpus.progress[&L40S.parse().unwrap()] else { panic!("not failed") };
    assert_eq!(refusal.reason, "KernelRefused");
    assert!(refusal.message.contains("Device or resource busy"), "{}", refusal.message);
    assert!(observation.again.is_some());
    let (again, _) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    assert_eq!(again.plan, Vec::<String>::new(), "not at once");
}

#[test]
fn another_mode_takes_the_vgpus_away_and_goes_on_in_the_same_round() {
    let mut host = Host::of(fresh());
    host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    let (observation, offered) = host.round(&mode(WorkloadMode::VmPassthrough));
    assert!(observation.refusals.is_empty(), "{:?}", observation.refusals);
    assert_eq!(names(&offered), [("nvidia.com/AD102GL_L40S", 1)]);
}

#[test]
fn another_mode_is_refused_while_a_vm_has_a_vgpu_and_no_vgpu_is_touched() {
    let mut host = Host::of(fresh());
    let (_, offered) = host.round(&wish(L40S, &[("L40S-24Q", 2)]));
    let allocation = Allocation { pod: "vms/a".to_owned(), resource: Q24.to_owned() };
    host.allocations.insert(ids(&offered)[0].clone(), vec![allocation]);
    for other in [WorkloadMode::VmPassthrough, WorkloadMode::Container] {
        let (observation, _) = host.round(&mode(other));
        let refusal = observation.refusals.get(&L40S.parse().unwrap());
        let refusal = refusal.unwrap_or_else(|| panic!("{other}: {:?}", observation.plan));
        assert_eq!(refusal.reason, "VgpuInUse", "{other}: {}", refusal.message);
        assert!(refusal.message.contains("vms/a"), "{}", refusal.message);
        assert_eq!(observation.vgpus.gpus[&L40S.parse().unwrap()].instances.len(), 2);
    }
}

#[test]
fn vgpus_of_somebody_else_are_left_in_container_mode_and_said() {
    let mut host = Host::of(Machine::described("a2-sriov"));
    let (observation, _) = host.round(&mode(WorkloadMode::Container));
    assert_eq!(observation.refusals[&A2.parse().unwrap()].reason, "ForeignVgpus");
    assert_eq!(observation.vgpus.gpus[&A2.parse().unwrap()].instances.len(), 3);
}

#[test]
fn a_function_that_is_switched_off_changes_nothing() {
    let mut host = Host::of(fresh());
    let mut order = wish(L40S, &[("L40S-24Q", 2)]);
    order.spec.disabled = vec![AgentFunction::VgpuDeviceManager];
    let (observation, _) = host.round(&order);
    let Progress::Failed(refusal) = &observation.vgpus.progress[&L40S.parse().unwrap()] else { panic!("not said") };
    assert_eq!((refusal.reason.as_str(), observation.plan.len()), ("VgpuDeviceManagerDisabled", 0));
}

#[test]
fn a_vm_that_only_the_driver_tells_of_keeps_its_vgpu_and_is_named() {
    let machine = Machine::described("a2-sriov");
    let mut library = machine.library();
    let mdev = vfio::observe(&machine).mdevs.keys().next().unwrap().clone();
    let vm = "0f0e0d0c-0b0a-4908-8706-050403020100".to_owned();
    library.active =
        vec![ActiveVgpu { gpu: A2.parse().unwrap(), kind: None, vm: vm.clone(), mdev: Some(mdev.clone()) }];
    let mut host = Host::with_library(machine, library);
    let (observation, offered) = host.round(&wish(A2, &[]));
    let Progress::Failed(refusal) = &observation.vgpus.progress[&A2.parse().unwrap()] else { panic!("not refused") };
    assert_eq!(refusal.reason, "VgpuInUse");
    assert!(
        refusal.message.contains(&mdev) && refusal.message.contains(&format!("stop VM {vm}")),
        "{}",
        refusal.message
    );
    assert_eq!(observation.vgpus.gpus[&A2.parse().unwrap()].instances.len(), 3, "nothing was touched");
    let report = status(&observation, &offered);
    let shown = report.gpus[0].vgpu.as_ref().unwrap().instances.iter().find(|vgpu| vgpu.id == mdev).unwrap();
    assert_eq!(shown.vm.as_deref(), Some(vm.as_str()));
}

fn status(observation: &Observation, offered: &Offered) -> crds::v1alpha1::AgentStatus {
    let report = translate::Report {
        wish: &wish(A2, &[]),
        observation,
        plugins: &BTreeMap::default(),
        offered,
        container: &super::super::container_node::ContainerNode::look(std::path::Path::new("/nonexistent")),
        generation: 1,
        old: None,
    };
    let now = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
    translate::status(&report, &k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now))
}

#[test]
fn modes_that_hide_types_are_the_reason_and_a_silent_library_is_one_too() {
    let machine = fresh();
    let gpu: PciAddress = L40S.parse().unwrap();
    machine.remove("/sys/bus/pci/devices/0000:26:00.0/sriov_totalvfs");
    let mut library = machine.library();
    library.says.entry(gpu).or_default().display = Some(true);
    library.says.entry(gpu).or_default().mig = Some(MigMode { on: false, next: false });
    let mut host = Host::with_library(machine, library);
    let (observation, offered) = host.round(&wish(L40S, &[("L40S-24Q", 1)]));
    let Progress::Failed(refusal) = &observation.vgpus.progress[&gpu] else { panic!("not refused") };
    assert_eq!(refusal.reason, "DisplayMode");
    let vgpu = status(&observation, &offered).gpus.remove(0).vgpu.unwrap();
    assert_eq!(vgpu.reason, "DisplayMode");
    let told = vgpu.library.unwrap();
    assert_eq!((told.display, told.mig), (Some(true), Some(false)));

    let machine = fresh();
    let mut library = machine.library();
    library.silence = Some(Silence { reason: SilenceReason::VersionMismatch, message: "595 and 580".to_owned() });
    let mut host = Host::with_library(machine, library);
    let (observation, offered) = host.round(&wish(L40S, &[("L40S-24Q", 1)]));
    assert_eq!(names(&offered), [(Q24, 1)], "the node serves all the same");
    let told = status(&observation, &offered).gpus.remove(0).vgpu.unwrap().library.unwrap();
    assert_eq!((told.reason.as_str(), told.message.as_str()), ("VersionMismatch", "595 and 580"));
}
