//! What the commands print, of two machines: the text, and the JSON that scripts rely on.

use std::path::Path;

use super::{View, early, inspect, plan, vgpus};
use crate::answer::{json, yaml};

fn fixture(name: &str) -> View {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("vfio/fixtures").join(name).with_extension("yaml");
    View::described(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The RTX 4000's USB port and the GPU are in use; of two A40 one is with a VM already.
fn machines() -> [(&'static str, View); 2] {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("vfio/fixtures/two-a40.yaml")).unwrap();
    let used =
        text.replace("functions:", "holders: [{ pid: 4242, command: python, open: \"0000:4a:00.0\" }]\nfunctions:");
    [("rtx-4000", fixture("rtx-4000")), ("two-a40-in-use", View::described(&used).unwrap())]
}

fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

#[test]
fn a_terminal_sees_colours() {
    let report = inspect::report(&fixture("troubled"));
    let text = inspect::text(&report, false);
    assert_ne!(text, plain(&text));
}

#[test]
fn inspect_prints_as_before() {
    for (name, view) in machines() {
        let report = inspect::report(&view);
        insta::assert_snapshot!(format!("inspect-{name}"), plain(&inspect::text(&report, false)));
        insta::assert_snapshot!(format!("inspect-wide-{name}"), plain(&inspect::text(&report, true)));
        insta::assert_snapshot!(format!("inspect-json-{name}"), json(&report).unwrap());
    }
}

#[test]
fn inspect_shows_links_errors_of_the_bus_and_vgpu_frameworks() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("vfio/fixtures/l40s-vgpu.yaml");
    let sound = std::fs::read_to_string(path).unwrap();
    let sick = sound
        .replace(r#"link: ["16.0 GT/s x16""#, r#"link: ["16.0 GT/s x8""#)
        .replace("aer: [0, 0, 0]", "aer: [7, 2, 1]");
    for (name, view) in [("l40s-sick", View::described(&sick).unwrap()), ("a2-sriov", fixture("a2-sriov"))] {
        insta::assert_snapshot!(format!("inspect-wide-{name}"), plain(&inspect::text(&inspect::report(&view), true)));
    }
}

#[test]
fn plan_prints_as_before() {
    for (name, view) in machines() {
        for mode in [plan::Mode::VmPassthrough, plan::Mode::Container] {
            let report = plan::report(&view, mode, &[]);
            insta::assert_snapshot!(format!("plan-{mode:?}-{name}"), plain(&plan::text(&report)));
            insta::assert_snapshot!(format!("plan-json-{mode:?}-{name}"), json(&report).unwrap());
        }
    }
}

#[test]
fn yaml_says_the_same_as_json() {
    let report = plan::report(&fixture("rtx-4000"), plan::Mode::VmPassthrough, &[]);
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml(&report).unwrap()).unwrap();
    let from_json: serde_json::Value = serde_json::from_str(&json(&report).unwrap()).unwrap();
    assert_eq!(from_yaml, from_json);
}

#[test]
fn twins_are_planned_once() {
    let report = plan::report(&fixture("twins"), plan::Mode::VmPassthrough, &[]);
    let verdicts: Vec<_> = report.gpus.iter().map(|gpu| &gpu.verdict).collect();
    assert!(matches!(verdicts[0], plan::Verdict::Change { .. }), "{verdicts:?}");
    assert!(matches!(verdicts[1], plan::Verdict::Together { with } if *with == report.gpus[0].address), "{verdicts:?}");
}

#[test]
fn one_of_twins_alone_is_refused() {
    let report = plan::report(&fixture("twins"), plan::Mode::VmPassthrough, &["0000:03:00.0".parse().unwrap()]);
    let [gpu] = report.gpus.as_slice() else { panic!("{report:?}") };
    assert!(matches!(&gpu.verdict, plan::Verdict::Refused { refusal, .. } if refusal.reason == "SharedIommuGroup"));
}

#[test]
fn early_prints_as_before() {
    for name in ["eight-h200", "gb200", "gtx-860m", "rtx-4000", "troubled"] {
        insta::assert_snapshot!(format!("early-{name}"), plain(&early::text(&early::report(&fixture(name), &[]))));
    }
}

fn arguments(report: &early::EarlyReport) -> Vec<&str> {
    report.kernel_arguments.iter().map(|argument| argument.argument.as_str()).collect()
}

#[test]
fn a_gpu_that_stays_keeps_its_ids_out_of_the_kernel_arguments() {
    let report = early::report(&fixture("eight-h200"), &["0000:18:00.0".parse().unwrap()]);
    assert_eq!(report.functions.len(), 1, "{report:?}");
    assert!(arguments(&report).iter().all(|argument| !argument.starts_with("vfio-pci.ids=")), "{report:?}");
}

#[test]
fn an_argument_that_the_kernel_has_is_not_asked_for_again() {
    let mut view = fixture("eight-h200");
    view.inventory.facts.command_line = "root=/dev/sda1 iommu=pt quiet".to_owned();
    let report = early::report(&view, &[]);
    assert!(!arguments(&report).contains(&"iommu=pt"), "{report:?}");
}

#[test]
fn a_gpu_that_is_in_use_now_can_be_bound_at_the_next_boot() {
    let [_, (_, used)] = machines();
    assert!(early::report(&used, &[]).refused.is_empty());
}

#[test]
fn a_machine_config_carries_the_files_and_arguments_of_the_machine() {
    let report = early::report(&fixture("eight-h200"), &[]);
    let object = report.machine_config.as_ref().unwrap();
    let files = object["spec"]["config"]["storage"]["files"].as_array().unwrap();
    for (file, ours) in files.iter().zip(&report.files) {
        assert_eq!(file["path"], ours.path);
        let source = file["contents"]["source"].as_str().unwrap().strip_prefix("data:,").unwrap();
        assert_eq!(percent_encoding::percent_decode_str(source).decode_utf8().unwrap(), ours.contents);
    }
    assert_eq!(files.len(), 3);
    assert_eq!(object["spec"]["kernelArguments"], serde_json::json!(arguments(&report)));
}

#[test]
fn a_machine_without_gpus_needs_nothing() {
    let report = early::report(&fixture("mi300x"), &[]);
    assert!(report.files.is_empty() && report.kernel_arguments.is_empty() && report.machine_config.is_none());
}

const LAYOUTS: &str = "version: v1
vgpu-configs:
  mine:
    - {device-filter: '0x25B610DE', devices: all, vgpu-devices: {A2-4Q: 2}}
    - {device-filter: '0x26B910DE', devices: all, vgpu-devices: {L40S-24Q: 2}}
  clear: [{devices: all, vgpu-devices: {}}]
  twice: [{devices: all, vgpu-devices: {A2-4Q: 1}}, {devices: [0], vgpu-devices: {A2-4C: 1}}]
";

fn vgpu_plan(machine: &str, layout: &str) -> Result<vgpus::VgpuPlanReport, String> {
    vgpus::report(&fixture(machine), LAYOUTS, layout, &[], &vfio::vgpu::LibraryFacts::default(), "node-1")
}

#[test]
fn a_vgpu_layout_is_planned_on_described_machines() {
    for machine in ["a2-sriov", "l40s-vgpu"] {
        for layout in ["mine", "clear"] {
            let report = vgpu_plan(machine, layout).unwrap();
            insta::assert_snapshot!(format!("plan-vgpu-{layout}-{machine}"), plain(&vgpus::text(&report)));
        }
    }
    insta::assert_snapshot!("plan-vgpu-json-a2-sriov", json(&vgpu_plan("a2-sriov", "mine").unwrap()).unwrap());
}

#[test]
fn a_layout_that_is_wrong_or_not_there_is_told_as_on_a_node() {
    let error = vgpu_plan("a2-sriov", "miner").unwrap_err();
    assert!(error.contains("did you mean mine?"), "{error}");
    let error = vgpu_plan("a2-sriov", "twice").unwrap_err();
    assert!(error.contains("line 7 and line 7"), "{error}");
    let wrong = LAYOUTS.replace("devices: all", "device: all");
    let library = vfio::vgpu::LibraryFacts::default();
    let error = vgpus::report(&fixture("a2-sriov"), &wrong, "mine", &[], &library, "node-1").unwrap_err();
    assert!(error.contains("line 4, column"), "{error}");
}

#[test]
fn inspect_tells_vgpus_and_what_could_still_be_made() {
    let report = inspect::report(&fixture("a2-sriov"));
    let vgpu = report.gpus[0].vgpu.as_ref().unwrap();
    insta::assert_snapshot!("inspect-vgpus-a2-sriov", json(vgpu).unwrap());
}
