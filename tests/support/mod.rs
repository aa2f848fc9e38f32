//! A real control plane for tests, the product's programs against it, and players for the parts that are not there.
//!
//! ```text
//! alone     one test at a time
//! turn      a test's turn on the one control plane, clean at its beginning
//! cluster   the control plane (tests/cluster/up.sh), the chart in it
//! kubevirt  KubeVirt's own controllers (tests/cluster/kubevirt.sh), and virtual machines in them
//! machine   this host as a real node (tests/cluster/node.sh)
//! program   `gpuvirt …` as a process, its log shown when the test fails
//! identity  kubeconfigs of ServiceAccounts
//! nodes · agents · kubelets    players: they write what the real ones would write
//! wait · tape                  what is waited for, and in which order things were written
//! ```

#![allow(dead_code, reason = "each ring uses its own part")]

pub mod agents;
pub mod alone;
pub mod cluster;
pub mod identity;
pub mod kubelets;
pub mod kubevirt;
pub mod machine;
pub mod nodes;
pub mod policies;
pub mod program;
pub mod tape;
pub mod turn;
pub mod wait;

use tokio::task::JoinHandle;

/// The namespace of the release in every ring.
pub const NAMESPACE: &str = "gpuvirt";

/// A task that ends with its owner.
struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}
