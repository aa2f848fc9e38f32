//! One file in which all is well, and one thing wrong with it at a time.

use proptest::prelude::*;

use super::{
    config::{Config, Devices, Fault, Wrong},
    defaults,
};

const WELL: &str = r#"version: v1
vgpu-configs:
  T4-small:
    - devices: [0]
      vgpu-devices:
        T4-1Q: 16
    - devices: [1]
      vgpu-devices:
        T4-2Q: 8
  boards:
    - device-filter: ["0x25B610DE:0x14A910DE", "0x223610DE"]
      devices: all
      vgpu-devices: {A16-8Q: 1, A16-4Q: 0}
    - device-filter: "0x20B010DE"
      devices: all
      vgpu-devices: {A100-1-5CME: 1}
  none:
    - devices: all
      vgpu-devices: {}
"#;

fn parsed(text: &str) -> Result<Config, Fault> {
    Config::parse(text)
}

/// The file with one thing replaced is refused there.
#[track_caller]
fn refused(from: &str, to: &str, line: u64, column: u64, words: &str) -> Wrong {
    assert!(WELL.contains(from), "{from:?} is in the file");
    let fault = parsed(&WELL.replacen(from, to, 1)).expect_err("a fault");
    assert_eq!((fault.line, fault.column), (line, column), "{fault}");
    assert!(fault.to_string().contains(words), "{words:?} in {fault}");
    fault.wrong
}

#[test]
fn a_file_is_read_as_it_is_written() {
    let config = parsed(WELL).expect("a config");
    assert_eq!(config.names().collect::<Vec<_>>(), ["T4-small", "boards", "none"]);
    let small = config.layout("T4-small").expect("a layout");
    assert_eq!(small[0].devices, Devices::At(vec![0]));
    assert_eq!(small[1].instances, [("T4-2Q".parse().expect("a type"), 8)]);
    assert_eq!((small[0].line, small[1].line), (4, 7));
    let boards = config.layout("boards").expect("a layout");
    let filters: Vec<String> = boards[0].filters.iter().map(ToString::to_string).collect();
    assert_eq!(filters, ["0x25B610DE:0x14A910DE", "0x223610DE"]);
    assert_eq!(boards[0].instances, [("A16-8Q".parse().expect("a type"), 1)], "a zero beside others is none of it");
    assert_eq!(boards[1].filters.len(), 1, "a text as well as a list");
    assert_eq!(config.layout("none").expect("a layout")[0].instances, []);
    assert_eq!(config.layout("other"), None);
}

#[test]
fn json_and_anchors_are_yaml() {
    let json = r#"{"version": "v1", "vgpu-configs": {"a": [{"devices": "all", "vgpu-devices": {"A10-4Q": 6}}]}}"#;
    assert_eq!(parsed(json).expect("a config").names().count(), 1);
    let anchors = "version: v1\nvgpu-configs:\n  a: &a\n    - devices: all\n      vgpu-devices: {A10-4Q: 6}\n  b: *a\n";
    let config = parsed(anchors).expect("a config");
    assert_eq!(config.layout("a").map(<[_]>::len), config.layout("b").map(<[_]>::len));
}

#[test]
fn unknown_fields_are_refused_at_every_level_with_their_place() {
    refused("version: v1\n", "version: v1\nmig-configs: {}\n", 2, 1, "mig-configs");
    refused("    - devices: [0]", "    - device: 0\n      devices: [0]", 4, 7, "device");
    refused("    - devices: [0]", "    - mig-enabled: true\n      devices: [0]", 4, 7, "mig-enabled");
}

#[test]
fn another_version_or_none_is_refused() {
    assert_eq!(refused("v1", "v2", 1, 10, "v2"), Wrong::Version("v2".to_owned()));
    refused("version: v1\n", "", 1, 1, "version");
}

#[test]
fn nothing_to_choose_from_is_refused_and_a_file_without_the_field_is_none() {
    assert_eq!(parsed("version: v1\nvgpu-configs: {}\n").expect_err("a fault").wrong, Wrong::NoConfigs);
    assert_eq!(parsed("version: v1\n"), Ok(Config::default()));
    let empty = parsed("version: v1\nvgpu-configs:\n  a: []\n").expect_err("a fault");
    assert_eq!((empty.line, empty.wrong), (3, Wrong::NoEntries("a".to_owned())));
}

