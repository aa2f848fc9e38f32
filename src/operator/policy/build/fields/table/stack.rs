//! The container stack above the driver.

use serde_json::json;

use super::{Effect, Of, PLUGIN, Row, changes, container, elsewhere, unused, unused_below, with};

const TOOLKIT: &str = "nvidia-container-toolkit-daemonset";
const MPS: &str = "nvidia-device-plugin-mps-control-daemon";
const GFD: &str = "gpu-feature-discovery";
const EXPORTER: &str = "nvidia-dcgm-exporter";
const MIG: &str = "nvidia-mig-manager";
const VALIDATOR: &str = "nvidia-operator-validator";

pub(super) fn rows() -> Vec<Row> {
    [toolkit(), device_plugin(), metrics(), mig(), validator()].into_iter().flatten().collect()
}

fn toolkit() -> Vec<Row> {
    let mut rows = container(
        "toolkit",
        &[Of {
            set: TOOLKIT,
            main: Some("nvidia-container-toolkit-ctr"),
            image: &["nvidia-container-toolkit-ctr"],
            resources: &["nvidia-container-toolkit-ctr"],
        }],
    );
    let hook = [
        "DaemonSet nvidia-device-plugin-daemonset *[NVIDIA_CDI_HOOK_PATH].*",
        "DaemonSet nvidia-mig-manager *[NVIDIA_CDI_HOOK_PATH].*",
    ];
    rows.push(changes(
        "toolkit.enabled",
        &[
            &hook[..],
            &["DaemonSet nvidia-container-toolkit-daemonset *", "ConfigMap nvidia-container-toolkit-entrypoint *"],
        ]
        .concat(),
    ));
    rows.push(changes(
        "toolkit.installDir",
        &[
            &hook[..],
            &[
                "DaemonSet nvidia-container-toolkit-daemonset *.env[ROOT].value",
                "DaemonSet nvidia-container-toolkit-daemonset *.volumeMounts*",
                "DaemonSet nvidia-container-toolkit-daemonset *.volumes[toolkit-install-dir].hostPath.path",
            ],
        ]
        .concat(),
    ));
    rows
}

fn device_plugin() -> Vec<Row> {
    let mut rows = container(
        "devicePlugin",
        &[
            Of {
                set: PLUGIN,
                main: Some("nvidia-device-plugin"),
                image: &["nvidia-device-plugin", "config-manager-init", "config-manager"],
                resources: &["nvidia-device-plugin", "config-manager"],
            },
            Of {
                set: MPS,
                main: None,
                image: &[
                    "mps-control-daemon-ctr",
                    "mps-control-daemon-mounts",
                    "config-manager-init",
                    "config-manager",
                ],
                resources: &["mps-control-daemon-ctr", "config-manager"],
            },
        ],
    );
    rows.extend(container(
        "gfd",
        &[Of {
            set: GFD,
            main: Some("gpu-feature-discovery"),
            image: &["gpu-feature-discovery", "config-manager-init", "config-manager"],
            resources: &["gpu-feature-discovery", "config-manager"],
        }],
    ));
    // With configurations there is one more program of the image.
    for row in &mut rows {
        row.with = json!({"devicePlugin": {"config": {"name": "one"}}});
    }
    let configured = |set: &str| {
        [
            format!("DaemonSet {set} spec.template.spec.initContainers[config-manager-init].*"),
            format!("DaemonSet {set} spec.template.spec.containers[config-manager].*"),
            format!("DaemonSet {set} *.env[CONFIG_FILE].*"),
            format!("DaemonSet {set} *.volumeMounts*"),
            format!("DaemonSet {set} spec.template.spec.volumes[*"),
        ]
    };
    let mut places: Vec<String> = [PLUGIN, MPS, GFD].into_iter().flat_map(configured).collect();
    places.extend([PLUGIN, GFD].map(|set| format!("DaemonSet {set} spec.template.spec.shareProcessNamespace")));
    rows.push(Row { field: "devicePlugin.config.name".to_owned(), effect: Effect::Changes(places), with: json!({}) });
    rows.push(with(
        json!({"devicePlugin": {"config": {"name": "one"}}}),
        changes("devicePlugin.config.default", &["DaemonSet * *.env[DEFAULT_CONFIG].value"]),
    ));
    rows.push(changes(
        "devicePlugin.enabled",
        &[
            "DaemonSet nvidia-device-plugin-daemonset *",
            "DaemonSet nvidia-device-plugin-mps-control-daemon *",
            "ConfigMap nvidia-device-plugin-entrypoint *",
        ],
    ));
    rows.push(changes(
        "devicePlugin.mps.root",
        &[
            "DaemonSet nvidia-device-plugin-* spec.template.spec.volumes[mps-*].hostPath.path",
            "DaemonSet nvidia-device-plugin-daemonset *.env[MPS_ROOT].value",
        ],
    ));
    rows.push(changes("gfd.enabled", &["DaemonSet gpu-feature-discovery *"]));
    rows
}

