//! Who may do what: every right that the chart gives to any account, against a list that was read by a person, and against
//! what the API server says itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
};

use k8s_openapi::api::authorization::v1::{SelfSubjectRulesReview, SelfSubjectRulesReviewSpec};
use kube::{Api, api::PostParams};
use serde_json::Value;

use crate::support::{
    NAMESPACE, cluster, identity,
    turn::{Turn, turn},
};

const REVIEWED: &str = "tests/fixtures/identities.yaml";
/// Everything that adds a right.
const EVERYTHING: &[&str] = &[
    "--set=nfd.enabled=true,platform.openshift=true",
    r#"--set-json=validator={"cuda":{"env":[{"name":"WITH_WORKLOAD","value":"true"}]}}"#,
];

/// `cluster` or `namespace`, then `resource.group[/name]` or a path, then verbs.
type Rights = BTreeMap<&'static str, BTreeMap<String, BTreeSet<String>>>;

fn objects(t: &Turn, settings: &[&str]) -> Vec<Value> {
    let rest = ["template", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE];
    let text = t.cluster.helm(&[&rest[..], settings].concat()).expect("a rendering");
    let parts = text.split("\n---\n").filter(|part| part.contains("kind: "));
    parts.map(|part| serde_saphyr::from_str(part).expect("YAML")).collect()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Resources of a rule, as in `pods/eviction`, `gpunodes.gpuvirt.io/status`, `leases.coordination.k8s.io gpuvirt-operator`.
fn resources(rule: &Value) -> Vec<String> {
    let mut all = Vec::new();
    let names = texts(&rule["resourceNames"]);
    for group in texts(&rule["apiGroups"]) {
        for resource in texts(&rule["resources"]) {
            let (resource, sub) =
                resource.split_once('/').map_or((&*resource, String::new()), |(r, s)| (r, format!("/{s}")));
            let group = if group.is_empty() { String::new() } else { format!(".{group}") };
            let full = format!("{resource}{group}{sub}");
            match names.is_empty() {
                true => all.push(full),
                false => all.extend(names.iter().map(|name| format!("{full} {name}"))),
            }
        }
    }
    all
}

fn add<'a>(rights: &mut BTreeMap<String, BTreeSet<String>>, rules: impl IntoIterator<Item = &'a Value>) {
    for rule in rules {
        for resource in resources(rule) {
            rights.entry(resource).or_default().extend(texts(&rule["verbs"]));
        }
    }
}

/// By account, what the bindings of these objects give.
fn given(objects: &[Value]) -> BTreeMap<String, Rights> {
    let kind = |object: &Value, kinds: [&str; 2]| object["kind"].as_str().is_some_and(|kind| kinds.contains(&kind));
    let mut all: BTreeMap<String, Rights> = BTreeMap::new();
    for account in objects.iter().filter(|object| object["kind"] == "ServiceAccount") {
        all.entry(account["metadata"]["name"].as_str().expect("a name").to_owned()).or_default();
    }
    for binding in objects.iter().filter(|object| kind(object, ["ClusterRoleBinding", "RoleBinding"])) {
        let scope = if binding["kind"] == "ClusterRoleBinding" { "cluster" } else { "namespace" };
        let role = objects.iter().find(|object| {
            object["kind"] == binding["roleRef"]["kind"] && object["metadata"]["name"] == binding["roleRef"]["name"]
        });
        let rules = role.expect("a role of the chart")["rules"].as_array().expect("rules");
        for subject in binding["subjects"].as_array().expect("subjects") {
            assert_eq!(subject["kind"], "ServiceAccount", "only accounts of the chart get rights: {binding}");
            let rights = all.get_mut(subject["name"].as_str().expect("a name")).expect("an account of the chart");
            add(rights.entry(scope).or_default(), rules);
        }
    }
    all
}

fn written(all: &BTreeMap<String, Rights>) -> String {
    let mut text = "# Every right that the chart gives, with all of its options on. Read each line before you change it: a test compares.\n".to_owned();
    for (account, rights) in all {
        let _ = writeln!(text, "{account}:{}", if rights.is_empty() { " {}" } else { "" });
        for (scope, rights) in rights {
            let _ = writeln!(text, "  {scope}:");
            for (resource, verbs) in rights {
                let verbs: Vec<&str> = verbs.iter().map(String::as_str).collect();
                let _ = writeln!(text, "    {resource}: {}", verbs.join(" "));
            }
        }
    }
    text
}

