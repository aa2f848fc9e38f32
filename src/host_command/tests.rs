//! What the commands print, of two machines: the text, and the JSON that scripts rely on.

use std::path::Path;

use super::{View, inspect, json, plan};

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

#[test]
fn inspect_prints_as_before() {
    for (name, view) in machines() {
        let report = inspect::report(&view);
        insta::assert_snapshot!(format!("inspect-{name}"), inspect::text(&report, false));
        insta::assert_snapshot!(format!("inspect-wide-{name}"), inspect::text(&report, true));
        insta::assert_snapshot!(format!("inspect-json-{name}"), json(&report).unwrap());
    }
}

#[test]
fn plan_prints_as_before() {
    for (name, view) in machines() {
        for mode in [plan::Mode::VmPassthrough, plan::Mode::Container] {
            let report = plan::report(&view, mode, &[]);
            insta::assert_snapshot!(format!("plan-{mode:?}-{name}"), plan::text(&report));
            insta::assert_snapshot!(format!("plan-json-{mode:?}-{name}"), json(&report).unwrap());
        }
    }
}

#[test]
fn yaml_says_the_same_as_json() {
    let report = plan::report(&fixture("rtx-4000"), plan::Mode::VmPassthrough, &[]);
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&super::yaml(&report).unwrap()).unwrap();
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
