//! How many nodes may change at a time: places, and who has one.

use std::{collections::BTreeSet, sync::Mutex};

use super::rules::{Limits, Share};

/// The nodes that have a place. Kept in memory: one operator writes at a time, and a new one counts them again.
#[derive(Debug, Default)]
pub struct Budget(Mutex<BTreeSet<String>>);

/// The other GPU nodes, as the limits count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fleet {
    pub nodes: usize,
    /// Those that are not ready, the changing ones aside.
    pub unready: usize,
}

impl Budget {
    /// Lets `decide` say what `node` does with a place, if there is one for it, and keeps or frees the place by the answer's
    /// flag. Asking and taking are one act: two nodes cannot take the last one.
    pub fn with_place<T>(
        &self,
        node: &str,
        limits: &Limits,
        fleet: impl FnOnce() -> Fleet,
        decide: impl FnOnce(bool) -> (T, bool),
    ) -> T {
        let mut holding = self.0.lock().expect("budget lock should not be poisoned");
        let free = holding.contains(node) || admits(limits, holding.len(), fleet);
        let (answer, occupies) = decide(free);
        if occupies {
            holding.insert(node.to_owned());
        } else {
            holding.remove(node);
        }
        answer
    }

    /// Who has a place.
    pub fn holders(&self) -> BTreeSet<String> {
        self.0.lock().expect("budget lock should not be poisoned").clone()
    }

    /// A node that is gone, or whose change is.
    pub fn free(&self, node: &str) -> bool {
        self.0.lock().expect("budget lock should not be poisoned").remove(node)
    }

    /// Of a change that was under way when this operator began.
    pub fn occupy(&self, node: &str) {
        self.0.lock().expect("budget lock should not be poisoned").insert(node.to_owned());
    }
}

/// Both limits hold. One node may always change, or nothing ever would.
fn admits(limits: &Limits, holding: usize, fleet: impl FnOnce() -> Fleet) -> bool {
    if let Share::Count(parallel) = limits.parallel
        && holding >= parallel.max(1)
    {
        return false;
    }
    let Fleet { nodes, unready } = fleet();
    holding < limits.parallel.of(nodes).max(1) && holding + unready < limits.unavailable.of(nodes).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER: Limits = Limits { parallel: Share::Percent(100), unavailable: Share::Percent(25) };
    const ONE: Limits = Limits { parallel: Share::Count(1), unavailable: Share::Percent(100) };

    fn take(budget: &Budget, node: &str, limits: &Limits, unready: usize) -> bool {
        budget.with_place(node, limits, || Fleet { nodes: 12, unready }, |free| (free, free))
    }

    #[test]
    fn the_last_place_goes_to_one_node_and_comes_back_when_it_is_done() {
        let budget = Budget::default();
        assert!(take(&budget, "a", &ONE, 0));
        assert!(!take(&budget, "b", &ONE, 0));
        assert!(take(&budget, "a", &ONE, 0), "who has a place keeps it");
        budget.with_place("a", &ONE, || Fleet { nodes: 12, unready: 0 }, |_| ((), false));
        assert!(take(&budget, "b", &ONE, 0));
    }

    #[test]
    fn nodes_that_are_down_take_of_what_may_be_unavailable() {
        let budget = Budget::default();
        assert!(take(&budget, "a", &QUARTER, 2));
        assert!(!take(&budget, "b", &QUARTER, 2));
        assert!(take(&budget, "b", &QUARTER, 1));
    }

    #[test]
    fn a_share_that_rounds_to_nothing_lets_one_node_change() {
        let none = Limits { parallel: Share::Percent(100), unavailable: Share::Percent(0) };
        let budget = Budget::default();
        assert!(take(&budget, "a", &none, 0));
        assert!(!take(&budget, "b", &none, 0));
    }
}
