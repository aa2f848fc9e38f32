//! What is there to be taken over, read once.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    labels,
    v1::ClusterPolicy,
    v1alpha1::{CONFIG_NAME, GPUVirtConfig, GPUVirtConfigSpec},
};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node, Pod},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ListParams, PostParams},
    core::DeserializeGuard,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{DEVICE_PLUGIN, Error, VFIO_MANAGER, VFIO_MANAGER_PODS, WITHDRAWN, compare::differences};
use crate::{
    cluster::{gone, lease},
    operator::{
        LEASE, peer,
        policy::{AgentMetrics, Installation, Intended, Seen, intended},
    },
    telemetry::LogFormat,
};

pub struct Found {
    pub namespace: String,
    /// The peer's.
    pub deployment: Option<Deployment>,
    /// The one that counts.
    pub policy: Option<ClusterPolicy>,
    /// Of the peer, and those that have been taken over.
    pub sets: Vec<Operand>,
    pub nodes: Vec<Node>,
    /// Of the vfio-manager, with or without its set.
    pub vfio_managers: Vec<Pod>,
    /// Of VMs that have GPUs.
    pub launchers: Vec<Pod>,
    pub intended: Intended,
    /// Why no operator of ours waits in the namespace.
    pub no_operator: Option<String>,
    /// Our own Deployment, if the chart made one.
    pub ours: Option<Deployment>,
    pub openshift: bool,
}

pub struct Operand {
    pub set: DaemonSet,
    pub fate: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Our agent does its work.
    Withdrawn,
    /// The same, and its pods stay.
    Orphaned,
    /// It becomes ours; the fields of its pods that change.
    Adopted(Vec<String>),
    /// It cannot become ours: why.
    Refused(String),
    /// Nothing of ours has its name.
    Unknown,
}

impl Operand {
    pub fn is_ours(&self) -> bool {
        self.set.labels().contains_key(labels::POLICY)
    }

    pub fn pods(&self) -> i32 {
        self.set.status.as_ref().map_or(0, |status| status.desired_number_scheduled)
    }
}

fn reading(what: &'static str) -> impl Fn(kube::Error) -> Error {
    move |source| Error::Read { what, source: Box::new(source) }
}

/// All that decode; none where the type is not served.
async fn all<K>(client: &Client, what: &'static str) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
    match api.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items.into_iter().filter_map(|guarded| guarded.0.ok()).collect()),
        Err(error) if gone(&error) => Ok(Vec::new()),
        Err(error) => Err(reading(what)(error)),
    }
}

pub async fn look(client: &Client, namespace: Option<&str>) -> Result<Found, Error> {
    let named = ListParams::default().fields(&format!("metadata.name={}", peer::DEPLOYMENT));
    let deployments = Api::<Deployment>::all(client.clone()).list(&named).await.map_err(reading("Deployments"))?.items;
    let deployment = deployments.into_iter().find(|deployment| {
        peer::is_operator(deployment)
            && namespace.is_none_or(|wanted| deployment.namespace().as_deref() == Some(wanted))
    });
    let mut policies: Vec<ClusterPolicy> = all(client, "ClusterPolicies").await?;
    policies.sort_by_key(|policy| (policy.creation_timestamp(), policy.name_any()));
    let policy = policies.into_iter().next();
    let told = || policy.as_ref()?.status.as_ref()?.namespace.clone();
    let namespace = namespace.map(str::to_owned).or_else(|| deployment.as_ref()?.namespace()).or_else(told);
    let namespace = namespace.filter(|namespace| !namespace.is_empty()).ok_or(Error::Nothing)?;
    let gpu = |node: &Node| {
        let hints = labels::NFD_HINTS.iter().chain([&labels::GPU_PRESENT]);
        hints.into_iter().any(|key| node.labels().get(*key).is_some_and(|value| value == "true"))
    };
    let nodes: Vec<Node> = all(client, "Nodes").await?.into_iter().filter(gpu).collect();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let maps = maps.list(&ListParams::default()).await.map_err(reading("ConfigMaps"))?.items;
    let seen = Seen {
        config_maps: maps.iter().map(|map| (map.name_any(), keys(map))).collect(),
        drivers: all(client, "NVIDIADrivers").await?,
        nodes: nodes.clone(),
    };
    let config: Vec<GPUVirtConfig> = all(client, "GPUVirtConfigs").await?;
    let config = config.into_iter().find(|config| config.name_any() == CONFIG_NAME);
    let ours: Api<Deployment> = Api::namespaced(client.clone(), &namespace);
    // Its Deployment and its lease have the same name.
    let ours = ours.get_opt(LEASE).await.map_err(reading("Deployments"))?;
    let spec = config.map_or_else(GPUVirtConfigSpec::default, |config| config.spec);
    let intended =
        policy.as_ref().map(|policy| intended(policy, &spec, &seen, &installation(&namespace, ours.as_ref())));
    let intended = intended.unwrap_or(Intended { sets: Vec::new(), problems: Vec::new(), renews_drivers: false });
    let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
    let lease = leases.get_opt(LEASE).await.map_err(reading("Leases"))?;
    let pods = ListParams::default().labels(VFIO_MANAGER_PODS);
    let vms = ListParams::default().labels("kubevirt.io=virt-launcher");
    let in_namespace: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let launchers = Api::<Pod>::all(client.clone()).list(&vms).await.map_err(reading("Pods"))?.items;
    Ok(Found {
        sets: operands(client, &namespace, &intended).await?,
        vfio_managers: in_namespace.list(&pods).await.map_err(reading("Pods"))?.items,
        launchers: launchers.into_iter().filter(has_gpu).collect(),
        no_operator: lease::silence(LEASE, lease.as_ref()),
        openshift: nodes.iter().any(|node| node.labels().contains_key("node.openshift.io/os_id")),
        namespace,
        deployment,
        policy,
        nodes,
        intended,
        ours,
    })
}

