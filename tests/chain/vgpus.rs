//! What the library says of vGPUs, through the child that asks it.

use std::process::Output;

use serde_json::{Value, json};

use crate::{Node, PROGRAM, said};

fn ask(macros: &[&str]) -> Output {
    let node = Node::new();
    node.library("vgpus", macros, "host/usr/lib64/libnvidia-ml.so.1");
    put(&node, &["--vgpus"])
}

fn put(node: &Node, question: &[&str]) -> Output {
    let mut command = std::process::Command::new("timeout");
    command.args(["5", PROGRAM, "nvml", "--root"]).arg(node.path("host")).args(question);
    command.output().expect("the program should start")
}

fn answer(macros: &[&str]) -> Value {
    let output = ask(macros);
    assert!(output.status.success(), "{}", said(&output));
    serde_json::from_slice(&output.stdout).expect("an answer in JSON")
}

#[test]
fn a_board_says_which_types_it_has_which_it_could_make_and_which_vm_has_one() {
    let report = answer(&["-DBOARD=A10"]);
    assert_eq!(report["driver"], "595.91.07");
    let gpu = &report["gpus"][0];
    assert_eq!(
        (&gpu["address"], &gpu["mig"], &gpu["heterogeneous"]),
        (&json!("0000:3b:00.0"), &Value::Null, &Value::Null)
    );
    assert_eq!(
        gpu["supported"][0],
        json!({"id": 592, "name": "NVIDIA A10-4Q", "framebufferMib": 4096, "maxInstances": 6, "mig": null})
    );
    assert_eq!(gpu["creatable"], json!([592]));
    assert_eq!(
        gpu["active"],
        json!([{"kind": 592, "vm": "0f0e0d0c-0b0a-4908-8706-050403020100", "mdev": "c728e022-f16f-434b-ad2c-9665ee634d3d"}])
    );
    assert_eq!(report["gpus"][1]["active"], json!([]));
}

#[test]
fn modes_that_hide_types_are_told_where_a_board_has_them() {
    let modes = |board: &str| {
        let report = answer(&[board]);
        (report["gpus"][0]["mig"].clone(), report["gpus"][0]["heterogeneous"].clone())
    };
    assert_eq!(modes("-DBOARD=A100"), (json!({"on": true, "next": true}), Value::Null));
    assert_eq!(modes("-DBOARD=L40S"), (Value::Null, json!(true)));
    assert_eq!(modes("-DBOARD=H100"), (json!({"on": false, "next": false}), json!(false)));
    assert_eq!(answer(&["-DBOARD=L40S"])["gpus"][0]["active"][0]["mdev"], Value::Null, "no mediated device");
}

#[test]
fn a_lost_gpu_is_named_and_the_other_one_is_known() {
    let report = answer(&["-DBOARD=A10", "-DLOST=0"]);
    assert_eq!(report["gpus"][0]["address"], "0000:3b:00.0");
    assert!(report["gpus"][0]["error"].as_str().is_some_and(|error| error.contains("fell off the bus")), "{report}");
    assert_eq!((&report["gpus"][1]["error"], &report["gpus"][1]["supported"][1]["id"]), (&Value::Null, &json!(594)));
}

#[test]
fn a_library_that_hangs_can_be_ended() {
    let output = ask(&["-DHANGS=1"]);
    assert_eq!(output.status.code(), Some(124), "{}", said(&output));
}

#[test]
fn a_host_without_the_library_says_so() {
    let node = Node::new();
    std::fs::remove_file(node.path("host/usr/lib64/libnvidia-ml.so.1")).expect("removable");
    let output =
        std::process::Command::new(PROGRAM).args(["nvml", "--vgpus", "--root"]).arg(node.path("host")).output();
    let output = output.expect("the program should start");
    assert_eq!(output.status.code(), Some(10), "{}", said(&output));
    assert!(said(&output).contains("libnvidia-ml.so.1"), "{}", said(&output));
}

#[test]
fn a_library_of_another_version_than_the_module_says_so() {
    let output = ask(&["-DMISMATCH=1"]);
    assert_eq!(output.status.code(), Some(11), "{}", said(&output));
}

/// An H100 in the order in which the plan goes: mode, instance, compute instance; each act a process of its own.
#[test]
fn mig_is_turned_on_and_instances_come_and_go_with_their_compute_instances() {
    let node = Node::new();
    node.library("vgpus", &["-DBOARD=H100"], "host/usr/lib64/libnvidia-ml.so.1");
    let act = |act: Value| put(&node, &["--gpu", "0000:3b:00.0", "--act", &act.to_string()]);
    let done = |what: Value| {
        let output = act(what);
        assert!(output.status.success(), "{}", said(&output));
    };
    let shown = || -> Value {
        let output = put(&node, &["--vgpus"]);
        serde_json::from_slice::<Value>(&output.stdout).expect("an answer in JSON")["gpus"][0].take()
    };
    let create = |profile: u32| json!({"act": "create", "profile": profile, "name": "", "nth": 1});
    let refused = act(create(14));
    assert!(!refused.status.success(), "not before the mode is on");
    done(json!({"act": "mode", "on": true}));
    let gpu = shown();
    assert_eq!(gpu["mig"], json!({"on": true, "next": true}));
    assert_eq!(gpu["profiles"][1], json!({"id": 14, "name": "2g.20gb", "remaining": 3}));
    assert_eq!(gpu["supported"][1]["mig"], json!({"profile": 19, "most": 2}), "two vGPUs share an instance");
    assert_eq!(gpu["supported"][0]["mig"], Value::Null, "it shares time");

    (0..3).for_each(|_| done(create(14)));
    done(json!({"act": "compute", "instance": 2}));
    let gpu = shown();
    let one = |id: u32, compute: bool| json!({"id": id, "profile": 14, "compute": compute, "inUse": false});
    assert_eq!(gpu["instances"], json!([one(1, false), one(2, true), one(3, false)]));
    assert_eq!(gpu["profiles"][1]["remaining"], 0);
    let refused = act(create(14));
    assert!(said(&refused).contains("insufficient") || said(&refused).contains("resources"), "{}", said(&refused));

    done(json!({"act": "destroy", "instance": 2, "name": "2g.20gb"}));
    assert_eq!(shown()["instances"], json!([one(1, false), one(3, false)]), "with its compute instance");
    let refused = act(json!({"act": "destroy", "instance": 2, "name": ""}));
    assert!(!refused.status.success(), "it has gone");
}

#[test]
fn a_board_that_needs_a_reset_shows_the_mode_that_comes_next() {
    let node = Node::new();
    node.library("vgpus", &["-DBOARD=H100", "-DLATER=1"], "host/usr/lib64/libnvidia-ml.so.1");
    let output = put(&node, &["--gpu", "0000:3b:00.0", "--act", r#"{"act": "mode", "on": true}"#]);
    assert!(output.status.success(), "{}", said(&output));
    let output = put(&node, &["--vgpus"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("an answer in JSON");
    assert_eq!(report["gpus"][0]["mig"], json!({"on": false, "next": true}));
}
