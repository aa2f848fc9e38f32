//! What the agent tells in events on its `GPUNode`: each thing once, until it changes or ends.

use std::collections::BTreeMap;

use crds::v1alpha1::{GPUNode, Refusal, Severity};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Resource, ResourceExt};
use vfio::PciAddress;

use super::health::{Ailment, Ailments};
use crate::cluster::events::{Events, Notice};

pub struct News {
    events: Events,
    /// Refusals that were told.
    refusals: BTreeMap<PciAddress, String>,
    /// Ailments that were told. Their counters may go on; that is no news.
    ailments: Ailments,
}

impl News {
    pub fn new(events: Events) -> Self {
        Self { events, refusals: BTreeMap::new(), ailments: Ailments::new() }
    }

    pub async fn tell(&mut self, refusals: &BTreeMap<PciAddress, Refusal>, ailments: &Ailments, gpu_node: &GPUNode) {
        let about = ObjectReference {
            api_version: Some(GPUNode::api_version(&()).into_owned()),
            kind: Some(GPUNode::kind(&()).into_owned()),
            name: Some(gpu_node.name_any()),
            uid: gpu_node.uid(),
            ..ObjectReference::default()
        };
        for (gpu, refusal) in refusals {
            if self.refusals.get(gpu) != Some(&refusal.message) {
                tracing::warn!(%gpu, reason = refusal.reason, "{}", refusal.message);
                let note = format!("{}: {}", refusal.reason, refusal.message);
                self.events.publish(&Notice::warning("GPURefused", "ChangeDriver", note), &about).await;
            }
        }
        self.refusals = refusals.iter().map(|(gpu, refusal)| (*gpu, refusal.message.clone())).collect();
        for notice in changes(&self.ailments, ailments) {
            tracing::warn!(reason = notice.reason, "{}", notice.note);
            self.events.publish(&notice, &about).await;
        }
        self.ailments.clone_from(ailments);
    }
}

/// What is new between two states of health.
fn changes(before: &Ailments, now: &Ailments) -> Vec<Notice> {
    let nothing = Vec::new();
    let has = |ailments: &[Ailment], one: &Ailment| ailments.iter().any(|other| other.reason() == one.reason());
    let mut notices = Vec::new();
    for (gpu, ailments) in now {
        let old = before.get(gpu).unwrap_or(&nothing);
        for ailment in ailments.iter().filter(|ailment| !has(old, ailment)) {
            let reason = match ailment.severity() {
                Severity::Unhealthy => "GPUUnhealthy",
                Severity::Degraded => "GPUDegraded",
            };
            notices.push(Notice::warning(reason, "CheckHealth", format!("{}: {ailment}", ailment.reason())));
        }
    }
    for (gpu, ailments) in before {
        let left = now.get(gpu).unwrap_or(&nothing);
        let over: Vec<_> = ailments.iter().filter(|ailment| !has(left, ailment)).map(Ailment::reason).collect();
        if !over.is_empty() {
            let note = format!("GPU {gpu}: no longer {}", over.join(", "));
            notices.push(Notice::normal("GPURecovered", "CheckHealth", note));
        }
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> PciAddress {
        "0000:01:00.0".parse().expect("address")
    }

    fn errors(count: u64) -> Ailments {
        [(gpu(), vec![Ailment::NonfatalErrors { gpu: gpu(), count }])].into()
    }

    fn reasons(before: &Ailments, now: &Ailments) -> Vec<&'static str> {
        changes(before, now).iter().map(|notice| notice.reason).collect()
    }

    #[test]
    fn an_ailment_is_told_when_it_begins_and_when_it_ends() {
        let none = Ailments::new();
        assert_eq!(reasons(&none, &errors(1)), ["GPUDegraded"]);
        assert_eq!(reasons(&errors(1), &none), ["GPURecovered"]);
        assert_eq!(
            reasons(&errors(1), &[(gpu(), vec![Ailment::FellOff { gpu: gpu() }])].into()),
            ["GPUUnhealthy", "GPURecovered"]
        );
    }

    #[test]
    fn a_counter_that_goes_on_is_no_news() {
        assert_eq!(reasons(&errors(1), &errors(7)), [] as [&str; 0]);
    }
}
