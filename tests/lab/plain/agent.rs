//! The agent as a process of the host, with an API server that is away.

use crds::{
    WorkloadMode,
    v1alpha1::{Advertise, GPUNodeSpec},
};

use super::{AUDIO, IDLE, Plain, TWIN, plain_with};

/// Leads to nobody.
const KUBECONFIG: &str = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority": "/host/ca.crt"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}"#;

/// The agent, and somebody in the kubelet's place.
pub(super) fn start_agent(plain: &Plain) {
    plain.run(&format!("cat >/root/kubeconfig <<'E'\n{KUBECONFIG}\nE"));
    plain.run("setsid kubelet </dev/null >/tmp/kubelet.log 2>&1 &");
    plain
        .until("[ -S /var/lib/kubelet/pod-resources/kubelet.sock -a -S /var/lib/kubelet/device-plugins/kubelet.sock ]");
    let agent = "gpuvirt agent --node=plain --host-root=/ --listen=127.0.0.1:0";
    plain.run(&format!("KUBECONFIG=/root/kubeconfig setsid {agent} </dev/null >/tmp/agent.log 2>&1 &"));
}

#[test]
fn a_second_boot_restores_the_last_order_before_anything_is_offered_with_the_api_server_away() {
    plain_with("intel_iommu=on iommu=pt", |plain| {
        let order = GPUNodeSpec {
            mode: Some(WorkloadMode::VmPassthrough),
            advertise: Advertise::Offered,
            epoch: 3,
            ..GPUNodeSpec::default()
        };
        let order = serde_json::to_string(&order).expect("an order has a JSON form");
        // As the agent leaves it when it gets an order.
        plain.run(&format!("mkdir -p /var/lib/gpuvirt; echo '{order}' >/var/lib/gpuvirt/desired.json; mkdir -p /run/gpuvirt; touch /run/before"));
        plain.reboot();
        plain.run("[ ! -e /run/before ] && [ -s /var/lib/gpuvirt/desired.json ] && [ ! -d /sys/module/vfio_pci ]");
        start_agent(plain);
        plain.until("grep -q offered.*T4 /tmp/kubelet.log");
        let drivers = plain.drivers();
        for gpu in IDLE.iter().chain([&TWIN, &AUDIO]) {
            assert_eq!(drivers[*gpu], "vfio-pci");
        }
        let log = plain.run("cat /tmp/kubelet.log");
        let registered: Vec<_> = log.lines().filter(|line| line.starts_with("registered")).collect();
        assert!(!registered.is_empty(), "{log}");
        for line in registered {
            assert!(IDLE.iter().all(|gpu| line.contains(gpu)), "registered before all were bound: {line}");
        }
        eprintln!("{log}");
    });
}
