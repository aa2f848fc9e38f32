//! The NVIDIA driver of container nodes: the user's driver image, mounted and probed as the peer does it.

mod sidecars;
pub(super) mod volumes;

use crds::{
    labels,
    v1::{ContainerProbe, KernelModuleType},
    v1alpha1::DriverType,
};
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{
            Affinity, ConfigMap, Container, EnvFromSource, ExecAction, Lifecycle, LifecycleHandler, PodAffinityTerm,
            PodAntiAffinity, PodSpec, Probe, SecretEnvSource,
        },
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta},
};

use super::{
    Installation, VGPU_HOST_DRIVERS,
    openshift::{adapt, own_app},
    pod::{
        Operand, daemon_set as operand, env, env_from_field, mount, override_env, own_labels, privileged,
        privileged_s0, pull_secrets,
    },
    stack::VALIDATIONS,
};
use crate::operator::{
    host::label_value,
    policy::validate::{DRIVER, Driver, PRIORITY_CLASS, Placement, Pool, Rdma, Rollout, Settings, fnv1a, gpu_nodes},
};

pub(super) const COMPONENT: &str = "nvidia-driver";
/// Of a host driver that an `NVIDIADriver` asks for.
pub(super) const HOST_MANAGER: &str = "nvidia-vgpu-host-manager";
pub(super) const PROBE_SCRIPT: &str = "nvidia-driver-startup-probe";

/// By what it is made of and how it is set.
const DIGEST: &str = "DRIVER_CONFIG_DIGEST";

/// The driver image has a shell and `nvidia-smi`, and only it knows where its files are: so the probe is a script in it.
const STARTUP_PROBE: &str = r#"#!/bin/sh
set -e
if [ ! -f /sys/module/nvidia/refcnt ]; then
  echo "the nvidia module is not loaded yet"
  exit 1
fi
status=/run/nvidia/validations/.driver-daemons-status
if [ -f "$status" ] && [ "$(cat "$status")" != Ready ]; then
  echo "the driver's daemons are not ready: $(cat "$status")"
  exit 1
fi
nvidia-smi
mkdir -p /run/nvidia/validations
{
  echo "GDRCOPY_ENABLED: ${GDRCOPY_ENABLED:-false}"
  echo "GDS_ENABLED: ${GDS_ENABLED:-false}"
  echo "GPU_DIRECT_RDMA_ENABLED: ${GPU_DIRECT_RDMA_ENABLED:-false}"
} >/run/nvidia/validations/.driver-ctr-ready
"#;

pub(super) fn startup_probe_script(settings: &Settings, installation: &Installation) -> ConfigMap {
    ConfigMap {
        metadata: ObjectMeta {
            name: Some(PROBE_SCRIPT.to_owned()),
            namespace: Some(installation.namespace.clone()),
            labels: Some(own_labels(DRIVER, COMPONENT, settings)),
            ..ObjectMeta::default()
        },
        data: Some([("startup-probe.sh".to_owned(), STARTUP_PROBE.to_owned())].into()),
        ..ConfigMap::default()
    }
}

pub(super) fn daemon_set(settings: &Settings, driver: &Driver, installation: &Installation) -> DaemonSet {
    let pool = &driver.pool;
    let precompiled = if pool.kernel.is_some() { "true" } else { "false" };
    let placed = driver.placement.as_ref().map(|placement| placed(settings, placement));
    let settings = placed.as_ref().unwrap_or(settings);
    let (gate, component) = match kind(driver) {
        DriverType::Gpu | DriverType::Vgpu => ("driver", COMPONENT),
        DriverType::VgpuHostManager => ("vgpu-manager", HOST_MANAGER),
    };
    let mut set = operand(
        Operand {
            name: &pool.set,
            component,
            node_selector: [(format!("{}{gate}", labels::DEPLOY_PREFIX), "true".to_owned())].into(),
            // A new driver unloads the old one: that is a transition of the node, never a rollout.
            rollout: Rollout::OnDelete,
            labels: &[("nvidia.com/precompiled", precompiled)],
            annotations: [("kubectl.kubernetes.io/default-container".to_owned(), "nvidia-driver-ctr".to_owned())]
                .into(),
            pod: pod(settings, driver, installation),
        },
        settings,
        installation,
    );
    match &driver.placement {
        None => select(&mut set, DRIVER, pool),
        Some(placement) => {
            select(&mut set, &pool.set, pool);
            own(&mut set, pool, placement);
        }
    }
    let resources = &driver.container.resources;
    adapt(&mut set, "nvidia-driver-ctr", pool, settings.openshift.as_ref(), resources);
    set
}

fn kind(driver: &Driver) -> DriverType {
    driver.placement.as_ref().map_or(DriverType::Gpu, |placement| placement.kind)
}

