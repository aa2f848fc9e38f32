use vfio::{observe, testing::Machine};

use super::*;

const GPU: &str = "0000:18:00.0";

/// One GPU on vfio-pci as it should be, with what a test adds to its description.
fn machine(more: &str) -> Machine {
    Machine::from_yaml(&format!(
        "kernel: 6.8.0-45-generic\nos: ubuntu 24.04\niommufd: true\nfunctions:\n  \"{GPU}\": {{ ids: \"10de:1eb8\", class: \"030200\", driver: vfio-pci, group: 7, reset: \"flr bus\"{more} }}\n"
    ))
}

fn gpu() -> PciAddress {
    GPU.parse().unwrap()
}

fn reasons(ailments: &[Ailment]) -> Vec<&'static str> {
    ailments.iter().map(Ailment::reason).collect()
}

fn seen(machine: &Machine) -> Vec<Ailment> {
    let inventory = observe(machine);
    at_sight(&inventory, &inventory.gpu(gpu()).unwrap())
}

#[test]
fn a_gpu_that_is_well_has_nothing() {
    let well = machine(", link: [\"16.0 GT/s x16\", \"16.0 GT/s x16\"], aer: [3, 0, 0], power: D3hot");
    assert_eq!(seen(&well), []);
}

#[test]
fn what_fails_a_vm_makes_a_gpu_unhealthy_and_what_slows_it_does_not() {
    for (more, reason, severity) in [
        (", fell_off: true", "FellOff", Severity::Unhealthy),
        (", link: [\"16.0 GT/s x8\", \"16.0 GT/s x16\"]", "FewerLanes", Severity::Degraded),
        (", power: D3cold", "Asleep", Severity::Degraded),
    ] {
        let ailments = seen(&machine(more));
        assert_eq!(reasons(&ailments), [reason], "{more}");
        assert_eq!(ailments[0].severity(), severity, "{more}");
        assert_eq!(unfit(&ailments).is_some(), severity == Severity::Unhealthy, "{more}");
        assert!(ailments[0].to_string().contains(GPU), "{}", ailments[0]);
    }
}

#[test]
fn a_missing_node_is_named_until_it_is_back() {
    let machine = machine("");
    let inventory = observe(&machine);
    let device = inventory.gpu(gpu()).unwrap().primary.vfio_dev.clone().unwrap();
    for (path, reason) in
        [("/dev/vfio/7".to_owned(), "NoGroupNode"), (format!("/dev/vfio/devices/{device}"), "NoDeviceNode")]
    {
        machine.remove(&path);
        let ailments = seen(&machine);
        assert_eq!(reasons(&ailments), [reason]);
        assert!(unfit(&ailments).is_some_and(|ailment| ailment.to_string().contains(&path)), "{ailments:?}");
        machine.write(&path, "char 240:7");
        assert_eq!(seen(&machine), []);
    }
}

#[test]
fn a_gpu_without_a_reset_is_told_on_kernels_that_say_so() {
    for (kernel, expected) in [("6.8.0-45-generic", &["NoReset"][..]), ("5.4.0-122-generic", &[])] {
        let text = format!(
            "kernel: {kernel}\nos: ubuntu 24.04\nfunctions:\n  \"{GPU}\": {{ ids: \"10de:1eb8\", class: \"030200\", driver: vfio-pci, group: 7 }}\n"
        );
        assert_eq!(reasons(&seen(&Machine::from_yaml(&text))), expected, "{kernel}");
    }
}

/// Looks at a GPU again and again.
struct Looks {
    watch: Watch,
    start: Instant,
}

impl Looks {
    fn new() -> Self {
        Self { watch: Watch::default(), start: Instant::now() }
    }

    fn at(&mut self, second: u64, more: &str, in_use: bool) -> Vec<&'static str> {
        let now = self.start + Duration::from_secs(second);
        let ailments = self.watch.examine(&observe(&machine(more)), |_| in_use, now);
        ailments.get(&gpu()).map(|ailments| reasons(ailments)).unwrap_or_default()
    }
}

