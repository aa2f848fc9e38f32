use crds::v1alpha1::{Advertise, GPUNodeSpec, Refusal};
use prometheus_client::encoding::text::encode;
use vfio::{Inventory, PciAddress, observe, testing::Machine, vgpu::Framework};

use super::{
    super::{
        device_plugin::{Offer, PluginState},
        health::Ailment,
        offer,
        vgpu_manager::GpuVgpus,
        work::Change,
    },
    *,
};
use crds::WorkloadMode;

struct World {
    registry: Registry,
    metrics: Metrics,
    wish: Wish,
    observation: Observation,
    plugins: States,
    users: Vec<GPUUser>,
}

impl World {
    /// Eight T4 on vfio-pci, asked to be there.
    fn new() -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry, "n1");
        let spec = GPUNodeSpec {
            mode: Some(WorkloadMode::VmPassthrough),
            advertise: Advertise::Offered,
            ..GPUNodeSpec::default()
        };
        let observation = Observation { inventory: eight(), ..Observation::default() };
        Self { registry, metrics, wish: Wish { spec }, observation, plugins: States::new(), users: Vec::new() }
    }

    /// After another round, what a scrape sees.
    fn says(&mut self) -> String {
        self.metrics.count(&self.observation, Duration::from_millis(20));
        let offered = offer::offer(&self.wish, &self.observation, &Offer::new());
        let round =
            Round { wish: &self.wish, observation: &self.observation, offered: &offered, plugins: &self.plugins };
        self.metrics.show(&round, self.users.iter());
        self.scrape()
    }

    fn scrape(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("encodable");
        text
    }

    fn put_on_bus(&mut self, gpu: PciAddress) {
        let function = self.observation.inventory.functions.get_mut(&gpu).expect("a GPU");
        let state = |speed, width| vfio::LinkState { speed: Some(speed), width };
        function.link = Some(vfio::Link { current: state(2500, 8), maximum: state(16_000, 16) });
        function.aer = Some(vfio::Aer { correctable: 7, nonfatal: 1, fatal: 0 });
        function.power_state = Some("D3hot".to_owned());
    }

    fn gpu(&self) -> PciAddress {
        self.observation.inventory.gpus()[0].primary.address
    }
}

fn eight() -> Inventory {
    observe(&Machine::described("eight-t4"))
}

fn has(text: &str, line: &str) {
    assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
}

