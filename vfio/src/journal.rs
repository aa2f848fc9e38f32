//! What was changed on this host since boot, so that it can be undone and is not done twice.
//!
//! One JSON file, normally [`PATH`] (gone with the reboot, as bindings are). It is replaced atomically and
//! synced before the change that it describes is made. A function is known by address and ids: a card that was swapped
//! is not the one that was recorded.

#![allow(clippy::disallowed_methods, reason = "this file is the only writer of the journal")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::address::PciAddress;
use crate::host::Host;
use crate::inventory::{Function, Ids, Inventory};

mod pending;
mod vgpu;

pub use pending::Pending;
pub(crate) use pending::parse_stat;

/// Where it is by default, as the host sees it.
pub const PATH: &str = "/run/gpuvirt/journal";

/// Where a function was before it was given to VFIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Origin {
    /// On a driver of the host.
    Driver(String),
    /// On no driver.
    Unbound,
    /// On a VFIO driver already when it was first seen: somebody else's doing, never undone.
    Adopted,
    /// On a VFIO driver when an empty journal took the place of a damaged one: whose doing is not known, so never undone.
    Lost,
}

impl Origin {
    /// Whether it says that the function is not to be taken from VFIO.
    pub(crate) fn stays(&self) -> bool {
        match self {
            Self::Adopted | Self::Lost => true,
            Self::Driver(_) | Self::Unbound => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    ids: Ids,
    origin: Origin,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct State {
    epoch: i64,
    functions: BTreeMap<PciAddress, Entry>,
    pending: BTreeMap<PciAddress, Pending>,
    /// It follows a damaged one, and what is on VFIO has not been noted since.
    #[serde(skip_serializing_if = "is_false")]
    lost: bool,
    #[serde(skip_serializing_if = "vgpu::Vgpus::is_empty")]
    vgpus: vgpu::Vgpus,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The journal of one host. See the module.
#[derive(Clone, Debug)]
pub struct Journal {
    /// `None`: kept in memory only.
    path: Option<PathBuf>,
    state: State,
}

/// Why the journal could not be read or written.
#[allow(missing_docs, reason = "the sentence of a variant names its fields")]
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Its file or the directory around it.
    #[error("journal {path}: {source}; nothing is changed on the host before it can be written", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// It is no JSON of this version. Said once: it was moved aside.
    #[error(
        "journal {path} is damaged ({reason}) and was moved to {moved_to}; an empty one is used from now on, so who bound \
         the devices that are on vfio-pci now is not known, and they are not released",
        path = path.display(), moved_to = moved_to.display()
    )]
    Corrupt { path: PathBuf, moved_to: PathBuf, reason: String },
    /// Somebody asks who does not lead any more.
    #[error(
        "step of epoch {asked} is older than epoch {executed}, which this host has executed; a newer leader is at work"
    )]
    OldEpoch { asked: i64, executed: i64 },
}

