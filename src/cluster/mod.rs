//! A small adapter over kube: what every room that talks to the API server shares.

pub mod apply;
pub mod events;
pub mod lease;
