//! Kubernetes, gpuvirt itself, and others who would do its work. Pure.

use std::collections::BTreeSet;

use crds::{
    labels,
    v1::{ClusterPolicy, PolicyState},
    v1alpha1::Discovery,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use kube::ResourceExt;

use super::{Finding, Severity, Verdict, facts::Facts};

const OLDEST: u32 = 30;
/// From here on a service account's token says on which node it is used.
const NODE_CLAIM: u32 = 32;

pub fn kubernetes(facts: &Facts) -> Verdict {
    let version = match &facts.kubernetes {
        Ok(version) => version,
        Err(why) => return Verdict::skipped(why),
    };
    let seen = &version.git_version;
    let minor: u32 = version.minor.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0);
    match (version.major.as_str(), minor) {
        ("1", minor) if minor < OLDEST => Verdict::one(Finding::new(
            Severity::Error,
            "cluster",
            format!("Kubernetes {seen}"),
            format!("upgrade it: gpuvirt needs 1.{OLDEST} or newer"),
        )),
        ("1", minor) if minor < NODE_CLAIM => Verdict::one(Finding::new(
            Severity::Warning,
            "cluster",
            format!(
                "Kubernetes {seen}: tokens do not say on which node they are used, so agents are not held to theirs"
            ),
            format!("upgrade to 1.{NODE_CLAIM}, or set the feature gate ServiceAccountTokenPodNodeInfo"),
        )),
        _ => Verdict::passed(seen.clone()),
    }
}

pub fn installation(facts: &Facts) -> Verdict {
    match &facts.fleet {
        Ok(Some(fleet)) => {
            let unread = fleet.remarks.iter().map(|remark| {
                let fix = "correct or delete an object that does not decode; ask for a right that is missing";
                Finding::new(Severity::Warning, "installation", remark.clone(), fix)
            });
            let agents: BTreeSet<&str> = fleet
                .gpu_nodes
                .iter()
                .filter_map(|node| Some(node.status.as_ref()?.agent.as_ref()?.version.as_str()))
                .filter(|version| !version.is_empty())
                .collect();
            let mut findings: Vec<Finding> = unread.collect();
            if agents.len() > 1 {
                let seen = agents.iter().copied().collect::<Vec<_>>().join(", ");
                let fix = "wait for the rollout: kubectl rollout status daemonset/gpuvirt-agent";
                findings.push(Finding::new(Severity::Warning, "agents", format!("of versions {seen}"), fix));
            }
            let own = env!("CARGO_PKG_VERSION");
            if let [only] = agents.iter().copied().collect::<Vec<_>>()[..]
                && only != own
            {
                let seen = format!("agents are {only}, and this program is {own}: it may not know all that they say");
                findings.push(Finding::new(Severity::Advice, "kubectl gpuvirt", seen, "use the same version of both"));
            }
            let seen = format!("in namespace {}, {} GPU node(s)", fleet.namespace(), fleet.gpu_nodes.len());
            Verdict::of(findings, seen)
        }
        Ok(None) => Verdict::one(Finding::new(
            Severity::Advice,
            "gpuvirt",
            "its types are not in the cluster; what follows is checked for an installation to come",
            "helm install gpuvirt charts/gpuvirt --namespace gpuvirt",
        )),
        Err(why) => Verdict::skipped(why),
    }
}

pub fn operator(facts: &Facts) -> Verdict {
    let fleet = match facts.fleet() {
        Ok(fleet) => fleet,
        Err(why) => return Verdict::skipped(why),
    };
    match &fleet.silence {
        None => Verdict::passed("it renews its lease"),
        Some(why) => Verdict::one(Finding::new(
            Severity::Error,
            "operator",
            why.clone(),
            format!(
                "kubectl get pods -n {0} -l app=gpuvirt-operator; kubectl logs -n {0} -l app=gpuvirt-operator",
                fleet.namespace()
            ),
        )),
    }
}