impl Journal {
    /// Reads the journal; a missing file is an empty journal.
    ///
    /// A damaged file is moved aside and reported once as [`JournalError::Corrupt`]: opening again gives an empty journal
    /// that knows what it follows.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, JournalError> {
        let path = path.into();
        let state = match fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(state) => state,
                Err(error) => return Err(move_aside(path, &error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                State { lost: damaged(&path).exists(), ..State::default() }
            }
            Err(source) => return Err(JournalError::Io { path, source }),
        };
        Ok(Self { path: Some(path), state })
    }

    /// The journal of another process, for looking only: it is never written, and a damaged one stays where it is.
    pub fn look(path: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Io { path: path.to_owned(), source };
        match fs::read(path) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(state) => Ok(Self { path: None, state }),
                Err(error) => Err(failed(io::Error::new(io::ErrorKind::InvalidData, error))),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::in_memory()),
            Err(source) => Err(failed(source)),
        }
    }

    /// A journal that is never written, for looking only.
    pub fn in_memory() -> Self {
        Self { path: None, state: State::default() }
    }

    /// Where the function was before it was taken; `None` when it was not taken, or when another device is there now.
    pub fn origin(&self, function: &Function) -> Option<&Origin> {
        let entry = self.state.functions.get(&function.address)?;
        (entry.ids == function.ids()).then_some(&entry.origin)
    }

    /// [`Origin::Adopted`] or [`Origin::Lost`] of a function that is on VFIO and stays there; `None` where it was put there
    /// from here, or is not there. What is not in the journal was not done here, unless an earlier one was lost.
    pub(crate) fn adopted(&self, function: &Function) -> Option<Origin> {
        match self.origin(function) {
            _ if !function.on_vfio() => None,
            None => Some(self.newcomer()),
            Some(origin) => origin.stays().then(|| origin.clone()),
        }
    }

    fn newcomer(&self) -> Origin {
        if self.state.lost { Origin::Lost } else { Origin::Adopted }
    }

    /// Notes all functions of GPUs that are on a VFIO driver without having been put there by us; returns the new ones.
    pub fn adopt(&mut self, inventory: &Inventory) -> Result<Vec<PciAddress>, JournalError> {
        let mut state = self.state.clone();
        let mut adopted = Vec::new();
        for gpu in inventory.gpus() {
            for function in std::iter::once(gpu.primary).chain(gpu.companions) {
                if function.on_vfio() && self.origin(function).is_none() && !adopted.contains(&function.address) {
                    let entry = Entry { ids: function.ids(), origin: self.newcomer() };
                    state.functions.insert(function.address, entry);
                    adopted.push(function.address);
                }
            }
        }
        state.lost = false;
        self.save(state)?;
        Ok(adopted)
    }

    /// Entries whose device is not there any more, or is another one: reported, never acted on.
    pub fn stale(&self, inventory: &Inventory) -> Vec<PciAddress> {
        let differs = |address: &PciAddress, entry: &Entry| {
            inventory.functions.get(address).is_none_or(|function| function.ids() != entry.ids)
        };
        self.state
            .functions
            .iter()
            .filter(|(address, entry)| differs(address, entry))
            .map(|(address, _)| *address)
            .collect()
    }

    pub(crate) fn record(&mut self, address: PciAddress, ids: Ids, origin: Origin) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        state.functions.insert(address, Entry { ids, origin });
        self.save(state)
    }

    pub(crate) fn forget(&mut self, address: PciAddress) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        state.functions.remove(&address);
        self.save(state)
    }

    /// Writes that hang, or had not come back when their process was last heard of, by the device they are for.
    pub fn pending(&self) -> &BTreeMap<PciAddress, Pending> {
        &self.state.pending
    }

    /// Devices of which no attribute that takes the device's lock may be read; for [`crate::inventory::observe_except`].
    pub fn locked(&self) -> BTreeSet<PciAddress> {
        self.state.pending.keys().copied().collect()
    }

    pub(crate) fn add_pending(&mut self, address: PciAddress, pending: Pending) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        state.pending.insert(address, pending);
        self.save(state)
    }

    pub(crate) fn end_pending(&mut self, address: PciAddress) -> Result<(), JournalError> {
        let mut state = self.state.clone();
        state.pending.remove(&address);
        self.save(state)
    }

    /// Drops hanging writes whose process has ended; returns their devices. Cheap: call it before every look at the host.
    pub fn settle(&mut self, host: &impl Host) -> Result<Vec<PciAddress>, JournalError> {
        let ended: Vec<_> =
            self.state.pending.iter().filter(|(_, pending)| !pending::alive(host, pending)).map(|(a, _)| *a).collect();
        let mut state = self.state.clone();
        state.pending.retain(|address, _| !ended.contains(address));
        self.save(state)?;
        Ok(ended)
    }

    /// Whether the next change could be noted: known before anything is begun.
    pub fn writable(&self) -> Result<(), JournalError> {
        let Some(path) = &self.path else { return Ok(()) };
        let bytes = serde_json::to_vec_pretty(&self.state).expect("a journal should have a JSON form");
        replace(path, &bytes).map_err(|source| JournalError::Io { path: path.clone(), source })
    }

    /// Takes the file away, for a host that is left for good: `false`, and the file stays, while something of it has still to
    /// be undone or a write is pending. What somebody else has put on VFIO is seen to be so again by whoever comes next; what
    /// is known of a damaged journal is not.
    pub fn leave(&mut self) -> Result<bool, JournalError> {
        let State { epoch: _, functions, pending, lost, vgpus } = &self.state;
        let nothing_to_undo = functions.values().all(|entry| entry.origin == Origin::Adopted);
        if *lost || !(nothing_to_undo && pending.is_empty() && vgpus.is_empty()) {
            return Ok(false);
        }
        if let Some(path) = &self.path {
            match fs::remove_file(path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(JournalError::Io { path: path.clone(), source });
                }
                Ok(()) | Err(_) => {}
            }
        }
        self.state = State::default();
        Ok(true)
    }

    /// The highest epoch of which a step was executed; 0 when there was none.
    pub fn epoch(&self) -> i64 {
        self.state.epoch
    }

    /// Notes that a step of this epoch is about to be executed; refuses one that is older than what was executed.
    pub fn admit_epoch(&mut self, epoch: i64) -> Result<(), JournalError> {
        if epoch < self.state.epoch {
            return Err(JournalError::OldEpoch { asked: epoch, executed: self.state.epoch });
        }
        let mut state = self.state.clone();
        state.epoch = epoch;
        self.save(state)
    }

    /// On disk first: what could not be written has not happened.
    fn save(&mut self, state: State) -> Result<(), JournalError> {
        if state == self.state {
            return Ok(());
        }
        if let Some(path) = &self.path {
            let bytes = serde_json::to_vec_pretty(&state).expect("a journal should have a JSON form");
            replace(path, &bytes).map_err(|source| JournalError::Io { path: path.clone(), source })?;
        }
        self.state = state;
        Ok(())
    }
}