#[test]
fn a_field_that_is_missing_is_named() {
    refused("      vgpu-devices: {}\n", "", 18, 7, "vgpu-devices");
    refused("    - devices: all\n      vgpu-devices: {}", "    - vgpu-devices: {}", 18, 7, "devices");
}

#[test]
fn a_type_that_is_none_is_refused_where_it_stands() {
    for wrong in ["A16-8E", "' A100-5C'", "A100-1-5Cme", "A100-1-5C ME", "A100-1-5Cab", "NVIDIA A10-4Q"] {
        refused("T4-2Q: 8", &format!("{wrong}: 8"), 9, 9 + wrong.len() as u64 + 2, "is no vGPU type");
    }
}

#[test]
fn counts_are_numbers_of_vgpus() {
    refused("T4-2Q: 8", "T4-2Q: -1", 9, 16, "-1 is no number of vGPUs");
    refused("T4-2Q: 8", "T4-2Q: 99999999999", 9, 16, "99999999999");
    refused("T4-2Q: 8", "T4-2Q: many", 9, 16, "");
    refused("A16-8Q: 1, A16-4Q: 0", "A16-8Q: 0, A16-4Q: 0", 13, 21, "every count is 0");
}

#[test]
fn a_gpu_is_time_sliced_or_in_mig_mode() {
    let wrong = refused("{A100-1-5CME: 1}", "{A100-1-5CME: 1, A100-4C: 1}", 16, 21, "into two layouts");
    assert!(matches!(wrong, Wrong::Mixed { .. }), "{wrong:?}");
}

#[test]
fn devices_are_all_or_places() {
    refused("devices: [0]", "devices: some", 4, 16, "all, or a list of places");
    refused("devices: [0]", "devices: []", 4, 16, "empty");
    refused("devices: [0]", "devices: [0, 1, 0]", 4, 23, "GPU 0 twice");
    refused("devices: [0]", "devices: [-1]", 4, 17, "");
    refused("devices: [0]", "devices: 0", 4, 7, "all, or a list of places");
}

#[test]
fn a_filter_that_could_never_match_is_refused_where_it_stands() {
    refused("\"0x223610DE\"", "\"0x2236\"", 11, 48, "is no device");
    refused("\"0x20B010DE\"", "\"0x20B010DE:\"", 14, 22, "is no device");
    refused("\"0x20B010DE\"", "{}", 14, 22, "");
}

#[test]
fn a_layout_that_is_named_twice_is_refused() {
    refused("  none:", "  boards:", 17, 3, "boards");
}

#[test]
fn what_is_no_yaml_is_refused_with_its_place() {
    let fault = parsed("version: v1\nvgpu-configs: [\n").expect_err("a fault");
    assert!(fault.line >= 2, "{fault}");
    for text in ["", "\n", "~", "[]", "version", "\u{0}"] {
        assert!(parsed(text).is_err(), "{text:?}");
    }
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in any::<String>()) {
        let _any = parsed(&text);
    }

    /// Texts that get past the first level.
    #[test]
    fn no_file_makes_it_panic(
        devices in "(all|\\[[0-9, -]{0,6}\\]|\\PC{0,8})",
        filter in "(\"0x[0-9A-F]{0,9}(:0x[0-9A-F]{0,9})?\"|\\PC{0,12})",
        types in "\\{?([A-Z0-9a-z -]{0,8}: ?-?[0-9]{0,20},? ?){0,3}\\}?",
    ) {
        let text = format!(
            "version: v1\nvgpu-configs:\n  a:\n  - devices: {devices}\n    device-filter: {filter}\n    vgpu-devices: {types}\n"
        );
        if let Ok(config) = parsed(&text) {
            prop_assert!(config.layout("a").is_some_and(|entries| !entries.is_empty()));
        }
    }

    /// Our own file with a few bytes lost, doubled or changed.
    #[test]
    fn no_damage_makes_it_panic(at in 0usize..2000, length in 0usize..40, put in "\\PC{0,4}") {
        let mut text = defaults::yaml();
        text.truncate(2000);
        if text.is_char_boundary(at) && text.is_char_boundary((at + length).min(text.len())) {
            let end = (at + length).min(text.len());
            text.replace_range(at.min(end)..end, &put);
        }
        let _any = parsed(&text);
    }
}
