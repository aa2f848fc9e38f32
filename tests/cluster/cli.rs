//! `kubectl gpuvirt` as a person runs it: beside a real API server, with an operator that lives.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Output, Stdio},
};

use crds::{labels, v1alpha1::Holder};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use crate::{
    kubevirt::offering,
    support::{
        NAMESPACE,
        agents::T4,
        cluster::command,
        identity,
        kubelets::Kubelets,
        nodes,
        turn::{Turn, turn},
        wait,
    },
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_kubectl-gpuvirt");

/// Exit status, and what was said: the answer, or else the complaint.
fn asked(kubeconfig: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let done = command(PROGRAM, arguments).arg("--kubeconfig").arg(kubeconfig).output();
    let Output { status, stdout, stderr } = done.expect("kubectl-gpuvirt should run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), if stdout.is_empty() { text(&stderr) } else { text(&stdout) })
}

fn json_of(said: &str) -> Value {
    serde_json::from_str(said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

fn has(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part} is not in {said}");
    }
}

/// All that is in a gzipped tar file, as one text.
fn unpacked(file: &Path) -> String {
    let mut bytes = Vec::new();
    let mut packed = flate2::read::GzDecoder::new(File::open(file).expect("the archive should be there"));
    packed.read_to_end(&mut bytes).expect("the archive should be gzip");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// In a pod of our namespace, and in a Secret.
const SECRET: &str = "swordfish-4711-swordfish";

async fn plant_secrets(t: &Turn) {
    let data = json!({"metadata": {"name": "pull"}, "stringData": {"password": SECRET}});
    let secrets: Api<Secret> = t.ours();
    let secret = serde_json::from_value(data).expect("a Secret");
    secrets.create(&PostParams::default(), &secret).await.expect("a Secret should be creatable");
    let pod = json!({
        "metadata": {"name": "careless", "annotations": {"note": format!("password={SECRET}")}},
        "spec": {"containers": [{"name": "c", "image": "i", "args": [format!("--token={SECRET}")],
            "env": [{"name": "NGC_API_KEY", "value": SECRET}]}]},
    });
    let pods: Api<Pod> = t.ours();
    let pod = serde_json::from_value(pod).expect("a Pod");
    pods.create(&PostParams::default(), &pod).await.expect("a Pod should be creatable");
}

#[test]
fn a_person_sees_nodes_and_gpus_with_their_users_and_a_report_without_secrets() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = offering(t).await;
        let kubeconfig = t.cluster.kubeconfig();
        let ask = |arguments: &[&str]| asked(&kubeconfig, arguments);

        let (_, said) = ask(&["status"]);
        has(&said, &["cluster-policy", "1 of 1 nodes ready", "n1", "Ready", "vm-passthrough", T4]);
        let (_, said) = ask(&["status", "-o", "json"]);
        let node = json_of(&said)["nodes"][0].clone();
        assert_eq!(
            (&node["name"], &node["ready"], &node["wanted"], &node["real"]),
            (&json!("n1"), &json!(true), &json!("vm-passthrough"), &json!(["vm-passthrough"]))
        );
        let (_, yaml) = ask(&["nodes", "-o", "yaml"]);
        has(&yaml, &["name: n1", "wanted: vm-passthrough"]);

        let holder =
            Holder { pid: 7, command: "qemu-kvm".to_owned(), vm: Some("vms/a".to_owned()), ..Holder::default() };
        agent.change(|host| host.gpus[0].holders = vec![holder]);
        let seen = |node: &crds::v1alpha1::GPUNode| {
            node.status.as_ref().and_then(|s| s.agent.as_ref()).is_some_and(|agent| agent.summary.in_use == 1)
        };
        agent.until(t, "the agent tells of the VM", seen).await;
        let (code, said) = ask(&["gpus"]);
        assert_eq!(code, Some(0));
        has(&said, &["0000:18:00.0", "Tesla T4", "vfio-pci", "InUse", "VM vms/a"]);
        let (_, said) = ask(&["gpus", "-n", "other", "-o", "json"]);
        assert_eq!(json_of(&said), json!([]));
        let (code, said) = ask(&["explain", "gpu", "18:00.0"]);
        assert_eq!(code, Some(0), "{said}");
        has(&said, &["n1/0000:18:00.0", "is in use", "VM vms/a"]);
        let (code, said) = ask(&["explain", "node", "n1"]);
        assert_eq!(code, Some(0), "{said}");
        has(&said, &["n1 serves its mode", "0000:18:00.0"]);
        let (code, said) = ask(&["explain", "node", "n9"]);
        assert_eq!(code, Some(1));
        has(&said, &["error: node n9 has no GPUNode", "nodes with GPUs: n1"]);
        let (_, said) = ask(&["explain", "clusterpolicy"]);
        has(&said, &["cluster-policy", "Ready", "gpuvirt-agent"]);

        let (_, said) = ask(&["doctor", "-o", "json"]);
        let report = json_of(&said);
        let of = |name: &str| {
            let checks = report["checks"].as_array().expect("checks").iter();
            checks.clone().find(|check| check["check"] == name).expect("a check")["result"].clone()
        };
        assert_eq!(
            (of("kubernetes"), of("operator"), of("nvidia-operator")),
            (json!("passed"), json!("passed"), json!("passed"))
        );
        assert_eq!(of("pod-security"), json!("found"), "the tests' namespace says nothing of it: {said}");

        plant_secrets(t).await;
        let file = t.dir.path().join("report.tar.gz");
        let path = file.to_str().expect("a path");
        let (code, said) = ask(&["must-gather", "--dest", path, "-o", "json"]);
        assert_eq!(code, Some(0), "{said}");
        assert!(json_of(&said)["files"].as_u64().is_some_and(|files| files > 10), "{said}");
        let all = unpacked(&file);
        has(
            &all,
            &["objects/gpunodes/n1.yaml", "nodes/n1/advertised.yaml", "doctor.txt", "namespace/pods/careless.yaml"],
        );
        has(&all, &["namespace/daemonsets/gpuvirt-agent.yaml", "namespace/events.txt"]);
        assert!(!all.contains(SECRET), "a secret is in the report");
        let mode = fs::metadata(&file).expect("the archive").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        t.cluster.kubectl(&["delete", "-n", NAMESPACE, "secret/pull"]).expect("deleted");
    });
}

