//! The queries of dashboards and alerts, asked of a real Prometheus that scrapes operator and agent; and promtool's tests of
//! the alerts.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Child,
};

use crds::{
    labels,
    v1alpha1::{Advertise, GPUNode, GPUNodeSpec},
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use super::{address, tls};
use crate::support::{
    cluster::{command, run},
    nodes, policies,
    turn::{Turn, turn},
    wait,
};

/// Panels whose world is not played here: a cluster without vGPUs, KubeVirt, failures and changes has no such series.
const MAY_BE_EMPTY: &[&str] = &[
    "Changes that are not done",
    "What blocks changes",
    "Time of a phase (95 %)",
    "Refusals",
    "Who has them",
    "Ailments and refusals",
    "Changes of drivers (median)",
    "vGPUs",
    "CPU time",
    "Memory",
];
const GPU: &str = "0000:18:00.0";
/// A T4 with fewer lanes than it could have.
const MACHINE: &str = r#"
kernel: 6.1.0-26-amd64
os: debian 12
functions:
  "0000:18:00.0": { ids: "10de:1eb8 10de:12a2", class: "030200", driver: vfio-pci, native: nvidia, group: 20, numa: 0, link: ["8.0 GT/s x8", "8.0 GT/s x16"], aer: [3, 0, 0], power: D0 }
"#;

struct Prometheus {
    listen: SocketAddr,
    child: Child,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// One that scrapes as the chart's `ServiceMonitor`s have it.
    fn start(t: &Turn, token: &str, operator: SocketAddr, agent: SocketAddr) -> Self {
        let dir = t.dir.path();
        fs::write(dir.join("token"), token).expect("writable");
        let job = |name: &str, at: SocketAddr, honor: bool| {
            json!({
                "job_name": name, "scheme": "https", "honor_labels": honor,
                "authorization": {"credentials_file": dir.join("token")},
                "tls_config": {"insecure_skip_verify": true},
                "static_configs": [{"targets": [at.to_string()]}],
            })
        };
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/gpuvirt/files/alerts.yaml");
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [rules],
            "scrape_configs": [job("operator", operator, false), job("agent", agent, true)],
        });
        let file = dir.join("prometheus.yaml");
        fs::write(&file, config.to_string()).expect("writable");
        let listen = address();
        let log = File::create(dir.join("prometheus.log")).expect("a log should be creatable");
        let arguments = [
            "--pdeathsig".to_owned(),
            "KILL".to_owned(),
            "--".to_owned(),
            "prometheus".to_owned(),
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", dir.join("tsdb").display()),
            format!("--web.listen-address={listen}"),
        ];
        let child = command("setpriv", arguments).stderr(log).spawn();
        Self { listen, child: child.expect("prometheus should be there: tests/deps.sh installs it") }
    }

    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.listen).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    /// How many series a query has, or the error.
    fn ask(&self, query: &str) -> Result<usize, String> {
        let path = format!("/api/v1/query?query={}", utf8_percent_encode(query, NON_ALPHANUMERIC));
        let answer = self.get(&path).ok_or("no answer")?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"]["result"].as_array().map_or(0, Vec::len)),
            _ => Err(format!("{query}: {}", answer["error"])),
        }
    }

    async fn until(&self, query: &str) {
        wait::eventually(&format!("Prometheus has {query}"), async || {
            self.ask(query).is_ok_and(|count| count > 0).then_some(())
        })
        .await;
    }
}

/// Title of the panel and what it asks, with the variables as a person has chosen them.
fn queries(dashboard: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/gpuvirt/files/dashboards").join(dashboard);
    let text = fs::read_to_string(path).expect("a dashboard should be readable");
    let dashboard: Value = serde_json::from_str(&text).expect("a dashboard should be JSON");
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            let query = query.replace("$node", "n1").replace("$namespace", "vms").replace("$name", "training");
            all.push((panel["title"].as_str().expect("a title").to_owned(), query));
        }
    }
    all
}

/// Each query is answered, and where its world is played here, with data.
async fn answered(prometheus: &Prometheus, dashboard: &str) {
    for (title, query) in queries(dashboard) {
        if MAY_BE_EMPTY.contains(&title.as_str()) {
            prometheus.ask(&query).unwrap_or_else(|error| panic!("{dashboard}, {title}: {error}"));
            continue;
        }
        // A rate needs two scrapes.
        wait::eventually(&format!("{dashboard}, {title}: {query} has data"), async || match prometheus.ask(&query) {
            Ok(count) => (count > 0).then_some(()),
            Err(error) => panic!("{dashboard}, {title}: {error}"),
        })
        .await;
    }
}

/// As operator and kubelet would have it: a VM has the GPU.
async fn give_to_vm(t: &Turn) {
    let nodes: Api<GPUNode> = t.all();
    wait::until(&nodes, "n1", "the agent makes its GPUNode", |_| true).await;
    let mode = Some(crds::WorkloadMode::VmPassthrough);
    let spec = GPUNodeSpec { mode, advertise: Advertise::Offered, ..GPUNodeSpec::default() };
    let params = PatchParams::default();
    nodes.patch("n1", &params, &Patch::Merge(json!({"spec": spec}))).await.expect("patchable");
    let users = json!([{"pod": "vms/virt-launcher-training-x", "vmi": "vms/training", "gpus": [GPU]}]);
    let status = json!({"status": {"operator": {"users": users}}});
    nodes.patch_status("n1", &params, &Patch::Merge(status)).await.expect("patchable");
}

#[test]
fn every_query_of_dashboards_and_alerts_is_answered_by_a_real_prometheus() {
    turn(async |t| {
        let (operators, agents, probes) = (address(), address(), address());
        let host = vfio::testing::Machine::from_yaml(MACHINE);
        let guarded = format!("--metrics-listen={agents}");
        let _agent = tls::agent(t, "n1", host.path(), &["--listen=127.0.0.1:0", "--metrics=tls", &guarded]).await;
        let prometheus = Prometheus::start(t, &tls::reader(t).await, operators, agents);
        give_to_vm(t).await;
        prometheus.until(r#"gpuvirt_gpu_vm_info{node="n1",namespace="vms",name="training"}"#).await;
        answered(&prometheus, "vm.json").await;

        policies::create(t, policies::valid("cluster-policy")).await;
        let passthrough = [(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))];
        nodes::label(t, "n1", &passthrough).await;
        let _operator = tls::operator(t, probes, operators).await;
        prometheus.until("gpuvirt_operator_leading == 1").await;
        prometheus.until("gpuvirt_nodes").await;
        for dashboard in ["fleet.json", "node.json"] {
            answered(&prometheus, dashboard).await;
        }
        let groups = wait::eventually("every rule has been looked at", async || {
            let answer = prometheus.get("/api/v1/rules")?;
            let groups = answer["data"]["groups"].as_array()?.clone();
            let rules = groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten());
            rules.clone().all(|rule| rule["health"] != "unknown").then(|| rules.cloned().collect::<Vec<_>>())
        })
        .await;
        assert!(groups.len() > 10, "{groups:?}");
        for rule in &groups {
            assert_eq!(rule["health"], "ok", "{rule}");
        }
    });
}

#[test]
fn every_alert_fires_in_its_world_and_is_silent_in_the_mutated_one() {
    let tested = run(&mut command("promtool", ["test", "rules", "tests/alerts/tests.yaml"]));
    tested.expect("promtool should be there (tests/deps.sh), and content");
    run(&mut command("promtool", ["check", "rules", "charts/gpuvirt/files/alerts.yaml"])).expect("rules of Prometheus");
}
