//! A DaemonSet as facts: one entry a field, addressed by names instead of places, so that two can be compared.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, EnvVar, PodSpec, Probe, Volume, VolumeMount},
};
use serde_json::{Value, json};

/// Path (as in `containers[nvidia-driver-ctr].env[NODE_NAME]`) to value.
pub(super) type Fields = BTreeMap<String, String>;

/// Text that does not fit a line is a script: what it says is compared by what it does, not here.
const LINE: usize = 60;

/// In the shape of the recordings, with the API server's defaults filled in.
pub(super) fn condense(set: &DaemonSet) -> Value {
    let spec = set.spec.clone().expect("a spec");
    let meta = spec.template.metadata.unwrap_or_default();
    let pod = spec.template.spec.unwrap_or_default();
    let strategy = spec.update_strategy.map(|strategy| {
        let rolling = strategy.rolling_update.map(|rolling| json!({"maxSurge": rolling.max_surge.map_or(json!(0), |s| json!(s)), "maxUnavailable": rolling.max_unavailable}));
        json!({"type": strategy.type_, "rollingUpdate": rolling})
    });
    let containers = |containers: &[Container]| containers.iter().map(container).collect::<Vec<_>>();
    json!({
        "labels": set.metadata.labels,
        "selector": spec.selector.match_labels,
        "podLabels": meta.labels,
        "podAnnotations": meta.annotations,
        "updateStrategy": strategy,
        "nodeSelector": pod.node_selector,
        "tolerations": pod.tolerations,
        "priorityClassName": pod.priority_class_name,
        "serviceAccountName": pod.service_account_name,
        "runtimeClassName": pod.runtime_class_name,
        "terminationGracePeriodSeconds": pod.termination_grace_period_seconds.unwrap_or(30),
        "affinity": pod.affinity,
        "hostPID": pod.host_pid,
        "hostIPC": pod.host_ipc,
        "hostNetwork": pod.host_network,
        "shareProcessNamespace": pod.share_process_namespace,
        "initContainers": containers(pod.init_containers.as_deref().unwrap_or_default()),
        "containers": containers(&pod.containers),
        "volumes": volumes(&pod),
    })
}

fn container(container: &Container) -> Value {
    let texts =
        |texts: &Option<Vec<String>>| texts.as_ref().map(|texts| texts.iter().map(|t| line(t)).collect::<Vec<_>>());
    let stop = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()).and_then(|stop| stop.exec.as_ref());
    json!({
        "name": container.name,
        "image": container.image,
        "command": texts(&container.command),
        "args": texts(&container.args),
        "env": container.env.iter().flatten().map(env).collect::<Vec<_>>(),
        "mounts": container.volume_mounts.iter().flatten().map(mount).collect::<Vec<_>>(),
        "ports": container.ports.iter().flatten().map(|p| format!("{}:{}", p.name.clone().unwrap_or_default(), p.container_port)).collect::<Vec<_>>(),
        "securityContext": container.security_context,
        "startupProbe": container.startup_probe.as_ref().map(probe),
        "livenessProbe": container.liveness_probe.as_ref().map(probe),
        "readinessProbe": container.readiness_probe.as_ref().map(probe),
        "lifecycle": stop.map(|stop| json!({"preStop": {"exec": texts(&stop.command)}})),
    })
}

fn line(text: &str) -> String {
    if text.len() > LINE || text.contains('\n') { "<script>".to_owned() } else { text.to_owned() }
}

fn env(env: &EnvVar) -> String {
    let field = env.value_from.as_ref().and_then(|from| from.field_ref.as_ref());
    match (field, env.value.as_deref().unwrap_or_default()) {
        (Some(field), _) => format!("{}<-field:{}", env.name, field.field_path),
        (None, "") => env.name.clone(),
        (None, value) => format!("{}={value}", env.name),
    }
}

fn mount(mount: &VolumeMount) -> String {
    let sub_path = mount.sub_path.as_ref().map_or(String::new(), |path| format!(":{path}"));
    let read_only = if mount.read_only == Some(true) { " ro" } else { "" };
    let propagation = mount.mount_propagation.as_ref().map_or(String::new(), |p| format!(" {p}"));
    format!("{}->{}{sub_path}{read_only}{propagation}", mount.name, mount.mount_path)
}

fn volumes(pod: &PodSpec) -> Vec<String> {
    pod.volumes.iter().flatten().map(volume).collect()
}

fn volume(volume: &Volume) -> String {
    let source = if let Some(path) = &volume.host_path {
        let kind = path.type_.as_ref().map_or(String::new(), |kind| format!(" {kind}"));
        format!("hostPath:{}{kind}", path.path)
    } else if let Some(map) = &volume.config_map {
        let items: Vec<String> =
            map.items.iter().flatten().map(|item| format!("('{}', '{}')", item.key, item.path)).collect();
        let items = if items.is_empty() { String::new() } else { format!(" items=[{}]", items.join(", ")) };
        format!("configMap:{} mode={}{items}", map.name, map.default_mode.unwrap_or(0o644))
    } else if volume.empty_dir.is_some() {
        "emptyDir".to_owned()
    } else {
        format!("{volume:?}")
    };
    format!("{}={source}", volume.name)
}

fn probe(probe: &Probe) -> Value {
    let http = probe.http_get.as_ref().map(|get| json!({"path": get.path, "port": get.port, "scheme": get.scheme.clone().unwrap_or_else(|| "HTTP".to_owned())}));
    json!({
        "exec": probe.exec.as_ref().and_then(|exec| exec.command.clone()),
        "httpGet": http,
        "tcpSocket": probe.tcp_socket.as_ref().map(|socket| json!({"port": socket.port})),
        "initialDelaySeconds": probe.initial_delay_seconds,
        "periodSeconds": probe.period_seconds.unwrap_or(10),
        "timeoutSeconds": probe.timeout_seconds.unwrap_or(1),
        "successThreshold": probe.success_threshold.unwrap_or(1),
        "failureThreshold": probe.failure_threshold.unwrap_or(3),
    })
}

/// Flattens one operand of a recording, or of ours.
pub(super) fn fields(operand: &Value) -> Fields {
    let mut fields = Fields::new();
    put(&mut fields, "", operand);
    fields
}

fn put(into: &mut Fields, path: &str, value: &Value) {
    match value {
        Value::Null => {}
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                put(into, &path, field);
            }
        }
        Value::Array(entries) if entries.iter().all(|entry| entry.get("name").is_some()) => {
            let names: Vec<&str> = entries.iter().filter_map(|entry| entry["name"].as_str()).collect();
            if !names.is_empty() {
                into.insert(format!("{path}.order"), names.join(" "));
            }
            for entry in entries {
                let name = entry["name"].as_str().expect("a name");
                put(into, &format!("{path}[{name}]"), entry);
            }
        }
        // Neither the order of variables nor that of mounts and volumes says anything.
        Value::Array(entries) if ["env", "mounts", "volumes"].iter().any(|list| path.ends_with(list)) => {
            for entry in entries.iter().filter_map(Value::as_str) {
                let at = entry.find(['=', '<', ' ']).unwrap_or(entry.len());
                let at = entry
                    .find("->")
                    .map_or(at, |arrow| entry[arrow..].find([' ', ':']).map_or(entry.len(), |end| arrow + end));
                let (name, rest) = entry.split_at(at);
                into.insert(format!("{path}[{name}]"), format!("{rest};"));
            }
        }
        Value::Array(_) | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            into.insert(path.to_owned(), value.to_string());
        }
    }
}
