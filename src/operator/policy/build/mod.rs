//! Operands from validated settings: pure, and they cannot fail. One file an operand.

mod agent;
mod driver;
#[cfg(test)]
mod parity;
mod pod;
#[cfg(test)]
mod tests;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::ConfigMap};

use super::validate::{Settings, Wish};

/// How this operator runs: what its operands take over from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    pub namespace: String,
    /// The operator's own image, which the agent runs too.
    pub image: String,
    pub pull_policy: String,
    pub log_level: String,
}

/// Everything that a policy asks for in the operator's namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Operands {
    pub config_maps: Vec<ConfigMap>,
    pub daemon_sets: Vec<DaemonSet>,
    /// Names of objects that are not asked for, and not to be taken away either.
    pub kept: Vec<&'static str>,
}

pub const AGENT: &str = "gpuvirt-agent";

pub fn build(settings: &Settings, installation: &Installation) -> Operands {
    let mut operands = Operands { daemon_sets: vec![agent::daemon_set(settings, installation)], ..Operands::default() };
    match &settings.driver {
        Wish::Wanted(driver) => {
            operands.config_maps.push(driver::startup_probe_script(settings, installation));
            operands.daemon_sets.push(driver::daemon_set(settings, driver, installation));
        }
        Wish::NotWanted => {}
        Wish::Unknown => operands.kept.extend([driver::NAME, driver::PROBE_SCRIPT]),
    }
    operands
}
