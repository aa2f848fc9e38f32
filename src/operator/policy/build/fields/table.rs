//! What each field changes.

mod driver;
mod rest;
mod stack;

use serde_json::{Value, json};

pub(super) struct Row {
    /// Path below `spec.`.
    pub field: String,
    pub effect: Effect,
    /// What the field needs beside it to have its effect: a merge patch of the spec.
    pub with: Value,
}

pub(super) enum Effect {
    /// Patterns of places in the output, `*` for any text.
    Changes(Vec<String>),
    /// No operand changes; what does has tests of its own.
    #[expect(dead_code, reason = "for the reader")]
    Elsewhere(&'static str),
    /// Accepted, and why nothing follows.
    #[expect(dead_code, reason = "for the reader")]
    Unused(&'static str),
}

fn changes(field: &str, places: &[&str]) -> Row {
    let places = places.iter().map(|place| (*place).to_owned()).collect();
    Row { field: field.to_owned(), effect: Effect::Changes(places), with: json!({}) }
}

fn with(with: Value, row: Row) -> Row {
    Row { with, ..row }
}

fn elsewhere(field: &str, reason: &'static str) -> Row {
    Row { field: field.to_owned(), effect: Effect::Elsewhere(reason), with: json!({}) }
}

fn unused(fields: &[&str], reason: &'static str) -> Vec<Row> {
    let row = |field: &&str| Row { field: (*field).to_owned(), effect: Effect::Unused(reason), with: json!({}) };
    fields.iter().map(row).collect()
}

fn below(section: &str, fields: &[&str]) -> Vec<String> {
    fields.iter().map(|field| format!("{section}.{field}")).collect()
}

fn unused_below(section: &str, fields: &[&str], reason: &'static str) -> Vec<Row> {
    let fields = below(section, fields);
    unused(&fields.iter().map(String::as_str).collect::<Vec<_>>(), reason)
}

const IMAGE: [&str; 5] = ["image", "imagePullPolicy", "imagePullSecrets", "repository", "version"];
const CONTAINER: [&str; 9] = [
    "args",
    "env",
    "hostNetwork",
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "repository",
    "resources",
    "version",
];

/// A DaemonSet and its containers that a section is about.
struct Of {
    set: &'static str,
    /// The one that takes arguments and variables; none for a set that shares another's image.
    main: Option<&'static str>,
    /// All that run the section's image, init containers too.
    image: &'static [&'static str],
    /// All that have the section's resources.
    resources: &'static [&'static str],
}

const DRIVER: &str = "nvidia-driver-daemonset";
const PLUGIN: &str = "nvidia-device-plugin-daemonset";

/// The fields that all operands have.
fn container(section: &str, sets: &[Of]) -> Vec<Row> {
    let pod = |set: &str, place: &str| format!("DaemonSet {set} spec.template.spec.{place}");
    let per_container = |of: &Of, names: &[&str], place: &str| -> Vec<String> {
        names.iter().map(|name| pod(of.set, &format!("*ontainers[{name}].{place}"))).collect()
    };
    let all = |places: &dyn Fn(&Of) -> Vec<String>| sets.iter().flat_map(places).collect::<Vec<_>>();
    let image = || all(&|of| per_container(of, of.image, "image"));
    let main = |place: &str| all(&|of| of.main.map(|main| per_container(of, &[main], place)).unwrap_or_default());
    let mut rows = vec![
        ("args", main("args*")),
        ("env", main("env[A].*")),
        ("hostNetwork", all(&|of| vec![pod(of.set, "hostNetwork"), pod(of.set, "dnsPolicy")])),
        ("image", image()),
        ("repository", image()),
        ("version", image()),
        ("imagePullPolicy", all(&|of| per_container(of, of.image, "imagePullPolicy"))),
        ("imagePullSecrets", all(&|of| vec![pod(of.set, "imagePullSecrets*")])),
        ("resources", all(&|of| per_container(of, of.resources, "resources.*"))),
    ];
    // A change of the driver's container is a change of its digest.
    if sets.iter().any(|of| of.set == DRIVER && of.main.is_some()) {
        for (field, places) in &mut rows {
            if ["args", "env", "image", "repository", "version", "imagePullPolicy", "resources"].contains(field) {
                places.push(digest());
            }
        }
    }
    rows.into_iter()
        .map(|(field, places)| Row {
            field: format!("{section}.{field}"),
            effect: Effect::Changes(places),
            with: json!({}),
        })
        .collect()
}

