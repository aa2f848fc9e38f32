//! What the programs log: as much as GPUVirtConfig says, without a restart, and as JSON a line each.

use crds::v1alpha1::{GPUNode, GPUVirtConfig};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    metrics,
    support::{NAMESPACE, agents::operator as operator_of, identity, policies, program::Program, turn::turn, wait},
};

/// Each line on its own.
fn lines(program: &Program) -> Vec<Value> {
    let log = program.log();
    // The last one may be half written.
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn levels(program: &Program) -> Vec<String> {
    lines(program).iter().map(|line| line["level"].as_str().expect("a level").to_owned()).collect()
}

#[test]
fn the_log_level_of_operator_and_agents_follows_gpuvirtconfig_and_each_line_is_an_object() {
    turn(async |t| {
        let kubeconfig = identity::service_account(t, "gpuvirt-operator", None).await;
        let operator = Program::start(
            t,
            "op-json",
            &["operator", "--listen=127.0.0.1:0", "--log-format=json", "--log-level=warn"],
            &[
                ("KUBECONFIG", kubeconfig.as_os_str()),
                ("POD_NAMESPACE", NAMESPACE.as_ref()),
                ("POD_NAME", "op-json".as_ref()),
                ("GPUVIRT_IMAGE", "localhost/gpuvirt:test".as_ref()),
            ],
        );
        let host = vfio::testing::Machine::described("eight-t4");
        let more = ["--listen=127.0.0.1:0", "--log-format=json"];
        let agent = metrics::tls::agent(t, "n1", host.path(), &more).await;
        policies::create(t, policies::valid("cluster-policy")).await;
        let nodes: Api<GPUNode> = t.all();
        wait::until(&nodes, "n1", "the operator has seen it", |node| operator_of(node).is_some()).await;
        assert!(!levels(&operator).iter().any(|level| level == "INFO" || level == "DEBUG"), "{}", operator.log());

        let configs: Api<GPUVirtConfig> = t.all();
        let set = async |logging: Value| {
            let patch = json!({"spec": {"logging": logging}});
            wait::until(&configs, "default", "the operator makes it", |_| true).await;
            configs.patch("default", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patchable");
        };
        set(json!({"level": "debug", "agent": "info,gpuvirt=trace"})).await;
        operator.says(r#""wanted":"debug""#).await;
        agent.says(r#""wanted":"info,gpuvirt=trace""#).await;
        operator.says(r#""level":"DEBUG""#).await;
        set(json!({"level": null, "agent": null})).await;
        operator.says(r#""before":"debug","wanted":"warn""#).await;
        agent.says(r#""before":"info,gpuvirt=trace","wanted":"info""#).await;

        for line in lines(&operator).iter().chain(&lines(&agent)) {
            for field in ["timestamp", "level", "target", "message"] {
                assert!(line[field].is_string(), "{field} is not in {line}");
            }
        }
        let of_agent = lines(&agent);
        assert!(of_agent.iter().any(|line| line["span"]["node"] == "n1"), "{of_agent:?}");
    });
}
