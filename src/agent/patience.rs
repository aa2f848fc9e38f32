//! Failed work is tried again later and later. A failed bind makes uevents of its own: without this they would bring the
//! next try at once, and that one the next.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crds::v1alpha1::Refusal;
use vfio::{Binding, PciAddress};

const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(300);

#[derive(Default)]
pub(super) struct Patience(BTreeMap<PciAddress, Failure>);

struct Failure {
    binding: Binding,
    refusal: Refusal,
    wait: Duration,
    again: Instant,
}

impl Patience {
    /// What the last try said, while it is too early for the next one. Another order is tried at once.
    pub(super) fn too_early(&self, gpu: PciAddress, binding: Binding, now: Instant) -> Option<&Refusal> {
        self.0.get(&gpu).filter(|failure| failure.binding == binding && now < failure.again).map(|f| &f.refusal)
    }

    pub(super) fn failed(&mut self, gpu: PciAddress, binding: Binding, refusal: Refusal, now: Instant) {
        let wait = match self.0.get(&gpu) {
            Some(failure) if failure.binding == binding => (failure.wait * 2).min(LONGEST),
            Some(_) | None => FIRST,
        };
        self.0.insert(gpu, Failure { binding, refusal, wait, again: now + wait });
    }

    pub(super) fn succeeded(&mut self, gpu: PciAddress) {
        self.0.remove(&gpu);
    }

    /// When the next try is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|failure| failure.again).min()
    }
}

/// Agents of a cluster that started together do not look together. Up to a tenth later, by the node's name.
pub(super) fn jittered(resync: Duration, node: &str) -> Duration {
    let sum: u32 = node.bytes().map(u32::from).sum();
    resync + resync.mul_f64(f64::from(sum % 100) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal() -> Refusal {
        Refusal { reason: "NotVerified".to_owned(), message: "no driver".to_owned() }
    }

    fn gpu() -> PciAddress {
        "0000:01:00.0".parse().expect("address")
    }

    #[test]
    fn the_same_work_waits_longer_each_time_and_no_longer_than_the_longest() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        patience.failed(gpu(), Binding::Vfio, refusal(), start);
        assert!(patience.too_early(gpu(), Binding::Vfio, start + FIRST / 2).is_some());
        assert!(patience.too_early(gpu(), Binding::Vfio, start + FIRST).is_none());
        for _ in 0..20 {
            patience.failed(gpu(), Binding::Vfio, refusal(), start);
        }
        assert_eq!(patience.next(), Some(start + LONGEST));
    }

    #[test]
    fn another_order_is_tried_at_once() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        patience.failed(gpu(), Binding::Vfio, refusal(), start);
        assert!(patience.too_early(gpu(), Binding::Host, start).is_none());
    }

    #[test]
    fn success_ends_the_wait() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        patience.failed(gpu(), Binding::Vfio, refusal(), start);
        patience.succeeded(gpu());
        assert_eq!(patience.next(), None);
    }
}