fn keys(map: &ConfigMap) -> BTreeSet<String> {
    map.data.iter().flat_map(BTreeMap::keys).cloned().collect()
}

/// As the operator that waits there has it.
fn installation(namespace: &str, ours: Option<&Deployment>) -> Installation {
    let pod = ours.and_then(|ours| ours.spec.as_ref()?.template.spec.as_ref());
    let container = pod.and_then(|pod| pod.containers.first());
    Installation {
        namespace: namespace.to_owned(),
        image: container.and_then(|container| container.image.clone()).unwrap_or_else(|| "gpuvirt".to_owned()),
        pull_policy: container
            .and_then(|container| container.image_pull_policy.clone())
            .unwrap_or_else(|| "IfNotPresent".to_owned()),
        log_level: "info".to_owned(),
        log_format: LogFormat::default(),
        // The agent is no operand of theirs: nothing that is compared here has it.
        metrics: AgentMetrics::Off,
        images: BTreeMap::new(),
    }
}

fn has_gpu(pod: &Pod) -> bool {
    let over = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut limits = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref());
    !matches!(over, Some("Succeeded" | "Failed"))
        && limits.any(|limits| limits.keys().any(|name| name.starts_with("nvidia.com/")))
}

async fn operands(client: &Client, namespace: &str, intended: &Intended) -> Result<Vec<Operand>, Error> {
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    let sets = api.list(&ListParams::default()).await.map_err(reading("DaemonSets"))?.items;
    let mut operands = Vec::new();
    for set in sets {
        let ours = set.labels().contains_key(labels::POLICY);
        if ours || peer::owner(&set).is_some() {
            let fate = fate(&api, &set, &intended.sets).await?;
            operands.push(Operand { set, fate });
        }
    }
    operands.sort_by_key(|operand| operand.set.name_any());
    Ok(operands)
}

/// The API server itself says what the template would be, with its defaults, and whether it would take it.
async fn fate(api: &Api<DaemonSet>, set: &DaemonSet, intended: &[DaemonSet]) -> Result<Fate, Error> {
    let name = set.name_any();
    if name == VFIO_MANAGER {
        return Ok(Fate::Orphaned);
    }
    if name == DEVICE_PLUGIN || WITHDRAWN.contains(&name.as_str()) {
        return Ok(Fate::Withdrawn);
    }
    let Some(wish) = intended.iter().find(|wish| wish.name_any() == name) else { return Ok(Fate::Unknown) };
    let trial = PostParams { dry_run: true, field_manager: None };
    let (mut wish, mut live) = (wish.clone(), set.clone());
    loop {
        wish.metadata.resource_version = live.resource_version();
        match api.replace(&name, &trial, &wish).await {
            Ok(new) => return Ok(Fate::Adopted(differences(&template(&live), &template(&new)))),
            Err(kube::Error::Api(status)) if status.code == 422 => return Ok(Fate::Refused(status.message.clone())),
            // Its controller has written its status meanwhile.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                live = api.get(&name).await.map_err(reading("DaemonSets"))?;
            }
            Err(error) => return Err(reading("DaemonSets")(error)),
        }
    }
}

fn template(set: &DaemonSet) -> Value {
    let template = set.spec.as_ref().map(|spec| spec.template.clone());
    let mut template = serde_json::to_value(template).expect("an API object should serialize");
    // By whom a set was restarted is no part of the wish.
    if let Some(metadata) = template.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("creationTimestamp");
    }
    template
}
