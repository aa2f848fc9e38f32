//! What the library says of vGPUs, through the child that asks it.

use std::process::Output;

use serde_json::{Value, json};

use crate::{Node, PROGRAM, said};

fn ask(macros: &[&str]) -> Output {
    let node = Node::new();
    node.library("vgpus", macros, "host/usr/lib64/libnvidia-ml.so.1");
    let args = ["nvml", "--vgpus", "--root"];
    std::process::Command::new("timeout")
        .args(["5", PROGRAM])
        .args(args)
        .arg(node.path("host"))
        .output()
        .expect("the program should start")
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
        json!({"id": 592, "name": "NVIDIA A10-4Q", "framebufferMib": 4096, "maxInstances": 6})
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
    assert_eq!(modes("-DBOARD=A100"), (json!(true), Value::Null));
    assert_eq!(modes("-DBOARD=L40S"), (Value::Null, json!(true)));
    assert_eq!(modes("-DBOARD=H100"), (json!(false), json!(false)));
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
    assert!(!output.status.success() && said(&output).contains("libnvidia-ml.so.1"), "{}", said(&output));
}
