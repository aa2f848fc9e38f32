//! `gpuvirt inspect` and `gpuvirt plan`: one host, for a person, without a cluster. They change nothing.

pub mod early;
pub mod gather;
pub mod inspect;
pub mod plan;
mod report;
#[cfg(test)]
mod tests;
pub mod vgpus;

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use crate::answer;
use vfio::{Description, Holder, Host, Inventory, Journal, PciAddress, Root};

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The host whose `/` is mounted there.
    Host(PathBuf),
    /// A machine described in a file; `-` is standard input. The format is in vfio/README.md.
    Described(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("host root {root} cannot be opened")]
    Root { root: PathBuf, source: std::io::Error },
    #[error("{file} cannot be read")]
    File { file: PathBuf, source: std::io::Error },
    #[error("{file} describes no machine")]
    Description { file: PathBuf, source: vfio::DescriptionError },
    #[error("vGPU layout: {0}")]
    Layout(String),
    #[error("the answer cannot be written")]
    Output(#[from] std::io::Error),
    #[error(transparent)]
    Form(#[from] answer::Error),
}

/// One look at a host.
#[derive(Clone, Debug)]
pub struct View {
    pub inventory: Inventory,
    pub holders: BTreeMap<PciAddress, Vec<Holder>>,
    /// What an agent on that host has noted.
    pub journal: Journal,
    /// What is wrong with the look itself.
    pub remarks: Vec<String>,
}

impl View {
    pub fn of(subject: &Subject) -> Result<Self, Error> {
        match subject {
            Subject::Host(root) => {
                let host = Root::new(root).map_err(|source| Error::Root { root: root.clone(), source })?;
                let (journal, remarks) = match Journal::look(&root.join(vfio::journal::PATH.trim_start_matches('/'))) {
                    Ok(journal) => (journal, Vec::new()),
                    Err(error) => (Journal::in_memory(), vec![error.to_string()]),
                };
                Ok(Self::look(&host, journal, remarks))
            }
            Subject::Described(file) => {
                let text = read(file).map_err(|source| Error::File { file: file.clone(), source })?;
                Self::described(&text).map_err(|source| Error::Description { file: file.clone(), source })
            }
        }
    }

    /// A machine from the text of its description.
    pub fn described(text: &str) -> Result<Self, vfio::DescriptionError> {
        let tree = Description::parse(text)?.tree()?;
        Ok(Self::look(&tree, Journal::in_memory(), Vec::new()))
    }

    fn look(host: &impl Host, journal: Journal, remarks: Vec<String>) -> Self {
        let inventory = vfio::observe_except(host, &journal.locked());
        let holders = vfio::holders(host, &inventory);
        Self { inventory, holders, journal, remarks }
    }
}

fn read(file: &Path) -> std::io::Result<String> {
    if file != Path::new("-") {
        return std::fs::read_to_string(file);
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    Ok(text)
}