/// An `NVIDIADriver` says for itself what a policy says for all DaemonSets.
fn placed(settings: &Settings, placement: &Placement) -> Settings {
    let mut settings = settings.clone();
    let common = &mut settings.common;
    common.labels.clone_from(&placement.labels);
    common.annotations.clone_from(&placement.annotations);
    common.tolerations = [vec![gpu_nodes()], placement.tolerations.clone()].concat();
    common.priority_class = placement.priority_class.clone().unwrap_or_else(|| PRIORITY_CLASS.to_owned());
    common.pod_security_context.clone_from(&placement.pod_security_context);
    settings
}

/// Keeps a set to the nodes of its `NVIDIADriver`.
fn own(set: &mut DaemonSet, pool: &Pool, placement: &Placement) {
    let system = [("nvidia.com/node.os-version".to_owned(), pool.os.clone())];
    let of_set = set.metadata.labels.get_or_insert_default();
    of_set.extend(system.clone());
    of_set.insert(labels::NVIDIA_DRIVER.to_owned(), label_value(&placement.owner));
    let spec = set.spec.as_mut().expect("an operand should have a spec");
    spec.template.metadata.get_or_insert_default().labels.get_or_insert_default().extend(system);
    let pod = spec.template.spec.as_mut().expect("an operand should have a pod");
    pod.node_selector.get_or_insert_default().insert(labels::DRIVER_OWNER.to_owned(), placement.owner.clone());
}

/// Keeps a set to its pool. The label selects also where all nodes run one system: with the first node of another one it
/// would have to be added, and pods of a set that changes are out of date.
pub(super) fn select(set: &mut DaemonSet, base: &str, pool: &Pool) {
    let mut marks = vec![(labels::OS, pool.os.clone())];
    marks.extend(pool.kernel_label().map(|kernel| (labels::KERNEL, kernel)));
    let own = |marks: &[(&str, String)]| marks.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect::<Vec<_>>();
    set.metadata.labels.get_or_insert_default().extend(own(&marks));
    let spec = set.spec.as_mut().expect("an operand should have a spec");
    let pod = spec.template.spec.as_mut().expect("an operand should have a pod");
    pod.node_selector.get_or_insert_default().extend(own(&marks));
    if pool.set == base || own_app(pool) {
        return;
    }
    // All pods of a driver are found by one value of `app`; a set needs more to tell its own.
    let by = own(&[(labels::APP, base.to_owned()), (labels::DRIVER_POOL, label_value(&pool.set))]);
    for labels in [
        &mut set.metadata.labels,
        &mut spec.selector.match_labels,
        &mut spec.template.metadata.get_or_insert_default().labels,
    ] {
        labels.get_or_insert_default().extend(by.clone());
    }
}

fn pod(settings: &Settings, driver: &Driver, installation: &Installation) -> PodSpec {
    let images = [
        Some(&driver.container.image),
        driver.gds.as_ref().map(|s| &s.image),
        driver.gdrcopy.as_ref().map(|s| &s.image),
    ];
    let main = main(driver);
    let prepare = prepare(&main, installation);
    let mut containers = vec![main];
    containers.extend(sidecars::sidecars(driver));
    PodSpec {
        service_account_name: Some("nvidia-driver".to_owned()),
        automount_service_account_token: Some(false),
        affinity: Some(Affinity {
            node_affinity: driver.placement.as_ref().and_then(|placement| placement.node_affinity.clone()),
            ..alone(driver)
        }),
        termination_grace_period_seconds: (kind(driver) == DriverType::VgpuHostManager).then_some(120),
        host_pid: Some(true),
        host_network: driver.container.host_network.then_some(true),
        dns_policy: driver.container.host_network.then(|| "ClusterFirstWithHostNet".to_owned()),
        image_pull_secrets: pull_secrets(images.into_iter().flatten()),
        init_containers: Some(vec![prepare]),
        containers,
        volumes: Some(volumes::volumes(settings, driver)),
        ..PodSpec::default()
    }
}

