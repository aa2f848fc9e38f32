//! One writer at a time, by a `Lease`.
//!
//! Expiry is judged by this host's `CLOCK_BOOTTIME` from the moment a renewal was *seen*, never by comparing clocks of
//! two machines, and boot time goes on while the machine sleeps: a process that wakes up late knows that it is late.
//! Every take-over raises `leaseTransitions`; that number travels as the epoch with each order to an agent.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::{sleep, timeout};

use crate::shutdown::Shutdown;

/// How long others wait for a silent holder.
const DURATION: Duration = Duration::from_secs(15);
/// A holder that could not renew for this long stops writing. Shorter than [`DURATION`], so that writers never overlap.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("lease {name} cannot be read or written")]
    Api { name: String, source: kube::Error },
    #[error("lease {name} was taken over by {holder}")]
    TakenOver { name: String, holder: String },
    #[error("lease {name} could not be renewed for {seconds} s: writing stops before another may start")]
    NotRenewed { name: String, seconds: u64 },
}

/// A lease that this process holds.
pub struct Held {
    leases: Api<Lease>,
    name: String,
    identity: String,
    lease: Lease,
    renewed: Duration,
}

/// Waits until this process holds the lease; `None` if shutdown came first.
pub async fn acquire(
    client: &Client,
    namespace: &str,
    name: &str,
    identity: &str,
    shutdown: &Shutdown,
) -> Option<Held> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let mut seen: Option<Seen> = None;
    loop {
        match attempt(&leases, name, identity, &mut seen).await {
            Ok(Some(lease)) => {
                tracing::info!(name, identity, epoch = transitions(&lease), "lease acquired");
                let renewed = boottime();
                return Some(Held { leases, name: name.to_owned(), identity: identity.to_owned(), lease, renewed });
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(name, %error, "lease not acquired, trying again"),
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = shutdown.begun() => return None,
        }
    }
}

/// The last renewal of another holder, and when it was seen here.
struct Seen {
    version: Option<String>,
    at: Duration,
}

async fn attempt(
    leases: &Api<Lease>,
    name: &str,
    identity: &str,
    seen: &mut Option<Seen>,
) -> Result<Option<Lease>, kube::Error> {
    let Some(current) = leases.get_opt(name).await? else {
        let lease = Lease {
            metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
            spec: Some(taken(identity, first())),
        };
        return retry_later(leases.create(&PostParams::default(), &lease).await);
    };
    let holder = current.spec.as_ref().and_then(|s| s.holder_identity.as_deref()).unwrap_or_default();
    if !holder.is_empty() && holder != identity && !expired(&current, seen) {
        tracing::debug!(name, holder, "lease is held");
        return Ok(None);
    }
    let mut lease = current;
    let next = if transitions(&lease) == 0 { first() } else { transitions(&lease) + 1 };
    lease.spec = Some(taken(identity, next));
    // The resource version in `lease` makes this fail if anyone else wrote meanwhile.
    retry_later(leases.replace(name, &PostParams::default(), &lease).await)
}

