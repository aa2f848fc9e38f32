//! The driver's library for described boards with MIG: GPU instances are lines of a file in the machine's tree, which the
//! board's kernel side reads, too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::put;
use super::vgpus::Board;
use crate::address::PciAddress;
use crate::described::DescribedMig;
use crate::vgpu::{
    ActiveVgpu, GpuFacts, Library, LibraryFacts, MigAct, MigInstance, MigKind, MigMode, MigProfile, Silence, kind,
    shape,
};

/// See the module. Get it from [`Machine::library`](super::Machine::library).
#[derive(Debug)]
pub struct MemoryLibrary {
    pub(super) root: PathBuf,
    pub(super) boards: Vec<Board>,
    /// Everything that was done.
    pub acts: Vec<String>,
    /// It refuses whatever it is asked to do, with these words.
    pub refuses: Option<String>,
    /// It says nothing, for this reason.
    pub silence: Option<Silence>,
    /// VMs that it says to run with vGPUs.
    pub active: Vec<ActiveVgpu>,
    /// What it says of boards without MIG.
    pub says: BTreeMap<PciAddress, GpuFacts>,
    /// It says that a VM runs on each of these GPU instances.
    pub in_use: Vec<u32>,
}

/// MIG of a board: mode now and next, and its instances with profile and whether they compute.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub on: bool,
    next: bool,
    pub instances: Vec<(u32, u32, bool)>,
}

impl State {
    pub(super) fn of(root: &Path, gpu: PciAddress) -> Self {
        let text = super::read(root, &file(gpu)).unwrap_or_default();
        let mut state = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words.as_slice() {
                ["mode", now, next] => (state.on, state.next) = (*now == "true", *next == "true"),
                [id, profile, compute] => {
                    let number = |word: &str| word.parse().expect("a number should be there");
                    state.instances.push((number(id), number(profile), *compute == "true"));
                }
                _ => {}
            }
        }
        state
    }

    fn keep(&self, root: &Path, gpu: PciAddress) {
        let lines = self.instances.iter().map(|(id, profile, compute)| format!("{id} {profile} {compute}\n"));
        let text = format!("mode {} {}\n{}", self.on, self.next, lines.collect::<String>());
        put(root, &file(gpu).to_string_lossy(), text);
    }
}

fn file(gpu: PciAddress) -> PathBuf {
    PathBuf::from(format!("/mig/{gpu}"))
}

/// The profile of a type, which is numbered by its slices, and how many vGPUs of it an instance carries.
pub(super) fn stands_on(mig: &DescribedMig, name: &str) -> Option<(u32, u32)> {
    let shape = shape(kind(name))?;
    let slices = shape.slices?;
    Some((slices, slices * mig.memory / shape.framebuffer.max(1)))
}

impl MemoryLibrary {
    fn facts(&self, board: &Board, mig: &DescribedMig) -> GpuFacts {
        let state = State::of(&self.root, board.gpu);
        let types = || board.described.types.values();
        let kinds: BTreeMap<String, MigKind> = types()
            .filter_map(|name| {
                let (profile, most) = stands_on(mig, name)?;
                Some((kind(name).to_owned(), MigKind { profile, most }))
            })
            .collect();
        let used: u32 = state.instances.iter().map(|(_, profile, _)| profile).sum();
        let mut profiles: Vec<u32> = kinds.values().map(|kind| kind.profile).collect();
        profiles.sort_unstable();
        profiles.dedup();
        let profile = |id: u32| MigProfile {
            id,
            name: format!("{id}g.{}gb", id * mig.memory),
            remaining: if state.on { (mig.slices - used) / id } else { 0 },
        };
        let instance = |(id, profile, compute): &(u32, u32, bool)| MigInstance {
            id: *id,
            profile: *profile,
            compute: *compute,
            in_use: self.in_use.contains(id),
        };
        GpuFacts {
            mig: Some(MigMode { on: state.on, next: state.next }),
            heterogeneous: Some(board.described.heterogeneous),
            profiles: profiles.into_iter().map(profile).collect(),
            instances: state.instances.iter().map(instance).collect(),
            kinds,
            ..GpuFacts::default()
        }
    }
}

impl Library for MemoryLibrary {
    fn ask(&mut self) -> LibraryFacts {
        if let Some(silence) = &self.silence {
            return LibraryFacts { silence: Some(silence.clone()), ..LibraryFacts::default() };
        }
        let facts = |board: &Board| Some((board.gpu, self.facts(board, board.described.mig.as_ref()?)));
        let gpus = self.says.clone().into_iter().chain(self.boards.iter().filter_map(facts)).collect();
        LibraryFacts { gpus, active: self.active.clone(), silence: None }
    }

    fn act(&mut self, gpu: PciAddress, act: &MigAct) -> Result<(), String> {
        if let Some(words) = &self.refuses {
            return Err(words.clone());
        }
        self.acts.push(act.to_string());
        let board = self.boards.iter().find(|board| board.gpu == gpu).ok_or("Not Found")?;
        let mig = board.described.mig.as_ref().ok_or("Not Supported")?;
        let mut state = State::of(&self.root, gpu);
        match act {
            MigAct::Mode { on } => {
                state.next = *on;
                if !mig.reset {
                    state.on = *on;
                }
            }
            MigAct::Create { profile, .. } => {
                let used: u32 = state.instances.iter().map(|(_, profile, _)| profile).sum();
                if used + profile > mig.slices {
                    return Err("Insufficient Resources".to_owned());
                }
                let id = (1..1000).find(|id| state.instances.iter().all(|(other, ..)| other != id));
                state.instances.push((id.expect("a number should be free"), *profile, false));
            }
            MigAct::Compute { instance } => {
                let found = state.instances.iter_mut().find(|(id, ..)| id == instance).ok_or("Not Found")?;
                found.2 = true;
            }
            MigAct::Destroy { instance, .. }
                if self.in_use.contains(instance) || board.carries(&self.root, *instance) =>
            {
                return Err("In Use".to_owned());
            }
            MigAct::Destroy { instance, .. } => state.instances.retain(|(id, ..)| id != instance),
        }
        state.keep(&self.root, gpu);
        board.refresh(&self.root);
        Ok(())
    }
}
