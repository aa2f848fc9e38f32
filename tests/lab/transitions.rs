//! Changes of a node that is in use, and of gpuvirt itself, under a running VM.

use std::collections::BTreeSet;

use crds::{
    WorkloadMode,
    v1alpha1::{GPUStatus, GPUTransition, TransitionPhase as Phase},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Event};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams},
};

use crate::{
    kubevirt::{deployed, host_devices, launcher, running, told, with_kubevirt},
    node::{Lab, NODE, T4, lab},
    support::{
        NAMESPACE,
        kubevirt::{self, VMS},
        wait,
    },
};

/// All by which sysfs lets a device, its driver or its functions be changed.
const SWITCHES: &str = "/sys/bus/pci/devices/*/driver_override /sys/bus/pci/devices/*/remove \
    /sys/bus/pci/devices/*/reset /sys/bus/pci/devices/*/sriov_numvfs /sys/bus/pci/devices/*/enable \
    /sys/bus/pci/drivers/*/bind /sys/bus/pci/drivers/*/unbind /sys/bus/pci/drivers/*/new_id \
    /sys/bus/pci/drivers/*/remove_id /sys/bus/pci/drivers_probe /sys/bus/pci/drivers_autoprobe /sys/bus/pci/rescan";

/// Who writes to them from now on is on record.
struct Trace<'a> {
    lab: &'a Lab,
    pid: String,
    file: String,
}

impl<'a> Trace<'a> {
    fn start(lab: &'a Lab, name: &str) -> Self {
        let file = format!("/tmp/{name}.writes");
        let all = format!("$(ls -d {SWITCHES} 2>/dev/null)");
        let pid = lab.guest(&format!("setsid writes {all} </dev/null >{file} 2>&1 & echo $!"));
        lab.guest(&format!("until grep -q watching {file}; do usleep 20000; done"));
        Self { lab, pid: pid.trim().to_owned(), file }
    }

    /// What was written to.
    fn end(self) -> Vec<String> {
        self.lab.end(&self.pid);
        let said = self.lab.guest(&format!("cat {}", self.file));
        said.lines().filter(|line| !line.starts_with("watching")).map(str::to_owned).collect()
    }
}

fn changes(lab: &Lab) -> Api<GPUTransition> {
    Api::all(lab.client.clone())
}

async fn until_change(lab: &Lab, promise: &str, holds: impl Fn(&GPUTransition) -> bool) -> GPUTransition {
    wait::until(&changes(lab), NODE, promise, holds).await
}

fn stands(object: &GPUTransition, to: WorkloadMode, phase: Phase, reason: &str) -> bool {
    let status = object.status.as_ref();
    object.spec.to == to && status.is_some_and(|status| status.phase == phase && status.reason == reason)
}

fn has_been_in(object: &GPUTransition, to: WorkloadMode, phase: Phase) -> bool {
    let history = object.status.iter().flat_map(|status| &status.history);
    object.spec.to == to && history.into_iter().any(|event| event.phase == phase)
}

/// Another tag of the image, as a new version has one, for the operator and the agent.
async fn upgraded(lab: &Lab) {
    lab.guest("ctr -n k8s.io images tag --force localhost/gpuvirt:test localhost/gpuvirt:next");
    let agent = lab.agent_pod().await;
    let release = ["upgrade", "gpuvirt", "charts/gpuvirt", "--namespace", NAMESPACE, "--reuse-values"];
    let version = ["--set", "operator.version=next", "--wait", "--timeout", "3m"];
    lab.cluster.helm(&[&release[..], &version[..]].concat()).unwrap_or_else(|error| panic!("{error}"));
    let sets: Api<DaemonSet> = Api::namespaced(lab.client.clone(), NAMESPACE);
    wait::until(&sets, "gpuvirt-agent", "the agent of the new version is ready", |set: &DaemonSet| {
        let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let image = pod.and_then(|pod| pod.containers.first()?.image.clone());
        let status = set.status.clone().unwrap_or_default();
        image.as_deref() == Some("localhost/gpuvirt:next")
            && status.observed_generation == set.metadata.generation
            && (status.updated_number_scheduled, status.number_ready) == (Some(1), 1)
    })
    .await;
    assert_ne!(lab.agent_pod().await, agent, "another pod is there");
}

async fn event_of_change(lab: &Lab, reason: &str) -> String {
    let uid = changes(lab).get(NODE).await.expect("a change").uid().unwrap_or_default();
    let events: Api<Event> = Api::all(lab.client.clone());
    let about = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
    wait::eventually(&format!("an event {reason}"), async || {
        let found = events.list(&about).await.ok()?;
        found.items.into_iter().find(|event| event.reason.as_deref() == Some(reason))?.message
    })
    .await
}

#[test]
fn an_upgrade_and_a_flip_leave_a_running_vm_alone_and_its_end_lets_the_node_go_on() {
    lab(WorkloadMode::VmPassthrough, async |lab, _| {
        with_kubevirt(lab).await;
        let vm: DynamicObject = running(lab, "vm", &[T4]).await;
        let before = (launcher(lab, "vm").await, host_devices(lab, &vm).await, lab.drivers(), deployed(lab).await);
        let modules = lab.guest("cut -d' ' -f1 /proc/modules");
        let devices = before.1.clone();

        let trace = Trace::start(lab, "upgrade");
        upgraded(lab).await;
        let pod = format!("{VMS}/{}", before.0.1);
        let held = |gpu: &GPUStatus| gpu.holders.iter().any(|holder| holder.pod.as_deref() == Some(pod.as_str()));
        lab.until_gpu(&devices[0], "the agent of the new version knows whose it is", held).await;
        lab.until_allocatable(T4, "2").await;
        lab.until_serving(WorkloadMode::VmPassthrough).await;

        lab.label(WorkloadMode::Container).await;
        let blocked = |object: &GPUTransition| stands(object, WorkloadMode::Container, Phase::Blocked, "GPUInUse");
        let change = until_change(lab, "the VM keeps the node", blocked).await.status.expect("a status");
        assert!(change.message.contains("in use by VM vms/vm") && change.message.contains(&devices[0]), "{change:?}");
        assert_eq!(change.affected_vms, ["vms/vm"]);
        let said = told(lab, &vm, "NodeWaitsForVM").await;
        assert!(said.contains(NODE) && said.contains("container"), "{said}");
        assert!(event_of_change(lab, "ChangeBlocked").await.contains("vms/vm"));
        let now = (launcher(lab, "vm").await, host_devices(lab, &vm).await, lab.drivers(), deployed(lab).await);
        assert_eq!(now, before, "nothing has happened to the VM, its devices and its node");
        assert_eq!(lab.guest("cut -d' ' -f1 /proc/modules"), modules);
        assert_eq!(trace.end(), Vec::<String>::new(), "nobody has written to the host's devices");

        let trace = Trace::start(lab, "flip");
        kubevirt::delete(&lab.client, "vm").await;
        until_change(lab, "it goes on by itself", |object| has_been_in(object, WorkloadMode::Container, Phase::Switch))
            .await;
        // A mind that is changed in the middle.
        lab.label(WorkloadMode::VmPassthrough).await;
        lab.until_serving(WorkloadMode::VmPassthrough).await;
        assert!(lab.drivers().values().all(|driver| driver == "vfio-pci"), "{:?}", lab.drivers());
        lab.until_allocatable(T4, "2").await;
        let written: BTreeSet<String> = trace.end().into_iter().collect();
        assert!(written.iter().any(|file| file.ends_with("/driver_override")), "a change is on record: {written:?}");
    });
}
