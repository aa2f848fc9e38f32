//! What holds on every machine, not only on those that somebody has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use proptest::prelude::*;

use super::{View, at, drivers};
use crate::address::PciAddress;
use crate::described::Description;
use crate::execute::execute;
use crate::holders::holders;
use crate::inventory::{Inventory, observe};
use crate::journal::Journal;
use crate::kernel::{Kernel, KernelError};
use crate::plan::{Binding, Plan, Step, World, plan};
use crate::testing::{Machine, MemoryKernel};
use crate::verify::deviations;

/// At least; more with `PROPTEST_CASES`.
const CASES: u32 = 500;

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.max(CASES), ..default }
}

/// Ids, class and driver of what is plugged in.
const KINDS: [(&str, &str, &str); 6] = [
    ("10de:1eb1", "030000", "nvidia"),
    ("10de:2335", "030200", "nvidia"),
    ("10de:10f8", "040300", "snd_hda_intel"),
    ("10de:22a3", "068000", "nvidia-nvswitch"),
    ("8086:1593", "020000", "ice"),
    ("8086:347a", "060400", "pcieport"),
];

/// Places in [`KINDS`]; GPUs come before audio.
const AUDIO: usize = 2;
const SWITCH: usize = 3;
const NIC: usize = 4;

/// Who has a function at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Has {
    Nobody,
    Host,
    Vfio,
}

#[derive(Clone, Debug)]
struct Card {
    bus: u8,
    function: u8,
    kind: usize,
    has: Has,
    group: u8,
    held: bool,
    vf: bool,
}

impl Card {
    fn address(&self) -> PciAddress {
        at(&format!("0000:{:02x}:00.{}", self.bus, self.function))
    }

    /// Whether somebody has a node of it open: not every driver makes one.
    fn is_held(&self) -> bool {
        self.held && (self.has == Has::Vfio || (self.has == Has::Host && KINDS[self.kind].2 == "nvidia"))
    }
}

fn cards(vfio: bool) -> impl Strategy<Value = Vec<Card>> {
    let has = if vfio {
        prop_oneof![Just(Has::Nobody), Just(Has::Host), Just(Has::Vfio)].boxed()
    } else {
        prop_oneof![Just(Has::Nobody), Just(Has::Host)].boxed()
    };
    let card = (1u8..5, 0u8..3, 0..KINDS.len(), has, 1u8..6, prop::bool::weighted(0.2), prop::bool::weighted(0.1));
    let card =
        card.prop_map(|(bus, function, kind, has, group, held, vf)| Card { bus, function, kind, has, group, held, vf });
    prop::collection::vec(card, 1..9).prop_map(|mut cards| {
        let mut places = BTreeSet::new();
        cards.retain(|card| places.insert((card.bus, card.function)));
        cards
    })
}

fn yaml(cards: &[Card]) -> String {
    let mut functions = String::new();
    let mut holders = String::new();
    for card in cards {
        let Card { bus, function, kind, has, group, vf, .. } = card;
        let (ids, class, native) = KINDS[*kind];
        let address = card.address();
        let driver = match has {
            Has::Nobody => String::new(),
            Has::Host => format!("driver: {native}, "),
            Has::Vfio => "driver: vfio-pci, ".to_owned(),
        };
        let about = format!("ids: \"{ids}\", class: \"{class}\"");
        writeln!(functions, "  \"{address}\": {{ {about}, {driver}native: {native}, group: {group} }}").unwrap();
        if card.is_held() {
            let pid = 100 + u32::from(*bus) * 8 + u32::from(*function);
            writeln!(holders, "  - {{ pid: {pid}, command: python, open: \"{address}\" }}").unwrap();
        }
        if *vf && *kind < AUDIO {
            let place = format!("0000:{bus:02x}:01.{function}");
            let own = 100 + u32::from(*bus) * 8 + u32::from(*function);
            writeln!(functions, "  \"{place}\": {{ {about}, group: {own}, physfn: \"{address}\" }}").unwrap();
        }
    }
    let holders = if holders.is_empty() { "holders: []\n".to_owned() } else { format!("holders:\n{holders}") };
    format!(
        "kernel: 6.1.0\nos: debian 12\ndrivers: [nvidia, snd_hda_intel]\nmodules: [vfio-pci]\n{holders}functions:\n{functions}"
    )
}

fn gpus(inventory: &Inventory) -> Vec<PciAddress> {
    inventory.gpus().iter().map(|gpu| gpu.primary.address).collect()
}

