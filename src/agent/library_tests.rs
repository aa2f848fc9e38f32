//! When the library is asked, and what becomes of its answers.

use std::sync::{Arc, Mutex};

use vfio::{observe, testing::Machine};

use super::*;

/// Says what it is told to say, and counts.
#[derive(Clone, Default)]
struct Fake(Arc<Mutex<(LibraryFacts, usize)>>);

impl Fake {
    fn says(&self, facts: LibraryFacts) {
        self.0.lock().unwrap().0 = facts;
    }

    fn asked(&self) -> usize {
        self.0.lock().unwrap().1
    }
}

impl Library for Fake {
    fn ask(&mut self) -> LibraryFacts {
        let mut inner = self.0.lock().unwrap();
        inner.1 += 1;
        inner.0.clone()
    }

    fn act(&mut self, _: PciAddress, _: &MigAct) -> Result<(), String> {
        Ok(())
    }
}

fn view() -> View {
    View { inventory: observe(&Machine::described("a2-sriov")), ..View::default() }
}

fn silence(reason: SilenceReason) -> LibraryFacts {
    let silence = Some(Silence { reason, message: "no answer".to_owned() });
    LibraryFacts { silence, ..LibraryFacts::default() }
}

#[test]
fn it_is_asked_when_something_has_changed_and_after_a_while_and_nowhere_else() {
    let fake = Fake::default();
    let mut answers = Answers::of(Box::new(fake.clone()));
    let (now, mut view) = (Instant::now(), view());
    answers.follow(false, &view, now);
    assert_eq!(fake.asked(), 0, "no vGPU is asked for");
    answers.follow(true, &view, now);
    answers.follow(true, &view, now);
    assert_eq!(fake.asked(), 1);
    view.inventory.mdevs.clear();
    answers.follow(true, &view, now);
    assert_eq!(fake.asked(), 2, "vGPUs have gone");
    answers.follow(true, &view, now + FRESH);
    assert_eq!(fake.asked(), 3);
    view.inventory.facts.loaded_modules.remove("nvidia");
    answers.follow(true, &view, now + FRESH * 2);
    assert_eq!((fake.asked(), answers.facts()), (3, &LibraryFacts::default()), "no driver");
}

#[test]
fn a_library_that_hangs_is_left_alone_and_one_that_is_missing_is_not() {
    for (reason, questions) in [(SilenceReason::Late, 1), (SilenceReason::NoLibrary, 2)] {
        let fake = Fake::default();
        fake.says(silence(reason));
        let mut answers = Answers::of(Box::new(fake.clone()));
        let (now, mut view) = (Instant::now(), view());
        answers.follow(true, &view, now);
        view.inventory.mdevs.clear();
        answers.follow(true, &view, now + FRESH);
        assert_eq!(fake.asked(), questions, "{reason:?}");
    }
}

#[test]
fn errors_of_the_child_are_values_with_a_reason() {
    let reason = |error: nvml::Error| silent(&error).silence.unwrap().reason;
    assert_eq!(reason(nvml::Error::NoLibrary("not there".to_owned())), SilenceReason::NoLibrary);
    assert_eq!(reason(nvml::Error::VersionMismatch("595 and 580".to_owned())), SilenceReason::VersionMismatch);
    assert_eq!(reason(nvml::Error::Late { after: PATIENCE }), SilenceReason::Late);
    assert_eq!(reason(nvml::Error::Answer("GPU is lost".to_owned())), SilenceReason::Failed);
}

#[test]
fn types_and_vms_are_named_as_config_files_and_kubevirt_name_them() {
    let text = r#"{"driver": "595.91.07", "gpus": [{"address": "0000:3b:00.0", "mig": {"on": true, "next": true},
        "profiles": [{"id": 19, "name": "1g.5gb", "remaining": 6}],
        "instances": [{"id": 7, "profile": 19, "compute": true, "inUse": true}],
        "display": false, "ecc": true, "heterogeneous": null,
        "supported": [{"id": 474, "name": "NVIDIA A100-1-5C", "framebufferMib": 4864, "maxInstances": 7, "mig": {"profile": 19, "most": 1}}],
        "creatable": [474], "active": [{"kind": 474, "vm": "0f0e0d0c", "mdev": "c728e022"}], "error": null}]}"#;
    let facts = facts(serde_json::from_str(text).unwrap());
    let gpu = &facts.gpus[&"0000:3b:00.0".parse().unwrap()];
    assert_eq!(gpu.kinds["A100-1-5C"].profile, 19);
    assert_eq!((facts.vm("c728e022"), facts.active[0].kind.as_deref()), (Some("0f0e0d0c"), Some("A100-1-5C")));
    assert!(gpu.instances[0].in_use && gpu.mig.unwrap().on);
}
