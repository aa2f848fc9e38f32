//! vGPUs on a real kernel, on both frameworks: mediated devices of a GPU or of its virtual functions, and types of virtual
//! functions.

use crds::{
    WorkloadMode,
    v1alpha1::{Advertise, GPUNodeSpec, GPUVgpus, VgpuCount, VgpuLayout},
};

use super::{Answer, Plain, WITH_VFS, agent::start_agent, plain, plain_with};

/// A T4 makes its mediated devices itself.
const T4: &str = "0000:43:00.0";
const FIRST_VF: &str = "0000:02:00.1";

#[derive(Clone, Copy)]
enum Framework {
    Mdev,
    Vendor,
}

/// The GPU with virtual functions, its types of 24 or 12 GB of which it takes two, and a smaller one.
struct Board {
    gpu: &'static str,
    big: &'static str,
    small: &'static str,
}

const BOARDS: [(Framework, Board); 2] = [
    (Framework::Vendor, Board { gpu: WITH_VFS, big: "L40S-24Q", small: "L40S-8Q" }),
    (Framework::Mdev, Board { gpu: WITH_VFS, big: "A10-12Q", small: "A10-6Q" }),
];

impl Plain {
    fn load_vgpu(&self, framework: Framework) {
        let name = match framework {
            Framework::Mdev => "mdev",
            Framework::Vendor => "vendor",
        };
        self.load_nvidia();
        self.run(&format!(
            "d=/sys/bus/pci/devices/{WITH_VFS}; [ $(basename $(readlink $d/driver)) = nvidia ] || {{ echo nvidia >$d/driver_override; echo {WITH_VFS} >$d/driver/unbind; echo {WITH_VFS} >/sys/bus/pci/drivers_probe; echo >$d/driver_override; }}"
        ));
        self.run(&format!("modprobe nvidia_vgpu_vfio framework={name}"));
    }

    fn vgpus(&self, gpu: &str, layout: &str) -> Answer {
        self.ask(&format!("switch vgpus {gpu} {layout}"))
    }

    /// As [`Self::vgpus`], which must reach it; what is there then, one `ID TYPE on PARENT` each.
    fn made(&self, gpu: &str, layout: &str) -> Vec<String> {
        let answer = self.vgpus(gpu, layout);
        assert_eq!(answer.code, 0, "{answer:?}");
        vgpus(&answer)
    }

    /// What the kernel shows, read past the product: mediated devices, and the numbers of virtual functions that are vGPUs.
    fn shown(&self) -> Vec<String> {
        let said = self.run(
            "ls /sys/bus/mdev/devices 2>/dev/null; grep -vx 0 /sys/bus/pci/devices/*/nvidia/current_vgpu_type /dev/null 2>/dev/null || true",
        );
        said.lines().map(str::to_owned).collect()
    }

    /// "A VM is running": the vGPU's group is open. Its pid.
    fn holds(&self, vgpu: &str) -> String {
        let id = id(vgpu);
        let group = self.run(&format!(
            "basename $(readlink /sys/bus/mdev/devices/{id}/iommu_group || readlink /sys/bus/pci/devices/{id}/iommu_group)"
        ));
        self.start(&format!("hold {} {id} 1000", group.trim()))
    }

    fn refused(&self, gpu: &str, layout: &str, words: &[&str]) {
        let answer = self.vgpus(gpu, layout);
        assert_eq!(answer.code, 2, "{answer:?}");
        for word in words {
            assert!(answer.said.contains(word), "{word}: {answer:?}");
        }
    }
}

fn vgpus(answer: &Answer) -> Vec<String> {
    answer.said.lines().filter_map(|line| line.strip_prefix("vgpu ")).map(str::to_owned).collect()
}

fn id(vgpu: &str) -> &str {
    vgpu.split(' ').next().unwrap_or_default()
}

/// On both frameworks, each on a machine as after a boot.
fn on_both(test: impl Fn(&Plain, &Board) + Send + Sync) {
    plain(|plain| {
        for (framework, board) in &BOARDS {
            plain.load_vgpu(*framework);
            test(plain, board);
            plain.clean();
        }
    });
}

