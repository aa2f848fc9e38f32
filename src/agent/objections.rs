//! What speaks against giving devices away at this moment: asked right before the kubelet gives them, since its list and
//! its accounts may be older than the host. A pod that was deleted by force is gone from the kubelet's accounts at once,
//! and its VM from the GPU only some time later.

use std::{collections::BTreeMap, path::PathBuf};

use vfio::{
    Binding, Function, Holder, Host, Inventory, PciAddress, VgpuParent, deviations, holders, observe,
    vgpu::{part_ids, vgpu_holders},
};

use super::{
    device_plugin::Device,
    health::{at_sight, unfit},
    offer,
};

/// By device id; what is not in it may be given as it was offered. One look for all of them.
pub fn objections(host: &impl Host, offered: &[Device]) -> BTreeMap<String, String> {
    let inventory = observe(host);
    let held = holders(host, &inventory);
    offered.iter().filter_map(|device| Some((device.id.clone(), objection(&inventory, &held, device)?))).collect()
}

fn objection(inventory: &Inventory, held: &BTreeMap<PciAddress, Vec<Holder>>, offered: &Device) -> Option<String> {
    if let Some(partition) = &offered.partition {
        return against_vgpu(inventory, held, &partition.gpu, &offered.id);
    }
    let address: PciAddress = match offered.id.parse() {
        Ok(address) => address,
        Err(error) => return Some(format!("{error}")),
    };
    let still = deviations(inventory, address, Binding::Vfio);
    if !still.is_empty() {
        return Some(still.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
    }
    let gpu = inventory.gpu(address)?;
    let others = gpu.shares_group_with.iter().filter_map(|other| inventory.gpu(*other));
    let ailments: Vec<_> =
        std::iter::once(gpu.clone()).chain(others).flat_map(|gpu| at_sight(inventory, &gpu)).collect();
    if let Some(ailment) = unfit(&ailments) {
        return Some(ailment.to_string());
    }
    // A fit group, and not the one that was offered: it may have other members, and its node is not among those to be
    // handed over.
    let nodes = offer::nodes(inventory, &gpu);
    if nodes != offered.nodes {
        let (now, then) = (listed(&nodes), listed(&offered.nodes));
        return Some(format!("it was offered with {then}, and has {now} now; it is offered anew, start the pod again"));
    }
    let holder = held.get(&address)?.iter().find(|holder| holder.pid > 0)?;
    Some(format!("{holder} has it open still; {}, or wait until it ends, then start the pod anew", holder.next_step()))
}

fn listed(nodes: &[PathBuf]) -> String {
    nodes.iter().map(|node| node.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn against_vgpu(
    inventory: &Inventory,
    held: &BTreeMap<PciAddress, Vec<Holder>>,
    gpu: &str,
    id: &str,
) -> Option<String> {
    let gone = || Some(format!("{id} is no vGPU any more; delete the pod so that it is scheduled again"));
    let Some(gpu) = gpu.parse().ok().and_then(|address| inventory.gpu(address)) else { return gone() };
    if !part_ids(inventory, gpu.primary.address).iter().any(|part| part == id) {
        return gone();
    }
    let function = id.parse::<PciAddress>().ok().and_then(|address| inventory.functions.get(&address));
    let nothing = |function: &Function| !matches!(function.vgpu, Some(VgpuParent::VendorVfio { current: Some(_), .. }));
    if function.is_some_and(nothing) {
        return gone();
    }
    if let Some(ailment) = unfit(&at_sight(inventory, &gpu)) {
        return Some(ailment.to_string());
    }
    let holders = vgpu_holders(inventory, held);
    let holder = holders.get(id)?.iter().find(|holder| holder.pid > 0)?;
    Some(format!("{holder} has it open still; {}, or wait until it ends, then start the pod anew", holder.next_step()))
}

#[cfg(test)]
mod tests {
    use vfio::testing::Machine;

    use super::super::device_plugin::Health;

    use super::*;

    const GPU: &str = "0000:18:00.0";

    /// As it was offered before anything changed.
    fn offered(id: &str) -> Device {
        let inventory = observe(&Machine::described("eight-t4"));
        let gpu = id.parse().ok().and_then(|address| inventory.gpu(address));
        Device {
            id: id.to_owned(),
            health: Health::Healthy,
            numa_node: None,
            nodes: gpu.map(|gpu| offer::nodes(&inventory, &gpu)).unwrap_or_default(),
            others: vec![],
            path: vec![],
            egm: None,
            partition: None,
        }
    }

    fn against(machine: &Machine, id: &str) -> Option<String> {
        objections(machine, &[offered(id), offered("0000:19:00.0")]).remove(id)
    }

    #[test]
    fn nothing_speaks_against_a_gpu_that_is_as_it_was_offered() {
        assert_eq!(against(&Machine::described("eight-t4"), GPU), None);
    }

    #[test]
    fn a_gpu_that_an_old_vm_has_open_is_not_given_to_the_next_one() {
        let machine = Machine::described("eight-t4");
        let group = observe(&machine).gpu(GPU.parse().unwrap()).unwrap().group.unwrap();
        machine.open_device(
            4711,
            "qemu-kvm",
            &format!("/dev/vfio/{group}"),
            Some("7b5c2f0e-8a4d-4a6e-9a57-0d9f3a7c1b22"),
        );
        let why = against(&machine, GPU).unwrap();
        assert!(why.contains("pid 4711 (qemu-kvm)") && why.contains("7b5c2f0e"), "{why}");
        assert_eq!(against(&machine, "0000:35:00.0"), None);
    }

    #[test]
    fn a_gpu_whose_group_node_is_gone_is_not_given() {
        let machine = Machine::described("eight-t4");
        let group = observe(&machine).gpu(GPU.parse().unwrap()).unwrap().group.unwrap();
        machine.remove(&format!("/dev/vfio/{group}"));
        let why = against(&machine, GPU).unwrap();
        assert!(why.contains(&format!("/dev/vfio/{group}")), "{why}");
    }

    #[test]
    fn a_gpu_whose_group_is_another_fit_one_than_was_offered_is_not_given() {
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/vfio/fixtures/eight-t4.yaml")).unwrap();
        let moved = Machine::from_yaml(&text.replace("driver: vfio-pci, group: 20,", "driver: vfio-pci, group: 77,"));
        let why = against(&moved, GPU).unwrap();
        assert!(why.contains("offered with /dev/vfio/20") && why.contains("has /dev/vfio/77"), "{why}");
        assert_eq!(against(&moved, "0000:35:00.0"), None);
    }

    #[test]
    fn a_gpu_that_fell_off_the_bus_is_not_given() {
        let machine = Machine::described("eight-t4");
        machine.write(&format!("/sys/bus/pci/devices/{GPU}/config"), [0xff; 64]);
        let why = against(&machine, GPU).unwrap();
        assert!(why.contains("all ones"), "{why}");
    }

    #[test]
    fn what_is_no_gpu_of_this_host_is_not_given() {
        let machine = Machine::described("eight-t4");
        assert!(against(&machine, "0000:99:00.0").unwrap().contains("0000:99:00.0"));
        assert!(against(&machine, "GPU-5f6d").is_some());
    }
}
