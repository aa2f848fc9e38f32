//! Driver pods on OpenShift: with the cluster's proxy and certificates, and a toolkit that builds modules for the node's
//! very version of its system, which has no compiler and no package repository.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Container, EmptyDirVolumeSource, EnvVar, ResourceRequirements, Volume},
};

use super::{
    Installation,
    pod::{config_map, env, host_path, mount, override_env, privileged_s0, read_only},
    stack,
};
use crate::operator::policy::validate::{OSTREE_VERSION, OpenShift, Pool, Settings};

const TOOLKIT: &str = "openshift-driver-toolkit-ctr";
const SHARED: &str = "shared-nvidia-driver-toolkit";
const SHARED_PATH: &str = "/mnt/shared-nvidia-driver-toolkit";
pub(super) const TRUSTED_CA: &str = "gpu-operator-trusted-ca";
const COMPONENT: &str = "nvidia-driver";

/// OpenShift fills it with the certificates that its proxy needs.
pub(super) fn trusted_ca(settings: &Settings, installation: &Installation) -> ConfigMap {
    let mut map = stack::config_map(TRUSTED_CA, COMPONENT, [].into(), settings, installation);
    map.data = None;
    let injected = ("config.openshift.io/inject-trusted-cabundle".to_owned(), "true".to_owned());
    map.metadata.labels.get_or_insert_default().extend([injected]);
    map
}

/// `main`: the container that brings the driver.
pub(super) fn adapt(
    set: &mut DaemonSet,
    main: &str,
    pool: &Pool,
    openshift: Option<&OpenShift>,
    resources: &ResourceRequirements,
) {
    let Some(openshift) = openshift else { return };
    let spec = set.spec.as_mut().expect("an operand should have a spec");
    let pod = spec.template.spec.as_mut().expect("an operand should have a pod");
    let volumes = pod.volumes.get_or_insert_default();
    let container = pod.containers.iter_mut().find(|container| container.name == main);
    let container = container.expect("a driver's pod should have its main container");
    surroundings(container, openshift);
    if openshift.trusted_ca {
        let place = "/etc/pki/ca-trust/extracted/pem";
        container.volume_mounts.get_or_insert_default().push(read_only(mount(TRUSTED_CA, place, None)));
        volumes.push(config_map(TRUSTED_CA, TRUSTED_CA, None, &[("ca-bundle.crt", "tls-ca-bundle.pem")]));
    }
    let Some(rhcos) = &pool.rhcos else { return };
    let image = openshift.toolkits.get(rhcos);
    let own_image = container.image.clone();
    let missing = || vec![env("RHCOS_IMAGE_MISSING", "true"), env("RHCOS_VERSION", rhcos.clone())];
    if image.is_none() {
        override_env(container.env.get_or_insert_default(), &missing());
    }
    let mut variables = vec![env("RHCOS_VERSION", rhcos.clone()), env("NVIDIA_VISIBLE_DEVICES", "void")];
    variables.extend(image.is_none().then(|| env("RHCOS_IMAGE_MISSING", "true")));
    for (sidecar, program, variable) in [
        ("nvidia-fs-ctr", "nv-fs-ctr-run-with-dtk", "GDS_ENABLED"),
        ("nvidia-gdrcopy-ctr", "gdrcopy-ctr-run-with-dtk", "GDRCOPY_ENABLED"),
        (main, "nv-ctr-run-with-dtk", ""),
    ] {
        let Some(container) = pod.containers.iter_mut().find(|container| container.name == sidecar) else { continue };
        container.command = Some(vec!["ocp_dtk_entrypoint".to_owned()]);
        container.args = Some(vec![program.to_owned()]);
        container.volume_mounts.get_or_insert_default().push(mount(SHARED, SHARED_PATH, None));
        variables.extend((!variable.is_empty()).then(|| env(variable, "true")));
    }
    volumes.push(Volume {
        name: SHARED.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    });
    if volumes.iter().all(|volume| volume.name != "mlnx-ofed-usr-src") {
        volumes.push(host_path("mlnx-ofed-usr-src", "/run/mellanox/drivers/usr/src", stack::MADE));
    }
    pod.containers.push(toolkit(image.cloned().or(own_image), variables, resources));
    pod.node_selector.get_or_insert_default().insert(OSTREE_VERSION.to_owned(), rhcos.clone());
    let mut marks = vec![("openshift.driver-toolkit", "true".to_owned())];
    marks.extend(image.is_none().then(|| ("openshift.driver-toolkit.rhcos-image-missing", "true".to_owned())));
    let marks = || marks.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
    spec.template.metadata.get_or_insert_default().labels.get_or_insert_default().extend(marks());
    let of_set = set.metadata.labels.get_or_insert_default();
    of_set.extend(marks());
    of_set.insert("openshift.driver-toolkit.rhcos".to_owned(), rhcos.clone());
}

/// What the user sets wins.
fn surroundings(container: &mut Container, openshift: &OpenShift) {
    let proxy = &openshift.proxy;
    let mut variables: Vec<EnvVar> = Vec::new();
    if !openshift.version.is_empty() {
        variables.push(env("OPENSHIFT_VERSION", openshift.version.clone()));
    }
    for (name, value) in [("HTTPS_PROXY", &proxy.https), ("HTTP_PROXY", &proxy.http), ("NO_PROXY", &proxy.none)] {
        if let Some(value) = value {
            // Programs read the one or the other.
            variables.extend([env(name, value.clone()), env(&name.to_lowercase(), value.clone())]);
        }
    }
    override_env(&mut variables, container.env.as_deref().unwrap_or_default());
    container.env = Some(variables).filter(|variables| !variables.is_empty());
}