#[test]
fn errors_from_before_the_first_look_are_no_news() {
    let mut looks = Looks::new();
    assert_eq!(looks.at(0, ", aer: [900, 7, 2]", false), [] as [&str; 0]);
    assert_eq!(looks.at(30, ", aer: [950, 7, 2]", false), [] as [&str; 0]);
}

#[test]
fn counters_that_cannot_be_read_for_once_are_not_taken_for_zero() {
    let mut looks = Looks::new();
    looks.at(0, ", aer: [900, 7, 2]", false);
    looks.at(30, "", false);
    assert_eq!(looks.at(60, ", aer: [900, 7, 2]", false), [] as [&str; 0]);
}

#[test]
fn a_gpu_that_cannot_be_read_is_unhealthy_and_nothing_else_is_said_of_it() {
    let mut inventory = observe(&machine(", power: D3cold"));
    inventory.functions.get_mut(&gpu()).unwrap().late = true;
    inventory.functions.get_mut(&gpu()).unwrap().reset_methods.clear();
    let ailments = at_sight(&inventory, &inventory.gpu(gpu()).unwrap());
    assert_eq!(reasons(&ailments), ["Silent"]);
    assert!(unfit(&ailments).is_some());
}

#[test]
fn a_gpu_that_a_vm_starts_with_may_be_silent_for_one_look() {
    let mut inventory = observe(&machine(""));
    inventory.functions.get_mut(&gpu()).unwrap().late = true;
    for (in_use, expected) in [(true, [false, true, true]), (false, [true, true, true])] {
        let mut watch = Watch::default();
        let silent = expected.map(|_| !watch.examine(&inventory, |_| in_use, Instant::now()).is_empty());
        assert_eq!(silent, expected);
    }
}

#[test]
fn a_lost_transaction_is_told_and_a_fatal_error_withdraws_for_a_while() {
    let mut looks = Looks::new();
    looks.at(0, ", aer: [0, 0, 0]", false);
    assert_eq!(looks.at(30, ", aer: [0, 1, 0]", false), ["NonfatalErrors"]);
    assert_eq!(looks.at(60, ", aer: [0, 1, 1]", false), ["FatalErrors", "NonfatalErrors"]);
    assert_eq!(looks.at(59 + AFTER_FATAL.as_secs(), ", aer: [0, 1, 1]", false), ["FatalErrors", "NonfatalErrors"]);
    assert_eq!(looks.at(60 + AFTER_FATAL.as_secs(), ", aer: [0, 1, 1]", false), ["NonfatalErrors"]);
}

#[test]
fn another_card_in_the_same_place_begins_anew() {
    let mut looks = Looks::new();
    looks.at(0, ", aer: [0, 0, 0]", false);
    looks.at(30, ", aer: [0, 1, 1]", false);
    let other = machine(", aer: [0, 5, 5]");
    other.write(&format!("/sys/bus/pci/devices/{GPU}/device"), "0x1eb9\n");
    assert_eq!(looks.watch.examine(&observe(&other), |_| false, looks.start), Ailments::new());
}

#[test]
fn a_slow_link_is_told_only_of_a_gpu_that_had_work_and_was_never_fast() {
    let (slow, fast) =
        (", link: [\"2.5 GT/s x16\", \"16.0 GT/s x16\"]", ", link: [\"16.0 GT/s x16\", \"16.0 GT/s x16\"]");
    let many = u64::from(SLOW_LOOKS);
    let mut idle = Looks::new();
    assert!((0..2 * many).all(|look| idle.at(look, slow, false).is_empty()));
    let mut busy = Looks::new();
    assert!((1..many).all(|look| busy.at(look, slow, true).is_empty()));
    assert_eq!(busy.at(many, slow, true), ["SlowLink"]);
    assert_eq!(busy.at(many + 1, fast, true), [] as [&str; 0]);
    assert!((0..2 * many).all(|look| busy.at(look, slow, true).is_empty()), "it can be fast");
}
