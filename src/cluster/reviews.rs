//! Whose a token is and what its owner may do, asked of the API server.

use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};

/// What the API server says to a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allowed,
    /// It is nobody's, or not any more.
    Nobody,
    /// Somebody who may not.
    Forbidden {
        user: String,
    },
}

/// Whether the owner of a token may `get` a path.
pub async fn may_get(client: &Client, token: &str, path: &str) -> Result<Verdict, kube::Error> {
    let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
    let review = TokenReview { spec, ..TokenReview::default() };
    let answer = Api::<TokenReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    let status = answer.status.unwrap_or_default();
    let user = match status.user {
        Some(user) if status.authenticated == Some(true) => user,
        Some(_) | None => return Ok(Verdict::Nobody),
    };
    let name = user.username.clone().unwrap_or_default();
    let review = SubjectAccessReview { spec: asks(user, path), ..SubjectAccessReview::default() };
    let answer = Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    match answer.status.is_some_and(|status| status.allowed) {
        true => Ok(Verdict::Allowed),
        false => Ok(Verdict::Forbidden { user: name }),
    }
}

fn asks(user: UserInfo, path: &str) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(path.to_owned()),
            verb: Some("get".to_owned()),
        }),
        ..SubjectAccessReviewSpec::default()
    }
}