fn metrics() -> Vec<Row> {
    let one = |set, name: &'static [&'static str]| [Of { set, main: Some(name[0]), image: name, resources: name }];
    let mut rows = container("dcgm", &one("nvidia-dcgm", &["nvidia-dcgm-ctr"]));
    rows.extend(container("dcgmExporter", &one(EXPORTER, &["nvidia-dcgm-exporter"])));
    let exporter = |field: &str, places: &[&str]| {
        let places = places.iter().map(|place| format!("DaemonSet {EXPORTER} spec.template.{place}")).collect();
        Row { field: format!("dcgmExporter.{field}"), effect: Effect::Changes(places), with: json!({}) }
    };
    let container = "spec.containers[nvidia-dcgm-exporter]";
    rows.extend([
        changes(
            "dcgm.enabled",
            &[
                "DaemonSet nvidia-dcgm *",
                "Service nvidia-dcgm *",
                "DaemonSet nvidia-dcgm-exporter *[DCGM_REMOTE_HOSTENGINE_INFO].*",
            ],
        ),
        changes(
            "dcgmExporter.enabled",
            &[
                "DaemonSet nvidia-dcgm-exporter *",
                "Service nvidia-dcgm-exporter *",
                "ServiceMonitor nvidia-dcgm-exporter *",
            ],
        ),
        exporter("annotations", &["metadata.annotations.a"]),
        exporter("hostPID", &["spec.hostPID"]),
        exporter(
            "config.name",
            &[&format!("{container}.env*"), &format!("{container}.volumeMounts*"), "spec.volumes[metrics-config].*"],
        ),
        exporter(
            "hpcJobMapping.enabled",
            &[&format!("{container}.env*"), &format!("{container}.volumeMounts*"), "spec.volumes[hpc-job-mapping].*"],
        ),
        with(
            json!({"dcgmExporter": {"hpcJobMapping": {"enabled": true}}}),
            exporter(
                "hpcJobMapping.directory",
                &[
                    &format!("{container}.env*"),
                    &format!("{container}.volumeMounts*"),
                    "spec.volumes[hpc-job-mapping].*",
                ],
            ),
        ),
        exporter("enablePodLabels", &[&format!("{container}.env*"), "spec.automountServiceAccountToken"]),
        exporter("enablePodUID", &[&format!("{container}.env*"), "spec.automountServiceAccountToken"]),
        with(
            json!({"dcgmExporter": {"enablePodLabels": true}}),
            exporter("podLabelAllowlistRegex", &[&format!("{container}.env*")]),
        ),
        changes("dcgmExporter.service.type", &["Service nvidia-dcgm-exporter spec.type"]),
        changes(
            "dcgmExporter.service.internalTrafficPolicy",
            &["Service nvidia-dcgm-exporter spec.internalTrafficPolicy"],
        ),
        changes("dcgmExporter.serviceMonitor.enabled", &["ServiceMonitor nvidia-dcgm-exporter *"]),
        changes(
            "dcgmExporter.serviceMonitor.additionalLabels",
            &["ServiceMonitor nvidia-dcgm-exporter metadata.labels.a"],
        ),
        changes("dcgmExporter.serviceMonitor.honorLabels", &["ServiceMonitor * spec.endpoints[0].honorLabels"]),
        changes("dcgmExporter.serviceMonitor.interval", &["ServiceMonitor * spec.endpoints[0].interval"]),
        changes("dcgmExporter.serviceMonitor.scrapeTimeout", &["ServiceMonitor * spec.endpoints[0].scrapeTimeout"]),
        changes("dcgmExporter.serviceMonitor.relabelings", &["ServiceMonitor * spec.endpoints[0].relabelings*"]),
    ]);
    rows.extend(unused(&["dcgm.hostPort"], "deprecated: the engine is reached through its Service"));
    rows
}

fn mig() -> Vec<Row> {
    let mut rows = container(
        "migManager",
        &[Of {
            set: MIG,
            main: Some("nvidia-mig-manager"),
            image: &["nvidia-mig-manager"],
            resources: &["nvidia-mig-manager"],
        }],
    );
    rows.extend([
        changes("mig.strategy", &["DaemonSet * *.env*"]),
        changes(
            "migManager.enabled",
            &["DaemonSet nvidia-mig-manager *", "ConfigMap nvidia-mig-manager-entrypoint *", "ConfigMap default-*"],
        ),
        changes(
            "migManager.config.name",
            &[
                "ConfigMap default-mig-parted-config *",
                "DaemonSet nvidia-mig-manager *.env*",
                "DaemonSet nvidia-mig-manager *.volumes[mig-parted-config].configMap.*",
            ],
        ),
        changes(
            "migManager.gpuClientsConfig.name",
            &["ConfigMap default-gpu-clients *", "DaemonSet nvidia-mig-manager *.volumes[gpu-clients].configMap.name"],
        ),
    ]);
    rows.push(elsewhere("migManager.config.default", "nodes' label nvidia.com/mig.config: node/gates.rs"));
    rows
}

fn validator() -> Vec<Row> {
    let own = "its checks are our own program: condition ImagesNotUsed";
    let mut rows = vec![
        changes("validator.env", &["DaemonSet nvidia-operator-validator *.containers[nvidia-operator-validator].env*"]),
        changes("validator.imagePullSecrets", &["DaemonSet * spec.template.spec.imagePullSecrets*"]),
        changes("validator.driver.env", &["DaemonSet * *.initContainers[driver-validation].env*"]),
    ];
    for check in ["toolkit", "cuda", "plugin"] {
        let place = format!("DaemonSet {VALIDATOR} *.initContainers[{check}-validation].env*");
        rows.push(changes(&format!("validator.{check}.env"), &[&place]));
    }
    rows.extend(unused_below(
        "validator",
        &["args", "hostNetwork", "image", "imagePullPolicy", "repository", "resources", "version"],
        own,
    ));
    rows.extend(unused_below(
        "validator",
        &["vfioPCI.env", "vgpuDevices.env", "vgpuManager.env"],
        "the agent does it on VM nodes",
    ));
    rows
}
