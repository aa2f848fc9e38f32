//! Nodes that can share one driver image: those of one operating system and, for precompiled drivers, of one kernel.

use std::collections::BTreeMap;

use super::{Facts, facts::Host};
use crate::operator::host::{kernel_in_name, label_value};

/// The nodes of one driver `DaemonSet`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pool {
    /// Name of its `DaemonSet`.
    pub set: String,
    /// As driver images are tagged: `ubuntu24.04`.
    pub os: String,
    /// `uname -r`, where the driver was compiled for it.
    pub kernel: Option<String>,
}

impl Pool {
    /// What an image's tag ends in.
    pub fn suffix(&self) -> String {
        match &self.kernel {
            Some(kernel) => format!("{kernel}-{}", self.os),
            None => self.os.clone(),
        }
    }

    /// Value of the node label that pools are selected by.
    pub fn kernel_label(&self) -> Option<String> {
        self.kernel.as_deref().map(label_value)
    }
}

/// A driver `DaemonSet` that there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveSet {
    /// The operating system that it was made for.
    pub os: Option<String>,
    pub precompiled: bool,
    /// The `NVIDIADriver` that it was made for.
    pub owner: Option<String>,
    /// A node has every label that it selects by.
    pub wanted: bool,
}

/// One pool for each operating system. The first gets the plain name `base`, those that come later their own names; each
/// keeps its name for as long as it has a set, because a set that is renamed starts its pods anew.
pub fn by_system(base: &str, facts: &Facts) -> Vec<Pool> {
    let systems: Vec<String> = unique(facts.hosts.iter().map(Host::tag));
    let mut names: BTreeMap<&String, &String> = BTreeMap::new();
    for (name, live) in facts.live.iter().filter(|(name, live)| is_of(base, name) && !live.precompiled) {
        if let Some(os) = systems.iter().find(|os| live.os.as_ref() == Some(os)) {
            names.entry(os).or_insert(name);
        }
    }
    let mut base_is_free = names.values().all(|name| *name != base);
    let mut pools = Vec::new();
    for os in &systems {
        let set = match names.get(os) {
            Some(name) => (*name).clone(),
            None if base_is_free => {
                base_is_free = false;
                base.to_owned()
            }
            None => format!("{base}-{os}"),
        };
        pools.push(Pool { set, os: os.clone(), kernel: None });
    }
    pools
}

/// One pool for each kernel of each operating system, named as the peer names them.
pub fn by_kernel(base: &str, facts: &Facts) -> Vec<Pool> {
    let hosts = facts.hosts.iter().filter(|host| !host.kernel.is_empty());
    unique(hosts.map(|host| Pool {
        set: format!("{base}-{}-{}", kernel_in_name(&host.kernel), host.tag()),
        os: host.tag(),
        kernel: Some(host.kernel.clone()),
    }))
}

/// Sets of `base` that are not to be taken away though they are none of `pools`: a node still wants them, and its agent
/// has only not said so yet. Without `pools` nothing is known, and all stay.
pub fn kept(base: &str, pools: Option<&[Pool]>, facts: &Facts) -> Vec<String> {
    let live = facts.live.iter().filter(|(name, _)| is_of(base, name));
    let stays = |name: &String, live: &LiveSet| match pools {
        None => true,
        Some(pools) => live.wanted && pools.iter().all(|pool| pool.set != *name),
    };
    live.filter(|(name, live)| stays(name, live)).map(|(name, _)| name.clone()).collect()
}

fn is_of(base: &str, name: &str) -> bool {
    name.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn unique<T: Ord>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.collect::<std::collections::BTreeSet<T>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "nvidia-driver-daemonset";

    fn facts(hosts: &[(&str, &str)]) -> Facts {
        let host = |(os, kernel): &(&str, &str)| Host { os: (*os).to_owned(), kernel: (*kernel).to_owned() };
        Facts { hosts: hosts.iter().map(host).collect(), ..Facts::default() }
    }

    fn live(facts: &mut Facts, name: &str, os: &str, wanted: bool) {
        let set = LiveSet { os: Some(os.to_owned()), precompiled: false, owner: None, wanted };
        facts.live.insert(name.to_owned(), set);
    }

    fn names(pools: &[Pool]) -> Vec<(&str, &str)> {
        pools.iter().map(|pool| (pool.os.as_str(), pool.set.as_str())).collect()
    }

    #[test]
    fn one_system_has_the_plain_name_whatever_its_kernels() {
        let facts = facts(&[("ubuntu24.04", "6.8.0-1-generic"), ("ubuntu24.04", "6.8.0-2-generic")]);
        assert_eq!(names(&by_system(BASE, &facts)), [("ubuntu24.04", BASE)]);
    }

    #[test]
    fn a_system_that_joins_gets_a_name_of_its_own_and_the_first_one_keeps_its() {
        let mut facts = facts(&[("rhel9.4", "a"), ("ubuntu24.04", "b")]);
        live(&mut facts, BASE, "ubuntu24.04", true);
        let pools = by_system(BASE, &facts);
        assert_eq!(names(&pools), [("rhel9.4", "nvidia-driver-daemonset-rhel9.4"), ("ubuntu24.04", BASE)]);
    }

    #[test]
    fn a_system_keeps_its_name_when_the_one_with_the_plain_name_has_gone() {
        let mut facts = facts(&[("rhel9.4", "a")]);
        live(&mut facts, BASE, "ubuntu24.04", false);
        live(&mut facts, "nvidia-driver-daemonset-rhel9.4", "rhel9.4", true);
        let pools = by_system(BASE, &facts);
        assert_eq!(names(&pools), [("rhel9.4", "nvidia-driver-daemonset-rhel9.4")]);
        assert_eq!(kept(BASE, Some(&pools), &facts), Vec::<String>::new());
    }

    #[test]
    fn each_kernel_has_a_pool_whose_tag_has_the_whole_version() {
        let facts = facts(&[("rhel9.4", "5.14.0-427.el9.x86_64"), ("rhel9.4", "")]);
        let pools = by_kernel(BASE, &facts);
        assert_eq!(names(&pools), [("rhel9.4", "nvidia-driver-daemonset-5.14.0-427.el9-rhel9.4")]);
        assert_eq!(pools[0].suffix(), "5.14.0-427.el9.x86_64-rhel9.4");
    }

    #[test]
    fn a_set_of_a_vanished_kernel_stays_while_a_node_wants_it() {
        let mut facts = facts(&[("ubuntu24.04", "6.8.0-2-generic")]);
        live(&mut facts, "nvidia-driver-daemonset-6.8.0-1-generic-ubuntu24.04", "ubuntu24.04", true);
        live(&mut facts, "nvidia-driver-daemonset-6.8.0-0-generic-ubuntu24.04", "ubuntu24.04", false);
        live(&mut facts, "nvidia-dcgm", "", true);
        let pools = by_kernel(BASE, &facts);
        assert_eq!(kept(BASE, Some(&pools), &facts), ["nvidia-driver-daemonset-6.8.0-1-generic-ubuntu24.04"]);
        assert_eq!(kept(BASE, None, &facts).len(), 2, "while nothing is known all stay");
    }
}
