//! Metrics over TLS: who may read them, and what others are told.

use std::{net::SocketAddr, path::Path};

use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{Pod, ServiceAccount},
    rbac::v1::ClusterRoleBinding,
};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use super::{address, scrape};
use crate::support::{
    NAMESPACE, identity, nodes,
    program::Program,
    turn::{Turn, turn},
    wait,
};

/// One who asks at this address with this token, and asks nobody who it is that answers.
fn scraper(at: SocketAddr, token: Option<&str>) -> Client {
    let mut config = Config::new(format!("https://{at}").parse().expect("an address"));
    config.accept_invalid_certs = true;
    config.default_retry = false;
    config.auth_info.token = token.map(|token| token.to_owned().into());
    Client::try_from(config).expect("a client should be buildable")
}

/// The metrics, or the status and the text in their stead.
async fn ask(at: SocketAddr, token: Option<&str>) -> Option<Result<String, (u16, String)>> {
    let request = http::Request::get("/metrics").body(Vec::new()).expect("a request");
    match scraper(at, token).request_text(request).await {
        Ok(text) => Some(Ok(text)),
        Err(kube::Error::Api(status)) => Some(Err((status.code, status.message))),
        Err(_not_yet) => None,
    }
}

async fn answer(at: SocketAddr, token: Option<&str>) -> Result<String, (u16, String)> {
    wait::eventually("it answers over TLS", async || ask(at, token).await).await
}

async fn token(t: &Turn, account: &str) -> String {
    let accounts: Api<ServiceAccount> = t.ours();
    let request = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
    answer.expect("a token should be given").status.expect("an answer should have a status").token
}

/// An account that may read metrics, as the chart's value `metrics.readers` makes it one.
pub async fn reader(t: &Turn) -> String {
    let account = ServiceAccount {
        metadata: kube::core::ObjectMeta { name: Some("prometheus".to_owned()), ..kube::core::ObjectMeta::default() },
        ..ServiceAccount::default()
    };
    let _ = t.ours::<ServiceAccount>().create(&PostParams::default(), &account).await;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "prometheus"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpuvirt-metrics-reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "prometheus", "namespace": NAMESPACE}],
    });
    let bindings: Api<ClusterRoleBinding> = t.all();
    let _ = bindings.delete("prometheus", &DeleteParams::default()).await;
    let binding = serde_json::from_value(binding).expect("a binding");
    bindings.create(&PostParams::default(), &binding).await.expect("a binding should be creatable");
    token(t, "prometheus").await
}

/// `gpuvirt operator` with its metrics over TLS.
pub async fn operator(t: &Turn, probes: SocketAddr, metrics: SocketAddr) -> Program {
    let kubeconfig = identity::service_account(t, "gpuvirt-operator", None).await;
    let (listen, guarded) = (format!("--listen={probes}"), format!("--metrics-listen={metrics}"));
    Program::start(
        t,
        "op-tls",
        &["operator", &listen, "--metrics=tls", &guarded],
        &[
            ("KUBECONFIG", kubeconfig.as_os_str()),
            ("POD_NAMESPACE", NAMESPACE.as_ref()),
            ("POD_NAME", "op-tls".as_ref()),
            ("GPUVIRT_IMAGE", "localhost/gpuvirt:test".as_ref()),
        ],
    )
}

/// `gpuvirt agent` of a node without a kubelet, on a described machine.
pub async fn agent(t: &Turn, node: &str, host: &Path, more: &[&str]) -> Program {
    nodes::create(t, node, &[]).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("agent-{node}")},
        "spec": {"nodeName": node, "serviceAccountName": "gpuvirt-agent", "containers": [{"name": "c", "image": "c"}]},
    });
    let pods: Api<Pod> = t.ours();
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(pod).expect("a Pod")).await.expect("a pod");
    let kubeconfig = identity::service_account(t, "gpuvirt-agent", Some(&pod)).await;
    let root = format!("--host-root={}", host.display());
    Program::start(
        t,
        &format!("agent-{node}"),
        &[&["agent", &root], more].concat(),
        &[("KUBECONFIG", kubeconfig.as_os_str()), ("NODE_NAME", node.as_ref()), ("LOG_LEVEL", "info".as_ref())],
    )
}

/// Turns away whoever may not read, with what to do, and shows the metrics to whoever may.
async fn only_readers(t: &Turn, at: SocketAddr, metric: &str) {
    let (code, text) = answer(at, None).await.expect_err("nobody");
    assert!(code == 401 && text.contains("gpuvirt-metrics-reader") && text.contains("token"), "{code}: {text}");
    let (code, text) = answer(at, Some("rubbish")).await.expect_err("rubbish");
    assert!(code == 401 && text.contains("does not know this token"), "{code}: {text}");
    let (code, text) = answer(at, Some(&token(t, "nvidia-driver").await)).await.expect_err("another account");
    let account = format!("system:serviceaccount:{NAMESPACE}:nvidia-driver");
    assert!(code == 403 && text.contains(&account) && text.contains("gpuvirt-metrics-reader"), "{code}: {text}");
    let reader = reader(t).await;
    // The API server's authorizer sees a new binding a moment later, and each no holds for a while: so a new token each time.
    let shown = wait::eventually("a reader is shown the metrics", async || match ask(at, Some(&reader)).await {
        Some(Ok(text)) => Some(text),
        _ => None,
    });
    let shown = shown.await;
    assert!(shown.contains(metric) && shown.ends_with("# EOF\n"), "{shown}");
}

#[test]
fn the_operators_metrics_are_shown_over_tls_to_readers_only_and_probes_stay_plain() {
    turn(async |t| {
        let (probes, metrics) = (address(), address());
        let _operator = operator(t, probes, metrics).await;
        only_readers(t, metrics, "gpuvirt_operator_leading 1").await;
        let said = scrape(probes, "/readyz").expect("an answer");
        assert!(said.starts_with("HTTP/1.0 200"), "{said}");
        let said = scrape(probes, "/metrics").expect("an answer");
        assert!(said.starts_with("HTTP/1.0 404"), "metrics are not shown without TLS: {said}");
    });
}

#[test]
fn an_agents_metrics_are_shown_over_tls_to_readers_only_with_the_certificate_that_it_was_given() {
    turn(async |t| {
        let metrics = address();
        let host = vfio::testing::Machine::described("eight-t4");
        let folder = t.dir.path().join("certificate");
        std::fs::create_dir(&folder).expect("a folder");
        let pair =
            rcgen::generate_simple_self_signed(["gpuvirt-metrics.gpuvirt.svc".to_owned()]).expect("a certificate");
        std::fs::write(folder.join("tls.crt"), pair.cert.pem()).expect("writable");
        std::fs::write(folder.join("tls.key"), pair.signing_key.serialize_pem()).expect("writable");
        let (guarded, certificate) =
            (format!("--metrics-listen={metrics}"), format!("--metrics-certificate={}", folder.display()));
        let more = ["--listen=127.0.0.1:0", "--metrics=tls", &guarded, &certificate];
        let _agent = agent(t, "n1", host.path(), &more).await;
        only_readers(t, metrics, r#"gpuvirt_gpus{node="n1"} 8"#).await;
    });
}