#[test]
fn virtual_functions_and_vgpus_are_made_and_a_second_time_nothing_is_done() {
    on_both(|plain, board| {
        let Board { gpu, big, .. } = board;
        let made = plain.made(gpu, &format!("{big}=2"));
        assert_eq!(made.len(), 2, "{made:?}");
        assert_eq!(plain.shown().len(), 2);
        assert_eq!(plain.run(&format!("cat /sys/bus/pci/devices/{gpu}/sriov_numvfs")).trim(), "4");
        let again = plain.vgpus(gpu, &format!("{big}=2"));
        assert!(again.said.contains("0 steps"), "{again:?}");
        assert_eq!(vgpus(&again), made);
        eprintln!("{gpu} {big}: {} ms for a second look", again.took.as_millis());
    });
}

#[test]
fn what_a_vm_has_stays_while_the_rest_changes_and_its_removal_is_refused_by_its_name() {
    on_both(|plain, board| {
        let Board { gpu, big, small } = board;
        let made = plain.made(gpu, &format!("{big}=2"));
        let vm = plain.holds(&made[1]);
        let changed = plain.made(gpu, &format!("{big}=1"));
        assert_eq!(changed, [made[1].clone()], "the free one went, the other stayed as it is");
        plain.refused(gpu, &format!("{small}=1"), &["VgpuInUse", gpu, id(&made[1]), &vm, "hold", big]);
        assert_eq!(plain.shown().len(), 1, "nothing was touched");
        // It holds the size, too.
        plain.refused(gpu, &format!("{big}=1 {small}=1"), &["FramebufferSizesDiffer", small, big]);
        plain.end_process(&vm);
        assert_eq!(plain.made(gpu, &format!("{small}=3")).len(), 3);
    });
}

#[test]
fn a_full_gpu_and_a_type_that_it_does_not_have_are_refused_with_what_it_has() {
    on_both(|plain, board| {
        let Board { gpu, big, .. } = board;
        plain.made(gpu, &format!("{big}=2"));
        plain.refused(gpu, &format!("{big}=3"), &["GpuFull", gpu, big]);
        assert_eq!(plain.shown().len(), 2, "what was there stays");
        plain.made(gpu, "");
        plain.refused(gpu, "M60-0Q=1", &["UnknownVgpuType", "M60-0Q", big]);
    });
}

#[test]
fn what_the_kernel_answers_is_named_and_the_next_try_goes_on() {
    on_both(|plain, board| {
        let Board { gpu, big, .. } = board;
        plain.run("echo 16 >/sys/module/nvidia/parameters/vfs_error");
        plain.refused(gpu, &format!("{big}=1"), &["Device or resource busy", "make 4 virtual functions"]);
        plain.run("echo 0 >/sys/module/nvidia/parameters/vfs_error");
        for (number, words) in [("16", "resource busy"), ("22", "Invalid argument"), ("28", "No space left")] {
            plain.run(&format!("echo {number} >/sys/module/nvidia_vgpu_vfio/parameters/error"));
            plain.refused(gpu, &format!("{big}=1"), &[words, big]);
            assert_eq!(plain.shown(), [] as [&str; 0]);
        }
        plain.run("echo 0 >/sys/module/nvidia_vgpu_vfio/parameters/error");
        assert_eq!(plain.made(gpu, &format!("{big}=1")).len(), 1);
    });
}

#[test]
fn lost_virtual_functions_come_back_with_the_same_vgpus() {
    on_both(|plain, board| {
        let Board { gpu, big, .. } = board;
        let made = plain.made(gpu, &format!("{big}=2"));
        plain.run(&format!("echo 0 >/sys/bus/pci/devices/{gpu}/sriov_numvfs"));
        assert_eq!(plain.shown(), [] as [&str; 0]);
        assert_eq!(plain.made(gpu, &format!("{big}=2")), made);
    });
}

