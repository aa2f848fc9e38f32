//! What the API server has.

use std::{
    io::{self, Write},
    time::Duration,
};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{GPUNode, GPUTransition, GPUVirtConfig, NVIDIADriver},
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::{DaemonSet, Deployment},
        batch::v1::Job,
        coordination::v1::Lease,
        core::v1::{Event, Pod},
    },
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams, LogParams},
};
use serde_json::json;
use tokio::time::timeout;

use super::{
    super::{doctor::Facts, fleet::Fleet, report::report},
    Sink, Wish,
};
use crate::operator::kubevirt::{Dialect, Permitted, permitted_now, wish};

/// A node that is down does not answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Lines of each log.
const LINES: i64 = 5_000;

pub async fn ours<W: Write>(client: &Client, sink: &mut Sink<W>) -> io::Result<()> {
    let kinds = [
        ApiResource::erase::<ClusterPolicy>(&()),
        ApiResource::erase::<NVIDIADriver>(&()),
        ApiResource::erase::<GPUVirtConfig>(&()),
        ApiResource::erase::<GPUNode>(&()),
        ApiResource::erase::<GPUTransition>(&()),
        Dialect::KubeVirt.resource(),
        Dialect::HyperConvergedV1.resource(),
        Dialect::HyperConvergedV1Beta1.resource(),
    ];
    for kind in kinds {
        all(client, &kind, sink).await?;
    }
    Ok(())
}

/// As they are, also those that this program would not understand.
async fn all<W: Write>(client: &Client, kind: &ApiResource, sink: &mut Sink<W>) -> io::Result<()> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), kind);
    match api.list(&ListParams::default()).await {
        Ok(found) => {
            for mut object in found.items {
                object.types =
                    Some(kube::core::TypeMeta { api_version: kind.api_version.clone(), kind: kind.kind.clone() });
                sink.object(&format!("objects/{}/{}.yaml", kind.plural, object.name_any()), &object)?;
            }
        }
        // Kinds that are not there are no failure, and so is an older version of HyperConverged.
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => sink.missing(&format!("objects/{}", kind.plural), &crate::chain(&error)),
    }
    Ok(())
}

/// What the operator would change there, beside what there is.
pub async fn kubevirt<W: Write>(client: &Client, fleet: &Fleet, sink: &mut Sink<W>) -> io::Result<()> {
    const PATH: &str = "kubevirt/permitted-host-devices.yaml";
    match permitted_now(client).await {
        Ok(None) => Ok(()),
        Ok(Some(permitted)) => {
            let (verdict, patch) = wish(&permitted, &fleet.gpu_nodes);
            let Permitted { place, unset, entries, marks, .. } = &permitted;
            let entries: Vec<_> = entries.iter().map(|entry| &entry.raw).collect();
            let marks: Vec<String> = marks.iter().map(ToString::to_string).collect();
            let compared = json!({
                "object": place.to_string(),
                "permitsEverything": unset,
                "permitted": entries,
                "madeByGpuvirt": marks,
                "gpuvirtSays": {"holds": verdict.holds, "reason": verdict.reason, "message": verdict.message},
                "gpuvirtWouldPatch": patch,
            });
            sink.object(PATH, &compared)
        }
        Err(error) => {
            sink.missing(PATH, &crate::chain(&error));
            Ok(())
        }
    }
}

/// GPU nodes, and what is offered of each beside what its kubelet has.
pub fn nodes<W: Write>(fleet: &Fleet, facts: &Facts, wish: &Wish, sink: &mut Sink<W>) -> io::Result<()> {
    let report = report(fleet);
    let all = match &facts.nodes {
        Ok(all) => all.as_slice(),
        Err(why) => {
            sink.missing("nodes", why);
            &[]
        }
    };
    for node in report.nodes.iter().filter(|node| wish.wants(&node.name)) {
        let name = &node.name;
        if let Some(kubernetes) = all.iter().find(|kubernetes| kubernetes.name_any() == *name) {
            sink.object(&format!("nodes/{name}/node.yaml"), kubernetes)?;
            let status = kubernetes.status.clone().unwrap_or_default();
            let ours = |resources: Option<std::collections::BTreeMap<String, _>>| {
                let mut resources = resources.unwrap_or_default();
                resources.retain(|resource, _| {
                    resource.starts_with("nvidia.com/") || node.offers.iter().any(|o| o.name == *resource)
                });
                resources
            };
            let compared = json!({
                "offered": node.offers,
                "capacity": ours(status.capacity),
                "allocatable": ours(status.allocatable),
            });
            sink.object(&format!("nodes/{name}/advertised.yaml"), &compared)?;
        }
    }
    Ok(())
}

/// An agent's pod, and the node that it is on.
pub struct AgentPod {
    pub pod: String,
    pub node: String,
}

