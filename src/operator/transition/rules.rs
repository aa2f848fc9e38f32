//! What people allow to happen on a node while it changes: from `GPUVirtConfig`, with safe defaults.

use crds::v1alpha1::{Budget, Evict};
use k8s_openapi::{apimachinery::pkg::util::intstr::IntOrString, jiff::SignedDuration};

use super::windows::Windows;

/// How one kind of change is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    pub evict: Evict,
    pub cordon: Cordon,
    /// How long pods that were named may take to come to their own end; `None`: as long as they like.
    pub completion: Option<SignedDuration>,
    /// How long all other pods of the node may take to leave, if those that use a GPU do not; `None`: they may stay.
    pub drain: Option<SignedDuration>,
    pub limits: Limits,
    /// When it may begin.
    pub windows: Windows,
    pub patience: Patience,
}

/// Which nodes take no new pods while they change. A node that nobody uses is closed by what it stops to advertise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cordon {
    WhenInUse,
    Always,
}

/// How many nodes change at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Nodes in transition at once.
    pub parallel: Share,
    /// Nodes that are in transition or not ready.
    pub unavailable: Share,
}

/// Nodes, as a count or as a share of all GPU nodes, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    Count(usize),
    Percent(usize),
}

impl Share {
    pub fn of(self, nodes: usize) -> usize {
        match self {
            Self::Count(count) => count,
            Self::Percent(percent) => (nodes * percent).div_ceil(100),
        }
    }
}

/// A share that is neither a count nor a percentage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a count of nodes nor a share such as 25%")]
pub struct NotAShare(String);

impl TryFrom<&IntOrString> for Share {
    type Error = NotAShare;

    fn try_from(value: &IntOrString) -> Result<Self, NotAShare> {
        let text = match value {
            IntOrString::Int(count) => {
                return usize::try_from(*count)
                    .map_or_else(|_| Err(NotAShare(count.to_string())), |count| Ok(Self::Count(count)));
            }
            IntOrString::String(text) => text,
        };
        let parsed = match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().filter(|percent| *percent <= 100).map(Self::Percent),
            None => text.parse().ok().map(Self::Count),
        };
        parsed.ok_or_else(|| NotAShare(text.clone()))
    }
}

/// How long each phase may take before the change is blocked, or told about again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For the operator's own requests, and for the agent to report.
    pub answer: SignedDuration,
    /// In `WaitForSlot` and `WaitForUsers`: then it is said again.
    pub reminder: SignedDuration,
    /// For users to leave once they are asked to.
    pub eviction: SignedDuration,
    /// For the old mode's operands to leave.
    pub quiesce: SignedDuration,
    /// For the agent, with every device.
    pub switch: SignedDuration,
    /// For the new mode to serve; a driver container may have to compile its module.
    pub serve: SignedDuration,
    /// Before a change that ran out of time is tried again.
    pub retry: SignedDuration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: SignedDuration::from_mins(5),
            reminder: SignedDuration::from_hours(24),
            eviction: SignedDuration::from_mins(10),
            quiesce: SignedDuration::from_mins(15),
            switch: SignedDuration::from_mins(10),
            serve: SignedDuration::from_mins(45),
            retry: SignedDuration::from_mins(10),
        }
    }
}

/// Nothing is evicted, and one node changes at a time.
impl Default for Rules {
    fn default() -> Self {
        Self {
            evict: Evict::Never,
            cordon: Cordon::WhenInUse,
            completion: None,
            drain: None,
            limits: Limits { parallel: Share::Count(1), unavailable: Share::Percent(25) },
            windows: Windows::default(),
            patience: Patience::default(),
        }
    }
}

impl Rules {
    /// Of a mode change.
    pub fn new(evict: Evict, budget: &Budget) -> Result<Self, NotAShare> {
        let parallel = Share::try_from(&budget.max_parallel)?;
        let limits = Limits { parallel, unavailable: Share::try_from(&budget.max_unavailable)? };
        Ok(Self { evict, limits, ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(text: &str) -> Result<Share, NotAShare> {
        Share::try_from(&IntOrString::String(text.to_owned()))
    }

    #[test]
    fn a_share_of_nodes_is_rounded_up_so_that_it_is_never_none_of_them() {
        assert_eq!(share("25%"), Ok(Share::Percent(25)));
        assert_eq!([1, 4, 5, 5000].map(|nodes| Share::Percent(25).of(nodes)), [1, 1, 2, 1250]);
        assert_eq!(Share::Percent(0).of(5000), 0);
    }

    #[test]
    fn a_count_may_be_written_as_text() {
        assert_eq!(share("3"), Ok(Share::Count(3)));
        assert_eq!(Share::try_from(&IntOrString::Int(3)), Ok(Share::Count(3)));
    }

    #[test]
    fn what_is_no_share_is_refused_with_its_text() {
        for text in ["", "%", "-1", "101%", "many", "2.5%"] {
            assert_eq!(share(text), Err(NotAShare(text.to_owned())));
        }
        assert!(Share::try_from(&IntOrString::Int(-1)).is_err());
    }
}