fn digest() -> String {
    format!("DaemonSet {DRIVER} *.env[DRIVER_CONFIG_DIGEST].value")
}

pub(super) fn rows() -> Vec<Row> {
    [common(), driver::rows(), stack::rows(), rest::rows()].into_iter().flatten().collect()
}

fn common() -> Vec<Row> {
    vec![
        changes("daemonsets.labels", &["DaemonSet * spec.template.metadata.labels.a"]),
        changes("daemonsets.annotations", &["DaemonSet * spec.template.metadata.annotations.a"]),
        changes("daemonsets.tolerations", &["DaemonSet * spec.template.spec.tolerations*"]),
        changes("daemonsets.priorityClassName", &["DaemonSet * spec.template.spec.priorityClassName"]),
        changes("daemonsets.podSecurityContext", &["DaemonSet * spec.template.spec.securityContext.runAsUser"]),
        changes("daemonsets.updateStrategy", &["DaemonSet * spec.updateStrategy.*"]),
        changes(
            "daemonsets.rollingUpdate.maxUnavailable",
            &["DaemonSet * spec.updateStrategy.rollingUpdate.maxUnavailable"],
        ),
        changes(
            "hostPaths.rootFS",
            &[
                "DaemonSet * spec.template.spec.volumes[host-root].hostPath.path",
                "DaemonSet * spec.template.spec.initContainers[driver-validation].args[2]",
            ],
        ),
        changes(
            "hostPaths.driverInstallDir",
            &[
                "DaemonSet * spec.template.spec.volumes[driver-install-dir].hostPath.path",
                "DaemonSet * spec.template.spec.volumes[nv-firmware].hostPath.path",
                "DaemonSet * spec.template.spec.initContainers[driver-validation].args[3]",
                "DaemonSet gpuvirt-agent spec.template.spec.containers[agent].args[3]",
            ],
        ),
        changes(
            "hostPaths.kubeletRootDir",
            &[
                "DaemonSet gpuvirt-agent spec.template.spec.containers[agent].args*",
                "DaemonSet nvidia-device-plugin-daemonset spec.template.spec.volumes[device-plugin].hostPath.path",
                "DaemonSet nvidia-dcgm-exporter spec.template.spec.volumes[pod-gpu-resources].hostPath.path",
            ],
        ),
        changes(
            "operator.runtimeClass",
            &[
                "RuntimeClass *",
                "DaemonSet * spec.template.spec.runtimeClassName",
                "DaemonSet nvidia-container-toolkit-daemonset *.env[CONTAINERD_RUNTIME_CLASS].value",
            ],
        ),
        changes(
            "cdi.enabled",
            &[
                "RuntimeClass nvidia-*",
                "DaemonSet nvidia-container-toolkit-daemonset *containers[nvidia-container-toolkit-ctr].env*",
                "DaemonSet nvidia-device-plugin-daemonset *containers[nvidia-device-plugin].env*",
                "DaemonSet nvidia-mig-manager *containers[nvidia-mig-manager].env*",
            ],
        ),
        changes(
            "cdi.nriPluginEnabled",
            &[
                "RuntimeClass *",
                "DaemonSet * spec.template.spec.runtimeClassName",
                "DaemonSet * spec.template.metadata.annotations.nvidia.cdi.k8s.io/container.*",
                "DaemonSet nvidia-container-toolkit-daemonset *containers[nvidia-container-toolkit-ctr].env*",
                "DaemonSet nvidia-container-toolkit-daemonset *volumeMounts[/runtime/nri-dir/].*",
                "DaemonSet nvidia-container-toolkit-daemonset *volumes[nri-socket].*",
            ],
        ),
    ]
}