/// A kernel whose user is killed at one of its calls, right before or right after the kernel did it.
struct Killed {
    kernel: MemoryKernel,
    calls: usize,
    done: bool,
}

impl Killed {
    fn call(&mut self, act: impl FnOnce(&mut MemoryKernel) -> Result<(), KernelError>) -> Result<(), KernelError> {
        let dead = || Err(KernelError::Child { helper: "killed".into(), reason: String::new() });
        match self.calls.checked_sub(1) {
            Some(left) => {
                self.calls = left;
                act(&mut self.kernel)
            }
            None if self.done => {
                self.done = false;
                act(&mut self.kernel).and_then(|()| dead())
            }
            None => dead(),
        }
    }
}

impl Kernel for Killed {
    fn write(&mut self, path: &Path, value: &str) -> Result<(), KernelError> {
        self.call(|kernel| kernel.write(path, value))
    }

    fn load_module(&mut self, name: &str) -> Result<(), KernelError> {
        self.call(|kernel| kernel.load_module(name))
    }
}

/// Plans for a GPU while all GPUs are to go the same way.
fn planned(machine: &Machine, journal: &Journal, gpu: PciAddress, binding: Binding) -> Result<Plan, crate::Refusal> {
    let mut view = View::of(machine);
    view.wanted = gpus(&view.inventory).into_iter().map(|gpu| (gpu, binding)).collect();
    view.plan(journal, &gpu.to_string(), binding)
}

/// To the end, as another process that has only what is on disk. `false`: refused.
fn finish(machine: &Machine, gpu: PciAddress, binding: Binding) -> Result<bool, TestCaseError> {
    let mut journal = Journal::open(machine.path().join("run/journal")).unwrap();
    let plan = match planned(machine, &journal, gpu, binding) {
        Ok(plan) => plan,
        Err(refusal) => {
            let known = ["ForeignDeviceInGroup", "InUse", "VirtualFunctionsPresent"].contains(&refusal.reason());
            prop_assert!(known, "{}", refusal);
            return Ok(false);
        }
    };
    execute(&plan, &mut machine.kernel(), &mut journal).unwrap();
    prop_assert_eq!(deviations(&observe(machine), gpu, binding), []);
    prop_assert_eq!(planned(machine, &journal, gpu, binding).unwrap().steps, [], "a second plan has nothing to do");
    Ok(true)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_plan_touches_what_is_held_or_foreign(cards in cards(true)) {
        let tree = Description::parse(&yaml(&cards)).unwrap().tree().unwrap();
        let inventory = observe(&tree);
        prop_assert_eq!(&inventory.errors, &[]);
        let (holders, journal) = (holders(&tree, &inventory), Journal::in_memory());
        for binding in [Binding::Vfio, Binding::Host] {
            let wanted: BTreeMap<_, _> = gpus(&inventory).into_iter().map(|gpu| (gpu, binding)).collect();
            let world = World { inventory: &inventory, holders: &holders, journal: &journal, wanted: &wanted };
            for gpu in gpus(&inventory) {
                let Ok(plan) = plan(&world, gpu, binding) else { continue };
                for address in plan.steps.iter().filter_map(Step::address) {
                    let card = cards.iter().find(|card| card.address() == address);
                    prop_assert!(card.is_some_and(|card| card.kind < SWITCH), "{} for {}", address, gpu);
                    prop_assert!(!plan.disrupts() || !card.is_some_and(Card::is_held), "{:?}", plan);
                }
                if !plan.disrupts() {
                    continue;
                }
                let group = cards.iter().find(|card| card.address() == gpu).map(|card| card.group);
                for card in cards.iter().filter(|card| Some(card.group) == group) {
                    prop_assert!(!card.is_held(), "{:?} in {:?}", card, plan);
                    prop_assert!(!card.vf || card.kind >= AUDIO, "{:?} in {:?}", card, plan);
                    let foreign = matches!(card.kind, SWITCH | NIC) && card.has != Has::Vfio;
                    prop_assert!(binding == Binding::Host || !foreign, "{:?} in {:?}", card, plan);
                }
            }
        }
    }

    #[test]
    fn what_is_so_already_needs_no_step(cards in cards(true)) {
        let tree = Description::parse(&yaml(&cards)).unwrap().tree().unwrap();
        let inventory = observe(&tree);
        let (holders, journal) = (holders(&tree, &inventory), Journal::in_memory());
        for binding in [Binding::Vfio, Binding::Host] {
            // Also where others in the group are to go another way, and somebody uses it.
            let wanted = BTreeMap::new();
            let world = World { inventory: &inventory, holders: &holders, journal: &journal, wanted: &wanted };
            for gpu in gpus(&inventory) {
                if deviations(&inventory, gpu, binding).is_empty() {
                    prop_assert_eq!(plan(&world, gpu, binding).unwrap().steps, []);
                }
            }
        }
    }

    #[test]
    fn gpus_of_one_group_never_go_apart(cards in cards(true), vfio in prop::collection::vec(any::<bool>(), 12)) {
        let tree = Description::parse(&yaml(&cards)).unwrap().tree().unwrap();
        let inventory = observe(&tree);
        let (holders, journal) = (BTreeMap::new(), Journal::in_memory());
        let binding = |vfio: bool| if vfio { Binding::Vfio } else { Binding::Host };
        // Some GPUs are not asked for: they stay where they are.
        let wanted: BTreeMap<_, _> = gpus(&inventory).into_iter().zip(vfio).skip(1).map(|(gpu, vfio)| (gpu, binding(vfio))).collect();
        let world = World { inventory: &inventory, holders: &holders, journal: &journal, wanted: &wanted };
        for (gpu, asked) in &wanted {
            let Ok(plan) = plan(&world, *gpu, *asked) else { continue };
            let moved: BTreeSet<_> = plan.steps.iter().filter_map(Step::address).collect();
            for other in gpus(&inventory).into_iter().filter(|other| moved.contains(other)) {
                let stays = binding(inventory.functions[&other].on_vfio());
                prop_assert_eq!(wanted.get(&other).copied().unwrap_or(stays), *asked, "{} moves {}", gpu, other);
            }
        }
    }

    #[test]
    fn work_that_was_killed_at_any_call_goes_on_or_back(cards in cards(false), calls in 0usize..24, done: bool, back: bool) {
        let machine = Machine::from_yaml(&yaml(&cards));
        let before = drivers(&machine);
        for gpu in gpus(&observe(&machine)) {
            let mut journal = Journal::open(machine.path().join("run/journal")).unwrap();
            if let Ok(plan) = planned(&machine, &journal, gpu, Binding::Vfio) {
                let mut kernel = Killed { kernel: machine.kernel(), calls, done };
                // Whether it came to its end depends on where it was killed.
                let _ = execute(&plan, &mut kernel, &mut journal);
            }
            let reached = finish(&machine, gpu, if back { Binding::Host } else { Binding::Vfio })?;
            if !reached {
                continue;
            }
            let mut journal = Journal::open(machine.path().join("run/journal")).unwrap();
            if let Ok(plan) = planned(&machine, &journal, gpu, Binding::Host) {
                let mut kernel = Killed { kernel: machine.kernel(), calls, done };
                let _ = execute(&plan, &mut kernel, &mut journal);
            }
            finish(&machine, gpu, Binding::Host)?;
        }
        prop_assert_eq!(drivers(&machine), before);
    }
}

