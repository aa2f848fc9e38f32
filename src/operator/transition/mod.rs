//! Changes of nodes that are in use: planned, shown, budgeted, and never under a running VM.
//!
//! ```text
//! node controller ─▶ standing ─┐                    ┌─▶ GPUTransition (plan, phase, history)
//! GPUTransition ─▶ record ─────┼─▶ state::next ─────┼─▶ cordon · evict · uncordon
//! GPUVirtConfig ─▶ rules ──────┤   (pure)           └─▶ Leave ─▶ node controller: the order of a mode change
//! other nodes ───▶ budget ─────┘
//! ```
//! What is decided is written before it is done, so a crash at any point is a second look at the same phase.

mod act;
mod approach;
mod budget;
mod errand;
mod follow;
mod metrics;
mod next;
mod object;
mod passage;
mod plan;
pub mod preview;
mod record;
pub mod rules;
mod state;
mod tell;
#[cfg(test)]
mod tests;
mod upgrade;
pub mod windows;

#[cfg(test)]
pub(crate) use self::metrics::ALL as METRICS;
pub use self::{
    errand::{Asks, Pause, Underway, affected},
    follow::{Error, Step, Transitions},
    metrics::Metrics,
    next::{DRAINING, EVICTION_TIMED_OUT},
    plan::Affected,
    record::failure,
    state::{Leave, Progress, Transition},
    tell::HALTED,
    upgrade::{Unusable, Upgrade, Upgrades},
};