#[test]
fn a_gpu_is_told_with_its_product_driver_mode_and_the_name_that_it_is_offered_under() {
    let mut world = World::new();
    let (gpu, text) = (world.gpu(), world.says());
    has(
        &text,
        &format!(
            r#"gpuvirt_gpu_info{{node="n1",gpu="{gpu}",id="10de:1eb8",product="TU104GL [Tesla T4]",driver="vfio-pci",mode="vm-passthrough",resource="nvidia.com/TU104GL_TESLA_T4"}} 1"#
        ),
    );
    for line in ["gpuvirt_gpus{node=\"n1\"} 8", "gpuvirt_gpus_in_use{node=\"n1\"} 0"] {
        has(&text, line);
    }
    for flag in ["in_use", "withheld"] {
        has(&text, &format!(r#"gpuvirt_gpu_{flag}{{node="n1",gpu="{gpu}"}} 0"#));
    }
    has(&text, &format!(r#"gpuvirt_gpu_healthy{{node="n1",gpu="{gpu}"}} 1"#));
}

#[test]
fn the_series_of_a_gpu_that_was_taken_out_are_gone() {
    let mut world = World::new();
    let gpu = world.gpu();
    world.users = vec![GPUUser { pod: "vms/p".into(), vmi: Some("vms/a".into()), gpus: vec![gpu.to_string()] }];
    assert!(world.says().contains(&gpu.to_string()));
    world.observation.inventory.functions.remove(&gpu);
    world.users.clear();
    let text = world.says();
    assert!(!text.contains(&gpu.to_string()), "{text}");
    has(&text, "gpuvirt_gpus{node=\"n1\"} 7");
}

#[test]
fn what_a_gpu_is_like_on_the_bus_is_told_in_base_units_and_renewed_by_a_glance() {
    let mut world = World::new();
    let gpu = world.gpu();
    world.put_on_bus(gpu);
    let text = world.says();
    for (name, value) in [
        ("link_lanes", "8"),
        ("link_lanes_max", "16"),
        ("link_transfers_per_second", "2500000000.0"),
        ("link_transfers_per_second_max", "16000000000.0"),
    ] {
        has(&text, &format!(r#"gpuvirt_gpu_{name}{{node="n1",gpu="{gpu}"}} {value}"#));
    }
    has(&text, &format!(r#"gpuvirt_gpu_pcie_errors_total{{node="n1",gpu="{gpu}",severity="correctable"}} 7"#));
    has(&text, &format!(r#"gpuvirt_gpu_power_state{{node="n1",gpu="{gpu}",state="D3hot"}} 1"#));
    let mut bus = super::super::health::bus(&world.observation.inventory);
    let on_bus = bus.get_mut(&gpu).expect("a GPU");
    on_bus.aer = Some(vfio::Aer { correctable: 9, nonfatal: 1, fatal: 0 });
    on_bus.power_state = Some("something new".to_owned());
    world.metrics.glanced(&bus);
    let text = world.scrape();
    has(&text, &format!(r#"gpuvirt_gpu_pcie_errors_total{{node="n1",gpu="{gpu}",severity="correctable"}} 9"#));
    has(&text, &format!(r#"gpuvirt_gpu_power_state{{node="n1",gpu="{gpu}",state="unknown"}} 1"#));
    assert!(!text.contains("D3hot"), "{text}");
}

#[test]
fn a_vm_is_named_as_kubevirts_own_metrics_name_it_and_a_pod_by_uid_is_not_named() {
    let mut world = World::new();
    let gpu = world.gpu();
    let holder = vfio::Holder {
        pid: 4711,
        command: "qemu".into(),
        path: "/dev/vfio/1".into(),
        pod: Some("0f1c".into()),
        vm: Some("vms/a".into()),
    };
    world.observation.holders = [(gpu, vec![holder])].into();
    let text = world.says();
    has(&text, &format!(r#"gpuvirt_gpu_vm_info{{node="n1",gpu="{gpu}",namespace="vms",name="a"}} 1"#));
    has(&text, &format!(r#"gpuvirt_gpu_in_use{{node="n1",gpu="{gpu}"}} 1"#));
    assert!(!text.contains("0f1c"), "a UID is no name: {text}");
    world.users = vec![GPUUser { pod: "vms/p".into(), vmi: Some("vms/a".into()), gpus: vec![gpu.to_string()] }];
    let text = world.says();
    has(&text, &format!(r#"gpuvirt_gpu_pod_info{{node="n1",gpu="{gpu}",namespace="vms",pod="p"}} 1"#));
    assert_eq!(text.lines().filter(|line| line.starts_with("gpuvirt_gpu_vm_info{")).count(), 1, "told twice: {text}");
}

#[test]
fn a_refusal_counts_once_however_often_it_is_looked_at_and_again_when_it_comes_back() {
    let mut world = World::new();
    let gpu = world.gpu();
    let refused = |reason: &str| Refusal { reason: reason.to_owned(), message: String::new() };
    world.observation.refusals = [(gpu, refused("InUse"))].into();
    world.says();
    let text = world.says();
    has(&text, r#"gpuvirt_refusals_total{node="n1",reason="InUse"} 1"#);
    has(&text, &format!(r#"gpuvirt_gpu_refused{{node="n1",gpu="{gpu}",reason="InUse"}} 1"#));
    world.observation.refusals.clear();
    assert!(!world.says().contains("gpuvirt_gpu_refused{"));
    world.observation.refusals = [(gpu, refused("InUse"))].into();
    has(&world.says(), r#"gpuvirt_refusals_total{node="n1",reason="InUse"} 2"#);
}

#[test]
fn each_change_of_drivers_counts_with_its_time_and_how_it_ended() {
    let mut world = World::new();
    let change = |binding, millis, done| Change { binding, took: Duration::from_millis(millis), done };
    world.observation.changes = vec![change(Binding::Vfio, 30, true), change(Binding::Host, 3000, false)];
    let text = world.says();
    has(&text, r#"gpuvirt_driver_change_duration_seconds_bucket{node="n1",le="0.05",to="vfio",result="done"} 1"#);
    has(&text, r#"gpuvirt_driver_change_duration_seconds_sum{node="n1",to="host",result="failed"} 3.0"#);
}

#[test]
fn ailments_are_told_with_their_severity_and_only_the_grave_ones_make_a_gpu_unhealthy() {
    let mut world = World::new();
    let gpu = world.gpu();
    world.observation.ailments = [(gpu, vec![Ailment::NoReset { gpu }])].into();
    let text = world.says();
    has(&text, &format!(r#"gpuvirt_gpu_ailment{{node="n1",gpu="{gpu}",reason="NoReset",severity="Degraded"}} 1"#));
    has(&text, &format!(r#"gpuvirt_gpu_healthy{{node="n1",gpu="{gpu}"}} 1"#));
    world.observation.ailments = [(gpu, vec![Ailment::FellOff { gpu }])].into();
    let text = world.says();
    has(&text, &format!(r#"gpuvirt_gpu_healthy{{node="n1",gpu="{gpu}"}} 0"#));
    has(&text, "gpuvirt_gpus_unhealthy{node=\"n1\"} 1");
}

#[test]
fn a_vm_node_has_the_peers_names_and_a_container_node_leaves_them_to_its_exporter() {
    let mut world = World::new();
    let offered = offer::offer(&world.wish, &world.observation, &Offer::new());
    let name = offered.offer.keys().next().expect("an offer").clone();
    let state = PluginState { devices: 8, healthy: 8, registered: true, message: String::new() };
    world.plugins = [(name.clone(), state.clone())].into();
    let text = world.says();
    for (name, value) in [
        ("node_driver_ready", 1),
        ("node_plugin_ready", 1),
        ("node_driver_validation", 1),
        ("node_device_plugin_devices_total", 8),
        ("nvidia_pci_devices_total", 8),
    ] {
        has(&text, &format!("gpu_operator_{name}{{node=\"n1\"}} {value}"));
    }
    assert!(!text.contains("toolkit_ready") && !text.contains("cuda_ready"), "VM nodes have neither: {text}");
    world.plugins = [(name, PluginState { registered: false, ..state })].into();
    has(&world.says(), "gpu_operator_node_plugin_ready{node=\"n1\"} 0");
    world.wish.spec.mode = Some(WorkloadMode::Container);
    assert!(!world.says().contains("gpu_operator_"));
}

/// What is documented is what is served, name by name and label by label.
#[test]
fn every_metric_that_is_served_is_described_with_its_labels() {
    let mut world = World::new();
    let gpu = world.gpu();
    world.put_on_bus(gpu);
    world.observation.ailments = [(gpu, vec![Ailment::NoReset { gpu }])].into();
    world.observation.refusals = [(gpu, Refusal { reason: "InUse".to_owned(), message: String::new() })].into();
    world.users = vec![GPUUser { pod: "vms/p".into(), vmi: Some("vms/a".into()), gpus: vec![gpu.to_string()] }];
    world.observation.changes = vec![Change { binding: Binding::Vfio, took: Duration::from_millis(1), done: true }];
    let vgpu = vfio::vgpu::Vgpu {
        id: "aa618089-8b16-4d01-a136-25a0f3c73123".to_owned(),
        name: Some("GRID T4-4Q".to_owned()),
        parent: gpu,
        iommu_group: None,
        vfio_dev: None,
        mediated: true,
    };
    let made = GpuVgpus { framework: Framework::Mdev, instances: vec![vgpu], holders: BTreeMap::new() };
    world.observation.vgpus.gpus = [(gpu, made)].into();
    let offered = offer::offer(&world.wish, &world.observation, &Offer::new());
    let state = PluginState { devices: 8, healthy: 8, registered: true, message: String::new() };
    world.plugins = offered.offer.keys().map(|name| (name.clone(), state.clone())).collect();
    let text = world.says();
    crate::telemetry::check_described(&text, &ALL.concat());
}
