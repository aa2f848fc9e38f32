//! Who may read metrics: whoever the API server lets `get` the path `/metrics`.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use kube::Client;
use sha2::{Digest, Sha256};

use crate::cluster::reviews::{self, Verdict};

pub const PATH: &str = "/metrics";
/// As long as the API server's own authorizer webhooks keep a yes and a no: thousands of agents are scraped twice a minute.
const YES: Duration = Duration::from_secs(300);
const NO: Duration = Duration::from_secs(30);
/// Tokens that are remembered. There are as many scrapers as Prometheus has replicas.
const MOST: usize = 64;

/// Why somebody is turned away, and the next step.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error(
        "metrics need a bearer token: let the scraper send its ServiceAccount's, and bind the ClusterRole gpuvirt-metrics-reader to that account"
    )]
    NoToken,
    #[error("the API server does not know this token: it has expired, was revoked, or is of another cluster")]
    Nobody,
    #[error("{user} may not get {PATH}: bind the ClusterRole gpuvirt-metrics-reader to it")]
    Forbidden { user: String },
    #[error("the API server does not say whose this token is: {why}")]
    NoAnswer { why: String },
}

impl Refused {
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoToken | Self::Nobody => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::NoAnswer { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

pub struct Access {
    client: Client,
    /// By the token's hash, with the time until which it holds.
    known: Mutex<HashMap<[u8; 32], (Instant, Verdict)>>,
    /// One question at a time: who sends rubbish makes no load for the API server but this.
    asking: tokio::sync::Mutex<()>,
}

impl Access {
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    pub async fn check(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let token = bearer(headers).ok_or(Refused::NoToken)?;
        let hash: [u8; 32] = Sha256::digest(token).into();
        if let Some(verdict) = self.known(hash) {
            return judge(verdict);
        }
        let _turn = self.asking.lock().await;
        // Somebody may have asked meanwhile.
        if let Some(verdict) = self.known(hash) {
            return judge(verdict);
        }
        let verdict = reviews::may_get(&self.client, token, PATH).await;
        let verdict = verdict.map_err(|error| Refused::NoAnswer { why: crate::chain(&error) })?;
        let held = if verdict == Verdict::Allowed { YES } else { NO };
        remember(&mut self.lock(), hash, (Instant::now() + held, verdict.clone()), Instant::now());
        judge(verdict)
    }

    fn known(&self, hash: [u8; 32]) -> Option<Verdict> {
        self.lock().get(&hash).filter(|(until, _)| Instant::now() < *until).map(|(_, verdict)| verdict.clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<[u8; 32], (Instant, Verdict)>> {
        self.known.lock().expect("access lock should not be poisoned")
    }
}

fn judge(verdict: Verdict) -> Result<(), Refused> {
    match verdict {
        Verdict::Allowed => Ok(()),
        Verdict::Nobody => Err(Refused::Nobody),
        Verdict::Forbidden { user } => Err(Refused::Forbidden { user }),
    }
}

/// Makes room by what ends soonest: an answer of no lives shorter than a yes, so rubbish does not push scrapers out.
fn remember(
    known: &mut HashMap<[u8; 32], (Instant, Verdict)>,
    hash: [u8; 32],
    entry: (Instant, Verdict),
    now: Instant,
) {
    known.retain(|_, (until, _)| now < *until);
    if known.len() >= MOST
        && let Some(soonest) = known.iter().min_by_key(|(_, (until, _))| *until).map(|(hash, _)| *hash)
    {
        known.remove(&soonest);
    }
    known.insert(hash, entry);
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    Some(token.trim()).filter(|token| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_is_one() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().expect("a header"));
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(with("Bearer abc").as_deref(), Some("abc"));
        assert_eq!(with("bearer abc").as_deref(), Some("abc"));
        assert_eq!((with("Basic abc"), with("Bearer "), with("abc")), (None, None, None));
        assert_eq!(bearer(&HeaderMap::new()), None);
    }

    #[test]
    fn rubbish_pushes_no_scraper_out_and_takes_no_room_without_end() {
        let (mut known, now) = (HashMap::new(), Instant::now());
        remember(&mut known, [0; 32], (now + YES, Verdict::Allowed), now);
        for number in 1..200u8 {
            remember(&mut known, [number; 32], (now + NO, Verdict::Nobody), now);
        }
        assert_eq!((known.len(), known.contains_key(&[0; 32])), (MOST, true));
        remember(&mut known, [201; 32], (now + 2 * NO + NO, Verdict::Nobody), now + 2 * NO);
        assert_eq!(known.len(), 2, "what is over is forgotten");
    }
}
