//! Before a change: what it would be, and when it may begin.

use std::{path::Path, process::Output};

use crds::{
    WorkloadMode,
    v1::PolicyState,
    v1alpha1::{GPUTransition, GPUVirtConfig, TransitionPhase as Phase},
};
use k8s_openapi::jiff::{Timestamp, ToSpan, tz::TimeZone};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    support::{NAMESPACE, cluster::command, identity, kubelets::Kubelets, nodes, policies, turn::Turn, turn::turn},
    transitions::{container_node, gpu_pod, to_passthrough, until_phase},
};

const POLICY: &str = "cluster-policy";

fn window(schedule: &str, duration: &str, zone: &str) -> Value {
    json!({"maintenanceWindows": [{"schedule": schedule, "duration": duration, "timeZone": zone}]})
}

/// What the API server says to a config.
async fn refusal(t: &Turn, spec: &Value) -> String {
    let configs: Api<GPUVirtConfig> = t.all();
    let patch = json!({"spec": spec});
    let done = configs.patch("default", &PatchParams::default(), &Patch::Merge(&patch)).await;
    done.expect_err("it should be refused").to_string()
}

#[test]
fn outside_of_the_maintenance_windows_a_change_waits_and_says_until_when() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let opens = Timestamp::now().to_zoned(TimeZone::UTC) + 6.hours();
        policies::config(t, window(&format!("0 {} * * *", opens.hour()), "1h", "UTC")).await;
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        to_passthrough(t, "n1").await;
        let waits = until_phase(t, "n1", Phase::WaitForSlot, "OutsideMaintenanceWindow").await;
        let status = waits.status.expect("a status");
        let when = opens.strftime("%Y-%m-%d at %H:00 (UTC)").to_string();
        assert!(status.message.ends_with(&when), "{} does not end with {when}", status.message);
        assert_eq!(status.deadline.map(|at| at.0.to_zoned(TimeZone::UTC).hour()), Some(opens.hour()));
        let node = agent.until_reason(t, false, "OutsideMaintenanceWindow").await;
        assert_eq!(node.spec.mode, Some(WorkloadMode::Container));

        let zone = refusal(t, &window("0 1 * * *", "1h", "Mars/Phobos")).await;
        assert!(zone.contains("timeZone") && zone.contains("Mars/Phobos"), "{zone}");
        assert!(refusal(t, &window("0 1 * * *", "1m", "UTC")).await.contains("5m to 168h"));
        assert!(refusal(t, &window("0 1 * *", "1h", "UTC")).await.contains("schedule"));
        // What only its reader can tell: those before it count.
        policies::config(t, window("0 0 30 2 *", "1h", "UTC")).await;
        let parts = ["0 0 30 2 *", "never opens"];
        policies::until(t, POLICY, PolicyState::NotReady, "InvalidMaintenanceWindow", &parts).await;
        let transitions: Api<GPUTransition> = t.all();
        let still = transitions.get("n1").await.expect("a GPUTransition").status.expect("a status");
        assert_eq!((still.phase, still.message), (Phase::WaitForSlot, status.message));

        policies::config(t, window("* * * * *", "1h", "Europe/Berlin")).await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
    });
}

/// Who may look and nothing else.
async fn reader(t: &Turn) -> std::path::PathBuf {
    let all = "--resource=nodes,pods,gpunodes.gpuvirt.io,gputransitions.gpuvirt.io,gpuvirtconfigs.gpuvirt.io";
    for arguments in [
        ["create", "serviceaccount", "a-reader", "-n", NAMESPACE].as_slice(),
        &["create", "clusterrole", "a-reader", "--verb=get,list", all],
        &["create", "clusterrolebinding", "a-reader", "--clusterrole=a-reader", "--serviceaccount=gpuvirt:a-reader"],
    ] {
        t.cluster.kubectl(arguments).expect("a reader");
    }
    identity::service_account(t, "a-reader", None).await
}

fn plan(kubeconfig: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let all = ["plan", "n1"].iter().chain(arguments);
    let done = command(env!("CARGO_BIN_EXE_gpuvirt"), all).env("KUBECONFIG", kubeconfig).output();
    let Output { status, stdout, stderr } = done.expect("gpuvirt should run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), if stdout.is_empty() { text(&stderr) } else { text(&stdout) })
}

#[test]
fn a_reader_sees_what_a_mode_would_do_to_a_node_and_whom_it_meets_and_nothing_happens() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        let _operator = t.operator("op-1").await;
        policies::create(t, policies::valid(POLICY)).await;
        let agent = container_node(t, "n1").await;
        let reader = reader(t).await;
        gpu_pod(t, &agent, "train").await;
        agent
            .until(t, "the pod is seen", |node| {
                crate::support::agents::agent(node).is_some_and(|agent| !agent.gpus[0].holders.is_empty())
            })
            .await;
        let (code, said) = plan(&reader, &["--mode", "vm-passthrough", "-o", "json"]);
        let shown: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
        assert_eq!((code, &shown["blocks"][0]["reason"]), (Some(2), &json!("GPUInUse")), "{said}");
        assert_eq!(shown["affectedPods"], json!(["ml/train"]));
        policies::config(t, json!({"evict": "Pods"})).await;
        let (code, said) = plan(&reader, &["--mode", "vm-passthrough"]);
        assert_eq!(code, Some(0), "{said}");
        for part in
            ["can begin now", "evict pod ml/train", "bring GPU 0000:18:00.0 into vm-passthrough", "affected pods"]
        {
            assert!(said.contains(part), "{part} is not in {said}");
        }
        let transitions: Api<GPUTransition> = t.all();
        assert!(transitions.get_opt("n1").await.expect("an answer").is_none(), "nothing has begun");

        agent.change(|host| host.gpus[0].holders.clear());
        nodes::label(t, "n1", &[(crds::labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
        until_phase(t, "n1", Phase::Done, "Serving").await;
        let (code, said) = plan(&reader, &["--mode", "container", "-o", "yaml"]);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("tookSeconds") && said.contains("from: vm-passthrough"), "{said}");
        let (_, said) = plan(&reader, &["--mode", "vm-passthrough"]);
        assert!(said.contains("is there already"), "{said}");
    });
}
