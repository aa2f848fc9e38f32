//! Virtual machines, what is not built, and what is accepted for old policies' sake.

use serde_json::json;

use super::{CONTAINER, IMAGE, Row, changes, elsewhere, unused, unused_below, with};

pub(super) fn rows() -> Vec<Row> {
    [vms(), node_status(), nothing()].into_iter().flatten().collect()
}

fn vms() -> Vec<Row> {
    let agent = "the agent does it on VM nodes, where deploy labels switch it: condition ImagesNotUsed";
    let mut rows = vec![
        // And nodes' modes, of which node/mode.rs has tests.
        with(
            json!({"vgpuManager": {"enabled": true}}),
            changes("sandboxWorkloads.enabled", &["Problem OperandNotSupported"]),
        ),
        elsewhere("sandboxWorkloads.defaultWorkload", "nodes' modes: node/mode.rs"),
        changes("vfioManager.resources", &["DaemonSet gpuvirt-agent *containers[agent].resources.limits.*"]),
        with(
            json!({"kataSandboxDevicePlugin": {"enabled": true}}),
            changes("sandboxWorkloads.mode", &["Problem OperandNotSupported"]),
        ),
        changes("vgpuManager.enabled", &["Problem OperandNotSupported"]),
        with(
            json!({"sandboxWorkloads": {"mode": "kata"}, "kataSandboxDevicePlugin": {"enabled": false}}),
            changes("kataSandboxDevicePlugin.enabled", &["Problem OperandNotSupported"]),
        ),
        with(
            json!({"sandboxWorkloads": {"mode": "kata"}, "kataSandboxDevicePlugin": {"enabled": false}}),
            changes("ccManager.enabled", &["Problem OperandNotSupported"]),
        ),
    ];
    let not_built = "not built: OperandNotSupported when enabled";
    for section in ["vgpuManager", "kataSandboxDevicePlugin", "ccManager"] {
        rows.extend(unused_below(section, &CONTAINER, not_built));
    }
    rows.extend(unused_below("vgpuManager.driverManager", &[&IMAGE[..], &["env"]].concat(), not_built));
    rows.extend(unused(&["vgpuManager.kernelModuleConfig.name", "ccManager.defaultMode"], not_built));
    for section in ["vfioManager", "sandboxDevicePlugin", "vgpuDeviceManager"] {
        let fields: Vec<&str> =
            CONTAINER.into_iter().filter(|f| section != "vfioManager" || *f != "resources").collect();
        rows.extend(unused_below(section, &fields, agent));
        rows.push(elsewhere(
            &format!("{section}.enabled"),
            "the agent's function on every node: validate/tests.rs, node/tests",
        ));
    }
    rows.extend(unused_below("vfioManager.driverManager", &[&IMAGE[..], &["env"]].concat(), agent));
    rows.extend(unused_below("vgpuDeviceManager.config", &["name", "default"], "vGPUs are not made by this version"));
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
    rows.extend(unused(
        &["operator.use_ocp_driver_toolkit"],
        "OpenShift's driver toolkit is not rendered by this version",
    ));
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
