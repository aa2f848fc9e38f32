//! One world in which all is well, and one thing different in it at a time.

mod conflicts;
mod vgpus;

use std::collections::BTreeMap;

use crds::{
    labels,
    v1alpha1::{AgentStatus, GPUNode, GPUNodeSpec, GPUNodeStatus, GPUStatus, KubeVirtMode, ResourceStatus},
};
use kube::api::DynamicObject;
use proptest::{collection::vec, prelude::*};
use serde_json::{Value, json};

use super::{
    decide::{Decision, WOULD_BREAK, asks_for_users, serve, withdraw},
    dialect::Dialect,
    offers::offers,
    permitted::Permitted,
    users::Use,
};

const T4: &str = "nvidia.com/TU104GL_TESLA_T4";

/// One node offers one T4; KubeVirt's object permits a network card of somebody's.
#[derive(Clone)]
struct World {
    dialect: Dialect,
    object: DynamicObject,
    nodes: Vec<GPUNode>,
    all_read: bool,
    users: Vec<Use>,
    mode: KubeVirtMode,
}

fn node(name: &str, id: &str, resource: &str) -> GPUNode {
    let address = "0000:18:00.0".to_owned();
    let gpu = GPUStatus {
        address: address.clone(),
        id: id.to_owned(),
        resource: Some(resource.to_owned()),
        ..GPUStatus::default()
    };
    let offered = ResourceStatus { name: resource.to_owned(), devices: vec![address], registered: true };
    let agent = AgentStatus { gpus: vec![gpu], resources: vec![offered], ..AgentStatus::default() };
    let mut node = GPUNode::new(name, GPUNodeSpec::default());
    node.status = Some(GPUNodeStatus { agent: Some(agent), operator: None });
    node
}

fn nic() -> Value {
    json!({"pciVendorSelector": "8086:1572", "resourceName": "intel.com/x710"})
}

