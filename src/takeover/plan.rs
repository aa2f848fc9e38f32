//! What a take-over would do, in words, and what stands in its way. Pure.

use std::fmt::Write as _;

use crds::labels;
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::{Node, Pod},
};
use kube::ResourceExt;

use super::look::{Fate, Found, Operand};
use crate::operator::{peer, policy::host_of};

/// Of the fields of a template that differ so many are printed.
const FIELDS: usize = 8;
const MPS: &str = "nvidia-device-plugin-mps-control-daemon";

/// Sections of lines, and what is in the way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub sections: Vec<(String, Vec<String>)>,
    /// Ends it.
    pub stops: Vec<String>,
    /// Ends it unless the person accepts it.
    pub disrupts: Vec<String>,
}

impl Plan {
    pub fn section(&mut self, title: &str, lines: Vec<String>) {
        if !lines.is_empty() {
            self.sections.push((title.to_owned(), lines));
        }
    }

    pub fn obstacles(&self, accepted: bool) -> Vec<String> {
        let disrupts = self.disrupts.iter().filter(|_| !accepted);
        self.stops.iter().chain(disrupts).cloned().collect()
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut all = self.sections.clone();
        let hint = |line: &String| format!("{line}; with --accept-disruption it is done");
        all.push(("In the way".to_owned(), self.stops.iter().cloned().chain(self.disrupts.iter().map(hint)).collect()));
        for (title, lines) in all.iter().filter(|(_, lines)| !lines.is_empty()) {
            let _ = writeln!(text, "{title}:");
            for line in lines {
                let _ = writeln!(text, "  {line}");
            }
        }
        if self.stops.is_empty() && self.disrupts.is_empty() {
            text.push_str("Nothing stands in the way.\n");
        }
        text
    }
}

pub fn take(found: &Found) -> Plan {
    let mut plan = Plan::default();
    plan.section("Found", what_is_there(found));
    plan.section("Adopted", adopted(found));
    plan.section("Rolls", rolls(found));
    plan.section("Withdrawn, in this order", withdrawn(found));
    plan.section("Stays", stays(found));
    plan.stops = stops(found);
    plan.disrupts = disrupts(found);
    plan
}

fn what_is_there(found: &Found) -> Vec<String> {
    let mut lines = Vec::new();
    let place = |deployment: &Deployment| format!("Deployment {}/{}", found.namespace, deployment.name_any());
    lines.extend(found.deployment.as_ref().map(|d| format!("{}, {} replica(s)", place(d), peer::replicas(d))));
    lines.extend(found.policy.as_ref().map(|policy| format!("ClusterPolicy {}", policy.name_any())));
    let theirs = found.sets.iter().filter(|operand| !operand.is_ours()).count();
    lines.push(format!("{theirs} DaemonSet(s) of it, {} that have been taken over", found.sets.len() - theirs));
    lines.push(format!("{} node(s) with GPUs", found.nodes.len()));
    lines
}

fn name(operand: &Operand) -> String {
    format!("DaemonSet {}", operand.set.name_any())
}

fn adopted(found: &Found) -> Vec<String> {
    let mut lines: Vec<String> =
        found.policy.iter().map(|policy| format!("ClusterPolicy {}, as it is", policy.name_any())).collect();
    for operand in &found.sets {
        if let Fate::Adopted(fields) = &operand.fate {
            let what = match (fields.is_empty(), on_delete(found, &operand.set)) {
                (true, _) => "equal: nothing restarts",
                (false, true) => "its pods stay until they are renewed",
                (false, false) => "rolls",
            };
            lines.push(format!("{}, {} pod(s): {what}", name(operand), operand.pods()));
        }
    }
    if !found.nodes.is_empty() {
        lines.push(format!(
            "labels nvidia.com/* of {} node(s), and {}, {} added",
            found.nodes.len(),
            labels::OS,
            labels::KERNEL
        ));
    }
    lines
}

/// As it will be.
fn on_delete(found: &Found, set: &DaemonSet) -> bool {
    let wish = found.intended.sets.iter().find(|wish| wish.name_any() == set.name_any());
    let strategy = wish.and_then(|wish| wish.spec.as_ref()?.update_strategy.as_ref()?.type_.as_deref());
    strategy == Some("OnDelete")
}

fn rolls(found: &Found) -> Vec<String> {
    let mut lines = Vec::new();
    for operand in &found.sets {
        let Fate::Adopted(fields) = &operand.fate else { continue };
        if fields.is_empty() {
            continue;
        }
        let when = match on_delete(found, &operand.set) {
            true => "when a person or upgradePolicy renews its pods",
            false => "pod by pod, at once",
        };
        lines.push(format!("{}, {when}, since these differ:", name(operand)));
        lines.extend(fields.iter().take(FIELDS).map(|field| format!("  {field}")));
        if fields.len() > FIELDS {
            lines.push(format!("  and {} more", fields.len() - FIELDS));
        }
    }
    lines
}

