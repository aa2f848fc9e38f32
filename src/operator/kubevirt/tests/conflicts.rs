//! What stands in the way of an entry, and how HyperConverged differs.

use std::collections::BTreeMap;

use serde_json::json;

use super::{
    super::{
        dialect::Dialect,
        permitted::{Permitted, Unreadable},
    },
    T4, World, complains, nic, node, says, t4,
};

#[test]
fn an_id_that_a_user_gave_another_name_is_a_conflict_and_stays() {
    let mut world = World::well();
    // The spelling of older examples.
    let old = json!({"pciVendorSelector": "10DE:1EB8", "resourceName": "nvidia.com/TU104GL_Tesla_T4", "externalResourceProvider": true});
    world.permits(json!({"pciHostDevices": [old]}));
    let words = ["nvidia.com/TU104GL_Tesla_T4", T4, "KubeVirt kubevirt/kubevirt", "resourceAliases"];
    complains(&world, "SelectorHasAnotherName", &words);
}

#[test]
fn a_resource_that_kubevirt_itself_would_register_is_a_conflict() {
    let words = [T4, "externalResourceProvider: true"];
    let mut world = World::well();
    world.permits(json!({"pciHostDevices": [{"pciVendorSelector": "10DE:1EB8", "resourceName": T4}]}));
    complains(&world, "MissingExternalResourceProvider", &words);
    world.permits(json!({"pciHostDevices": [{"pciVendorSelector": "10DE:1EB9", "resourceName": T4}]}));
    complains(&world, "MissingExternalResourceProvider", &words);
    world.permits(json!({"mediatedDevices": [{"mdevNameSelector": "GRID T4-1Q", "resourceName": T4}]}));
    complains(
        &world,
        "MissingExternalResourceProvider",
        &[&words[..], &["permittedHostDevices.mediatedDevices"]].concat(),
    );
}

#[test]
fn a_name_of_the_container_stack_is_not_entered() {
    for name in ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared"] {
        let mut world = World::well();
        world.nodes = vec![node("n1", "10de:1eb8", name)];
        complains(&world, "ReservedName", &[name, "resourceAliases"]);
    }
}

#[test]
fn settings_beside_the_lists_are_shown_and_ours_are_entered_all_the_same() {
    let mut world = World::well();
    let mdev = json!([{"mdevNameSelector": "GRID P40-1Q", "resourceName": "nvidia.com/GRID_P40-1Q"}]);
    let field = json!({"mediatedDevices": mdev, "nodeMediatedDeviceTypes": [{"mediatedDevicesTypes": ["nvidia-46"]}]});
    world.permits(field.clone());
    let words =
        ["permittedHostDevices.nodeMediatedDeviceTypes", "move it to spec.configuration.mediatedDevicesConfiguration"];
    let decision = world.served();
    says(&decision, "Misplaced", &words);
    world.apply(&decision);
    assert_eq!(world.entries(), json!([t4()]));

    // The API server has dropped the field, and kubectl has kept what it was given.
    let mut world = World::well();
    let applied = json!({"apiVersion": "kubevirt.io/v1", "spec": {"configuration": {"permittedHostDevices": field}}});
    let kept = ("kubectl.kubernetes.io/last-applied-configuration".to_owned(), applied.to_string());
    world.object.metadata.annotations = Some(BTreeMap::from([kept]));
    says(&world.served(), "Misplaced", &words);
}

#[test]
fn the_other_objects_spelling_is_shown_as_misplaced() {
    let mut world = World::well();
    world.object.data = json!({"spec": {"permittedHostDevices": {"pciHostDevices": []}}});
    says(&world.served(), "Misplaced", &["spec.permittedHostDevices", "spec.configuration.permittedHostDevices"]);
}

#[test]
fn hyperconverged_has_its_own_field_and_key() {
    let mut world = World::well();
    world.hyper_converged(&json!([{"pciDeviceSelector": "8086:1572", "resourceName": "intel.com/x710"}]));
    let world = world.written();
    let ours = json!({"pciDeviceSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true});
    assert_eq!(world.entries()[1], ours);
    assert_eq!(world.object.data.pointer("/spec/permittedHostDevices/pciHostDevices/1"), Some(&ours));
}

#[test]
fn the_second_version_of_hyperconverged_has_the_field_below_virtualization() {
    let mut world = World::well();
    world.hyper_converged(&json!([]));
    world.dialect = Dialect::HyperConvergedV1;
    world.permits(json!({"pciHostDevices": []}));
    let world = world.written();
    let ours = json!({"pciDeviceSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true});
    assert_eq!(world.object.data.pointer("/spec/virtualization/permittedHostDevices/pciHostDevices/0"), Some(&ours));
}

#[test]
fn hyperconverged_cannot_have_two_names_for_an_id() {
    let mut world = World::well();
    world.hyper_converged(&json!([]));
    let mut world = world.written();
    world.nodes.push(node("n2", "10de:1eb8", "nvidia.com/T4"));
    complains(&world, "NotExpressible", &[T4, "nvidia.com/T4", "HyperConverged", "resourceAliases"]);
}

#[test]
fn an_entry_that_is_switched_off_in_hyperconverged_stays_off() {
    let mut world = World::well();
    let off = json!({"pciDeviceSelector": "10DE:1EB8", "resourceName": T4, "externalResourceProvider": true, "disabled": true});
    world.hyper_converged(&json!([off]));
    complains(&world, "EntryDisabled", &["disabled", T4]);
}

#[test]
fn a_list_that_cannot_be_read_is_an_error_and_not_an_empty_one() {
    let mut world = World::well();
    world.permits(json!({"pciHostDevices": [nic(), {"resourceName": "nvidia.com/X"}]}));
    let at = |world: &World| match Permitted::read(world.dialect, &world.object) {
        Err(Unreadable { at, .. }) => at,
        Ok(read) => panic!("{read:?}"),
    };
    let list = "spec.configuration.permittedHostDevices.pciHostDevices";
    assert_eq!(at(&world), format!("{list}[1].pciVendorSelector"));
    world.permits(json!({"pciHostDevices": [nic(), {"pciVendorSelector": "10DE:1EB8"}]}));
    assert_eq!(at(&world), format!("{list}[1].resourceName"));
    world.permits(json!({"pciHostDevices": {}}));
    assert_eq!(at(&world), list);
}
