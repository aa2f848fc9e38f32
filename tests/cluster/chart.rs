//! What of the chart nothing else tries: Node Feature Discovery, whose images are not at hand, values as users of the peer
//! have them, and the programs of its hooks.

use std::{fs, path::Path};

use crds::v1::PolicyState;
use k8s_openapi::{
    api::core::v1::ServiceAccount, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::Api;
use serde_json::json;

use crate::support::{
    NAMESPACE,
    agents::{Agent, t4},
    identity,
    kubelets::Kubelets,
    nodes, policies,
    program::Program,
    turn::{Turn, turn},
    wait,
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

/// Whether the API server would take what helm would send for these values: all, or what comes of a ClusterPolicy's part.
fn taken(t: &Turn, values: &[&str], all: bool) -> Result<String, String> {
    let rest = ["template", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE, "--dry-run=server"];
    let text = t.cluster.helm(&[&rest[..], values].concat())?;
    let of_policy = ["clusterpolicy.yaml", "configmaps.yaml", "driver/nvidiadriver.yaml"];
    // A pod is taken only once its account is there.
    let whole = |part: &&str| all && !part.contains("kind: Pod\n");
    let counts = |part: &&str| whole(part) || of_policy.iter().any(|file| part.contains(&format!("/templates/{file}")));
    let parts: Vec<&str> = text.split("\n---\n").filter(counts).collect();
    let path = t.dir.path().join("objects.yaml");
    fs::write(&path, parts.join("\n---\n")).expect("a file");
    let path = path.display().to_string();
    t.cluster.kubectl(&["apply", "--dry-run=server", "--validate=strict", "--namespace", NAMESPACE, "-f", &path])
}

#[test]
fn the_api_server_takes_everything_that_the_chart_can_make() {
    turn(async |t| {
        let all = "networkPolicy.enabled=true,operator.replicas=2,driver.nvidiaDriverCRD.enabled=true,gpuvirtConfig.evict=Pods";
        let done = taken(t, &["--set", all], true).expect("every object is accepted");
        for part in [
            "networkpolicy",
            "poddisruptionbudget",
            "nvidiadriver",
            "job.batch/gpuvirt-crds",
            "serviceaccount/gpuvirt-test",
        ] {
            assert!(done.contains(part), "{part} is not in {done}");
        }
    });
}

#[test]
fn the_api_server_takes_what_values_files_of_the_peer_ask_for() {
    turn(async |t| {
        let mut files: Vec<String> = fs::read_dir("tests/fixtures/peer-values")
            .expect("the values files")
            .map(|file| file.expect("an entry").path().display().to_string())
            .collect();
        files.sort();
        let mut wrong = Vec::new();
        for file in &files {
            match taken(t, &["--values", file], false) {
                Ok(done) if done.contains("clusterpolicy.nvidia.com/cluster-policy") => {}
                Ok(done) => wrong.push(format!("{file}: no ClusterPolicy in {done}")),
                Err(error) => wrong.push(format!("{file}: {error}")),
            }
        }
        assert!(files.len() > 15, "{files:?}");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

#[test]
fn a_value_that_nobody_knows_is_refused_with_the_one_that_was_meant() {
    turn(async |t| {
        let refused = rendered(t, &["template"], "drvier.enabled=true,operator.imagPullPolicy=Never").expect_err("two");
        for part in ["drvier: did you mean driver?", "operator.imagPullPolicy: did you mean operator.imagePullPolicy?"]
        {
            assert!(refused.contains(part), "{part} is not in {refused}");
        }
        let refused = rendered(t, &["template"], "sandboxWorkloads.xyzzyxyzzy=1").expect_err("one");
        assert!(refused.contains("known there: defaultWorkload, enabled, mode"), "{refused}");
    });
}

#[test]
fn every_image_comes_from_the_registry_that_is_named() {
    turn(async |t| {
        let settings =
            "global.imageRegistry=mirror.example:5000/gpu,nfd.enabled=true,driver.nvidiaDriverCRD.enabled=true";
        let text = rendered(t, &["template"], settings).expect("a rendering");
        let named = text.lines().map(str::trim).filter_map(|line| {
            let (key, value) = line.split_once(": ")?;
            (key == "repository" || key == "image" && value.contains('/')).then(|| value.trim_matches('"'))
        });
        let elsewhere: Vec<&str> = named.filter(|value| !value.starts_with("mirror.example:5000/gpu")).collect();
        assert!(elsewhere.is_empty(), "{elsewhere:?}");
        assert!(text.contains("mirror.example:5000/gpu/nvidia/cloud-native") && !text.contains("nvcr.io"), "{text}");
    });
}

#[test]
fn two_operators_are_spread_and_keep_a_budget_and_one_has_none() {
    turn(async |t| {
        let two = rendered(t, &["template"], "operator.replicas=2").expect("a rendering");
        assert!(
            two.contains("topologySpreadConstraints") && two.contains("templates/operator/disruption.yaml"),
            "{two}"
        );
        let one = rendered(t, &["template"], "operator.replicas=1").expect("a rendering");
        assert!(!one.contains("topologySpreadConstraints") && !one.contains("templates/operator/disruption.yaml"));
    });
}

/// The account of a hook, with the rights that its hook would have.
async fn account(t: &Turn, component: &str, template: &str) -> std::path::PathBuf {
    let only = ["template", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE, "--show-only", template];
    let text = t.cluster.helm(&only).expect("a rendering");
    let rights = text.split("\n---\n").filter(|part| !part.contains("kind: Job") && !part.contains("kind: Pod\n"));
    let file = t.dir.path().join(format!("{component}.yaml"));
    fs::write(&file, rights.collect::<Vec<_>>().join("\n---\n")).expect("a file");
    t.cluster.kubectl(&["apply", "-f", &file.display().to_string()]).expect("the account");
    let name = format!("gpuvirt-{component}");
    wait::eventually("the account", async || t.ours::<ServiceAccount>().get_opt(&name).await.ok().flatten()).await;
    identity::service_account(t, &name, None).await
}

async fn ended(t: &Turn, name: &str, kubeconfig: &Path, args: &[&str]) -> (bool, String) {
    let environment = [("KUBECONFIG", kubeconfig.as_os_str()), ("POD_NAMESPACE", NAMESPACE.as_ref())];
    let mut program = Program::start(t, name, args, &environment);
    let status = program.ended().await;
    (status.success(), program.log())
}

#[test]
fn the_hook_brings_definitions_up_to_date_makes_missing_ones_and_leaves_one_that_knows_more() {
    turn(async |t| {
        let kubeconfig = account(t, "crds", "templates/crds/job.yaml").await;
        let crds: Api<CustomResourceDefinition> = t.all();
        let (policies, drivers, nodes) =
            ("clusterpolicies.nvidia.com", "nvidiadrivers.nvidia.com", "gpunodes.gpuvirt.io");
        let at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
        let change = |name: &str, patch: serde_json::Value| {
            let done = t.cluster.kubectl(&["patch", "crd", name, "--type=json", "-p", &patch.to_string()]);
            done.expect("the admin may");
        };
        let has = async |name: &str, field: &str| {
            let crd = serde_json::to_value(crds.get(name).await.expect("a CRD")).expect("JSON");
            crd.pointer(&format!("{at}/{field}")).is_some()
        };
        change(policies, json!([{"op": "add", "path": format!("{at}/later"), "value": {"type": "string"}}]));
        change(nodes, json!([{"op": "remove", "path": format!("{at}/epoch")}]));
        t.cluster.kubectl(&["delete", "crd", drivers]).expect("deletable");

        let (done, log) = ended(t, "crds", &kubeconfig, &["crds", "--apply"]).await;
        let kept = has(policies, "later").await;
        change(policies, json!([{"op": "remove", "path": format!("{at}/later")}]));
        assert!(done && log.contains("v1.spec.later") && log.contains("left as it is"), "{log}");
        assert!(kept, "a field that this release does not know stays");
        assert!(has(nodes, "epoch").await, "a field that an earlier release had not is there");
        assert!(has(drivers, "driverType").await, "a missing type is made");
        let before = crds.get(nodes).await.expect("a CRD").metadata.resource_version;
        let (done, log) = ended(t, "again", &kubeconfig, &["crds", "--apply"]).await;
        assert!(done, "{log}");
        assert_eq!(crds.get(nodes).await.expect("a CRD").metadata.resource_version, before, "nothing to write again");
        let reads = t.cluster.kubectl(&[
            "auth",
            "can-i",
            "delete",
            "crd/gpunodes.gpuvirt.io",
            "--as",
            "system:serviceaccount:gpuvirt:gpuvirt-crds",
        ]);
        assert!(reads.is_err(), "it deletes none");
    });
}

#[test]
fn helm_test_passes_on_an_installation_that_works_and_names_what_does_not() {
    turn(async |t| {
        let kubeconfig = account(t, "test", "templates/tests/ready.yaml").await;
        let args = ["ready", "--timeout", "1s"];
        let (fine, log) = ended(t, "nothing", &kubeconfig, &args).await;
        assert!(!fine && log.contains("the operator is not running") && log.contains("no ClusterPolicy"), "{log}");

        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        nodes::create(t, "n1", &[]).await;
        let _agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid("cluster-policy")).await;
        policies::until(t, "cluster-policy", PolicyState::Ready, "Reconciled", &[]).await;
        let (fine, log) = ended(t, "works", &kubeconfig, &["ready", "--timeout", "30s"]).await;
        assert!(fine && log.contains("ready: 1 GPU node(s)"), "{log}");
    });
}