#[test]
fn a_journal_whose_writer_was_killed_at_any_of_its_writes_is_gone_on_with() {
    let gpu = at("0000:52:00.0");
    let count = |binding| if binding == Binding::Vfio { 16 } else { 18 };
    for binding in [Binding::Vfio, Binding::Host] {
        for stop in 0..=count(binding) {
            let machine = Machine::described("rtx-4000");
            let before = drivers(&machine);
            if binding == Binding::Host {
                assert!(finish(&machine, gpu, Binding::Vfio).unwrap());
            }
            let path = machine.path().join("run/journal");
            let mut journal = Journal::open(&path).unwrap();
            let mut part = planned(&machine, &journal, gpu, binding).unwrap();
            assert_eq!(part.steps.len(), count(binding), "every step is tried");
            let next = part.steps.get(stop).cloned();
            part.steps.truncate(stop);
            execute(&part, &mut machine.kernel(), &mut journal).unwrap();
            if matches!(next, Some(Step::RecordOriginal { .. } | Step::ForgetOriginal { .. })) {
                // In the middle of its next write: half a file beside the whole one.
                machine.write("/run/journal.new", "{ \"epoch\": 1, \"func");
            }
            assert!(finish(&machine, gpu, binding).unwrap(), "stopped before {next:?}");
            assert!(finish(&machine, gpu, Binding::Host).unwrap());
            assert_eq!(drivers(&machine), before, "stopped before {next:?}");
        }
    }
}