/// Losing a race is no error: another holder is there now.
fn retry_later(result: Result<Lease, kube::Error>) -> Result<Option<Lease>, kube::Error> {
    match result {
        Ok(lease) => Ok(Some(lease)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
        Err(error) => Err(error),
    }
}

fn expired(current: &Lease, seen: &mut Option<Seen>) -> bool {
    let version = current.metadata.resource_version.clone();
    let duration = current.spec.as_ref().and_then(|s| s.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
    let duration = duration.map_or(DURATION, Duration::from_secs);
    match seen {
        Some(s) if s.version == version => boottime().saturating_sub(s.at) > duration,
        Some(_) | None => {
            *seen = Some(Seen { version, at: boottime() });
            false
        }
    }
}

fn taken(identity: &str, transitions: i32) -> LeaseSpec {
    let now = MicroTime(Timestamp::now());
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    }
}

/// Of a lease that nobody has held: minutes since 1970, so that it counts on from one that was deleted, as with a release that
/// is installed again. A node may have been left with an order of the earlier one.
fn first() -> i32 {
    i32::try_from(Timestamp::now().as_second() / 60).unwrap_or(1)
}

fn transitions(lease: &Lease) -> i32 {
    lease.spec.as_ref().and_then(|s| s.lease_transitions).unwrap_or_default()
}

impl Held {
    /// Number of take-overs so far: higher than that of every holder before.
    pub fn epoch(&self) -> i64 {
        i64::from(transitions(&self.lease))
    }

    /// Renews until shutdown (`Ok`: stop writing, then [`release`](Self::release)) or until it is lost (`Err`: the process
    /// must exit).
    pub async fn keep(mut self, shutdown: &Shutdown) -> Result<Self, Error> {
        loop {
            tokio::select! {
                () = sleep(RETRY) => {}
                () = shutdown.begun() => return Ok(self),
            }
            let late = boottime().saturating_sub(self.renewed);
            if late > RENEW_DEADLINE {
                return Err(Error::NotRenewed { name: self.name, seconds: late.as_secs() });
            }
            match timeout(RENEW_DEADLINE.saturating_sub(late), self.renew()).await {
                Ok(Ok(())) => {}
                Ok(Err(error @ (Error::TakenOver { .. } | Error::NotRenewed { .. }))) => return Err(error),
                Ok(Err(error @ Error::Api { .. })) => tracing::warn!(%error, "lease not renewed, trying again"),
                Err(_elapsed) => {
                    return Err(Error::NotRenewed { name: self.name, seconds: RENEW_DEADLINE.as_secs() });
                }
            }
        }
    }

    async fn renew(&mut self) -> Result<(), Error> {
        let began = boottime();
        if let Some(spec) = &mut self.lease.spec {
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        match self.leases.replace(&self.name, &PostParams::default(), &self.lease).await {
            Ok(lease) => {
                self.lease = lease;
                self.renewed = began;
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => self.after_conflict().await,
            Err(source) => Err(Error::Api { name: self.name.clone(), source }),
        }
    }

    /// Someone wrote the lease: another holder, or a person who set a label on it.
    async fn after_conflict(&mut self) -> Result<(), Error> {
        let lease =
            self.leases.get(&self.name).await.map_err(|source| Error::Api { name: self.name.clone(), source })?;
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.clone()).unwrap_or_default();
        if holder != self.identity {
            return Err(Error::TakenOver { name: self.name.clone(), holder });
        }
        self.lease = lease;
        Ok(())
    }

    /// Gives the lease back: whoever waits for it need not wait until it expires.
    pub async fn release(mut self) -> Result<(), Error> {
        if let Some(spec) = &mut self.lease.spec {
            spec.holder_identity = Some(String::new());
        }
        self.leases
            .replace(&self.name, &PostParams::default(), &self.lease)
            .await
            .map(drop)
            .map_err(|source| Error::Api { name: self.name, source })
    }
}

/// Why nobody seems to hold the lease, for who only looks on: a living holder renews it every few seconds. Unlike those who
/// compete for it, this compares clocks of two machines.
pub fn silence(name: &str, lease: Option<&Lease>) -> Option<String> {
    let Some(lease) = lease else { return Some(format!("lease {name} does not exist")) };
    let spec = lease.spec.clone().unwrap_or_default();
    let holder = spec.holder_identity.unwrap_or_default();
    let Some(renewed) = spec.renew_time.filter(|_| !holder.is_empty()) else {
        return Some(format!("lease {name} has no holder"));
    };
    let silent = Timestamp::now().duration_since(renewed.0).as_secs();
    let patience = i64::from(spec.lease_duration_seconds.unwrap_or(15)) * 2;
    (silent > patience).then(|| format!("{holder} renewed its lease {silent} s ago"))
}

/// Time since boot, sleep included.
#[cfg(target_os = "linux")]
fn boottime() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_BOOTTIME).expect("CLOCK_BOOTTIME should exist since Linux 2.6.39").into()
}

/// Operators run on Linux. Elsewhere only [`silence`] is asked; this counts from its first call.
#[cfg(not(target_os = "linux"))]
fn boottime() -> Duration {
    static FIRST: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    FIRST.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(version: &str, seconds: i32) -> Lease {
        let mut spec = taken("other", 3);
        spec.lease_duration_seconds = Some(seconds);
        Lease {
            metadata: ObjectMeta { resource_version: Some(version.to_owned()), ..ObjectMeta::default() },
            spec: Some(spec),
        }
    }

    #[test]
    fn a_holder_seen_for_the_first_time_is_never_expired() {
        let mut seen = None;
        assert!(!expired(&lease("1", 0), &mut seen));
    }

    #[test]
    fn a_holder_that_does_not_renew_expires() {
        let mut seen = Some(Seen { version: Some("1".to_owned()), at: Duration::ZERO });
        assert!(expired(&lease("1", 0), &mut seen));
    }

    #[test]
    fn who_looks_on_sees_a_holder_that_lives_one_that_is_silent_and_none() {
        let mut held = lease("1", 15);
        assert_eq!(silence("l", Some(&held)), None);
        let spec = held.spec.as_mut().expect("a spec");
        spec.renew_time = Some(MicroTime(Timestamp::now() - Duration::from_secs(40)));
        assert!(silence("l", Some(&held)).is_some_and(|why| why.starts_with("other renewed its lease 40 s ago")));
        held.spec.as_mut().expect("a spec").holder_identity = Some(String::new());
        assert_eq!(silence("l", Some(&held)).as_deref(), Some("lease l has no holder"));
        assert_eq!(silence("l", None).as_deref(), Some("lease l does not exist"));
    }

    #[test]
    fn a_renewal_starts_the_wait_anew() {
        let mut seen = Some(Seen { version: Some("1".to_owned()), at: Duration::ZERO });
        assert!(!expired(&lease("2", 0), &mut seen));
        assert_eq!(seen.expect("seen").version.as_deref(), Some("2"));
    }
}
