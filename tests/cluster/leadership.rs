//! One writer at a time, and a quiet one.

use std::time::{Duration, Instant};

use crds::{WorkloadMode, labels, v1::PolicyState, v1alpha1::GPUNode};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;

use crate::{
    modes::{CONTAINER, PASSTHROUGH},
    support::{
        agents::{Agent, t4},
        kubelets::Kubelets,
        nodes::{self, label, until_deployed},
        policies,
        turn::{LEASE, Turn, turn},
        wait,
    },
};

const POLICY: &str = "cluster-policy";
/// A line for each request, from the client's own tracing.
const REQUESTS: &str = "info,kube_client::client::builder=debug";

/// `GET https://…/path` of each request that the log tells of, in order.
fn requests(log: &str) -> Vec<String> {
    let value = |line: &str, key: &str| {
        let rest = &line[line.find(key)? + key.len()..];
        Some(rest.split([' ', '}']).next()?.trim_matches('"').to_owned())
    };
    let lines = log.lines().filter(|line| line.contains("requesting"));
    lines.filter_map(|line| Some(format!("{} {}", value(line, "http.method=")?, value(line, "http.url=")?))).collect()
}

fn epoch(lease: &Lease) -> i32 {
    lease.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default()
}

async fn passthrough(t: &Turn, agent: &Agent) -> GPUNode {
    label(t, &agent.node, &[(labels::WORKLOAD_CONFIG, Some("vm-passthrough"))]).await;
    until_deployed(t, &agent.node, &PASSTHROUGH).await;
    agent.until_reason(t, true, "Serving").await
}

#[test]
fn a_waiting_replica_writes_nothing_and_takes_over_when_the_leader_is_killed() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        let leader = t.operator("op-1").await;
        let first = epoch(&t.leads("op-1").await);
        let waiting = t.operator_logging("op-2", REQUESTS).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        wait::eventually("the waiting replica looks at the lease", async || {
            (requests(&waiting.log()).len() >= 2).then_some(())
        })
        .await;

        let killed = Instant::now();
        leader.kill().await;
        let asked = requests(&waiting.log());
        assert!(asked.iter().all(|r| r.starts_with("GET ") && r.contains("/leases/")), "{asked:#?}");
        let second = epoch(&t.leads("op-2").await);
        let silent = killed.elapsed();
        assert!(second > first, "{second} after {first}");
        // The lease lasts 15 s from a renewal that is up to 2 s old, and is looked at every 2 s.
        assert!(silent > Duration::from_secs(10) && silent < Duration::from_secs(25), "{silent:?}");
        let served = passthrough(t, &agent).await;
        assert_eq!(served.spec.epoch, i64::from(second));
    });
}

#[test]
fn a_leader_that_is_stopped_hands_over_at_once() {
    turn(async |t| {
        let leader = t.operator("op-1").await;
        t.leads("op-1").await;
        let _waiting = t.operator("op-2").await;
        let stopped = Instant::now();
        let status = leader.stop().await;
        assert!(status.success(), "{status}");
        t.leads("op-2").await;
        assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
    });
}

#[test]
fn a_leader_whose_lease_is_taken_stops_writing_and_exits() {
    turn(async |t| {
        let mut leader = t.operator("op-1").await;
        t.leads("op-1").await;
        let leases: Api<Lease> = t.ours();
        let taken = json!({"spec": {"holderIdentity": "somebody-else"}});
        leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(&taken)).await.expect("patchable");
        let status = leader.ended().await;
        assert!(!status.success(), "{status}");
        assert!(leader.log().contains("taken over by somebody-else"), "{}", leader.log());
    });
}

#[test]
fn a_deleted_lease_does_not_lower_the_epoch() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        nodes::create(t, "n1", &[]).await;
        for _ in 0..2 {
            let operator = t.operator("op-1").await;
            t.leads("op-1").await;
            operator.stop().await;
        }
        let operator = t.operator("op-1").await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        let before = passthrough(t, &agent).await.spec.epoch;
        assert!(before >= 3, "{before}");
        operator.stop().await;
        let leases: Api<Lease> = t.ours();
        leases.delete(LEASE, &DeleteParams::default()).await.expect("deletable");
        let _operator = t.operator("op-1").await;
        t.leads("op-1").await;
        label(t, "n1", &[(labels::WORKLOAD_CONFIG, None)]).await;
        until_deployed(t, "n1", &CONTAINER).await;
        let asked = agent.until(t, "containers again", |n| n.spec.mode == Some(WorkloadMode::Container)).await;
        assert!(asked.spec.epoch > before, "{} after {before}", asked.spec.epoch);
    });
}

#[test]
fn an_idle_operator_only_renews_its_lease() {
    turn(async |t| {
        let _kubelets = Kubelets::start(t);
        for name in ["n1", "n2"] {
            nodes::create(t, name, &[]).await;
        }
        let operator = t.operator_logging("op-1", REQUESTS).await;
        let agent = Agent::start(t, "n1", vec![t4("0000:18:00.0")]).await;
        policies::create(t, policies::valid(POLICY)).await;
        passthrough(t, &agent).await;
        policies::until(t, POLICY, PolicyState::Ready, "Reconciled", &[]).await;
        // What follows from the last writes (their own echoes) has been dealt with after two renewals.
        let renewals = |log: &str| requests(log).iter().filter(|r| r.starts_with("PUT ")).count();
        let after = async |count: usize| {
            wait::eventually("the lease is renewed", async || (renewals(&operator.log()) >= count).then_some(())).await;
        };
        after(renewals(&operator.log()) + 2).await;
        let before = requests(&operator.log()).len();
        // Five renewals are ten seconds.
        after(renewals(&operator.log()) + 5).await;
        let made = requests(&operator.log()).split_off(before);
        let quiet = made.iter().all(|r| r.starts_with("PUT ") && r.ends_with(&format!("/leases/{LEASE}?")));
        assert!(quiet && made.len() <= 6, "{made:#?}");
    });
}