/// Two driver pods on one node would unload each other's modules.
fn alone(driver: &Driver) -> Affinity {
    let mut components = vec![COMPONENT.to_owned()];
    if driver.placement.is_some() {
        components.extend(VGPU_HOST_DRIVERS.map(str::to_owned));
    }
    let same = LabelSelectorRequirement {
        key: labels::APP_COMPONENT.to_owned(),
        operator: "In".to_owned(),
        values: Some(components),
    };
    let term = PodAffinityTerm {
        label_selector: Some(LabelSelector { match_expressions: Some(vec![same]), match_labels: None }),
        topology_key: "kubernetes.io/hostname".to_owned(),
        ..PodAffinityTerm::default()
    };
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            required_during_scheduling_ignored_during_execution: Some(vec![term]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

/// Makes room for the driver: what an earlier one has left is unloaded, and GPUs of VMs are never touched.
pub(super) fn prepare(main: &Container, installation: &Installation) -> Container {
    let mut variables = vec![env("LOG_LEVEL", installation.log_level.clone())];
    // With the same digest the loaded driver stays, under whoever uses it.
    variables.extend(main.env.iter().flatten().filter(|variable| variable.name == DIGEST).cloned());
    Container {
        name: "prepare-driver".to_owned(),
        image: Some(installation.image.clone()),
        image_pull_policy: Some(installation.pull_policy.clone()),
        args: Some(vec!["prepare-driver".to_owned(), "--host-root=/host".to_owned()]),
        env: Some(variables),
        volume_mounts: Some(vec![
            mount("host-root", "/host", Some("HostToContainer")),
            // What is unmounted there is unmounted on the host.
            mount("run-nvidia", "/run/nvidia", Some("Bidirectional")),
        ]),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        security_context: Some(privileged()),
        ..Container::default()
    }
}

fn main(driver: &Driver) -> Container {
    let module_type = match driver.kernel_module_type {
        KernelModuleType::Auto => "auto",
        KernelModuleType::Open => "open",
        KernelModuleType::Proprietary => "proprietary",
    };
    let mut environment = vec![
        env_from_field("NODE_NAME", "spec.nodeName"),
        env_from_field("NODE_IP", "status.hostIP"),
        env("KERNEL_MODULE_TYPE", module_type),
    ];
    // Images of before 2025 know only this one.
    let open = driver.kernel_module_type == KernelModuleType::Open;
    environment.extend(open.then(|| env("OPEN_KERNEL_MODULES_ENABLED", "true")));
    environment.extend(driver.gdrcopy.as_ref().map(|_| env("GDRCOPY_ENABLED", "true")));
    environment.extend(driver.gds.as_ref().map(|_| env("GDS_ENABLED", "true")));
    environment.extend((driver.rdma != Rdma::Off).then(|| env("GPU_DIRECT_RDMA_ENABLED", "true")));
    environment.extend((driver.rdma == Rdma::WithHostMofed).then(|| env("USE_HOST_MOFED", "true")));
    // Images of guest and host drivers are the same in some registries, and told apart by it.
    let placement = driver.placement.as_ref().filter(|placement| placement.kind != DriverType::Gpu);
    environment.extend(placement.map(|placement| env("DRIVER_TYPE", placement.kind.as_str())));
    override_env(&mut environment, &driver.container.env);
    let args = match driver.container.args.is_empty() {
        true => vec!["init".to_owned()],
        false => driver.container.args.clone(),
    };
    let stale = [".driver-ctr-ready", ".driver-daemons-status"].map(|name| format!("{VALIDATIONS}/{name}")).join(" ");
    let stop = ExecAction { command: Some(vec!["/bin/sh".into(), "-c".into(), format!("rm -f {stale}")]) };
    let secret = driver.secret_env.as_ref().map(|name| EnvFromSource {
        secret_ref: Some(SecretEnvSource { name: name.clone(), optional: None }),
        ..EnvFromSource::default()
    });
    let mut main = Container {
        name: "nvidia-driver-ctr".to_owned(),
        image: Some(driver.container.image.reference.to_string()),
        image_pull_policy: Some(driver.container.image.pull_policy.clone()),
        command: Some(vec!["nvidia-driver".to_owned()]),
        args: Some(args),
        env: Some(environment),
        env_from: secret.map(|secret| vec![secret]),
        resources: Some(driver.container.resources.clone()),
        security_context: Some(privileged_s0()),
        volume_mounts: Some(volumes::mounts(driver)),
        // Only nodes with a working `nvidia-smi` can be asked, and a vGPU host's says nothing of containers.
        startup_probe: (kind(driver) != DriverType::VgpuHostManager).then(|| startup_probe(&driver.startup_probe)),
        liveness_probe: driver.liveness_probe.as_ref().map(alive),
        readiness_probe: driver.readiness_probe.as_ref().map(alive),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler { exec: Some(stop), ..LifecycleHandler::default() }),
            ..Lifecycle::default()
        }),
        ..Container::default()
    };
    // The image skips a rebuild where the same digest was installed before. No secret is in it.
    let digest = format!("{:08x}", fnv1a(&serde_json::to_vec(&main).expect("a container should serialize")));
    main.env.get_or_insert_default().push(env(DIGEST, digest));
    main
}

/// Building a driver takes minutes: 60 s, then every 10 s, 20 minutes in all, unless the user says otherwise.
fn startup_probe(times: &ContainerProbe) -> Probe {
    let script = ["sh", "/usr/local/bin/startup-probe.sh"].map(str::to_owned).to_vec();
    Probe {
        exec: Some(ExecAction { command: Some(script) }),
        initial_delay_seconds: times.initial_delay_seconds.or(Some(60)),
        period_seconds: times.period_seconds.or(Some(10)),
        timeout_seconds: times.timeout_seconds.or(Some(60)),
        failure_threshold: times.failure_threshold.or(Some(120)),
        success_threshold: times.success_threshold.or(Some(1)),
        ..Probe::default()
    }
}

fn alive(times: &ContainerProbe) -> Probe {
    Probe {
        exec: Some(ExecAction { command: Some(vec!["sh".into(), "-c".into(), "nvidia-smi".into()]) }),
        initial_delay_seconds: times.initial_delay_seconds,
        period_seconds: times.period_seconds,
        timeout_seconds: times.timeout_seconds,
        failure_threshold: times.failure_threshold,
        success_threshold: times.success_threshold,
        ..Probe::default()
    }
}
