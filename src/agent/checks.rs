//! The checks of a node's vGPUs, as the peer's sandbox validator has them: whether a driver makes vGPUs, and whether those
//! that were asked for are there. Each is a condition, and while it holds a file that others wait for.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crds::{WorkloadMode, conditions::Verdict, v1alpha1::AgentFunction};
use vfio::{
    PciAddress,
    vgpu::{Framework, NoVgpu},
};

use super::{
    vfio_manager::Observation,
    vgpu_manager::Progress,
    wish::{Wish, addresses},
};

/// Where the peer's pods look.
pub const DIRECTORY: &str = "run/nvidia/validations";
/// All that [`Files`] writes there.
pub const FILES: [&str; 2] = ["vgpu-manager-ready", "vgpu-devices-ready"];
const NOBODY: &str = "no GPU is asked to have vGPUs";

/// A check and the file that says that it holds.
struct Check {
    verdict: Verdict,
    file: &'static str,
}

/// As conditions.
pub fn verdicts(wish: &Wish, observation: &Observation) -> Vec<Verdict> {
    checks(wish, observation).into_iter().map(|check| check.verdict).collect()
}

fn checks(wish: &Wish, observation: &Observation) -> [Check; 2] {
    let asked: Vec<PciAddress> = asked(wish, observation).collect();
    [
        Check { verdict: manager(observation, &asked), file: FILES[0] },
        Check { verdict: devices(observation, &asked), file: FILES[1] },
    ]
}

fn asked(wish: &Wish, observation: &Observation) -> impl Iterator<Item = PciAddress> {
    addresses(&observation.inventory).filter(|gpu| wish.mode(*gpu) == Some(WorkloadMode::VmVgpu))
}

/// Every GPU that is asked to have vGPUs is with a driver that makes them.
fn manager(observation: &Observation, asked: &[PciAddress]) -> Verdict {
    const NAME: &str = "VgpuManagerReady";
    if asked.is_empty() {
        return Verdict::yes(NAME, "NotAsked", NOBODY);
    }
    let without = |gpu: &PciAddress| match &observation.vgpus.gpus.get(gpu)?.framework {
        Framework::Mdev | Framework::VendorVfio | Framework::None(NoVgpu::VfsOff { .. }) => None,
        Framework::None(why) => Some(why),
    };
    let none: Vec<&NoVgpu> = asked.iter().filter_map(without).collect();
    match none.first() {
        None => Verdict::yes(NAME, "Ready", "the driver makes vGPUs on every GPU that is asked to have some"),
        Some(first) => {
            let all: Vec<String> = none.iter().map(ToString::to_string).collect();
            Verdict::no(NAME, first.reason(), all.join("; "))
        }
    }
}

/// Every GPU has its layout, and at least one has a vGPU.
fn devices(observation: &Observation, asked: &[PciAddress]) -> Verdict {
    const NAME: &str = "VgpuDevicesReady";
    if asked.is_empty() {
        return Verdict::yes(NAME, "NotAsked", NOBODY);
    }
    let open = asked.iter().filter_map(|gpu| match observation.vgpus.progress.get(gpu) {
        Some(Progress::Pending(why) | Progress::Failed(why)) => Some(why.message.clone()),
        Some(Progress::Done) | None => None,
    });
    let open: Vec<String> = open.collect();
    if !open.is_empty() {
        return Verdict::no(NAME, "NotReady", open.join("; "));
    }
    let count: usize = observation.vgpus.gpus.values().map(|gpu| gpu.instances.len()).sum();
    match count {
        0 => Verdict::no(NAME, "NoVgpus", "no GPU has a vGPU: set the label nvidia.com/vgpu.config to a layout"),
        _ => Verdict::yes(NAME, "Ready", format!("{count} vGPUs are as asked for")),
    }
}

/// The files, below the host's root.
pub struct Files {
    directory: PathBuf,
}

impl Files {
    pub fn below(host_root: &Path) -> Self {
        Self { directory: host_root.join(DIRECTORY) }
    }