/// Workloads, pods with their logs, events. And the agents that may be asked.
pub async fn namespace<W: Write>(
    client: &Client,
    namespace: &str,
    wish: &Wish,
    sink: &mut Sink<W>,
) -> io::Result<Vec<AgentPod>> {
    each::<Deployment, W>(client, namespace, "deployments", sink).await?;
    each::<DaemonSet, W>(client, namespace, "daemonsets", sink).await?;
    each::<Job, W>(client, namespace, "jobs", sink).await?;
    each::<Lease, W>(client, namespace, "leases", sink).await?;
    events(client, namespace, sink).await?;
    let mut agents = Vec::new();
    for pod in each::<Pod, W>(client, namespace, "pods", sink).await? {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        if !node.is_empty()
            && !wish.wants(&node)
            && pod.labels().get(labels::APP).is_some_and(|app| app != "gpuvirt-operator")
        {
            continue;
        }
        logs(client, namespace, &pod, sink).await?;
        let runs = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        if runs && pod.labels().get(labels::APP).map(String::as_str) == Some("gpuvirt-agent") {
            agents.push(AgentPod { pod: pod.name_any(), node });
        }
    }
    Ok(agents)
}

async fn each<K, W: Write>(client: &Client, namespace: &str, plural: &str, sink: &mut Sink<W>) -> io::Result<Vec<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + serde::Serialize
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    match Api::<K>::namespaced(client.clone(), namespace).list(&ListParams::default()).await {
        Ok(found) => {
            for object in &found.items {
                sink.object(&format!("namespace/{plural}/{}.yaml", object.name_any()), object)?;
            }
            Ok(found.items)
        }
        Err(error) => {
            sink.missing(&format!("namespace/{plural}"), &crate::chain(&error));
            Ok(Vec::new())
        }
    }
}

/// Of the namespace, and those that we have written, wherever their objects are.
async fn events<W: Write>(client: &Client, namespace: &str, sink: &mut Sink<W>) -> io::Result<()> {
    let events: Api<Event> = Api::all(client.clone());
    let found = match events.list(&ListParams::default()).await {
        Ok(found) => found.items,
        Err(error) => {
            sink.missing("namespace/events.txt", &crate::chain(&error));
            return Ok(());
        }
    };
    let about = |event: &&Event| {
        let by_us = event.reporting_component.as_deref().is_some_and(|component| component.starts_with("gpuvirt"));
        event.namespace().as_deref() == Some(namespace) || by_us
    };
    let mut lines: Vec<String> = found.iter().filter(about).map(told).collect();
    lines.sort();
    sink.text("namespace/events.txt", &lines.join("\n"))
}

fn told(event: &Event) -> String {
    let last = event.series.as_ref().and_then(|series| series.last_observed_time.clone()).or(event.event_time.clone());
    let at = last.map(|time| time.0).or(event.last_timestamp.as_ref().map(|time| time.0));
    let about = &event.involved_object;
    let place = about.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
    let count = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
    format!(
        "{} {} {} {} {place}{} ×{count}: {}",
        at.map(|at| format!("{at:.0}")).unwrap_or_default(),
        event.type_.as_deref().unwrap_or("-"),
        event.reason.as_deref().unwrap_or("-"),
        about.kind.as_deref().unwrap_or("-"),
        about.name.as_deref().unwrap_or("-"),
        event.message.as_deref().unwrap_or_default().replace('\n', " "),
    )
}

/// Of each container now, and of its last life if it had one.
async fn logs<W: Write>(client: &Client, namespace: &str, pod: &Pod, sink: &mut Sink<W>) -> io::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let spec = pod.spec.clone().unwrap_or_default();
    let status = pod.status.clone().unwrap_or_default();
    let names = spec.init_containers.iter().flatten().chain(&spec.containers).map(|container| container.name.clone());
    let lives_of: Vec<_> = status
        .init_container_statuses
        .into_iter()
        .flatten()
        .chain(status.container_statuses.into_iter().flatten())
        .collect();
    for container in names {
        let state = lives_of.iter().find(|state| state.name == container);
        let began =
            state.and_then(|state| state.state.as_ref()).is_some_and(|s| s.running.is_some() || s.terminated.is_some());
        let lives = [(false, began), (true, state.is_some_and(|state| state.restart_count > 0))];
        for (previous, _) in lives.into_iter().filter(|(_, was)| *was) {
            let of = LogParams {
                container: Some(container.clone()),
                tail_lines: Some(LINES),
                timestamps: true,
                previous,
                ..LogParams::default()
            };
            let suffix = if previous { ".previous" } else { "" };
            let path = format!("namespace/logs/{}/{container}{suffix}.log", pod.name_any());
            match timeout(PATIENCE, pods.logs(&pod.name_any(), &of)).await {
                Ok(Ok(log)) => sink.text(&path, &log)?,
                Ok(Err(error)) => sink.missing(&path, &crate::chain(&error)),
                Err(_late) => sink.missing(&path, &format!("its kubelet has not answered in {PATIENCE:?}")),
            }
        }
    }
    Ok(())
}