pub fn policy(facts: &Facts) -> Verdict {
    let fleet = match facts.fleet() {
        Ok(fleet) => fleet,
        Err(why) => return Verdict::skipped(why),
    };
    let Some(policy) = fleet.policy() else {
        let fix = "create one, or set clusterPolicy.deployCR in the chart's values";
        return Verdict::one(Finding::new(Severity::Error, "ClusterPolicy", "none counts", fix));
    };
    let mut findings: Vec<Finding> = Vec::new();
    let name = format!("ClusterPolicy {}", policy.name_any());
    let status = policy.status.clone().unwrap_or_default();
    let ready = status.conditions.iter().find(|c| c.type_ == "Ready" && c.status == "False");
    if let Some(ready) = ready.filter(|ready| ready.reason != "GPUNodeNotReady") {
        let fix = format!("what {} means: docs/troubleshooting.md#the-clusterpolicy", ready.reason);
        findings.push(Finding::new(Severity::Error, &*name, format!("{}: {}", ready.reason, ready.message), fix));
    }
    for pruned in status.conditions.iter().filter(|c| c.type_ == "SchemaComplete" && c.status == "False") {
        let fix = "gpuvirt crds --apply, or have whoever keeps the CRD upgrade it";
        findings.push(Finding::new(Severity::Warning, &*name, pruned.message.clone(), fix));
    }
    let ignored = |policy: &&ClusterPolicy| {
        policy.status.as_ref().is_some_and(|status| status.state == Some(PolicyState::Ignored))
    };
    for other in fleet.policies.iter().filter(ignored) {
        let seen = format!("{name} is older, and counts");
        let object = format!("ClusterPolicy {}", other.name_any());
        findings.push(Finding::new(Severity::Warning, object, seen, "delete one of the two"));
    }
    let state = match status.state {
        Some(PolicyState::Ready) => "ready",
        Some(PolicyState::NotReady) if ready.is_some() => "its operands are ready, and not all nodes are: see below",
        Some(PolicyState::NotReady | PolicyState::Ignored) | None => "the operator has not looked at it yet",
    };
    Verdict::of(findings, format!("{}: {state}", policy.name_any()))
}

/// The label of a mode does nothing without the switch, as with NVIDIA's operator.
pub fn sandbox_workloads(facts: &Facts) -> Verdict {
    let (fleet, nodes) = match (facts.fleet(), &facts.nodes) {
        (Ok(fleet), Ok(nodes)) => (fleet, nodes),
        (Err(why), _) => return Verdict::skipped(why),
        (_, Err(why)) => return Verdict::skipped(why),
    };
    let Some(policy) = fleet.policy() else { return Verdict::skipped("no ClusterPolicy counts") };
    if policy.spec.sandbox_workloads.enabled == Some(true) {
        return Verdict::passed("sandboxWorkloads.enabled");
    }
    let asked: Vec<String> = nodes
        .iter()
        .filter(|node| node.labels().get(labels::WORKLOAD_CONFIG).is_some_and(|mode| mode.starts_with("vm-")))
        .map(ResourceExt::name_any)
        .collect();
    if asked.is_empty() {
        return Verdict::passed("off, and no node asks for a VM mode");
    }
    Verdict::one(Finding::new(
        Severity::Error,
        format!("ClusterPolicy {}", policy.name_any()),
        format!("sandboxWorkloads is off, so the label {} of {} is ignored", labels::WORKLOAD_CONFIG, asked.join(", ")),
        format!(
            "kubectl patch clusterpolicy {} --type merge -p '{{\"spec\":{{\"sandboxWorkloads\":{{\"enabled\":true}}}}}}'",
            policy.name_any()
        ),
    ))
}

const ENFORCE: &str = "pod-security.kubernetes.io/enforce";

pub fn pod_security(facts: &Facts) -> Verdict {
    let namespace = match &facts.namespace {
        Ok(namespace) => namespace,
        Err(why) => return Verdict::skipped(why),
    };
    let name = namespace.name_any();
    let fix = format!("kubectl label namespace {name} {ENFORCE}=privileged --overwrite");
    match namespace.labels().get(ENFORCE).map(String::as_str) {
        Some("privileged") => Verdict::passed(format!("namespace {name} lets the agent's privileged pods in")),
        Some(level) => Verdict::one(Finding::new(
            Severity::Error,
            format!("namespace {name}"),
            format!("Pod Security enforces {level} there, and the agent is privileged: it binds drivers"),
            fix,
        )),
        None => Verdict::one(Finding::new(
            Severity::Advice,
            format!("namespace {name}"),
            "it says nothing of Pod Security; a cluster-wide default would keep the privileged agent out",
            fix,
        )),
    }
}

fn is_nfd(set: &DaemonSet) -> bool {
    let named = |label: &str| set.labels().get(label).map(String::as_str) == Some("node-feature-discovery");
    named(labels::APP_NAME) || named(labels::APP) || set.name_any().starts_with("nfd-worker")
}

