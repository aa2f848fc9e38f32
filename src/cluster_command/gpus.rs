//! `kubectl gpuvirt gpus`: a line for each GPU and each vGPU, and who has it.

use crds::{
    WorkloadMode,
    v1alpha1::{GPUNode, GPUStatus, GPUUser, Holder, Severity},
};
use kube::ResourceExt;
use serde::Serialize;

use super::{Target, fleet::Fleet, status::Error};
use crate::{
    answer::Output,
    terminal::{BAD, Cell, FAINT, GOOD, PLAIN, STRONG, WARN, table},
};

/// Which of them are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    pub node: Option<String>,
    /// Of the pods and VMs that have them.
    pub namespace: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    pub node: String,
    pub address: String,
    /// Vendor and device id, as in `10de:1eb8`.
    pub id: String,
    pub model: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<WorkloadMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu_group: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<i32>,
    /// The resource that it is offered under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    pub state: State,
    /// Why it is in this state, and the next step; empty where there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    pub users: Vec<User>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vgpus: Vec<VgpuReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VgpuReport {
    /// UUID of a mediated device, or PCI address of a virtual function.
    pub id: String,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    pub users: Vec<User>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    Unhealthy,
    /// The agent cannot bring it into the mode asked for.
    Refused,
    InUse,
    /// It is in its mode, and not given out.
    Withheld,
    /// It serves, with less than it could.
    Degraded,
    Free,
}

/// Who has a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum User {
    #[serde(rename = "VM")]
    Vm {
        /// `namespace/name` of KubeVirt's, else as the hypervisor names it.
        name: String,
    },
    #[serde(rename = "Pod")]
    Pod {
        /// `namespace/name`.
        name: String,
    },
    Process {
        command: String,
        pid: i32,
    },
}

impl User {
    pub fn told(&self) -> String {
        match self {
            Self::Vm { name } => format!("VM {name}"),
            Self::Pod { name } => format!("pod {name}"),
            Self::Process { command, pid } => format!("{command} (pid {pid})"),
        }
    }

    fn namespace(&self) -> Option<&str> {
        match self {
            Self::Vm { name } | Self::Pod { name } => name.split_once('/').map(|(namespace, _)| namespace),
            Self::Process { .. } => None,
        }
    }
}

pub async fn run(target: &Target, only: &Only, output: Output) -> Result<(), Error> {
    let (client, _) = target.connect().await?;
    let gpus = report(&Fleet::read(&client).await?.gpu_nodes, only);
    Ok(output.print(&gpus, |gpus| text(gpus))?)
}

pub fn report(gpu_nodes: &[GPUNode], only: &Only) -> Vec<GpuReport> {
    let nodes = gpu_nodes.iter().filter(|node| only.node.as_ref().is_none_or(|name| *name == node.name_any()));
    let gpus = nodes.flat_map(of_node);
    gpus.filter(|gpu| only.namespace.as_deref().is_none_or(|namespace| gpu.is_used_from(namespace))).collect()
}

fn of_node(node: &GPUNode) -> Vec<GpuReport> {
    let status = node.status.clone().unwrap_or_default();
    let users = status.operator.unwrap_or_default().users;
    let gpus = status.agent.unwrap_or_default().gpus;
    gpus.iter().map(|gpu| of_gpu(&node.name_any(), gpu, &users)).collect()
}

pub fn of_gpu(node: &str, gpu: &GPUStatus, users: &[GPUUser]) -> GpuReport {
    let vgpus: Vec<VgpuReport> = gpu
        .vgpu
        .iter()
        .flat_map(|vgpu| &vgpu.instances)
        .map(|instance| {
            let mut who = named(&instance.id, &instance.holders, users);
            if who.is_empty() {
                who.extend(instance.vm.clone().map(|name| User::Vm { name }));
            }
            VgpuReport {
                id: instance.id.clone(),
                kind: instance.kind.clone(),
                resource: instance.resource.clone(),
                users: who,
            }
        })
        .collect();
    let users = named(&gpu.address, &gpu.holders, users);
    let used = is_used(&users, &vgpus);
    let (state, message) = state(gpu, used);
    GpuReport {
        node: node.to_owned(),
        address: gpu.address.clone(),
        id: gpu.id.clone(),
        model: model(&gpu.product),
        mode: gpu.mode,
        driver: gpu.driver.clone(),
        iommu_group: gpu.iommu_group,
        numa_node: gpu.numa_node,
        resource: gpu.resource.clone(),
        state,
        message,
        users,
        vgpus,
    }
}

/// `Tesla T4` of `TU104GL [Tesla T4]`.
fn model(product: &str) -> String {
    let name = product.split_once('[').and_then(|(_, rest)| rest.strip_suffix(']'));
    name.unwrap_or(product).to_owned()
}

