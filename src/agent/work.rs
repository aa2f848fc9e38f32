//! What a round has done.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crds::v1alpha1::Refusal;
use vfio::{Binding, PciAddress};

/// What a round has done so far.
#[derive(Default)]
pub struct Work {
    pub tried: BTreeSet<PciAddress>,
    pub steps: Vec<String>,
    pub changes: Vec<Change>,
    pub refusals: BTreeMap<PciAddress, Refusal>,
}

/// One GPU's way to other drivers, its group's companions included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub binding: Binding,
    pub took: Duration,
    /// Every step was taken; whether the kernel shows it is another question.
    pub done: bool,
}
