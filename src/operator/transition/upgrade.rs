//! What people allow to happen on a node while its driver is renewed: from `driver.upgradePolicy` of a `ClusterPolicy` or
//! `upgradePolicy` of an `NVIDIADriver`, and from `GPUVirtConfig` for virtual machines.

use std::collections::BTreeMap;

use crds::{
    v1::UpgradePolicy,
    v1alpha1::{DriverUpgradePolicy, Evict, GPUVirtConfigSpec},
};
use k8s_openapi::jiff::SignedDuration;
use kube::core::Selector;

use super::{
    rules::{Cordon, Limits, NotAShare, Patience, Rules, Share},
    windows::Windows,
};
use crate::operator::{
    drivers::Set,
    selector::{self, NotASelector},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgrade {
    pub rules: Rules,
    /// So many failed nodes, and no further one begins.
    pub halt_after: usize,
    /// Pods that are to come to their own end first.
    pub awaited: Option<Selector>,
    /// Which of all other pods leave, where the node is drained.
    pub drained: Option<Selector>,
    /// Pods may be evicted that nobody makes again.
    pub bare: bool,
    /// Pods may be evicted that lose what they have written to an emptyDir.
    pub empty_dirs: bool,
}

/// By who brings the driver; `None`: nodes get a new one by hand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Upgrades {
    pub policy: Option<Upgrade>,
    /// By the name of an `NVIDIADriver`.
    pub objects: BTreeMap<String, Option<Upgrade>>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("maxUnavailable: {0}")]
    Unavailable(#[from] NotAShare),
    #[error("waitForCompletion.podSelector: {0}")]
    Awaited(NotASelector),
    #[error("drain.podSelector: {0}")]
    Drained(NotASelector),
}

impl Upgrades {
    /// None begins outside of these.
    pub fn begin_in(&mut self, windows: &Windows) {
        let all = self.policy.iter_mut().chain(self.objects.values_mut().flatten());
        all.for_each(|upgrade| upgrade.rules.windows.clone_from(windows));
    }

    pub fn of(&self, set: &Set) -> Option<&Upgrade> {
        match &set.owner {
            None => self.policy.as_ref(),
            Some(owner) => self.objects.get(owner)?.as_ref(),
        }
    }
}

/// 0 is no limit: none that anybody lives to see.
fn patience(seconds: u64) -> SignedDuration {
    match i64::try_from(seconds) {
        Ok(0) | Err(_) => SignedDuration::from_hours(24 * 365),
        Ok(seconds) => SignedDuration::from_secs(seconds.min(365 * 24 * 3600)),
    }
}

impl Upgrade {
    /// `Ok(None)`: drivers are not renewed by themselves.
    pub fn new(policy: &UpgradePolicy, config: &GPUVirtConfigSpec) -> Result<Option<Self>, Unusable> {
        let UpgradePolicy { pod_deletion, wait_for_completion, drain, .. } = policy;
        let awaited = selector::parse(wait_for_completion.pod_selector.as_deref().unwrap_or_default());
        let drained = selector::parse(drain.pod_selector.as_deref().unwrap_or_default());
        let parallel = match usize::try_from(policy.max_parallel_upgrades) {
            Ok(0) | Err(_) => Share::Percent(100),
            Ok(count) => Share::Count(count),
        };
        let limits = Limits { parallel, unavailable: Share::try_from(&policy.max_unavailable)? };
        let rules = Rules {
            // VMs are never a policy's alone to end.
            evict: match config.evict {
                Evict::Never | Evict::Pods => Evict::Pods,
                Evict::PodsAndVms => Evict::PodsAndVms,
            },
            completion: (wait_for_completion.timeout_seconds > 0)
                .then(|| patience(wait_for_completion.timeout_seconds)),
            drain: drain.enable.then(|| patience(drain.timeout_seconds)),
            limits,
            patience: Patience { eviction: patience(pod_deletion.timeout_seconds), ..waits() },
            cordon: Cordon::Always,
            // See `Upgrades::begin_in`: until then none opens.
            windows: Windows::Unknown,
        };
        let upgrade = Self {
            rules,
            halt_after: usize::try_from(config.budget.halt_after_failures).unwrap_or(1).max(1),
            awaited: awaited.map_err(Unusable::Awaited)?,
            drained: drained.map_err(Unusable::Drained)?,
            bare: pod_deletion.force || drain.enable && drain.force,
            empty_dirs: pod_deletion.delete_empty_dir || drain.enable && drain.delete_empty_dir,
        };
        Ok(policy.auto_upgrade.then_some(upgrade))
    }

