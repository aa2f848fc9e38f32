//! Gives GPUs to VFIO, or back to the host, or cuts one into vGPUs: the whole library in one small program, for any Linux
//! machine, as root.
//!
//! ```sh
//! cargo run -p vfio --example switch -- vfio 0000:01:00.0 0000:41:00.0
//! cargo run -p vfio --example switch -- host 0000:01:00.0 0000:41:00.0
//! cargo run -p vfio --example switch -- vgpus 0000:26:00.0 L40S-24Q=2
//! ```
//!
//! It says each step before it takes it. It may be killed at any moment: what was changed stands in the journal, and the
//! next run goes on from there. Exits with 0 when the kernel shows what was asked for, with 2 when a GPU was refused or has
//! not got there, with 1 when nothing could be tried.

#![expect(clippy::print_stdout, reason = "a command's answer goes to standard output")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use vfio::kernel::{COMMAND, child_main};
use vfio::vgpu::{self, ApplyError, Asked, Layout, LibraryFacts, NoLibrary, VgpuWorld, View, vgpu_holders};
use vfio::{
    Binding, Host, Journal, LinuxKernel, PciAddress, Root, World, deviations, execute, holders, journal,
    observe_except, plan,
};

/// For one write. An idle device takes far less; one that somebody uses takes for ever.
const DEADLINE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let Some(verb) = args.next() else { return usage() };
    // The library writes from a child, which can be left behind when the kernel does not let it go: this program again.
    if verb == COMMAND {
        return u8::try_from(child_main(args)).map_or(ExitCode::FAILURE, ExitCode::from);
    }
    if verb == "vgpus" {
        let Some((gpu, layout)) = order(args) else { return usage() };
        return exit_code(vgpus(gpu, &layout));
    }
    let binding = match verb.to_str() {
        Some("vfio") => Binding::Vfio,
        Some("host") => Binding::Host,
        Some(_) | None => return usage(),
    };
    let Some(gpus) = addresses(args).filter(|gpus| !gpus.is_empty()) else { return usage() };
    exit_code(switch(&gpus, binding))
}

fn exit_code(result: Result<bool, Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    println!("usage: switch vfio|host ADDRESS... | switch vgpus ADDRESS [TYPE=COUNT...]");
    ExitCode::FAILURE
}

fn addresses(args: impl Iterator<Item = OsString>) -> Option<Vec<PciAddress>> {
    args.map(|word| word.to_str()?.parse().ok()).collect()
}

fn order(args: impl Iterator<Item = OsString>) -> Option<(PciAddress, Layout)> {
    let mut words = args.map(|word| word.to_str().map(str::to_owned));
    let gpu = words.next()??.parse().ok()?;
    let count = |word: Option<String>| {
        let word = word?;
        let (kind, count) = word.split_once('=')?;
        Some((kind.to_owned(), count.parse().ok()?))
    };
    Some((gpu, words.map(count).collect::<Option<_>>()?))
}

/// Whether the GPU has the vGPUs that it shall have.
fn vgpus(gpu: PciAddress, layout: &Layout) -> Result<bool, Box<dyn Error>> {
    let began = Instant::now();
    let root = Root::new("/")?;
    let node = String::from_utf8(root.read(Path::new("/proc/sys/kernel/hostname"))?)?;
    let mut kernel = LinuxKernel::new(PathBuf::from("/"), std::env::current_exe()?, DEADLINE);
    let mut journal = Journal::open(journal::PATH)?;
    journal.settle(&root)?;
    let look = |journal: &Journal| {
        let inventory = observe_except(&root, &journal.locked());
        let gpu_holders = holders(&root, &inventory);
        View { holders: vgpu_holders(&inventory, &gpu_holders), gpu_holders, inventory }
    };
    let plan = |world: &VgpuWorld<'_>| vgpu::plan(world, gpu, layout);
    let (mut library, mut facts) = (NoLibrary, LibraryFacts::default());
    let mut asked = Asked { library: &mut library, facts: &mut facts };
    let (steps, result) = vgpu::apply(gpu, node.trim(), &mut kernel, &mut journal, &mut asked, look, plan);
    for step in &steps {
        println!("{gpu}: {step}");
    }
    match &result {
        Ok(()) => {}
        Err(ApplyError::Refused(refusal)) => println!("{}: {refusal}", refusal.reason()),
        Err(error) => println!("{error}"),
    }
    for vgpu in vgpu::vgpus(&observe_except(&root, &journal.locked()), gpu, journal.vgpu_types()) {
        println!("vgpu {} {} on {}", vgpu.id, vgpu.kind().unwrap_or("unknown"), vgpu.parent);
    }
    println!("{} steps in {} ms", steps.len(), began.elapsed().as_millis());
    Ok(result.is_ok())
}

/// Whether all of the GPUs are where they should be.
fn switch(gpus: &[PciAddress], binding: Binding) -> Result<bool, Box<dyn Error>> {
    let began = Instant::now();
    let root = Root::new("/")?;
    let mut kernel = LinuxKernel::new(PathBuf::from("/"), std::env::current_exe()?, DEADLINE);
    let mut journal = Journal::open(journal::PATH)?;
    // A write that hung when the last run ended may have come back; a device whose write still hangs is not asked much.
    journal.settle(&root)?;
    let inventory = observe_except(&root, &journal.locked());
    journal.adopt(&inventory)?;
    for error in &inventory.errors {
        println!("{error}");
    }

    let wanted: BTreeMap<_, _> = gpus.iter().map(|gpu| (*gpu, binding)).collect();
    let mut groups = BTreeSet::new();
    let mut reached = true;
    for gpu in gpus {
        // A plan is for all GPUs of a group.
        let group = inventory.gpu(*gpu).and_then(|gpu| gpu.group);
        if group.is_some_and(|group| !groups.insert(group)) {
            continue;
        }
        // Looked for anew each time: somebody may have opened a GPU since.
        let holders = holders(&root, &inventory);
        let world = World { inventory: &inventory, holders: &holders, journal: &journal, wanted: &wanted };
        match plan(&world, *gpu, binding) {
            Err(refusal) => {
                println!("{}: {refusal}", refusal.reason());
                reached = false;
            }
            Ok(plan) => {
                plan.steps.iter().for_each(|step| println!("{gpu}: {step}"));
                if let Err(error) = execute(&plan, &mut kernel, &mut journal) {
                    println!("{error}");
                    reached = false;
                }
            }
        }
    }

    // That the kernel took every write proves nothing: what it shows now does.
    let inventory = observe_except(&root, &journal.locked());
    for deviation in gpus.iter().flat_map(|gpu| deviations(&inventory, *gpu, binding)) {
        println!("{deviation}");
        reached = false;
    }
    println!("{} GPUs in {} ms", gpus.len(), began.elapsed().as_millis());
    Ok(reached)
}
