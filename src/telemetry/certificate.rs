//! The certificate of the metrics: one that is given in a folder, and followed there, or one that this process makes.
//!
//! Its own one proves nothing about who serves, but what it serves cannot be read on the way, nor the scraper's token.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use k8s_openapi::jiff::{Timestamp, ToSpan, civil::Date, tz::TimeZone};
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use tokio_rustls::rustls::{
    self, ServerConfig,
    crypto::ring::{default_provider, sign::any_supported_type},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
    server::{ClientHello, NoServerSessionStorage, ResolvesServerCert},
    sign::CertifiedKey,
};

/// Names of the files, as in a Secret of type `kubernetes.io/tls`.
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// How often it is looked whether there is another one, at the most, and only when somebody connects.
const LOOK: Duration = Duration::from_secs(10);
const VALID_DAYS: i64 = 365;
/// One's own is made anew at each start, and in a process that lives on.
const RENEW: Duration = Duration::from_secs(180 * 24 * 3600);

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("{path} cannot be read: give a Secret of type kubernetes.io/tls, or none")]
    File { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("key and certificate in {folder} cannot be used")]
    Unusable { folder: PathBuf, source: rustls::Error },
    #[error("no certificate can be made")]
    Make(#[from] rcgen::Error),
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
}

/// Where the certificate is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Own,
    Folder(PathBuf),
}

struct Known {
    key: Arc<CertifiedKey>,
    /// When the file was written.
    written: Option<SystemTime>,
    looked: Instant,
    made: Instant,
}

struct Certificates {
    origin: Origin,
    known: Mutex<Known>,
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// TLS that serves with it. Sessions are not kept: a scraper holds its connection.
pub fn config(origin: Origin) -> Result<ServerConfig, CertificateError> {
    let versions =
        ServerConfig::builder_with_provider(Arc::new(default_provider())).with_safe_default_protocol_versions();
    let certificates = Certificates::open(origin)?;
    let mut config = versions?.with_no_client_auth().with_cert_resolver(Arc::new(certificates));
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

impl Certificates {
    fn open(origin: Origin) -> Result<Self, CertificateError> {
        let now = Instant::now();
        let known = Known { key: load(&origin)?, written: written(&origin), looked: now, made: now };
        Ok(Self { origin, known: Mutex::new(known) })
    }

    fn current(&self, now: Instant) -> Arc<CertifiedKey> {
        let mut known = self.known.lock().expect("certificate lock should not be poisoned");
        if now < known.looked + LOOK {
            return known.key.clone();
        }
        known.looked = now;
        let is_due = match &self.origin {
            Origin::Own => now > known.made + RENEW,
            Origin::Folder(_) => written(&self.origin) != known.written,
        };
        if is_due {
            let time = written(&self.origin);
            match load(&self.origin) {
                Ok(key) => *known = Known { key, written: time, looked: now, made: now },
                Err(error) => {
                    tracing::warn!(error = crate::chain(&error), "the metrics keep the certificate that they have");
                }
            }
        }
        known.key.clone()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current(Instant::now()))
    }
}

fn written(origin: &Origin) -> Option<SystemTime> {
    match origin {
        Origin::Own => None,
        Origin::Folder(folder) => std::fs::metadata(folder.join(CERTIFICATE)).and_then(|file| file.modified()).ok(),
    }
}

fn load(origin: &Origin) -> Result<Arc<CertifiedKey>, CertificateError> {
    match origin {
        Origin::Own => own(),
        Origin::Folder(folder) => given(folder),
    }
}

fn given(folder: &Path) -> Result<Arc<CertifiedKey>, CertificateError> {
    let unreadable = |name: &str| {
        let path = folder.join(name);
        move |source| CertificateError::File { path, source }
    };
    let chain = CertificateDer::pem_file_iter(folder.join(CERTIFICATE)).map_err(unreadable(CERTIFICATE))?;
    let chain = chain.collect::<Result<Vec<_>, _>>().map_err(unreadable(CERTIFICATE))?;
    let key = PrivateKeyDer::from_pem_file(folder.join(KEY)).map_err(unreadable(KEY))?;
    let unusable = |source| CertificateError::Unusable { folder: folder.to_owned(), source };
    let key = CertifiedKey::new(chain, any_supported_type(&key).map_err(unusable)?);
    key.keys_match().map_err(unusable)?;
    Ok(Arc::new(key))
}

fn own() -> Result<Arc<CertifiedKey>, CertificateError> {
    let pair = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec!["gpuvirt".to_owned()])?;
    let today = Timestamp::now().to_zoned(TimeZone::UTC).date();
    let midnight =
        |date: Date| date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs());
    // Clocks of others may be behind.
    params.not_before = midnight(today.saturating_sub(1.day()));
    params.not_after = midnight(today.saturating_add(VALID_DAYS.days()));
    let certificate = params.self_signed(&pair)?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialize_der()));
    Ok(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], any_supported_type(&key)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path) {
        let pair = KeyPair::generate().expect("a key");
        let certificate =
            CertificateParams::new(vec!["metrics".to_owned()]).and_then(|params| params.self_signed(&pair));
        std::fs::write(folder.join(CERTIFICATE), certificate.expect("a certificate").pem()).expect("writable");
        std::fs::write(folder.join(KEY), pair.serialize_pem()).expect("writable");
    }

    #[test]
    fn a_given_certificate_is_followed_and_kept_while_the_next_one_is_broken() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(Certificates::open(Origin::Folder(folder.path().to_owned())).is_err(), "there is none");
        write(folder.path());
        let certificates = Certificates::open(Origin::Folder(folder.path().to_owned())).expect("usable");
        let (start, first) = (Instant::now(), certificates.current(Instant::now()));
        std::fs::write(folder.path().join(CERTIFICATE), "rubbish").expect("writable");
        assert_eq!(certificates.current(start + 2 * LOOK).cert, first.cert, "it keeps what it has");
        write(folder.path());
        assert_eq!(certificates.current(start + 2 * LOOK).cert, first.cert, "it was looked at just now");
        assert_ne!(certificates.current(start + 4 * LOOK).cert, first.cert, "it takes the new one");
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let (one, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        write(one.path());
        write(other.path());
        std::fs::copy(other.path().join(KEY), one.path().join(KEY)).expect("copied");
        let error = given(one.path()).expect_err("they do not match");
        assert!(matches!(error, CertificateError::Unusable { .. }), "{error}");
    }

    #[test]
    fn ones_own_certificate_is_renewed_while_the_process_lives() {
        let certificates = Certificates::open(Origin::Own).expect("makeable");
        let (start, first) = (Instant::now(), certificates.current(Instant::now()));
        assert_eq!(certificates.current(start + RENEW / 2).cert, first.cert);
        assert_ne!(certificates.current(start + RENEW + LOOK).cert, first.cert);
    }
}