/// Waits for the driver's sources, builds them with the compiler of the node's system, and hands the modules back.
fn toolkit(image: Option<String>, variables: Vec<EnvVar>, resources: &ResourceRequirements) -> Container {
    let script = format!(
        "until [ -f {SHARED_PATH}/dir_prepared ]; do echo \"the driver's container has not put its sources into {SHARED_PATH} yet\"; sleep 10; done; exec {SHARED_PATH}/ocp_dtk_entrypoint dtk-build-driver"
    );
    Container {
        name: TOOLKIT.to_owned(),
        image,
        image_pull_policy: Some("IfNotPresent".to_owned()),
        command: Some(vec!["bash".to_owned(), "-xc".to_owned()]),
        args: Some(vec![script]),
        env: Some(variables),
        resources: Some(resources.clone()),
        security_context: Some(privileged_s0()),
        volume_mounts: Some(vec![
            mount(SHARED, SHARED_PATH, None),
            mount("var-log", "/var/log", None),
            mount("mlnx-ofed-usr-src", "/run/mellanox/drivers/usr/src", Some("HostToContainer")),
            read_only(mount("host-os-release", "/host-etc/os-release", None)),
        ]),
        ..Container::default()
    }
}

/// Whether a set's pods have a value of `app` of their own, as the peer's on OpenShift.
pub(super) fn own_app(pool: &Pool) -> bool {
    pool.rhcos.is_some()
}

#[cfg(test)]
mod tests {
    use crds::{labels, v1alpha1::GPUVirtConfigSpec};

    use super::*;
    use crate::operator::policy::{
        build::{Operands, build, tests::installation},
        validate::{Facts, Host, Platform, Proxy, tests::driver_only, validate},
    };

    const RHCOS: &str = "416.94.202405291527-0";

    fn openshift() -> OpenShift {
        OpenShift {
            version: "4.16".to_owned(),
            proxy: Proxy { https: Some("http://proxy:3128".to_owned()), ..Proxy::default() },
            trusted_ca: true,
            stream: true,
            toolkits: [(RHCOS.to_owned(), "quay.example/dtk@sha256:ab".to_owned())].into(),
        }
    }

    fn made(openshift: OpenShift, toolkit: bool) -> Operands {
        let mut policy = driver_only();
        policy.spec.operator.use_ocp_driver_toolkit = Some(toolkit);
        let host = Host { os: "rhcos4.16".to_owned(), rhcos: Some(RHCOS.to_owned()), ..Host::default() };
        let facts = Facts { hosts: [host].into(), platform: Platform::OpenShift(openshift), ..Facts::default() };
        let validated = validate(&policy, &GPUVirtConfigSpec::default(), &facts);
        assert_eq!(validated.problems, []);
        build(&validated.settings, &installation())
    }

    fn containers(set: &DaemonSet) -> &[Container] {
        &set.spec.as_ref().unwrap().template.spec.as_ref().unwrap().containers
    }

    fn value(container: &Container, name: &str) -> Option<String> {
        container.env.iter().flatten().find(|entry| entry.name == name)?.value.clone()
    }

    #[test]
    fn a_toolkit_builds_the_driver_for_the_nodes_of_one_version() {
        let operands = made(openshift(), true);
        let set = &operands.daemon_sets[1];
        assert_eq!(set.metadata.name.as_deref(), Some("nvidia-driver-daemonset-416.94.202405291527-0"));
        let [main, toolkit] = containers(set) else { panic!("two containers") };
        assert_eq!(main.command.as_deref(), Some(&["ocp_dtk_entrypoint".to_owned()][..]));
        assert_eq!(toolkit.image.as_deref(), Some("quay.example/dtk@sha256:ab"));
        let spec = set.spec.as_ref().unwrap();
        assert_eq!(spec.template.spec.as_ref().unwrap().node_selector.as_ref().unwrap()[OSTREE_VERSION], RHCOS);
        assert_eq!(spec.selector.match_labels.as_ref().unwrap()[labels::APP], set.metadata.name.clone().unwrap());
        assert_eq!(
            spec.template.metadata.as_ref().unwrap().labels.as_ref().unwrap()["openshift.driver-toolkit"],
            "true"
        );
    }

    #[test]
    fn a_version_without_a_toolkit_is_told_to_the_image_which_looks_for_one() {
        let operands = made(OpenShift { toolkits: [].into(), ..openshift() }, true);
        let [main, toolkit] = containers(&operands.daemon_sets[1]) else { panic!("two containers") };
        assert_eq!(toolkit.image, main.image);
        assert_eq!(value(main, "RHCOS_IMAGE_MISSING").as_deref(), Some("true"));
        assert_eq!(value(toolkit, "RHCOS_VERSION").as_deref(), Some(RHCOS));
    }

    #[test]
    fn the_clusters_proxy_and_certificates_reach_the_driver_also_without_the_toolkit() {
        let operands = made(openshift(), false);
        let set = &operands.daemon_sets[1];
        assert_eq!(set.metadata.name.as_deref(), Some("nvidia-driver-daemonset"));
        let [main] = containers(set) else { panic!("one container") };
        assert_eq!(value(main, "OPENSHIFT_VERSION").as_deref(), Some("4.16"));
        for name in ["HTTPS_PROXY", "https_proxy"] {
            assert_eq!(value(main, name).as_deref(), Some("http://proxy:3128"));
        }
        let mounts = main.volume_mounts.as_ref().unwrap();
        assert!(mounts.iter().any(|mount| mount.name == TRUSTED_CA));
        assert!(operands.config_maps.iter().any(|map| map.metadata.name.as_deref() == Some(TRUSTED_CA)));
        assert_eq!(value(main, "HTTP_PROXY"), None);
    }
}
