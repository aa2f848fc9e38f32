//! A small adapter over kube: what every room that talks to the API server shares.

pub mod apply;
pub mod events;
pub mod lease;
pub mod reviews;

use crds::labels;
use kube::api::PatchParams;

/// Of a merge patch by the operator.
pub fn merges() -> PatchParams {
    PatchParams { field_manager: Some(labels::OPERATOR_MANAGER.to_owned()), ..PatchParams::default() }
}

/// The object has gone, or another one has its name by now, or somebody wrote it meanwhile: its own event brings the next
/// look at it.
pub fn gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404 || status.code == 409)
}