    /// Makes the files of the checks that hold, and removes the others'. Without an order they stay as they are.
    pub fn keep(&self, wish: &Wish, observation: &Observation) {
        if wish.spec.mode.is_none() && wish.spec.gpus.is_empty() {
            return;
        }
        let wanted = wish.has(AgentFunction::SandboxValidator) && asked(wish, observation).next().is_some();
        for check in checks(wish, observation) {
            let path = self.directory.join(check.file);
            let done = match (wanted && check.verdict.holds, path.exists()) {
                (true, false) => self.write(&path),
                (false, true) => fs::remove_file(&path),
                (true, true) | (false, false) => Ok(()),
            };
            if let Err(error) = done {
                tracing::warn!(path = %path.display(), %error, "what waits for this file does not see the check's result");
            }
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        fs::write(path, "")
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::{GPUNodeSpec, Refusal};
    use vfio::{observe, testing::Machine};

    use super::{
        super::vgpu_manager::{GpuVgpus, Vgpus},
        *,
    };

    const A2: &str = "0000:08:00.0";

    /// An A2 with three vGPUs, asked to have them.
    fn world() -> (Wish, Observation) {
        let inventory = observe(&Machine::described("a2-sriov"));
        let gpu: PciAddress = A2.parse().unwrap();
        let instances = vfio::vgpu::vgpus(&inventory, gpu, &std::collections::BTreeMap::new());
        let found = GpuVgpus { framework: Framework::Mdev, instances, holders: std::collections::BTreeMap::new() };
        let vgpus = Vgpus { gpus: [(gpu, found)].into(), progress: [(gpu, Progress::Done)].into(), ..Vgpus::default() };
        let spec = GPUNodeSpec { mode: Some(WorkloadMode::VmVgpu), ..GPUNodeSpec::default() };
        (Wish { spec }, Observation { inventory, vgpus, ..Observation::default() })
    }

    fn held(wish: &Wish, observation: &Observation) -> Vec<(bool, String)> {
        verdicts(wish, observation).into_iter().map(|v| (v.holds, v.reason.to_string())).collect()
    }

    #[test]
    fn both_hold_on_a_node_with_its_vgpus_and_their_files_are_there() {
        let (wish, observation) = world();
        assert!(verdicts(&wish, &observation).iter().all(|verdict| verdict.holds));
        let host = tempfile::tempdir().unwrap();
        Files::below(host.path()).keep(&wish, &observation);
        for file in ["vgpu-manager-ready", "vgpu-devices-ready"] {
            assert!(host.path().join(DIRECTORY).join(file).exists(), "{file}");
        }
        let container = Wish { spec: GPUNodeSpec { mode: Some(WorkloadMode::Container), ..GPUNodeSpec::default() } };
        Files::below(host.path()).keep(&container, &observation);
        assert_eq!(fs::read_dir(host.path().join(DIRECTORY)).unwrap().count(), 0, "another mode has none");
    }

    #[test]
    fn a_driver_that_makes_none_fails_the_first_check_with_its_reason() {
        let (wish, mut observation) = world();
        let gpu: PciAddress = A2.parse().unwrap();
        let found = observation.vgpus.gpus.get_mut(&gpu).unwrap();
        found.framework = Framework::None(NoVgpu::NoVgpuDriver { gpu });
        assert_eq!(held(&wish, &observation)[0], (false, "NoVgpuDriver".to_owned()));
    }

    #[test]
    fn a_layout_that_is_not_there_fails_the_second_check_and_so_does_none_at_all() {
        let (wish, mut observation) = world();
        let gpu: PciAddress = A2.parse().unwrap();
        let why = Refusal { reason: "VgpuInUse".to_owned(), message: "a VM has it".to_owned() };
        observation.vgpus.progress.insert(gpu, Progress::Failed(why));
        let verdict = &verdicts(&wish, &observation)[1];
        assert!(!verdict.holds && verdict.message.contains("a VM has it"), "{}", verdict.message);
        let (wish, mut observation) = world();
        observation.vgpus.gpus.get_mut(&gpu).unwrap().instances.clear();
        assert_eq!(held(&wish, &observation)[1], (false, "NoVgpus".to_owned()));
    }

    #[test]
    fn the_validators_label_switches_the_files_off() {
        let (mut wish, observation) = world();
        wish.spec.disabled = vec![AgentFunction::SandboxValidator];
        let host = tempfile::tempdir().unwrap();
        Files::below(host.path()).keep(&wish, &observation);
        assert!(!host.path().join(DIRECTORY).exists());
    }
}