fn t4() -> Value {
    json!({"pciVendorSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true})
}

fn used(device: &str) -> Use {
    Use { by: "VirtualMachineInstance default/vm-1".to_owned(), device: device.to_owned() }
}

impl World {
    fn well() -> Self {
        let mut world = Self {
            dialect: Dialect::KubeVirt,
            object: DynamicObject::new("kubevirt", &Dialect::KubeVirt.resource()).within("kubevirt"),
            nodes: vec![node("n1", "10de:1eb8", T4)],
            all_read: true,
            users: Vec::new(),
            mode: KubeVirtMode::Manage,
        };
        world.permits(json!({"pciHostDevices": [nic()]}));
        world
    }

    fn permits(&mut self, field: Value) {
        let nested = self.dialect.path().iter().rev().fold(field, |inner, key| json!({*key: inner}));
        self.object.data = nested;
    }

    fn unset(&mut self) {
        self.object.data = json!({"spec": {"configuration": {}}});
    }

    fn hyper_converged(&mut self, entries: &Value) {
        self.dialect = Dialect::HyperConvergedV1Beta1;
        self.object =
            DynamicObject::new("kubevirt-hyperconverged", &self.dialect.resource()).within("kubevirt-hyperconverged");
        self.permits(json!({"pciHostDevices": entries}));
    }

    fn mark(&mut self, marks: &str) {
        let own = BTreeMap::from([(labels::PERMITTED_HOST_DEVICES.to_owned(), marks.to_owned())]);
        self.object.metadata.annotations.get_or_insert_default().extend(own);
    }

    fn read(&self) -> Permitted {
        Permitted::read(self.dialect, &self.object).unwrap()
    }

    fn served(&self) -> Decision {
        serve(&self.read(), &offers(&self.nodes, self.all_read), &self.users, self.mode)
    }

    /// The world after the write that was decided on.
    fn written(mut self) -> Self {
        let decision = self.served();
        self.apply(&decision);
        self
    }

    fn apply(&mut self, decision: &Decision) {
        let patch = &decision.change.as_ref().expect("a write").patch;
        let mut whole = serde_json::to_value(&self.object).unwrap();
        merge(&mut whole, patch);
        self.object = serde_json::from_value(whole).unwrap();
    }

    fn field(&self) -> Option<&Value> {
        self.dialect.path().iter().try_fold(&self.object.data, |value, key| value.get(key))
    }

    fn entries(&self) -> Value {
        self.field().and_then(|field| field.get("pciHostDevices")).cloned().unwrap_or_default()
    }

    fn marks(&self) -> Option<&str> {
        self.object.metadata.annotations.as_ref()?.get(labels::PERMITTED_HOST_DEVICES).map(String::as_str)
    }
}

/// RFC 7386, as the API server does it.
fn merge(into: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else { return *into = patch.clone() };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        let object = into.as_object_mut().unwrap();
        if value.is_null() {
            object.remove(key);
        } else {
            merge(object.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Nothing is written, and the condition has this reason and these words.
#[track_caller]
fn complains(world: &World, reason: &str, words: &[&str]) {
    let decision = world.served();
    assert_eq!(decision.change, None);
    says(&decision, reason, words);
}

#[track_caller]
fn says(decision: &Decision, reason: &str, words: &[&str]) {
    let verdict = &decision.verdict;
    assert_eq!((verdict.holds, verdict.reason), (false, reason), "{}", verdict.message);
    for word in words {
        assert!(verdict.message.contains(word), "{word} is not in: {}", verdict.message);
    }
}

#[test]
fn an_offered_gpu_is_appended_and_marked_and_foreign_entries_stay() {
    let world = World::well().written();
    assert_eq!(world.entries(), json!([nic(), t4()]));
    assert_eq!(world.marks(), Some(format!("10DE:1EB8={T4}").as_str()));
    let settled = world.served();
    assert_eq!((settled.change, settled.verdict.holds, settled.verdict.reason), (None, true, "Permitted"));
}

#[test]
fn sibling_lists_and_unknown_fields_of_others_stay() {
    let mut world = World::well();
    let mdev = json!([{"mdevNameSelector": "GRID T4-1Q", "resourceName": "nvidia.com/GRID_T4-1Q"}]);
    let mut odd = nic();
    odd["fromTheFuture"] = json!(1);
    world.permits(json!({"pciHostDevices": [odd], "mediatedDevices": mdev}));
    let world = world.written();
    assert_eq!(world.field().unwrap()["mediatedDevices"], mdev);
    assert_eq!(world.entries(), json!([odd, t4()]));
}

#[test]
fn an_entry_that_a_user_made_is_enough_in_any_case_of_letters_and_never_becomes_ours() {
    let mut world = World::well();
    let by_user = json!({"pciVendorSelector": "10de:1eb8", "resourceName": T4, "externalResourceProvider": true});
    world.permits(json!({"pciHostDevices": [by_user]}));
    let decision = world.served();
    assert!(decision.change.is_none() && decision.verdict.holds, "{}", decision.verdict.message);
    assert_eq!(withdraw(&world.read()).change, None);
}

#[test]
fn two_ids_of_one_resource_are_two_entries() {
    let mut world = World::well();
    world.nodes.push(node("n2", "10de:1eb9", T4));
    assert_eq!(world.written().entries().as_array().unwrap().len(), 3);
}

#[test]
fn a_gpu_that_no_node_offers_is_not_entered() {
    let mut world = World::well();
    world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap().resources.clear();
    let decision = world.served();
    assert_eq!((decision.change, decision.verdict.reason), (None, "NothingToPermit"));
}

#[test]
fn of_two_ids_of_one_resource_only_the_offered_one_is_entered() {
    let mut world = World::well();
    let agent = world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap();
    let other = GPUStatus { address: "0000:19:00.0".to_owned(), id: "10de:1eb9".to_owned(), ..agent.gpus[0].clone() };
    agent.gpus.push(other);
    assert_eq!(world.written().entries(), json!([nic(), t4()]));
}

#[test]
fn our_entry_stays_while_its_gpu_is_withdrawn_for_a_mode_change() {
    let mut world = World::well().written();
    world.nodes[0].status.as_mut().unwrap().agent.as_mut().unwrap().resources.clear();
    assert_eq!(world.served().change, None);
}

#[test]
fn our_entry_goes_when_the_last_node_with_that_gpu_has_gone() {
    let mut world = World::well().written();
    world.nodes = vec![node("n2", "10de:2236", "nvidia.com/GA102GL_A10")];
    let world = world.written();
    assert_eq!(world.entries()[0], nic());
    assert_eq!(world.entries()[1]["resourceName"], "nvidia.com/GA102GL_A10");
    assert_eq!(world.marks(), Some("10DE:2236=nvidia.com/GA102GL_A10"));
}

#[test]
fn a_gpunode_that_nobody_can_read_proves_nothing() {
    let mut world = World::well().written();
    world.nodes.clear();
    world.all_read = false;
    assert_eq!(world.served().change, None);
    world.all_read = true;
    world.nodes = vec![GPUNode::new("n1", GPUNodeSpec::default())];
    assert_eq!(world.served().change, None, "a report that is not there yet proves nothing");
}

#[test]
fn a_renamed_resource_gets_its_new_entry_and_loses_the_old_one() {
    let mut world = World::well().written();
    world.nodes = vec![node("n1", "10de:1eb8", "nvidia.com/T4")];
    let world = world.written();
    assert_eq!(world.entries()[1]["resourceName"], "nvidia.com/T4");
    assert_eq!(world.entries().as_array().unwrap().len(), 2);
}

#[test]
fn while_nodes_disagree_on_a_name_kubevirt_permits_both() {
    let mut world = World::well().written();
    world.nodes.push(node("n2", "10de:1eb8", "nvidia.com/T4"));
    assert_eq!(world.written().entries().as_array().unwrap().len(), 3);
}

#[test]
fn an_entry_of_ours_that_somebody_deleted_comes_back() {
    let mut world = World::well().written();
    world.permits(json!({"pciHostDevices": [nic()]}));
    assert_eq!(world.written().entries(), json!([nic(), t4()]));
}

#[test]
fn withdrawing_takes_ours_and_leaves_the_rest() {
    let mut world = World::well().written();
    world.apply(&withdraw(&world.read()));
    assert_eq!(world.entries(), json!([nic()]));
    assert_eq!(world.marks(), None);
    assert_eq!(withdraw(&world.read()).change, None, "once");
}

#[test]
fn an_entry_of_ours_that_somebody_has_changed_is_theirs() {
    let mut world = World::well().written();
    let mut changed = t4();
    changed["externalResourceProvider"] = json!(false);
    world.permits(json!({"pciHostDevices": [changed]}));
    says(&world.served(), "MissingExternalResourceProvider", &[]);
    world.apply(&withdraw(&world.read()));
    assert_eq!(world.entries(), json!([changed]));
}

#[test]
fn the_first_entry_of_all_is_made_when_no_vm_uses_anything_and_unset_again_at_the_end() {
    let mut world = World::well();
    world.unset();
    assert!(asks_for_users(&world.read(), &offers(&world.nodes, true)));
    let mut world = world.written();
    assert_eq!(world.entries(), json!([t4()]));
    world.apply(&withdraw(&world.read()));
    assert_eq!(world.field(), None, "an empty field would refuse every device");
    assert_eq!(world.object.metadata.annotations, Some(BTreeMap::new()));
}

#[test]
fn a_field_that_a_user_left_empty_stays_there_at_the_end() {
    let mut world = World::well();
    world.permits(json!({}));
    let mut world = world.written();
    world.apply(&withdraw(&world.read()));
    assert_eq!(world.field(), Some(&json!({})));
}

#[test]
fn the_first_entry_waits_while_a_vm_would_lose_a_device() {
    let mut world = World::well();
    world.unset();
    world.users = vec![used(T4), used("example.com/nic")];
    let words = [
        "VirtualMachineInstance default/vm-1",
        "example.com/nic",
        "spec.configuration.permittedHostDevices",
        "by hand",
    ];
    complains(&world, WOULD_BREAK, &words);
    assert!(!world.served().verdict.message.contains(&format!("uses {T4}")), "ours is permitted by the entry");
    world.users.pop();
    assert_eq!(world.written().entries(), json!([t4()]));
}

#[test]
fn a_device_in_use_that_a_node_has_and_does_not_offer_now_is_permitted_with_the_first() {
    let mut world = World::well();
    world.unset();
    let mut other = node("n2", "10de:2236", "nvidia.com/GA102GL_A10");
    other.status.as_mut().unwrap().agent.as_mut().unwrap().resources.clear();
    world.nodes.push(other);
    world.users = vec![used("nvidia.com/GA102GL_A10")];
    assert_eq!(world.written().entries().as_array().unwrap().len(), 2);
}

#[test]
fn vms_do_not_stand_in_the_way_once_a_user_has_set_the_field() {
    let mut world = World::well();
    world.permits(json!({}));
    world.users = vec![used("example.com/nic")];
    assert!(!asks_for_users(&world.read(), &offers(&world.nodes, true)));
    assert_eq!(world.written().entries(), json!([t4()]));
}

#[test]
fn report_shows_the_entry_to_add_and_writes_nothing() {
    let mut world = World::well();
    world.mode = KubeVirtMode::Report;
    complains(
        &world,
        "NotPermitted",
        &["pciVendorSelector", "10DE:1EB8", T4, "spec.configuration.permittedHostDevices.pciHostDevices"],
    );
    world.permits(json!({"pciHostDevices": [t4()]}));
    assert!(world.served().verdict.holds);
}

#[test]
fn report_does_not_take_away_what_was_managed_before() {
    let mut world = World::well().written();
    world.mode = KubeVirtMode::Report;
    world.nodes.clear();
    assert_eq!(world.served().change, None);
}

#[test]
fn marks_that_mean_nothing_take_nothing_away() {
    let mut world = World::well();
    world.mark("what is this,8086:1572=intel.com/other");
    let world = world.written();
    assert_eq!(world.entries(), json!([nic(), t4()]));
}

proptest! {
    #[test]
    fn whatever_others_have_there_is_there_after_our_entries_have_come_and_gone(
        list in vec((0..4_usize, 0..3_usize, any::<bool>()), 0..6),
    ) {
        let ids = ["10de:1eb8", "10DE:1EB8", "8086:1572", "10de:2236"];
        let resources = [T4, "intel.com/x710", "nvidia.com/TU104GL_Tesla_T4"];
        let foreign: Vec<Value> = list
            .into_iter()
            .map(|(id, resource, external)| json!({
                "pciVendorSelector": ids[id], "resourceName": resources[resource], "externalResourceProvider": external,
            }))
            .collect();
        let mut world = World::well();
        world.permits(json!({"pciHostDevices": foreign}));
        let decision = world.served();
        if decision.change.is_some() {
            world.apply(&decision);
            let entries = world.entries();
            let (others, ours) = entries.as_array().unwrap().split_at(foreign.len());
            prop_assert_eq!(others, &foreign[..]);
            prop_assert_eq!(ours, &[t4()]);
            world.apply(&withdraw(&world.read()));
            prop_assert_eq!(world.entries().as_array().cloned().unwrap_or_default(), foreign);
        }
    }
}
