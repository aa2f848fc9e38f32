//! Secrets go in, and none comes out.

use serde_json::json;

use super::redact::Redactor;

/// Each is a secret or names a person or a machine.
const SECRETS: [&str; 14] = [
    "hunter2hunter2",
    "s3cr3t-p4ss",
    "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl",
    "MIIEpAIBAAKCAQEA7",
    "AKIAIOSFODNN7EXAMPLE",
    "nvapi-0123456789abcdefghij",
    "alice.liddell@wonderland.example.com",
    "AAAAC3NzaC1lZDI1NTE5AAAAIJ0",
    "10.42.17.3",
    "203.0.113.77",
    "2001:db8:85a3::8a2e:370:7334",
    "52:54:00:12:34:56",
    "bGljZW5zZS1zZXJ2ZXI",
    "swordfish99",
];

fn log() -> String {
    format!(
        "\
level=info msg=\"pulling\" image=registry.example/a/b:1 url=https://robot:{}@registry.example/v2\n\
Authorization: Bearer {}\n\
password={} and api_key: \"{}\"\n\
mounting --token {} for {}\n\
-----BEGIN RSA PRIVATE KEY-----\n{}\nqqq\n-----END RSA PRIVATE KEY-----\n\
key {} {} ssh-ed25519 {}AAAA alice@host\n\
dial tcp {}:6443: connect: no route; peer {} and [{}]:443 at {}\n",
        SECRETS[0],
        SECRETS[2],
        SECRETS[1],
        SECRETS[13],
        SECRETS[12],
        SECRETS[6],
        SECRETS[3],
        SECRETS[4],
        SECRETS[5],
        SECRETS[7],
        SECRETS[8],
        SECRETS[9],
        SECRETS[10],
        SECRETS[11],
    )
}

fn none_in(text: &str) {
    for secret in SECRETS {
        assert!(!text.contains(secret), "{secret} is in {text}");
    }
}

#[test]
fn no_secret_that_goes_into_a_text_comes_out() {
    let redacted = Redactor::default().text(&log());
    none_in(&redacted);
    assert!(redacted.contains("registry.example/a/b:1") && redacted.contains("no route"), "{redacted}");
}

#[test]
fn no_secret_that_goes_into_an_object_comes_out() {
    let mut object = json!({
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "managedFields": [{"manager": SECRETS[6]}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": SECRETS[0], "note": log()},
        },
        "spec": {
            "imagePullSecrets": [{"name": "pull-it"}],
            "automountServiceAccountToken": true,
            "containers": [{
                "env": [{"name": "DB_PASSWORD", "value": SECRETS[1]}, {"name": "NGC_API_KEY", "value": SECRETS[13]}],
                "args": [format!("--password={}", SECRETS[0])],
            }],
        },
        "licenseToken": SECRETS[12],
        "nested": {"clientSecret": SECRETS[1], "secretName": "kept"},
        "status": {"podIP": SECRETS[8], "podIPs": [{"ip": SECRETS[8]}, {"ip": SECRETS[10]}]},
    });
    Redactor::default().object(&mut object);
    none_in(&object.to_string());
    assert_eq!(object["spec"]["imagePullSecrets"][0]["name"], "pull-it");
    assert_eq!(object["nested"]["secretName"], "kept");
    let mut secret = json!({"kind": "Secret", "data": {"a": "aHVudGVyMg=="}, "stringData": {"b": SECRETS[0]}});
    Redactor::default().object(&mut secret);
    assert_eq!(secret, json!({"kind": "Secret"}));
}

#[test]
fn an_address_has_one_name_everywhere_and_what_looks_like_one_stays() {
    let mut redactor = Redactor::default();
    assert_eq!(redactor.text("10.0.0.5 to 10.0.0.6"), "<ip-1> to <ip-2>");
    assert_eq!(redactor.text("from 10.0.0.6 at 127.0.0.1"), "from <ip-2> at 127.0.0.1");
    for kept in [
        "0000:43:00.0 is on vfio-pci, group 35",
        "NVRM: Xid (PCI:0000:65:00): 79, pid=4711, name=python3",
        "driver 580.95.05 on 6.8.0-90-generic, 10de:1eb8 10DE:1EB8=nvidia.com/T4",
        "GPU-8d1b2c3e-1111-2222-3333-444455556666",
        "the token expired; secret volumes are mounted; password login is off",
        "2026-01-01T00:00:00Z INFO gpuvirt::agent: registered resource=nvidia.com/TU104GL_TESLA_T4",
        "resource 0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200",
    ] {
        assert_eq!(redactor.text(kept), kept);
    }
}
