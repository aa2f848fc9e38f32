//! What is measured, one after the other, on one fleet.

use std::{
    path::PathBuf,
    slice,
    time::{Duration, Instant},
};

use crds::{WorkloadMode, labels, v1::PolicyState};
use k8s_openapi::api::apps::v1::DaemonSet;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    fleet::Fleet,
    meter::{Cost, Meter},
    operands,
    report::Run,
    support::{identity, policies, program::Program, turn::Turn, wait},
    wire,
};

const POLICY: &str = "cluster-policy";
const GPUS: u8 = 8;
/// Nodes that change one after the other.
const WAVES: usize = 10;
const IDLE: Duration = Duration::from_secs(60);

/// The operator's process, and what leads it to the API server.
struct Operators<'a> {
    turn: &'a Turn,
    kubeconfig: PathBuf,
}

impl Operators<'_> {
    fn start(&self, pod: &str) -> Program {
        self.turn.operator_by(&self.kubeconfig, pod, "info", "127.0.0.1:0")
    }
}

struct Bench<'a> {
    turn: &'a Turn,
    fleet: Fleet,
    meter: Meter,
    costs: Vec<Cost>,
}

pub async fn run(turn: &Turn, nodes: usize) -> Run {
    let kubeconfig = identity::service_account(turn, "gpuvirt-operator", None).await;
    let (kubeconfig, bytes) = wire::through(&kubeconfig).await;
    let operators = Operators { turn, kubeconfig };

    let began = Instant::now();
    let fleet = Fleet::start(turn.client.clone(), nodes, GPUS).await;
    println!("{nodes} nodes with {GPUS} GPUs each made in {:.1} s", began.elapsed().as_secs_f64());
    let began = Instant::now();
    fleet.label(&fleet.names, "example.com/floor", "1").await;
    let floor_seconds = began.elapsed().as_secs_f64();
    let players = tokio::spawn(operands::play(turn.client.clone(), fleet.seen.clone()));

    policies::create(turn, policies::valid(POLICY)).await;
    budget(turn, &json!("100%"), "100%").await;
    let operator = operators.start("first");
    let meter = Meter::new(operator.pid(), turn.cluster.state().join("log/audit.log"), bytes);
    let mut bench = Bench { turn, fleet, meter, costs: Vec::new() };
    bench.fleets().await;
    bench.waves().await;
    bench.deaths(&operators, operator).await;
    players.abort();
    Run { nodes, gpus: GPUS, floor_seconds, costs: bench.costs }
}

impl Bench<'_> {
    async fn phase(&mut self, name: &str, run: impl AsyncFnOnce(&Fleet)) {
        let fleet = &self.fleet;
        let cost = self.meter.phase(name, async || run(fleet).await).await;
        println!("{name}: {:.2} s", cost.seconds);
        self.costs.push(cost);
        // What a phase has begun and nobody waits for is not the next one's.
        sleep(Duration::from_secs(5)).await;
    }

    /// All nodes at once.
    async fn fleets(&mut self) {
        self.phase("first labelling", async |fleet| {
            fleet.until_labelled(labels::GPU_PRESENT).await;
            fleet.until_serving(&fleet.names, WorkloadMode::Container).await;
        })
        .await;
        self.phase("idle, a minute", async |_| sleep(IDLE).await).await;
        self.phase("all to vm-passthrough", async |fleet| flip(fleet, &fleet.names, WorkloadMode::VmPassthrough).await)
            .await;
        self.phase("all but one back", async |fleet| {
            let (one, others) = fleet.names.split_first().expect("a fleet has nodes");
            let single = async {
                sleep(Duration::from_secs(1)).await;
                let began = Instant::now();
                flip(fleet, slice::from_ref(one), WorkloadMode::Container).await;
                println!("the one, begun a second later: {:.2} s", began.elapsed().as_secs_f64());
            };
            tokio::join!(flip(fleet, others, WorkloadMode::Container), single);
        })
        .await;
        let turn = self.turn;
        self.phase("a new image in the policy", async |_| new_image(turn).await).await;
    }

    /// The default budget.
    async fn waves(&mut self) {
        budget(self.turn, &json!(1), "25%").await;
        self.phase(&format!("{WAVES} nodes, one at a time"), async |fleet| {
            let some = &fleet.names[..WAVES.min(fleet.names.len())];
            flip(fleet, some, WorkloadMode::VmPassthrough).await;
        })
        .await;
    }

    async fn deaths(&mut self, operators: &Operators<'_>, operator: Program) {
        // The kubelet starts a container that died anew in the same pod.
        operator.kill().await;
        let operator = operators.start("first");
        self.meter.pid = operator.pid();
        self.phase("restart, and a node's flip", async |fleet| {
            flip(fleet, &fleet.names[..1], WorkloadMode::Container).await;
        })
        .await;

        // A second replica waits for the lease of one that goes without a word.
        let next = operators.start("second");
        sleep(Duration::from_secs(5)).await;
        operator.signal(Signal::KILL);
        self.meter.pid = next.pid();
        self.phase("failover, and a node's flip", async |fleet| {
            flip(fleet, &fleet.names[..1], WorkloadMode::VmPassthrough).await;
        })
        .await;
    }
}

async fn flip(fleet: &Fleet, nodes: &[String], mode: WorkloadMode) {
    fleet.switch(nodes, mode).await;
    fleet.until_serving(nodes, mode).await;
}

async fn budget(turn: &Turn, max_parallel: &Value, max_unavailable: &str) {
    policies::config(turn, json!({"budget": {"maxParallel": max_parallel, "maxUnavailable": max_unavailable}})).await;
}

/// Until the driver's DaemonSet has it and the policy is ready again.
async fn new_image(turn: &Turn) {
    policies::patch(turn, POLICY, &json!({"spec": {"driver": {"version": "next"}}})).await;
    let has = |set: &DaemonSet| {
        let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        pod.is_some_and(|pod| pod.containers.iter().any(|c| c.image.as_deref().is_some_and(|i| i.contains(":next"))))
    };
    wait::until(&turn.ours::<DaemonSet>(), "nvidia-driver-daemonset", "the DaemonSet has the new image", has).await;
    policies::until(turn, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
}
