//! Who a program is: kubeconfigs with tokens of service accounts, as their pods would have them.

use std::{fs, path::PathBuf};

use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Pod, ServiceAccount},
};
use kube::{Api, ResourceExt, api::PostParams};
use serde_json::json;

use super::turn::Turn;

/// A kubeconfig for a service account of the release. With a pod, its token says which node that pod is on.
pub async fn service_account(turn: &Turn, name: &str, pod: Option<&Pod>) -> PathBuf {
    let accounts: Api<ServiceAccount> = turn.ours();
    let bound = pod.map(|pod| BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name_any()),
        uid: pod.uid(),
    });
    let request = TokenRequest {
        spec: TokenRequestSpec {
            bound_object_ref: bound,
            expiration_seconds: Some(3600),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let answer = accounts.create_token_request(name, &PostParams::default(), &request).await;
    let token = answer.expect("a token should be given").status.expect("an answer should have a status").token;
    let suffix = pod.map(ResourceExt::name_any).unwrap_or_default();
    let path = turn.dir.path().join(format!("{name}{suffix}.kubeconfig"));
    let own = fs::read_to_string(turn.cluster.kubeconfig()).expect("the admin's kubeconfig should be readable");
    let mut own: serde_json::Value = serde_saphyr::from_str(&own).expect("the admin's kubeconfig should be YAML");
    own["users"] = json!([{"name": "u", "user": {"token": token}}]);
    fs::write(&path, own.to_string()).expect("a kubeconfig should be writable");
    path
}