fn withdrawn(found: &Found) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    lines.extend(found.deployment.iter().map(|d| format!("Deployment {}: to 0 replicas", d.name_any())));
    let with = |fate: Fate| found.sets.iter().filter(move |operand| operand.fate == fate);
    lines.extend(with(Fate::Orphaned).map(|operand| format!("{}: deleted, its pods stay", name(operand))));
    let mut rest: Vec<&Operand> = with(Fate::Withdrawn).collect();
    rest.sort_by_key(|operand| super::WITHDRAWN.iter().position(|name| **name == operand.set.name_any()));
    lines.extend(
        rest.iter().map(|operand| format!("{}: deleted, and its {} pod(s) waited for", name(operand), operand.pods())),
    );
    if !lines.is_empty() {
        lines.push("then gpuvirt's agent offers the GPUs; in between VMs run, and new ones wait".to_owned());
    }
    lines
}

fn stays(found: &Found) -> Vec<String> {
    let mut lines: Vec<String> = found.launchers.iter().map(|pod| format!("{}: it runs on", vm(pod))).collect();
    lines.push("every GPU with the driver that it has".to_owned());
    lines.extend(found.vfio_managers.iter().map(|pod| {
        format!(
            "pod {} of node {}: its end unbinds every GPU there; once no VM has one: kubectl -n {} delete pod {}",
            pod.name_any(),
            node(pod),
            found.namespace,
            pod.name_any()
        )
    }));
    let has_operator = found.deployment.is_some();
    lines.extend(has_operator.then(|| {
        "the peer's Helm release; `helm uninstall` of it would delete the ClusterPolicy: docs/migration.md says how it goes".to_owned()
    }));
    lines
}

pub fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

pub fn vm(pod: &Pod) -> String {
    let owner = pod.owner_references().iter().find(|owner| owner.kind == "VirtualMachineInstance");
    let name = owner.map_or_else(|| pod.name_any(), |owner| owner.name.clone());
    format!("VM {}/{name} on node {}", pod.namespace().unwrap_or_default(), node(pod))
}

fn stops(found: &Found) -> Vec<String> {
    let mut stops = Vec::new();
    if found.policy.is_none() {
        stops.push("there is no ClusterPolicy to go by".to_owned());
    }
    let bundle =
        |deployment: &Deployment| deployment.owner_references().iter().any(|o| o.kind == "ClusterServiceVersion");
    if found.openshift || found.deployment.as_ref().is_some_and(bundle) {
        stops.push(
            "the Operator Lifecycle Manager keeps NVIDIA's operator running, and on OpenShift driver sets have other names: \
             take it over by hand, as docs/migration.md says"
                .to_owned(),
        );
    }
    if let Some(why) = &found.no_operator {
        stops.push(format!(
            "gpuvirt's operator does not run in namespace {} ({why}): helm install gpuvirt charts/gpuvirt -n {} \
             --take-ownership --set clusterPolicy.deployCR=false,nfd.enabled=false; it waits there and touches nothing",
            found.namespace, found.namespace
        ));
    }
    let unknown = |node: &&Node| host_of(node).is_none();
    stops.extend(found.nodes.iter().filter(unknown).map(|node| {
        format!(
            "node {} does not say its operating system and kernel: Node Feature Discovery's labels system-os_release.ID, \
             system-os_release.VERSION_ID and kernel-version.full are missing",
            node.name_any()
        )
    }));
    stops.extend(found.intended.problems.iter().cloned());
    for operand in &found.sets {
        match &operand.fate {
            Fate::Refused(why) => stops.push(format!("{} cannot become gpuvirt's: {why}", name(operand))),
            Fate::Unknown if operand.pods() > 0 => stops.push(format!(
                "{} has {} pod(s), and gpuvirt would not bring it: switch it off in the ClusterPolicy first",
                name(operand),
                operand.pods()
            )),
            Fate::Unknown | Fate::Withdrawn | Fate::Orphaned | Fate::Adopted(_) => {}
        }
    }
    stops
}

fn disrupts(found: &Found) -> Vec<String> {
    let differs = |operand: &&Operand| matches!(&operand.fate, Fate::Adopted(fields) if !fields.is_empty());
    let changed: Vec<&Operand> =
        found.sets.iter().filter(differs).filter(|operand| operand.pods() > 0 && !operand.is_ours()).collect();
    let mut lines = Vec::new();
    let drivers: i32 = changed.iter().filter(|o| on_delete(found, &o.set)).map(|operand| operand.pods()).sum();
    if drivers > 0 && found.intended.renews_drivers {
        lines.push(format!(
            "driver.upgradePolicy.autoUpgrade is true, so {drivers} driver pod(s) would be renewed afterwards, node by node, \
             and pods with a GPU evicted: set it to false first, and renew them when it suits you"
        ));
    }
    lines.extend(changed.iter().filter(|operand| operand.set.name_any() == MPS).map(|operand| {
        format!(
            "{} rolls, and programs that share a GPU by MPS end with it on {} node(s)",
            name(operand),
            operand.pods()
        )
    }));
    lines
}