#[test]
fn every_right_of_every_account_has_been_read_by_a_person() {
    turn(async |t| {
        let text = written(&given(&objects(t, EVERYTHING)));
        let reviewed = fs::read_to_string(REVIEWED).unwrap_or_default();
        if text != reviewed {
            let path = "target/identities.yaml";
            fs::write(path, &text).expect("a file");
            let more: Vec<&str> = text.lines().filter(|line| !reviewed.contains(line)).collect();
            panic!(
                "the chart gives other rights than {REVIEWED} has: diff it with {path}, and copy that if it is meant; new: {more:#?}"
            );
        }
    });
}

#[test]
fn nobody_has_a_wildcard_or_reads_secrets_and_nobody_may_give_rights() {
    turn(async |t| {
        for (account, rights) in given(&objects(t, EVERYTHING)) {
            for (resource, verbs) in rights.values().flatten() {
                let right = format!("{account}: {resource}: {verbs:?}");
                assert!(!resource.contains('*') && !verbs.contains("*"), "{right}");
                assert!(!resource.starts_with("secrets"), "{right}");
                assert!(!resource.contains("rbac.authorization.k8s.io"), "{right}");
                assert!(["escalate", "bind", "impersonate"].iter().all(|verb| !verbs.contains(*verb)), "{right}");
            }
        }
    });
}

/// What the API server says that an account may do in a namespace; what every account may is not told.
async fn effective(t: &Turn, account: &str, namespace: &str) -> BTreeMap<String, BTreeSet<String>> {
    let client = cluster::client(&identity::service_account(t, account, None).await).await;
    let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
    let review = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
    let answer = Api::all(client).create(&PostParams::default(), &review).await.expect("everybody may ask");
    let rules = serde_json::to_value(answer.status.expect("an answer").resource_rules).expect("JSON");
    let mut rights = BTreeMap::new();
    add(&mut rights, rules.as_array().expect("rules"));
    rights
}

#[test]
fn the_api_server_gives_each_account_what_the_chart_says_and_no_more() {
    turn(async |t| {
        // One that has no rights of its own.
        let everybody = effective(t, "nvidia-driver", NAMESPACE).await;
        let own = |all: BTreeMap<String, BTreeSet<String>>| -> BTreeMap<String, BTreeSet<String>> {
            all.into_iter().filter(|(resource, verbs)| everybody.get(resource) != Some(verbs)).collect()
        };
        for (account, rights) in given(&objects(t, &["--set=nfd.enabled=false,operator.upgradeCRD=false"])) {
            // Accounts of hooks are there while the hook runs.
            if account == "gpuvirt-test" {
                continue;
            }
            let cluster = rights.get("cluster").cloned().unwrap_or_default();
            assert_eq!(own(effective(t, &account, "default").await), cluster, "{account} in another namespace");
            let mut here = cluster;
            for (resource, verbs) in rights.get("namespace").cloned().unwrap_or_default() {
                here.entry(resource).or_default().extend(verbs);
            }
            assert_eq!(own(effective(t, &account, NAMESPACE).await), here, "{account} in the release's namespace");
        }
    });
}

#[test]
fn the_charts_own_pods_are_nobody_on_their_node() {
    turn(async |t| {
        let objects = objects(t, EVERYTHING);
        let mut seen = Vec::new();
        for object in &objects {
            let pod = match object["kind"].as_str() {
                Some("Pod") => &object["spec"],
                Some("Deployment" | "DaemonSet" | "Job") => &object["spec"]["template"]["spec"],
                _ => continue,
            };
            let name = object["metadata"]["name"].as_str().expect("a name");
            seen.push(name);
            assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{name}");
            assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            for host in ["hostPID", "hostIPC", "hostNetwork"] {
                assert!(pod[host].is_null(), "{name}: {host}");
            }
            for container in pod["containers"].as_array().expect("containers") {
                let context = &container["securityContext"];
                assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
                assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
                assert_eq!(context["capabilities"]["drop"][0], "ALL", "{name}");
            }
            // It looks at the host, and mounts all of it for reading only.
            let looks = name == "nfd-worker";
            let of_host = pod["volumes"].as_array().into_iter().flatten().any(|volume| !volume["hostPath"].is_null());
            assert_eq!(of_host, looks, "{name}");
            if looks {
                let mounts = pod["containers"][0]["volumeMounts"].as_array().expect("mounts");
                assert!(mounts.iter().all(|mount| mount["readOnly"] == true), "{name}");
            }
        }
        for name in
            ["gpuvirt-operator", "gpuvirt-uninstall", "gpuvirt-crds", "gpuvirt-test", "nfd-master", "nfd-worker"]
        {
            assert!(seen.contains(&name), "{name} is not among {seen:?}");
        }
    });
}