fn move_aside(path: PathBuf, error: &serde_json::Error) -> JournalError {
    let moved_to = damaged(&path);
    match fs::rename(&path, &moved_to) {
        Ok(()) => JournalError::Corrupt { path, moved_to, reason: error.to_string() },
        Err(source) => JournalError::Io { path, source },
    }
}

/// Where a damaged journal is kept.
fn damaged(path: &Path) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(".damaged");
    name.into()
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir)?;
    let mut new = path.to_owned().into_os_string();
    new.push(".new");
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "0000:01:00.0";
    const IDS: Ids = Ids { vendor: 0x10de, device: 0x1eb8, subsystem_vendor: 0x10de, subsystem_device: 0x12a2 };

    fn file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpuvirt/journal");
        (dir, path)
    }

    #[test]
    fn what_was_noted_is_there_for_the_next_process() {
        let (_dir, path) = file();
        let mut journal = Journal::open(&path).unwrap();
        journal.record(GPU.parse().unwrap(), IDS, Origin::Driver("nvidia".to_owned())).unwrap();
        journal.admit_epoch(7).unwrap();
        let again = Journal::open(&path).unwrap();
        assert_eq!(again.state, journal.state);
        assert_eq!(again.epoch(), 7);
        assert_eq!(again.state.functions.len(), 1);
    }

    #[test]
    fn a_host_is_left_without_a_journal_but_not_while_something_is_to_be_undone() {
        let (_dir, path) = file();
        let mut journal = Journal::open(&path).unwrap();
        let gpu: PciAddress = GPU.parse().unwrap();
        journal.record(gpu, IDS, Origin::Driver("nvidia".to_owned())).unwrap();
        journal.admit_epoch(7).unwrap();
        assert!(!journal.leave().unwrap() && path.exists());
        journal.record(gpu, IDS, Origin::Adopted).unwrap();
        assert!(journal.leave().unwrap() && !path.exists());
        assert!(journal.leave().unwrap(), "what is not there can be left");
    }

    #[test]
    fn a_step_of_an_older_epoch_is_refused_and_an_equal_one_is_not() {
        let mut journal = Journal::in_memory();
        journal.admit_epoch(7).unwrap();
        journal.admit_epoch(7).unwrap();
        assert!(matches!(journal.admit_epoch(6), Err(JournalError::OldEpoch { asked: 6, executed: 7 })));
        assert_eq!(journal.epoch(), 7);
    }

    #[test]
    fn a_damaged_journal_is_named_moved_aside_and_not_fatal() {
        for damage in ["", "{", "7", "{\"functions\": {\"nonsense\": 1}}", "{\"unknown\": 1}", "\u{0}\u{0}"] {
            let (_dir, path) = file();
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, damage).unwrap();
            let error = Journal::open(&path).unwrap_err();
            let JournalError::Corrupt { moved_to, .. } = &error else { panic!("{damage}: {error}") };
            assert_eq!(fs::read_to_string(moved_to).unwrap(), damage);
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            assert_eq!(Journal::open(&path).unwrap().state, State { lost: true, ..State::default() });
        }
    }

    #[test]
    fn what_is_on_vfio_behind_a_lost_journal_is_nobodys_for_sure_and_what_comes_later_is_somebody_elses() {
        let (_dir, path) = file();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "{").unwrap();
        Journal::open(&path).unwrap_err();
        let inventory = crate::observe(&crate::testing::Machine::described("eight-t4"));
        let gpu = &inventory.functions[&"0000:35:00.0".parse().unwrap()];
        // A process that was killed before it could note them changes nothing about that.
        Journal::open(&path).unwrap().admit_epoch(3).unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.adopted(gpu), Some(Origin::Lost));
        journal.adopt(&inventory).unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.adopted(gpu), Some(Origin::Lost));
        journal.forget(gpu.address).unwrap();
        assert_eq!(journal.adopted(gpu), Some(Origin::Adopted));
    }

    #[test]
    fn what_could_not_be_written_has_not_happened() {
        let (dir, path) = file();
        let mut journal = Journal::open(&path).unwrap();
        fs::write(dir.path().join("gpuvirt"), "in the way").unwrap();
        let error = journal.admit_epoch(1).unwrap_err();
        assert!(error.to_string().contains("gpuvirt/journal"), "{error}");
        assert_eq!(journal.epoch(), 0);
    }

    #[test]
    fn an_interrupted_write_leaves_the_old_journal() {
        let (_dir, path) = file();
        let mut journal = Journal::open(&path).unwrap();
        journal.admit_epoch(3).unwrap();
        fs::write(path.with_extension("new"), "{\"epoch\": 9").unwrap();
        assert_eq!(Journal::open(&path).unwrap().epoch(), 3);
    }
}