    /// Of an `NVIDIADriver`.
    pub fn of_object(policy: &DriverUpgradePolicy, config: &GPUVirtConfigSpec) -> Result<Option<Self>, Unusable> {
        let policy = policy.clone();
        let same = UpgradePolicy {
            auto_upgrade: policy.auto_upgrade,
            max_parallel_upgrades: policy.max_parallel_upgrades,
            max_unavailable: policy.max_unavailable,
            pod_deletion: policy.pod_deletion,
            wait_for_completion: policy.wait_for_completion,
            drain: policy.drain,
        };
        Self::new(&same, config)
    }
}

/// To finish what was begun before upgrades were switched off.
impl Default for Upgrade {
    fn default() -> Self {
        Self {
            rules: Rules { cordon: Cordon::Always, patience: waits(), ..Rules::default() },
            halt_after: 1,
            awaited: None,
            drained: None,
            bare: false,
            empty_dirs: false,
        }
    }
}

/// A driver's image may be pulled and its module compiled; the checks then have ten minutes (gpu-operator 26.7).
fn waits() -> Patience {
    Patience { switch: SignedDuration::from_mins(45), serve: SignedDuration::from_mins(10), ..Patience::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upgrade(change: impl FnOnce(&mut UpgradePolicy), evict: Evict) -> Option<Upgrade> {
        let mut policy = UpgradePolicy { auto_upgrade: true, ..UpgradePolicy::default() };
        change(&mut policy);
        Upgrade::new(&policy, &GPUVirtConfigSpec { evict, ..GPUVirtConfigSpec::default() }).unwrap()
    }

    #[test]
    fn pods_may_be_evicted_and_vms_only_as_our_own_settings_say() {
        assert_eq!(upgrade(|_| {}, Evict::Never).unwrap().rules.evict, Evict::Pods);
        assert_eq!(upgrade(|_| {}, Evict::PodsAndVms).unwrap().rules.evict, Evict::PodsAndVms);
        assert_eq!(upgrade(|policy| policy.auto_upgrade = false, Evict::Pods), None);
    }

    #[test]
    fn every_field_of_the_policy_counts() {
        let defaults = upgrade(|_| {}, Evict::Never).unwrap();
        let one = Share::Count(1);
        assert_eq!(defaults.rules.limits, Limits { parallel: one, unavailable: Share::Percent(25) });
        assert_eq!((defaults.rules.completion, defaults.rules.drain), (None, None));
        assert_eq!(defaults.rules.patience.eviction, SignedDuration::from_secs(300));
        let all = upgrade(
            |policy| {
                policy.max_parallel_upgrades = 0;
                policy.max_unavailable = k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::Int(3);
                policy.wait_for_completion.pod_selector = Some("app=train".to_owned());
                policy.wait_for_completion.timeout_seconds = 60;
                policy.pod_deletion.force = true;
                policy.pod_deletion.timeout_seconds = 7;
                policy.pod_deletion.delete_empty_dir = true;
                policy.drain.enable = true;
                policy.drain.pod_selector = Some("!keep".to_owned());
                policy.drain.timeout_seconds = 8;
            },
            Evict::Never,
        );
        let all = all.unwrap();
        assert_eq!(all.rules.limits, Limits { parallel: Share::Percent(100), unavailable: Share::Count(3) });
        assert_eq!(all.rules.completion, Some(SignedDuration::from_secs(60)));
        assert_eq!(all.rules.patience.eviction, SignedDuration::from_secs(7));
        assert_eq!(all.rules.drain, Some(SignedDuration::from_secs(8)));
        assert!(all.bare && all.empty_dirs && all.awaited.is_some() && all.drained.is_some());
        let forced = upgrade(|policy| policy.drain.force = true, Evict::Never).unwrap();
        assert!(!forced.bare, "options of a drain that is off");
    }

    #[test]
    fn what_cannot_be_followed_is_named_by_its_field() {
        let unusable = |change: fn(&mut UpgradePolicy)| {
            let mut policy = UpgradePolicy::default();
            change(&mut policy);
            Upgrade::new(&policy, &GPUVirtConfigSpec::default()).unwrap_err().to_string()
        };
        let error = unusable(|policy| policy.wait_for_completion.pod_selector = Some("a b".to_owned()));
        assert!(error.starts_with("waitForCompletion.podSelector: \"a b\""), "{error}");
        let error = unusable(|policy| policy.drain.pod_selector = Some("=".to_owned()));
        assert!(error.starts_with("drain.podSelector"), "{error}");
    }
}
