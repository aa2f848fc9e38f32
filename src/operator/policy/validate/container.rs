//! What most sections say about an operand's container.

use crds::v1::{self, ImageSpec};
use k8s_openapi::api::core::v1::{EnvVar, ResourceRequirements};

use super::{Facts, Problem, given};
use crate::operator::policy::image::{self, ImageRef};

/// An operand's main container, as the user wants it.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    pub image: Image,
    /// Empty: the operand's own.
    pub args: Vec<String>,
    pub env: Vec<EnvVar>,
    pub resources: ResourceRequirements,
    pub host_network: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    pub reference: ImageRef,
    pub pull_policy: String,
    pub pull_secrets: Vec<String>,
}

/// `section` as in `driver`; `suffix` goes behind a tag.
pub(super) fn container(
    section: &str,
    given: &v1::Container,
    suffix: Option<&str>,
    facts: &Facts,
) -> Result<Container, Problem> {
    Ok(Container {
        image: image(section, &given.image, suffix, facts)?,
        args: given.args.clone(),
        env: environment(&given.env),
        resources: (&given.resources).into(),
        host_network: given.host_network.unwrap_or(false),
    })
}

/// The policy's own image, else the operator's environment's.
pub(super) fn image(section: &str, spec: &ImageSpec, suffix: Option<&str>, facts: &Facts) -> Result<Image, Problem> {
    let reference = image::resolve(spec, suffix)
        .or_else(|error| match (error, facts.images.get(section)) {
            (image::Error::Missing, Some(reference)) => image::of_environment(reference, suffix),
            (error, _) => Err(error),
        })
        .map_err(|error| Problem { reason: "InvalidImage", message: format!("spec.{section}: {error}") })?;
    Ok(Image {
        reference,
        pull_policy: given(spec.image_pull_policy.as_deref()).unwrap_or("IfNotPresent").to_owned(),
        pull_secrets: spec.image_pull_secrets.clone(),
    })
}

/// The last value of a name wins, in the place of the first: the API server refuses duplicates in an apply.
pub(super) fn environment(env: &[v1::EnvVar]) -> Vec<EnvVar> {
    let mut merged: Vec<EnvVar> = Vec::new();
    for entry in env {
        match merged.iter_mut().find(|known| known.name == entry.name) {
            Some(known) => known.value = Some(entry.value.clone()),
            None => merged.push(entry.into()),
        }
    }
    merged
}
