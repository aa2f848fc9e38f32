//! `kubectl gpuvirt explain gpu`: what one GPU is, what drives it, who has it, and which modes it can be in.

use std::fmt::Write as _;

use crds::{
    WorkloadMode,
    v1alpha1::{FunctionStatus, GPUNode, GPUStatus, Obstacle},
};
use kube::ResourceExt;
use serde::Serialize;

use super::{
    super::{
        Target,
        fleet::Fleet,
        gpus::{GpuReport, State, User, of_gpu},
    },
    Error,
};
use crate::{
    answer::Output,
    terminal::{BAD, FAINT, GOOD, PLAIN, STRONG, WARN, indented, paint, wrapped},
};

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    #[serde(flatten)]
    pub gpu: GpuReport,
    /// Functions of its card that go with it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub companions: Vec<FunctionStatus>,
    /// What stands in the way of modes that it is not in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<Obstacle>,
    /// All that is wrong with it, the worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ailments: Vec<String>,
}

/// `gpu` is `node/address`, or an address that one node has. Whether it is as asked for and well.
pub async fn run(target: &Target, gpu: &str, output: Output) -> Result<bool, Error> {
    let (client, _) = target.connect().await?;
    let fleet = Fleet::read(&client).await?;
    let explained = explained(&fleet, gpu)?;
    output.print(&explained, text)?;
    Ok(match explained.gpu.state {
        State::Unhealthy | State::Refused | State::Withheld => false,
        State::InUse | State::Degraded | State::Free => true,
    })
}

/// PCI addresses may be written without the domain, as `lspci` does.
fn is(gpu: &GPUStatus, address: &str) -> bool {
    gpu.address == address || gpu.address.strip_prefix("0000:") == Some(address)
}

pub fn explained(fleet: &Fleet, wanted: &str) -> Result<Explained, Error> {
    let (node, address) = match wanted.split_once('/') {
        Some((node, address)) => (Some(node), address),
        None => (None, wanted),
    };
    let address = address.to_ascii_lowercase();
    let mut found: Vec<(&GPUNode, &GPUStatus)> = Vec::new();
    for gpu_node in fleet.gpu_nodes.iter().filter(|gpu_node| node.is_none_or(|node| gpu_node.name_any() == node)) {
        let agent = gpu_node.status.as_ref().and_then(|status| status.agent.as_ref());
        let gpus = agent.into_iter().flat_map(|agent| &agent.gpus);
        found.extend(gpus.filter(|gpu| is(gpu, &address)).map(|gpu| (gpu_node, gpu)));
    }
    match found.as_slice() {
        [] => Err(Error::NoGpu { wanted: wanted.to_owned() }),
        [(node, gpu)] => Ok(of(node, gpu)),
        many => {
            let nodes = many.iter().map(|(node, _)| node.name_any()).collect();
            Err(Error::ManyGpus { address, nodes })
        }
    }
}

fn of(node: &GPUNode, gpu: &GPUStatus) -> Explained {
    let operator = node.status.as_ref().and_then(|status| status.operator.clone()).unwrap_or_default();
    let mut ailments = gpu.ailments.clone();
    ailments.sort_by_key(|ailment| ailment.severity);
    Explained {
        gpu: of_gpu(&node.name_any(), gpu, &operator.users),
        companions: gpu.companions.clone(),
        obstacles: gpu.obstacles.clone(),
        ailments: ailments.iter().map(|ailment| format!("{}: {}", ailment.reason, ailment.message)).collect(),
    }
}

pub fn text(explained: &Explained) -> String {
    let Explained { gpu, companions, obstacles, ailments } = explained;
    let (style, state) = match gpu.state {
        State::Unhealthy => (BAD, "is unhealthy"),
        State::Refused => (BAD, "is not in the mode asked for"),
        State::InUse => (PLAIN, "is in use"),
        State::Withheld => (WARN, "is not given out"),
        State::Degraded => (WARN, "is free, and not at its best"),
        State::Free => (GOOD, "is free"),
    };
    let name = format!("{}/{}", gpu.node, gpu.address);
    let mut text = format!("{} {} {}\n", paint(STRONG, &name), gpu.model, paint(style, state));
    let mut said: Vec<&str> = ailments.iter().map(String::as_str).collect();
    if !gpu.message.is_empty() && !said.contains(&gpu.message.as_str()) {
        said.insert(0, &gpu.message);
    }
    for message in said {
        let _ = writeln!(text, "\n{}", indented(message));
    }
    let users = |users: &[User]| users.iter().map(User::told).collect::<Vec<_>>().join(", ");
    let companions: Vec<String> = companions
        .iter()
        .map(|function| format!("{} ({})", function.address, function.driver.as_deref().unwrap_or("no driver")))
        .collect();
    let facts = [
        ("mode", gpu.mode.map(|mode| mode.to_string())),
        ("driver", gpu.driver.clone()),
        ("id", Some(gpu.id.clone())),
        ("group", gpu.iommu_group.map(|group| group.to_string())),
        ("numa", gpu.numa_node.map(|node| node.to_string())),
        ("with it", Some(companions.join(", "))),
        ("offered", gpu.resource.clone()),
        ("user", Some(users(&gpu.users))),
    ];
    text.push('\n');
    for (what, fact) in facts {
        let Some(fact) = fact.filter(|fact| !fact.is_empty()) else { continue };
        let _ = writeln!(text, "  {} {fact}", paint(FAINT, &format!("{what:<8}")));
    }
    for vgpu in &gpu.vgpus {
        let user = if vgpu.users.is_empty() { "free".to_owned() } else { users(&vgpu.users) };
        let _ = writeln!(text, "  {} {} {}: {user}", paint(FAINT, "vGPU    "), vgpu.id, vgpu.kind);
    }
    text.push('\n');
    for mode in WorkloadMode::ALL.into_iter().filter(|mode| gpu.mode != Some(*mode)) {
        let obstacle = obstacles.iter().find(|obstacle| obstacle.mode == mode);
        let _ = match obstacle {
            None => writeln!(text, "  {mode}: nothing is known that forbids it"),
            Some(obstacle) => {
                let why = wrapped(&format!("{}: {}", obstacle.reason, obstacle.message), 4, 92);
                writeln!(text, "  {mode}: {}\n{why}", paint(WARN, "not possible"))
            }
        };
    }
    text
}
