//! Virtual machines, what is not built, and what is accepted for old policies' sake.

use serde_json::json;

use super::{CONTAINER, IMAGE, Of, Row, changes, container, elsewhere, unused, unused_below, with};

pub(super) fn rows() -> Vec<Row> {
    [vms(), node_status(), nothing()].into_iter().flatten().collect()
}

fn vms() -> Vec<Row> {
    let agent = "the agent does it on VM nodes, where deploy labels switch it: condition ImagesNotUsed";
    let kata = json!({"sandboxWorkloads": {"mode": "kata"}});
    let vgpu = ["DaemonSet nvidia-vgpu-manager-daemonset *"];
    let main = |set: &'static str, name: &'static [&'static str]| {
        [Of { set, main: Some(name[0]), image: name, resources: name }]
    };
    let layouts = "ConfigMap default-vgpu-devices-config *";
    let mut rows = vec![
        // And nodes' modes, of which node/mode.rs has tests.
        changes("sandboxWorkloads.enabled", &[vgpu[0], layouts]),
        // And the agent's function on every node: validate/tests.rs, node/tests.
        changes("vgpuDeviceManager.enabled", &[layouts]),
        changes("vgpuDeviceManager.config.name", &[layouts]),
        elsewhere("vgpuDeviceManager.config.default", "nodes' vGPU layouts: operator/vgpu/wish.rs"),
        elsewhere("sandboxWorkloads.defaultWorkload", "nodes' modes: node/mode.rs"),
        changes("vfioManager.resources", &["DaemonSet gpuvirt-agent *containers[agent].resources.limits.*"]),
        changes("sandboxWorkloads.mode", &["DaemonSet nvidia-kata-* *", "DaemonSet nvidia-cc-manager *"]),
        changes("vgpuManager.enabled", &vgpu),
        changes(
            "vgpuManager.kernelModuleConfig.name",
            &[
                "DaemonSet nvidia-vgpu-manager-daemonset *containers[nvidia-vgpu-manager-ctr].volumeMounts[/drivers/*",
                "DaemonSet nvidia-vgpu-manager-daemonset *.volumes[*",
            ],
        ),
        with(kata.clone(), changes("kataSandboxDevicePlugin.enabled", &["DaemonSet nvidia-kata-* *"])),
        with(kata.clone(), changes("ccManager.enabled", &["DaemonSet nvidia-cc-manager *"])),
        with(
            kata.clone(),
            changes("ccManager.defaultMode", &["DaemonSet nvidia-cc-manager *.env[DEFAULT_CC_MODE].value"]),
        ),
    ];
    rows.extend(container("vgpuManager", &main("nvidia-vgpu-manager-daemonset", &["nvidia-vgpu-manager-ctr"])));
    let plugin = main("nvidia-kata-sandbox-device-plugin-daemonset", &["nvidia-kata-sandbox-device-plugin-ctr"]);
    let of_kata = [
        container("kataSandboxDevicePlugin", &plugin),
        container("ccManager", &main("nvidia-cc-manager", &["nvidia-cc-manager"])),
    ];
    rows.extend(of_kata.into_iter().flatten().map(|row| with(kata.clone(), row)));
    rows.extend(unused_below(
        "vgpuManager.driverManager",
        &[&IMAGE[..], &["env"]].concat(),
        "prepare-driver is our own program: condition ImagesNotUsed",
    ));
    for section in ["vfioManager", "sandboxDevicePlugin", "vgpuDeviceManager"] {
        let fields: Vec<&str> =
            CONTAINER.into_iter().filter(|f| section != "vfioManager" || *f != "resources").collect();
        rows.extend(unused_below(section, &fields, agent));
    }
    for section in ["vfioManager.enabled", "sandboxDevicePlugin.enabled"] {
        rows.push(elsewhere(section, "the agent's function on every node: validate/tests.rs, node/tests"));
    }
    rows.extend(unused_below("vfioManager.driverManager", &[&IMAGE[..], &["env"]].concat(), agent));
    rows
}

fn node_status() -> Vec<Row> {
    let own = "our own program in our own image: condition ImagesNotUsed";
    let mut rows = unused_below("nodeStatusExporter", &IMAGE, own);
    let main = "DaemonSet nvidia-node-status-exporter *containers[nvidia-node-status-exporter]";
    let on = |row| with(json!({"nodeStatusExporter": {"enabled": true}}), row);
    rows.extend([
        changes("nodeStatusExporter.enabled", &["* nvidia-node-status-exporter *"]),
        on(changes("nodeStatusExporter.args", &[&format!("{main}.args*")])),
        on(changes("nodeStatusExporter.env", &[&format!("{main}.env*")])),
        on(changes("nodeStatusExporter.resources", &[&format!("{main}.resources*")])),
        on(changes(
            "nodeStatusExporter.hostNetwork",
            &[
                "DaemonSet nvidia-node-status-exporter *.hostNetwork",
                "DaemonSet nvidia-node-status-exporter *.dnsPolicy",
            ],
        )),
    ]);
    rows
}

fn nothing() -> Vec<Row> {
    let mut rows = unused_below(
        "kataManager",
        &[&CONTAINER[..], &["enabled", "config.artifactsDir", "config.runtimeClasses"]].concat(),
        "deprecated by the peer, which only cleans up after it",
    );
    rows.extend(unused_below("operator.initContainer", &IMAGE, "deprecated: no operand has it"));
    rows.extend(unused(&["operator.defaultRuntime"], "deprecated: the runtime is read from the nodes"));
    rows.push(elsewhere("operator.use_ocp_driver_toolkit", "on OpenShift alone: build/openshift.rs"));
    rows.extend(unused_below(
        "operator",
        &[
            "labels",
            "annotations",
            "metrics.serviceMonitor.additionalLabels",
            "metrics.serviceMonitor.enabled",
            "metrics.serviceMonitor.honorLabels",
            "metrics.serviceMonitor.interval",
            "metrics.serviceMonitor.relabelings",
            "metrics.serviceMonitor.scrapeTimeout",
        ],
        "about the operator's own pod, which the chart makes",
    ));
    rows.extend(unused(&["cdi.default"], "deprecated: CDI is the default where it is enabled"));
    rows.extend(unused(&["psp.enabled"], "Kubernetes has no pod security policies since 1.25"));
    rows.extend(unused(&["psa.enabled"], "the chart's notes say how to label the namespace"));
    rows
}