pub fn feature_discovery(facts: &Facts) -> Verdict {
    let (sets, nodes) = match (&facts.daemon_sets, &facts.nodes) {
        (Ok(sets), Ok(nodes)) => (sets, nodes),
        (Err(why), _) | (_, Err(why)) => return Verdict::skipped(why),
    };
    let workers: Vec<String> = sets
        .iter()
        .filter(|set| is_nfd(set) && set.name_any().contains("worker"))
        .map(|set| format!("{}/{}", set.namespace().unwrap_or_default(), set.name_any()))
        .collect();
    let hinted = |node: &&k8s_openapi::api::core::v1::Node| {
        labels::NFD_HINTS.iter().any(|hint| node.labels().get(*hint).map(String::as_str) == Some("true"))
    };
    let hinted = nodes.iter().filter(hinted).count();
    let by_labels = facts.fleet().ok().and_then(|fleet| fleet.config.as_ref()).map(|config| config.spec.discovery)
        == Some(Discovery::Labels);
    if workers.len() > 1 {
        return Verdict::one(Finding::new(
            Severity::Warning,
            "Node Feature Discovery",
            format!("there are several, which take each other's labels away: {}", workers.join(", ")),
            "keep one; nfd.enabled=false in the chart's values leaves the cluster's own",
        ));
    }
    if by_labels && hinted == 0 {
        return Verdict::one(Finding::new(
            Severity::Error,
            "GPUVirtConfig default",
            "discovery is Labels, and no node has a label that hints at an NVIDIA GPU",
            format!(
                "install Node Feature Discovery, label nodes with {}=true, or set discovery: AllNodes",
                labels::GPU_PRESENT
            ),
        ));
    }
    match workers.first() {
        Some(worker) => Verdict::passed(format!("{worker}; {hinted} node(s) hint at an NVIDIA GPU")),
        None => Verdict::passed("there is none, and agents find GPUs themselves"),
    }
}

/// NVIDIA's own operator writes the same labels and objects.
pub fn nvidia_operator(facts: &Facts) -> Verdict {
    let deployments = match &facts.deployments {
        Ok(deployments) => deployments,
        Err(why) => return Verdict::skipped(why),
    };
    let theirs = |deployment: &&Deployment| {
        let runs = |container: &k8s_openapi::api::core::v1::Container| {
            container.image.as_deref().is_some_and(|image| image.contains("nvidia/gpu-operator"))
        };
        let template = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1) > 0;
        let named = deployment.labels().get(labels::APP).map(String::as_str) == Some("gpu-operator");
        wanted && (named || template.is_some_and(|pod| pod.containers.iter().any(runs)))
    };
    let found = deployments.iter().find(theirs);
    found.map_or_else(
        || Verdict::passed("NVIDIA's GPU Operator does not run here"),
        |deployment| {
            let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
            Verdict::one(Finding::new(
                Severity::Error,
                format!("Deployment {namespace}/{name}"),
                "NVIDIA's GPU Operator runs, and reads the same ClusterPolicy: both would write the same labels and objects",
                format!("one of the two: kubectl scale deployment -n {namespace} {name} --replicas=0, or leave gpuvirt out"),
            ))
        },
    )
}

/// Device plugins that would register resources of ours with the kubelet.
pub fn device_plugins(facts: &Facts) -> Verdict {
    let sets = match &facts.daemon_sets {
        Ok(sets) => sets,
        Err(why) => return Verdict::skipped(why),
    };
    let plugin = |set: &DaemonSet| {
        let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let images = pod.iter().flat_map(|pod| &pod.containers).filter_map(|container| container.image.clone());
        // AMD's and Intel's plugins have a name like that, too.
        images.into_iter().find(|image| image.contains("nvidia") && image.contains("device-plugin"))
    };
    let others = sets.iter().filter(|set| !set.labels().contains_key(labels::POLICY));
    let findings: Vec<Finding> = others
        .filter_map(|set| Some((set, plugin(set)?)))
        .filter(|(set, _)| set.status.as_ref().is_none_or(|status| status.desired_number_scheduled > 0))
        .map(|(set, image)| {
            let (namespace, name) = (set.namespace().unwrap_or_default(), set.name_any());
            let whose = match set.labels().get(labels::APP_MANAGED_BY) {
                Some(manager) => format!(" (managed by {manager})"),
                None => String::new(),
            };
            Finding::new(
                Severity::Error,
                format!("DaemonSet {namespace}/{name}"),
                format!("runs {image}{whose}, which offers the same GPUs to the kubelet as gpuvirt does"),
                format!("remove it from nodes that gpuvirt serves: kubectl delete daemonset -n {namespace} {name}, or its chart"),
            )
        })
        .collect();
    Verdict::of(findings, "none but gpuvirt's offers NVIDIA GPUs")
}