#[test]
fn a_gpu_in_heterogeneous_mode_takes_two_sizes() {
    on_both(|plain, board| {
        let Board { gpu, big, small } = board;
        plain.run("echo Y >/sys/module/nvidia_vgpu_vfio/parameters/heterogeneous");
        let made = plain.made(gpu, &format!("{big}=1 {small}=2"));
        assert_eq!(made.len(), 3, "{made:?}");
    });
}

#[test]
fn a_gpu_without_virtual_functions_has_many_mediated_devices() {
    plain(|plain| {
        plain.load_vgpu(Framework::Mdev);
        let made = plain.made(T4, "T4-4Q=3 T4-4C=1");
        assert!(made.len() == 4 && made.iter().all(|vgpu| vgpu.ends_with(T4)), "{made:?}");
        plain.refused(T4, "T4-4Q=5", &["GpuFull", T4]);
        let vm = plain.holds(&made[3]);
        assert!(plain.made(T4, "T4-4Q=3 T4-4C=1").contains(&made[3]));
        plain.end_process(&vm);
    });
}

#[test]
fn the_driver_without_the_vgpu_module_makes_none_and_says_so() {
    plain(|plain| {
        plain.load_vgpu(Framework::Vendor);
        plain.run("rmmod nvidia_vgpu_vfio");
        plain.refused(WITH_VFS, "L40S-24Q=1", &["NoVgpuDriver", "nvidia_vgpu_vfio"]);
        assert!(!plain.drivers().contains_key(FIRST_VF), "and no virtual function was made");
    });
}

/// The last order of an agent, as it leaves it for the next boot.
fn order() -> String {
    let instances = |counts: &[(&str, i32)]| {
        counts.iter().map(|(kind, count)| VgpuCount { kind: (*kind).to_owned(), count: *count }).collect()
    };
    let gpus = vec![
        GPUVgpus { address: WITH_VFS.to_owned(), instances: instances(&[("A10-12Q", 2)]) },
        GPUVgpus { address: T4.to_owned(), instances: instances(&[("T4-2Q", 3)]) },
    ];
    let spec = GPUNodeSpec {
        mode: Some(WorkloadMode::VmVgpu),
        vgpu: Some(VgpuLayout { name: "test".to_owned(), gpus }),
        advertise: Advertise::Offered,
        epoch: 3,
        ..GPUNodeSpec::default()
    };
    serde_json::to_string(&spec).expect("an order has a JSON form")
}

#[test]
fn a_second_boot_offers_the_same_vgpus_and_not_before_all_are_there_with_the_api_server_away() {
    plain_with("intel_iommu=on iommu=pt", |plain| {
        let order = order();
        plain.run(&format!("mkdir -p /var/lib/gpuvirt; echo '{order}' >/var/lib/gpuvirt/desired.json"));
        let mut boots = Vec::new();
        for boot in 0..2 {
            if boot > 0 {
                plain.reboot();
            }
            start_agent(plain);
            // The driver comes after the agent, as its pod does.
            plain.load_vgpu(Framework::Mdev);
            plain.until("grep -q offered.*A10 /tmp/kubelet.log && grep -q offered.*T4-2Q /tmp/kubelet.log");
            let log = plain.run("cat /tmp/kubelet.log");
            let first = |name: &str| {
                let mut lines = log.lines().filter(|line| line.starts_with(&format!("offered {name}:")));
                lines.next().unwrap_or_else(|| panic!("{name}: {log}")).to_owned()
            };
            let made = plain.run("ls /sys/bus/mdev/devices");
            let made: Vec<&str> = made.split_whitespace().collect();
            assert_eq!(made.len(), 5, "{made:?}");
            let offered = [first("nvidia.com/NVIDIA_A10-12Q"), first("nvidia.com/GRID_T4-2Q")].concat();
            assert!(made.iter().all(|uuid| offered.contains(uuid)), "registered before all were there: {log}");
            assert!(plain.run("ls /run/nvidia/validations").contains("vgpu-devices-ready"));
            eprintln!("{log}");
            boots.push(made.iter().map(|uuid| (*uuid).to_owned()).collect::<Vec<_>>());
        }
        assert_eq!(boots[0], boots[1]);
    });
}
