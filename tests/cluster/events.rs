//! Events as the API server has them.

use std::time::Duration;

use gpuvirt::cluster::events::{Events, Notice};
use k8s_openapi::api::{core::v1::ObjectReference, events::v1::Event};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};

use crate::support::{cluster, identity, turn::turn, wait};

fn about(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("gpuvirt.io/v1alpha1".to_owned()),
        kind: Some("GPUNode".to_owned()),
        name: Some(name.to_owned()),
        uid: Some("0f1c".to_owned()),
        ..ObjectReference::default()
    }
}

#[test]
fn a_thousand_repeats_are_one_event_with_their_number_and_another_gpus_is_told_too() {
    turn(async |t| {
        let api: Api<Event> = Api::namespaced(t.client.clone(), "default");
        let ours = ListParams::default().fields("regarding.name=repeater");
        let _ = api.delete_collection(&DeleteParams::default(), &ours).await;
        let agent = cluster::client(&identity::service_account(t, "gpuvirt-agent", None).await).await;
        let events = Events::new(agent, "gpuvirt-agent", "agent-n1");
        for _ in 0..1000 {
            events.publish(&Notice::warning("GPURefused", "ChangeDriver", "GPU a is in use"), &about("repeater")).await;
        }
        events.publish(&Notice::warning("GPURefused", "ChangeDriver", "GPU b is in use"), &about("repeater")).await;
        let all = async || api.list(&ours).await.expect("listable").items;
        let counted = wait::eventually("the number is written", async || {
            let all = all().await;
            all.iter().any(|event| event.series.as_ref().is_some_and(|series| series.count == 1000)).then_some(all)
        });
        let counted = counted.await;
        assert_eq!(counted.len(), 2, "{counted:?}");
        for event in &counted {
            assert_eq!(event.action.as_deref(), Some("ChangeDriver"));
            assert_eq!((event.reason.as_deref(), event.type_.as_deref()), (Some("GPURefused"), Some("Warning")));
            assert_eq!(event.reporting_controller.as_deref(), Some("gpuvirt-agent"));
        }
        let other = counted.iter().find(|event| event.note.as_deref() == Some("GPU b is in use"));
        assert!(other.expect("the other GPU's").series.is_none());
        // It goes on counting in the same event.
        events.publish(&Notice::warning("GPURefused", "ChangeDriver", "GPU a is in use"), &about("repeater")).await;
        let counted = wait::eventually("the next number is written", async || {
            let all = all().await;
            all.iter().any(|event| event.series.as_ref().is_some_and(|series| series.count == 1001)).then_some(all)
        });
        assert_eq!(tokio::time::timeout(Duration::from_secs(60), counted).await.expect("in time").len(), 2);
    });
}