/// Ended with the test.
struct Watching {
    child: Child,
    screen: PathBuf,
}

impl Watching {
    /// On a terminal of its own, which `script` gives it and whose keys come from a pipe; or into a file.
    fn start(t: &Turn, terminal: bool) -> Self {
        let screen = t.dir.path().join(if terminal { "terminal" } else { "lines" });
        let kubeconfig = t.cluster.kubeconfig().display().to_string();
        let line = format!("{PROGRAM} status --watch --kubeconfig {kubeconfig}");
        let file = File::create(&screen).expect("a file should be creatable");
        let own = ["--pdeathsig", "KILL", "--"];
        let shell = if terminal { vec!["script", "-qefc", &line, "/dev/null"] } else { vec!["sh", "-c", &line] };
        let child = command("setpriv", own.iter().chain(&shell)).stdin(Stdio::piped()).stdout(file).spawn();
        Self { child: child.expect("it should be startable"), screen }
    }

    async fn shows(&self, parts: &[&str]) -> String {
        wait::eventually(&format!("the screen has {parts:?}"), async || {
            let text = fs::read_to_string(&self.screen).unwrap_or_default();
            parts.iter().all(|part| text.contains(part)).then_some(text)
        })
        .await
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_live_screen_follows_the_cluster_and_gives_the_terminal_back() {
    const CTRL_C: &[u8] = b"\x03";
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        let agent = offering(t).await;
        let mut terminal = Watching::start(t, true);
        let lines = Watching::start(t, false);
        terminal.shows(&["\x1b[?1049h", "n1", "vm-passthrough", "Ctrl-C ends it"]).await;
        let before = lines.shows(&["n1", "vm-passthrough"]).await;
        assert!(!before.contains('\x1b'), "a pipe gets no codes of a terminal: {before:?}");

        nodes::label(t, "n1", &[(labels::WORKLOAD_CONFIG, Some("container"))]).await;
        agent.until_reason(t, true, "Serving").await;
        let after = lines.shows(&["vm-passthrough → container"]).await;
        assert!(after.starts_with(&before), "what was printed stays");
        terminal.shows(&["vm-passthrough → container"]).await;
        let keys = terminal.child.stdin.as_mut().expect("a pipe");
        keys.write_all(CTRL_C).and_then(|()| keys.flush()).expect("a key should be pressable");
        let end = terminal.shows(&["\x1b[?1049l"]).await;
        assert!(end.contains("\x1b[?25h"), "the cursor is back: {end:?}");
    });
}

#[test]
fn who_may_not_read_is_told_what_to_ask_for() {
    turn(async |t| {
        t.cluster.kubectl(&["create", "serviceaccount", "nobody", "-n", NAMESPACE]).expect("an account");
        let nobody = identity::service_account(t, "nobody", None).await;
        let (code, said) = asked(&nobody, &["status"]);
        assert_eq!(code, Some(1));
        has(&said, &["error: you may not read gpunodes.gpuvirt.io", "kubectl auth can-i list gpunodes.gpuvirt.io"]);
        let (code, said) = asked(&nobody, &["doctor"]);
        assert_eq!(code, Some(0), "nothing is known to be wrong: {said}");
        has(&said, &["skipped", "you may not read gpunodes.gpuvirt.io", "you may not read daemonsets.apps"]);
        t.cluster.kubectl(&["delete", "serviceaccount", "nobody", "-n", NAMESPACE]).expect("deleted");
    });
}
