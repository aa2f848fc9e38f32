//! What a version of KubeVirt cannot do. Pure.

use serde_json::Value;

use super::{decide::Problem, dialect::Kind, find::Cr, offers::Offers};

/// vGPUs that are virtual functions on their host's driver became host devices in this one.
const VIRTUAL_FUNCTIONS: (u32, u32) = (1, 9);

/// As KubeVirt's operator has it, e.g. `v1.8.0`.
pub fn of(all: &[Cr]) -> Option<String> {
    let kubevirt = all.iter().find(|cr| cr.dialect.kind() == Kind::KubeVirt)?;
    kubevirt.object.data.pointer("/status/observedKubeVirtVersion").and_then(Value::as_str).map(str::to_owned)
}

/// A version that is not known, or not understood, is not complained of.
pub fn objection(version: Option<&str>, offers: &Offers) -> Option<Problem> {
    let version = version?;
    if offers.virtual_functions.is_empty() || parsed(version)? >= VIRTUAL_FUNCTIONS {
        return None;
    }
    let resources: Vec<&str> = offers.virtual_functions.iter().map(String::as_str).collect();
    let (major, minor) = VIRTUAL_FUNCTIONS;
    Some(Problem {
        reason: "KubeVirtTooOld",
        message: format!(
            "KubeVirt {version} knows no vGPUs that are virtual functions ({}): VMs may not start with them before KubeVirt {major}.{minor}; upgrade it",
            resources.join(", ")
        ),
    })
}

fn parsed(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_version_is_named_where_it_matters() {
        let offers =
            Offers { virtual_functions: ["nvidia.com/NVIDIA_L40S-24Q".to_owned()].into(), ..Offers::default() };
        let problem = objection(Some("v1.8.2"), &offers).expect("a problem");
        assert!(problem.message.contains("v1.8.2") && problem.message.contains("L40S-24Q"), "{}", problem.message);
        for fine in [Some("v1.9.0"), Some("v1.10.1"), Some("v2.0.0-rc.1"), Some("devel"), None] {
            assert_eq!(objection(fine, &offers), None, "{fine:?}");
        }
        assert_eq!(objection(Some("v1.8.2"), &Offers::default()), None, "nobody offers one");
    }
}
