//! Which nodes do not have the newest driver, and why, for people who look at a policy.

use std::collections::BTreeSet;

use crds::{conditions::Verdict, v1alpha1::GPUTransition};

use super::Set;
use crate::operator::transition::{HALTED, Upgrades, failure};

/// Condition: every node has the newest driver of its DaemonSet.
pub const DRIVERS_CURRENT: &str = "DriversCurrent";
/// So many nodes are named.
const NAMED: usize = 10;

/// `outdated`: nodes, and whose driver they have.
pub fn verdict(outdated: &[(String, Set)], changes: &[&GPUTransition], upgrades: &Upgrades) -> Verdict {
    let renewals = || changes.iter().filter(|object| object.spec.driver.is_some());
    let failed: Vec<String> = renewals().filter_map(|object| failure(object)).collect();
    if !failed.is_empty() {
        let halted = renewals().any(|object| object.status.as_ref().is_some_and(|status| status.reason == HALTED));
        let (reason, then) = match halted {
            true => ("UpgradeHalted", "; no further node begins: mend them, or choose another version"),
            false => ("UpgradeFailed", ""),
        };
        let message =
            format!("the new driver does not work on {}{then}", some(failed.iter().map(String::as_str), "; "));
        return Verdict::no(DRIVERS_CURRENT, reason, message);
    }
    let by_hand: BTreeSet<&str> =
        outdated.iter().filter(|(_, set)| upgrades.of(set).is_none()).map(|(node, _)| node.as_str()).collect();
    let waiting: BTreeSet<&str> = outdated.iter().map(|(node, _)| node.as_str()).collect();
    match (waiting.is_empty(), by_hand.is_empty()) {
        (true, _) => Verdict::yes(DRIVERS_CURRENT, "AllCurrent", "every node has the newest driver that it is to have"),
        (false, false) => {
            let names = some(by_hand.into_iter(), ", ");
            let how = "upgradePolicy.autoUpgrade is false: set it, or delete their driver pods one after another";
            Verdict::no(DRIVERS_CURRENT, "AutoUpgradeOff", format!("node(s) {names} have an older driver, and {how}"))
        }
        (false, true) => {
            let names = some(waiting.into_iter(), ", ");
            let message = format!("node(s) {names} have an older driver: see kubectl get gputransitions");
            Verdict::no(DRIVERS_CURRENT, "Upgrading", message)
        }
    }
}

fn some<'a>(all: impl Iterator<Item = &'a str>, between: &str) -> String {
    let all: Vec<&str> = all.collect();
    let more = all.len().saturating_sub(NAMED);
    let named = all.iter().take(NAMED).copied().collect::<Vec<_>>().join(between);
    if more == 0 { named } else { format!("{named} and {more} more") }
}
