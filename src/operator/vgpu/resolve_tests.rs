//! A node with two A10 and a T4, and what layouts make of it.

use crds::v1alpha1::{GPUStatus, VgpuFramework, VgpuInstance, VgpuStatus, VgpuTypeStatus};

use super::{
    config::Config,
    defaults,
    resolve::{Resolved, Unresolved, resolve},
};

const FIRST: &str = "0000:18:00.0";
const SECOND: &str = "0000:3b:00.0";
const FAR: &str = "10000:01:00.0";

fn gpu(address: &str, id: &str, product: &str) -> GPUStatus {
    GPUStatus {
        address: address.to_owned(),
        id: id.to_owned(),
        product: product.to_owned(),
        subsystem: Some("10de:1482".to_owned()),
        ..GPUStatus::default()
    }
}

/// In an order of its own: addresses decide.
fn gpus() -> Vec<GPUStatus> {
    vec![
        gpu(FAR, "10de:1eb8", "TU104GL [Tesla T4]"),
        gpu(SECOND, "10de:2236", "GA102GL [A10]"),
        gpu(FIRST, "10de:2236", "GA102GL [A10]"),
    ]
}

fn listing(mut gpu: GPUStatus, framework: VgpuFramework, types: &[&str]) -> GPUStatus {
    let of = |name: &&str| VgpuTypeStatus { name: (*name).to_owned(), available: 1 };
    gpu.vgpu = Some(VgpuStatus { framework, types: types.iter().map(of).collect(), ..VgpuStatus::default() });
    gpu
}

fn layout(entries: &str, gpus: &[GPUStatus]) -> Result<Resolved, Unresolved> {
    let text = format!("version: v1\nvgpu-configs:\n  mine:\n{entries}");
    resolve(&Config::parse(&text).expect("a config"), "mine", gpus)
}

/// `ADDRESS TYPE×COUNT …` of each GPU.
fn cut(resolved: &Resolved) -> Vec<String> {
    let of = |gpu: &crds::v1alpha1::GPUVgpus| {
        let instances = gpu.instances.iter().map(|i| format!(" {}×{}", i.kind, i.count));
        gpu.address.clone() + &instances.collect::<String>()
    };
    resolved.layout.gpus.iter().map(of).collect()
}

#[track_caller]
fn refused(resolved: Result<Resolved, Unresolved>, words: &[&str]) -> Unresolved {
    let error = resolved.expect_err("an error");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} in {error}");
    }
    error
}

#[test]
fn places_count_all_gpus_in_the_order_of_their_addresses() {
    let entries = "
    - {devices: [0], vgpu-devices: {A10-4Q: 6}}
    - {devices: [1], vgpu-devices: {A10-8Q: 2, A10-8C: 1}}
    - {devices: [2], vgpu-devices: {}}\n";
    let resolved = layout(entries, &gpus()).expect("a layout");
    let expected = [format!("{FIRST} A10-4Q×6"), format!("{SECOND} A10-8C×1 A10-8Q×2"), FAR.to_owned()];
    assert_eq!(cut(&resolved), expected);
    assert_eq!((resolved.layout.name.as_str(), resolved.notes), ("mine", Vec::new()));
}

#[test]
fn a_filter_picks_a_model_and_the_place_still_counts_all() {
    let entries = "
    - {device-filter: '0x223610DE', devices: [1, 2], vgpu-devices: {A10-4Q: 6}}
    - {device-filter: ['0x1EB810DE', '0x1EB910DE'], devices: all, vgpu-devices: {T4-2Q: 8}}\n";
    let resolved = layout(entries, &gpus()).expect("a layout");
    assert_eq!(cut(&resolved), [format!("{SECOND} A10-4Q×6"), format!("{FAR} T4-2Q×8")]);
}

#[test]
fn two_entries_for_one_gpu_are_an_error_that_names_both_and_the_gpu() {
    let entries = "
    - {device-filter: '0x223610DE', devices: all, vgpu-devices: {A10-4Q: 6}}
    - {devices: [1], vgpu-devices: {A10-8Q: 3}}\n";
    let error = refused(layout(entries, &gpus()), &[SECOND, "line 5", "line 6", "mine"]);
    assert_eq!(error.reason(), "VGPUConfigAmbiguous");
}

#[test]
fn a_type_that_the_driver_does_not_list_is_an_error_that_names_the_nearest() {
    let types = ["A10-1Q", "A10-2Q", "A10-4Q", "A10-8Q"];
    let gpus: Vec<GPUStatus> = gpus().into_iter().map(|gpu| listing(gpu, VgpuFramework::Mdev, &types)).collect();
    let entry = |kind: &str| format!("    - {{devices: [0], vgpu-devices: {{{kind}: 1}}}}\n");
    assert!(layout(&entry("A10-4Q"), &gpus).is_ok());
    refused(
        layout(&entry("A10-4C"), &gpus),
        &["line 4", FIRST, "GA102GL [A10]", "no vGPU type A10-4C", "mean A10-4Q?"],
    );
    refused(layout(&entry("L40S-48Q"), &gpus), &["lists A10-1Q, A10-2Q, A10-4Q, A10-8Q"]);
    assert!(layout("    - {devices: [0], vgpu-devices: {}}\n", &gpus).is_ok());
}

