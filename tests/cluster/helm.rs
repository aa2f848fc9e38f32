//! The chart's whole life with each major version of Helm: install, use, upgrade, refuse, uninstall, and nothing left.
//!
//! Its hooks are pods that no node runs here: they are played by the very program, arguments and account that they name.

use std::{collections::BTreeSet, panic::AssertUnwindSafe, time::Duration};

use futures::FutureExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::{task::spawn_blocking, time::sleep};

use crate::{
    support::{
        NAMESPACE,
        agents::{self, qemu},
        identity,
        kubelets::Kubelets,
        kubevirt,
        program::Program,
        turn::{Turn, turn},
    },
    teardown::{nothing_is_left, serving_vms},
    uninstall::found,
};

#[test]
fn helm_4_installs_upgrades_and_uninstalls_and_leaves_nothing() {
    turn(async |t| alone_on(t, "helm", "v4.").await);
}

#[test]
fn helm_3_installs_upgrades_and_uninstalls_and_leaves_nothing() {
    turn(async |t| alone_on(t, "helm3", "v3.").await);
}

/// The release of all tests makes room, and is there again for the next one, however this ends.
async fn alone_on(t: &Turn, helm: &'static str, version: &str) {
    let is = t.cluster.helm_of(helm, &["version", "--short"]).expect("its version");
    assert!(is.starts_with(version), "{helm} is {is}");
    t.cluster.helm(&["uninstall", "gpuvirt", "--namespace", NAMESPACE, "--no-hooks", "--wait"]).expect("room");
    // Accounts that other tests have made from the chart's files belong to no release.
    let accounts =
        "serviceaccounts,clusterroles.rbac.authorization.k8s.io,clusterrolebindings.rbac.authorization.k8s.io";
    let left = ["delete", accounts, "-n", NAMESPACE, "-l", "app.kubernetes.io/component in (crds, test)"];
    t.cluster.kubectl(&left).expect("room");
    let done = AssertUnwindSafe(life(t, helm)).catch_unwind().await;
    if done.is_err() {
        let _ = t.cluster.helm(&["uninstall", "gpuvirt", "--namespace", NAMESPACE, "--no-hooks", "--wait"]);
    }
    t.cluster.install_chart().await.expect("the release of all tests");
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

async fn life(t: &Turn, helm: &'static str) {
    const RELEASE: [&str; 4] = ["gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE];
    // The operator's pod is played, too: its node has to let go of it.
    let _kubelets = Kubelets::of_all(t);
    if kubevirt::is_installed() {
        let nic = json!({"pciVendorSelector": "8086:1572", "resourceName": "intel.com/x710"});
        kubevirt::fresh(&t.client, &json!({"pciHostDevices": [nic]})).await;
    }
    let before = found(t).await;
    let settings = ["--set", "clusterPolicy.deployCR=false,nfd.enabled=false,gpuvirtConfig.evict=Pods"];
    hooked(t, helm, &[&["install"], &RELEASE[..], &settings].concat()).await.unwrap_or_else(|error| panic!("{error}"));
    let operator = t.operator("op-1").await;
    let (agent, policy) = serving_vms(t).await;

    let more = ["--reuse-values", "--set", "networkPolicy.enabled=true"];
    hooked(t, helm, &[&["upgrade"], &RELEASE[..], &more].concat()).await.unwrap_or_else(|error| panic!("{error}"));
    agent.until_reason(t, true, "Serving").await;

    agent.change(|host| host.gpus[0].holders = vec![qemu(4711)]);
    agent.until(t, "the VM is seen", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 1)).await;
    let uninstall = ["uninstall", "gpuvirt", "--namespace", NAMESPACE, "--timeout", "60s"];
    hooked(t, helm, &uninstall).await.expect_err("a VM has a GPU");
    agent.until_reason(t, true, "Serving").await;
    agent.change(|host| host.gpus[0].holders.clear());
    agent.until(t, "the VM has gone", |n| agents::agent(n).is_some_and(|a| a.summary.in_use == 0)).await;
    hooked(t, helm, &uninstall).await.unwrap_or_else(|error| panic!("{error}"));
    operator.stop().await;
    nothing_is_left(t, &policy).await;
    t.all::<Node>().delete("n1", &DeleteParams::default()).await.expect("deletable");
    // What garbage collection takes goes a moment later.
    let mut after = found(t).await;
    for _ in 0..20 {
        if after == before {
            return;
        }
        sleep(Duration::from_millis(500)).await;
        after = found(t).await;
    }
    panic!("{:#?}", before.symmetric_difference(&after).collect::<Vec<_>>());
}

/// Helm with these arguments, while the pods of its hooks are played.
async fn hooked(t: &Turn, helm: &'static str, args: &[&str]) -> Result<String, String> {
    let cluster = t.cluster;
    let owned: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let helm = spawn_blocking(move || cluster.helm_of(helm, &owned.iter().map(String::as_str).collect::<Vec<_>>()));
    tokio::pin!(helm);
    let mut played = BTreeSet::new();
    loop {
        tokio::select! {
            done = &mut helm => return done.expect("helm should be waited for"),
            () = play(t, &mut played) => {}
        }
    }
}

/// One pod of a hook, if there is a new one.
async fn play(t: &Turn, played: &mut BTreeSet<String>) {
    let pods: Api<Pod> = t.ours();
    let hooks = ListParams::default().labels("job-name");
    for pod in pods.list(&hooks).await.expect("pods should be listable").items {
        let name = pod.name_any();
        if !played.insert(pod.uid().unwrap_or_default()) {
            continue;
        }
        let spec = pod.spec.as_ref().expect("a pod should have a spec");
        let account = spec.service_account_name.as_deref().expect("a hook should have an account");
        let args = spec.containers[0].args.clone().unwrap_or_default();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let kubeconfig = identity::service_account(t, account, None).await;
        let environment = [
            ("KUBECONFIG", kubeconfig.as_os_str()),
            ("POD_NAMESPACE", NAMESPACE.as_ref()),
            ("POD_NAME", name.as_ref()),
        ];
        let mut hook = Program::start(t, &name, &args, &environment);
        let phase = if hook.ended().await.success() { "Succeeded" } else { "Failed" };
        let status = json!({"status": {"phase": phase}});
        // The Job may have been given up meanwhile.
        let _ = pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await;
    }
    sleep(Duration::from_millis(200)).await;
}