/// By the names that the operator knows; else as the agent sees them.
fn named(device: &str, holders: &[Holder], users: &[GPUUser]) -> Vec<User> {
    let given = users.iter().filter(|user| user.gpus.iter().any(|gpu| gpu == device));
    let mut who: Vec<User> = given
        .map(|user| match &user.vmi {
            Some(name) => User::Vm { name: name.clone() },
            None => User::Pod { name: user.pod.clone() },
        })
        .collect();
    if who.is_empty() {
        who = holders
            .iter()
            .map(|holder| match (&holder.vm, &holder.pod) {
                (Some(name), _) => User::Vm { name: name.clone() },
                (None, Some(name)) => User::Pod { name: name.clone() },
                (None, None) => User::Process { command: holder.command.clone(), pid: holder.pid },
            })
            .collect();
    }
    who.sort();
    who.dedup();
    who
}

fn state(gpu: &GPUStatus, used: bool) -> (State, String) {
    let ailment = |severity| gpu.ailments.iter().find(|ailment| ailment.severity == severity);
    let said = |ailment: &crds::v1alpha1::Ailment| format!("{}: {}", ailment.reason, ailment.message);
    if let Some(ailment) = ailment(Severity::Unhealthy) {
        return (State::Unhealthy, said(ailment));
    }
    if let Some(refusal) = &gpu.refusal {
        return (State::Refused, format!("{}: {}", refusal.reason, refusal.message));
    }
    if used {
        return (State::InUse, String::new());
    }
    match (&gpu.withheld, ailment(Severity::Degraded)) {
        (Some(why), _) => (State::Withheld, why.clone()),
        (None, Some(ailment)) => (State::Degraded, said(ailment)),
        (None, None) => (State::Free, String::new()),
    }
}

fn is_used(users: &[User], vgpus: &[VgpuReport]) -> bool {
    !users.is_empty() || vgpus.iter().any(|vgpu| !vgpu.users.is_empty())
}

impl GpuReport {
    /// Somebody has it, or one of its vGPUs.
    pub fn is_used(&self) -> bool {
        is_used(&self.users, &self.vgpus)
    }

    fn is_used_from(&self, namespace: &str) -> bool {
        let all = self.users.iter().chain(self.vgpus.iter().flat_map(|vgpu| &vgpu.users));
        all.into_iter().any(|user| user.namespace() == Some(namespace))
    }
}

pub fn text(gpus: &[GpuReport]) -> String {
    if gpus.is_empty() {
        return "no GPU\n".to_owned();
    }
    let head = ["NODE", "ADDRESS", "MODEL", "MODE", "DRIVER", "GROUP", "STATE", "USER"];
    let mut rows: Vec<Vec<Cell>> = vec![head.map(|title| Cell::new(STRONG, title)).into()];
    let mut last = "";
    for gpu in gpus {
        let node = if last == gpu.node { String::new() } else { gpu.node.clone() };
        last = &gpu.node;
        rows.extend(rows_of(node, gpu));
    }
    table(&rows)
}

fn rows_of(node: String, gpu: &GpuReport) -> Vec<Vec<Cell>> {
    let style = match gpu.state {
        State::Unhealthy | State::Refused => BAD,
        State::Withheld | State::Degraded => WARN,
        State::InUse => PLAIN,
        State::Free => GOOD,
    };
    let reason = gpu.message.split_once(':').map(|(reason, _)| reason).filter(|reason| !reason.contains(' '));
    let state = match reason {
        Some(reason) => format!("{:?} ({reason})", gpu.state),
        None => format!("{:?}", gpu.state),
    };
    let mut rows = vec![vec![
        Cell::new(PLAIN, node),
        Cell::new(PLAIN, gpu.address.clone()),
        Cell::new(PLAIN, gpu.model.clone()),
        Cell::plain(gpu.mode.map(|mode| mode.to_string())),
        Cell::plain(gpu.driver.clone()),
        Cell::plain(gpu.iommu_group.map(|group| group.to_string())),
        Cell::new(style, state),
        Cell::plain(gpu.users.first().map(User::told)),
    ]];
    let blank = || (0..6).map(|_| Cell::new(PLAIN, "")).collect::<Vec<_>>();
    for user in gpu.users.iter().skip(1) {
        rows.push(blank().into_iter().chain([Cell::new(PLAIN, ""), Cell::new(PLAIN, user.told())]).collect());
    }
    for vgpu in &gpu.vgpus {
        let users = vgpu.users.iter().map(User::told).collect::<Vec<_>>().join(", ");
        let (style, state) = if users.is_empty() { (GOOD, "Free") } else { (PLAIN, "InUse") };
        rows.push(vec![
            Cell::new(PLAIN, ""),
            Cell::new(FAINT, format!("  {}", vgpu.id)),
            Cell::new(PLAIN, vgpu.kind.clone()),
            Cell::new(FAINT, "vGPU"),
            Cell::new(PLAIN, ""),
            Cell::new(PLAIN, ""),
            Cell::new(style, state),
            Cell::plain(Some(users)),
        ]);
    }
    rows
}