#[test]
fn suffixes_are_part_of_the_name() {
    let gpus = [listing(gpu(FIRST, "10de:20f1", ""), VgpuFramework::Mdev, &["A100-1-5C", "A100-2-10CNOME"])];
    refused(layout("    - {devices: all, vgpu-devices: {A100-1-5CME: 1}}\n", &gpus), &["no vGPU type A100-1-5CME"]);
    refused(layout("    - {devices: all, vgpu-devices: {A100-2-10C: 1}}\n", &gpus), &["no vGPU type A100-2-10C"]);
}

#[test]
fn what_a_driver_leaves_out_beside_others_is_no_unknown_type() {
    let entries = "    - {devices: all, vgpu-devices: {L40S-24Q: 2}}\n";
    let mut gpus = [listing(gpu(FIRST, "10de:26b9", ""), VgpuFramework::VendorVfio, &["L40S-48Q"])];
    refused(layout(entries, &gpus), &["no vGPU type L40S-24Q"]);
    gpus[0].vgpu.as_mut().expect("a status").instances = vec![VgpuInstance::default()];
    assert!(layout(entries, &gpus).is_ok(), "one exists, and the rest is what fits beside it");
    gpus[0] = listing(gpu(FIRST, "10de:26b9", ""), VgpuFramework::VendorVfio, &[]);
    assert!(layout(entries, &gpus).is_ok(), "it has listed nothing yet");
    gpus[0] = listing(gpu(FIRST, "10de:26b9", ""), VgpuFramework::None, &["L40S-48Q"]);
    assert!(layout(entries, &gpus).is_ok(), "its driver is not there yet");
}

#[test]
fn a_layout_for_other_gpus_is_refused_with_those_of_the_node() {
    let entries = "    - {device-filter: '0x25B610DE:0x14A910DE', devices: all, vgpu-devices: {A16-4Q: 4}}\n";
    let words = ["0x25B610DE:0x14A910DE", FIRST, "10de:2236, subsystem 10de:1482"];
    assert_eq!(refused(layout(entries, &gpus()), &words).reason(), "VGPUConfigMatchesNoGPU");
    refused(layout("    - {devices: [7], vgpu-devices: {A16-4Q: 4}}\n", &gpus()), &["place [7]"]);
}

#[test]
fn a_place_that_a_node_does_not_have_is_said() {
    let entries = "
    - {devices: [0], vgpu-devices: {A10-4Q: 6}}
    - {devices: [3], vgpu-devices: {A10-8Q: 3}}
    - {device-filter: '0x25B610DE', devices: [9], vgpu-devices: {A16-8Q: 2}}\n";
    let resolved = layout(entries, &gpus()).expect("a layout");
    assert_eq!(resolved.notes, ["line 6 names GPU 3, and this node has 3, counted from 0"]);
}

#[test]
fn a_name_that_no_layout_has_is_refused_with_the_one_that_was_meant() {
    let config = Config::parse(&defaults::yaml()).expect("our own layouts");
    let error = resolve(&config, "a10-4q", &gpus()).expect_err("no such layout");
    assert!(error.to_string().contains("did you mean A10-4Q?"), "{error}");
    assert_eq!(error.reason(), "VGPUConfigUnknown");
    let error = resolve(&config, "gaming", &gpus()).expect_err("no such layout");
    assert!(error.to_string().contains("there are 6000D-1-42C") && error.to_string().contains("703 more"), "{error}");
}

#[test]
fn a_node_of_several_models_gets_the_usual_types_of_each() {
    let config = Config::parse(&defaults::yaml()).expect("our own layouts");
    let resolved = resolve(&config, defaults::USUAL, &gpus()).expect("the usual layout");
    let expected = [format!("{FIRST} A10-12Q×2"), format!("{SECOND} A10-12Q×2"), format!("{FAR} T4-8Q×2")];
    assert_eq!(cut(&resolved), expected);
    let resolved = resolve(&config, "T4-4Q", &gpus()).expect("a layout of one model");
    assert_eq!(cut(&resolved), [format!("{FAR} T4-4Q×4")]);
}

#[test]
fn boards_of_one_device_id_get_their_own_types() {
    let config = Config::parse(&defaults::yaml()).expect("our own layouts");
    for (subsystem, kind) in [("10de:14a9", "A16-8Q"), ("10de:157e", "A2-8Q")] {
        let mut gpu = gpu(FIRST, "10de:25b6", "GA107GL [A2 / A16]");
        gpu.subsystem = Some(subsystem.to_owned());
        let resolved = resolve(&config, defaults::USUAL, &[gpu]).expect("the usual layout");
        assert_eq!(cut(&resolved), [format!("{FIRST} {kind}×2")]);
    }
}

#[test]
fn types_of_the_other_mig_mode_are_left_to_the_agent_which_changes_it() {
    let listing = |types: &[&str]| vec![listing(gpu(FIRST, "10de:2331", "H100"), VgpuFramework::VendorVfio, types)];
    let asked = "  - {devices: all, vgpu-devices: {H100-1-10C: 7}}\n";
    let shared = listing(&["NVIDIA H100-40C", "H100-40C"]);
    assert_eq!(cut(&layout(asked, &shared).expect("a layout")), [format!("{FIRST} H100-1-10C×7")]);
    refused(layout(asked, &listing(&["H100-1-10CME", "H100-2-20C"])), &["H100-1-10C", "H100-1-10CME"]);
}
