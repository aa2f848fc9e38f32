//! The committed YAML.

use std::{fs, path::Path};

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn the_committed_files_are_those_that_the_types_make() {
    for (file, crd) in crds::generated() {
        let committed = fs::read_to_string(workspace().join("crds/generated").join(file)).unwrap_or_default();
        assert!(
            committed == crds::to_yaml(&crd).unwrap(),
            "crds/generated/{file} is stale: run `cargo run -- crds --write crds/generated`"
        );
    }
}

#[test]
fn there_is_no_file_that_no_type_makes() {
    let mut committed: Vec<_> = fs::read_dir(workspace().join("crds/generated"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let mut made: Vec<_> = crds::generated().into_iter().map(|(file, _)| file.to_owned()).collect();
    committed.sort();
    made.sort();
    assert_eq!(committed, made);
}

#[test]
fn the_chart_installs_these_very_files() {
    for (file, _) in crds::generated() {
        let link = workspace().join("charts/gpuvirt/crds").join(file);
        assert_eq!(
            fs::read_link(&link).unwrap(),
            Path::new("../../../crds/generated").join(file),
            "{}",
            link.display()
        );
        assert!(link.exists(), "{} leads nowhere", link.display());
    }
}

#[test]
fn a_file_reads_back_as_the_same_crd() {
    for (file, crd) in crds::generated() {
        let read: serde_json::Value = serde_saphyr::from_str(&crds::to_yaml(&crd).unwrap()).unwrap();
        assert_eq!(serde_json::from_value::<K8sCrd>(read).unwrap(), crd, "{file}");
    }
}

#[test]
fn writing_into_a_directory_that_is_not_there_names_the_file() {
    let refused = crds::write_generated(Path::new("/nowhere/crds")).unwrap_err().to_string();
    assert!(refused.contains("/nowhere/crds/nvidia.com_clusterpolicies.yaml"), "{refused}");
}

type K8sCrd = k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
