//! What of the chart nothing else tries: Node Feature Discovery, whose images are not at hand.

use std::fs;

use crate::support::{
    NAMESPACE,
    turn::{Turn, turn},
};

/// The chart as it is, with these settings; of a real API server what it serves is asked.
fn rendered(t: &Turn, command: &[&str], settings: &str) -> Result<String, String> {
    let rest = ["gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE, "--dry-run=server", "--set", settings];
    t.cluster.helm(&[command, &rest[..]].concat())
}

/// The documents that Node Feature Discovery consists of.
fn of_nfd(text: &str) -> String {
    let ours = |document: &&str| document.contains("templates/nfd/");
    text.split("\n---\n").filter(ours).collect::<Vec<_>>().join("\n---\n")
}

#[test]
fn the_api_server_takes_node_feature_discovery_and_an_install_beside_another_one_is_refused() {
    turn(async |t| {
        let text = rendered(t, &["template"], "nfd.enabled=true").expect("a rendering");
        let nfd = of_nfd(&text);
        for part in ["kind: DaemonSet", "nfd-master", "nfd-gc", "nodefeaturerules.nfd.k8s-sigs.io", "nvidia.com"] {
            assert!(nfd.contains(part), "{part} is not in {nfd}");
        }
        let file = t.dir.path().join("nfd.yaml");
        fs::write(&file, &nfd).expect("a file");
        let file = file.to_str().expect("UTF-8");
        let done = t.cluster.kubectl(&["apply", "--dry-run=server", "-f", file]).expect("every object is accepted");
        assert!(done.contains("daemonset.apps/nfd-worker"), "{done}");
        let off = rendered(t, &["template"], "nfd.enabled=false").expect("a rendering");
        assert_eq!(of_nfd(&off), "");

        let types: Vec<&str> = nfd.split("\n---\n").filter(|part| part.contains("kind: CustomResource")).collect();
        let crds = t.dir.path().join("crds.yaml");
        fs::write(&crds, types.join("\n---\n")).expect("a file");
        let crds = crds.to_str().expect("UTF-8");
        t.cluster.kubectl(&["apply", "-f", crds]).expect("the types are accepted");
        t.cluster.kubectl(&["wait", "--for=condition=Established", "-f", crds]).expect("and served");
        let feature = "apiVersion: nfd.k8s-sigs.io/v1alpha1\nkind: NodeFeature\nmetadata: {name: n1, namespace: default}\nspec: {labels: {a: b}, features: {flags: {f: {elements: {x: {}}}}, attributes: {a: {elements: {x: text}}}, instances: {i: {elements: [{attributes: {x: text}}]}}}}\n";
        let path = t.dir.path().join("feature.yaml");
        fs::write(&path, feature).expect("a file");
        let create = ["create", "--validate=strict", "--dry-run=server", "-f", path.to_str().expect("UTF-8")];
        let kept = t.cluster.kubectl(&create);
        let refused = rendered(t, &["install"], "nfd.enabled=true");
        let beside = rendered(t, &["template"], "nfd.enabled=false");
        t.cluster.kubectl(&["delete", "-f", crds]).expect("the types go");
        kept.expect("what a worker writes is of the type");
        let refused = refused.expect_err("there is one already");
        assert!(refused.contains("nfd.enabled") && refused.contains("already"), "{refused}");
        beside.expect("with nfd.enabled=false there is nothing to refuse");
    });
}
