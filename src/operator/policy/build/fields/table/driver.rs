//! The driver and what is beside it.

use serde_json::json;

use super::{DRIVER, Effect, Of, PLUGIN, Row, below, changes, container, digest, elsewhere, unused_below, with};

pub(super) fn rows() -> Vec<Row> {
    [driver(), sidecars(), without_effect()].into_iter().flatten().collect()
}

fn driver() -> Vec<Row> {
    let driver = |field: &str, places: &[&str]| {
        let of = |place: &&str| format!("DaemonSet {DRIVER} spec.template.spec.{place}");
        let mut places: Vec<String> = places.iter().map(of).collect();
        places.push(digest());
        Row { field: format!("driver.{field}"), effect: Effect::Changes(places), with: json!({}) }
    };
    let removed = ["DaemonSet nvidia-driver-daemonset *", "ConfigMap nvidia-driver-startup-probe *"];
    let main = "containers[nvidia-driver-ctr]";
    let files = |field: &str, path: &str| driver(field, &[&format!("{main}.volumeMounts[{path}*"), "volumes[*"]);
    let mut rows = container(
        "driver",
        &[Of {
            set: DRIVER,
            main: Some("nvidia-driver-ctr"),
            image: &["nvidia-driver-ctr", "nvidia-peermem-ctr"],
            resources: &["nvidia-driver-ctr", "nvidia-peermem-ctr", "nvidia-fs-ctr", "nvidia-gdrcopy-ctr"],
        }],
    );
    rows.extend([
        changes("driver.enabled", &removed),
        changes(
            "driver.useNvidiaDriverCRD",
            &["DaemonSet nvidia-driver-daemonset *", "DaemonSet nvidia-vgpu-manager-daemonset *"],
        ),
        with(
            json!({"driver": {"version": "595"}}),
            changes(
                "driver.usePrecompiled",
                &[
                    "DaemonSet nvidia-driver-daemonset *",
                    "DaemonSet nvidia-driver-daemonset-6.8.0-31-generic-ubuntu24.04 *",
                ],
            ),
        ),
        driver("kernelModuleType", &[&format!("{main}.env*")]),
        driver("useOpenKernelModules", &[&format!("{main}.env*")]),
        with(
            json!({"driver": {"rdma": {"useHostMofed": true}}}),
            driver(
                "rdma.enabled",
                &[
                    "containers[nvidia-peermem-ctr].*",
                    &format!("{main}.env*"),
                    "volumes[mlnx-ofed-usr-src].hostPath.path",
                ],
            ),
        ),
        driver("rdma.useHostMofed", &["volumes[mlnx-ofed-usr-src].hostPath.path", &format!("{main}.env*")]),
        driver("startupProbe", &[&format!("{main}.startupProbe.periodSeconds")]),
        driver("livenessProbe", &[&format!("{main}.livenessProbe.*")]),
        driver("readinessProbe", &[&format!("{main}.readinessProbe.*")]),
        driver("secretEnv", &[&format!("{main}.envFrom*")]),
        files("licensingConfig.secretName", "/drivers/"),
        files("licensingConfig.configMapName", "/drivers/"),
        with(
            json!({"driver": {"licensingConfig": {"secretName": "one"}}}),
            files("licensingConfig.nlsEnabled", "/drivers/ClientConfigToken/"),
        ),
        files("virtualTopology.config", "/etc/nvidia-topologyd/"),
        files("kernelModuleConfig.name", "/drivers/"),
        files("repoConfig.configMapName", "/etc/apt/sources.list.d/"),
        files("certConfig.name", "/usr/local/share/ca-certificates/"),
    ]);
    rows
}

fn sidecars() -> Vec<Row> {
    let mut rows = Vec::new();
    for (section, name, variables) in
        [("gds", "nvidia-fs-ctr", "GDS_ENABLED"), ("gdrcopy", "nvidia-gdrcopy-ctr", "GDRCOPY_ENABLED")]
    {
        let sidecar = container(section, &[Of { set: DRIVER, main: Some(name), image: &[], resources: &[] }]);
        let image = format!("DaemonSet {DRIVER} spec.template.spec.containers[{name}].image");
        rows.extend(sidecar.into_iter().filter_map(|row| {
            let field = row.field.rsplit('.').next().expect("a field");
            let place = match field {
                "image" | "repository" | "version" => image.clone(),
                "imagePullPolicy" => format!("{image}PullPolicy"),
                "imagePullSecrets" => format!("DaemonSet {DRIVER} spec.template.spec.imagePullSecrets*"),
                "args" => format!("DaemonSet {DRIVER} *containers[{name}].args*"),
                "env" => format!("DaemonSet {DRIVER} *containers[{name}].env*"),
                _ => return None,
            };
            Some(Row { effect: Effect::Changes(vec![place]), ..row })
        }));
        rows.push(with(
            json!({section: {"imagePullSecrets": ["one"]}}),
            changes(
                &format!("{section}.enabled"),
                &[
                    &format!("DaemonSet {DRIVER} spec.template.spec.containers[{name}].*"),
                    &format!("DaemonSet {DRIVER} *containers[nvidia-driver-ctr].env[{variables}].*"),
                    &digest(),
                    &format!("DaemonSet {PLUGIN} *containers[nvidia-device-plugin].env*"),
                    &format!("DaemonSet {DRIVER} spec.template.spec.imagePullSecrets*"),
                ],
            ),
        ));
    }
    rows
}

fn without_effect() -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(unused_below(
        "driver.manager",
        &["env", "image", "imagePullPolicy", "imagePullSecrets", "repository", "version"],
        "prepare-driver is our own program: condition ImagesNotUsed",
    ));
    let fields = below(
        "driver.upgradePolicy",
        &[
            "autoUpgrade",
            "maxParallelUpgrades",
            "maxUnavailable",
            "drain.deleteEmptyDir",
            "drain.enable",
            "drain.force",
            "drain.podSelector",
            "drain.timeoutSeconds",
            "podDeletion.deleteEmptyDir",
            "podDeletion.force",
            "podDeletion.timeoutSeconds",
            "waitForCompletion.podSelector",
            "waitForCompletion.timeoutSeconds",
        ],
    );
    rows.extend(
        fields.iter().map(|field| elsewhere(field, "how nodes get a new driver: operator::transition::upgrade")),
    );
    rows
}
