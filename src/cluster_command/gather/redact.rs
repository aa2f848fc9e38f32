//! Takes out of objects and texts what is nobody's business: secrets, and what names persons or their machines' addresses.
//! An address becomes a name of its own, the same everywhere in the archive, so that one can still follow it.

use std::{collections::BTreeMap, sync::LazyLock};

use regex::{Captures, Regex};
use serde_json::Value;

/// What stands where a secret was.
pub const GONE: &str = "<redacted>";

#[derive(Default)]
pub struct Redactor {
    addresses: BTreeMap<String, usize>,
}

/// Keys whose values are secrets, whatever is around them.
const SECRET_WORDS: &str = r"pass(?:word|wd|phrase)?|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|credentials?|authorization|cookie|bearer";

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a pattern of this file should compile")
}

static PEM: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?s)-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\z)"));
/// Three parts in base64, the first of which begins with `{"`.
static JWT: LazyLock<Regex> = LazyLock::new(|| pattern(r"eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*"));
static SCHEME: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}"));
static USERINFO: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@:]+(?::[^\s/@]*)?@"));
static ASSIGNED: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r#"(?i)\b([a-z0-9_.-]*(?:{SECRET_WORDS}))("?\s*[=:]\s*"?|\s+"?)([^\s"',;&]+)"#)));
/// Keys of clouds and forges by their well-known beginnings.
static KNOWN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[opsur]_[A-Za-z0-9]{20,}|glpat-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,})",
    )
});
static SSH: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[a-z0-9-]+)\s+[A-Za-z0-9+/=]{20,}(?:\s+\S+@\S+)?")
});
static MAIL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\b[A-Za-z0-9][A-Za-z0-9._%+-]*@[A-Za-z0-9](?:[A-Za-z0-9.-]*\.)[A-Za-z]{2,}\b"));
static IPV4: LazyLock<Regex> = LazyLock::new(|| {
    let octet = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    pattern(&format!(r"\b{octet}(?:\.{octet}){{3}}\b"))
});
/// PCI addresses have one colon less than the shortest of these, or a dot behind.
static IPV6: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}\b|\b(?:[0-9a-f]{1,4}:){1,6}:(?:[0-9a-f]{1,4}:){0,5}[0-9a-f]{1,4}\b",
    )
});
static MAC: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"));
static SECRET_KEY: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r"(?i)(?:^|[^a-z])(?:{SECRET_WORDS})s?$|(?i:{SECRET_WORDS})$")));

/// Keys that end like a secret and hold the name of one, or what is none.
const HARMLESS: [&str; 6] = [
    "automountserviceaccounttoken",
    "imagepullsecret",
    "imagepullsecrets",
    "serviceaccounttoken",
    "licenseservertoken",
    "secret",
];

impl Redactor {
    /// A text of any form: a log, a message, a file.
    pub fn text(&mut self, text: &str) -> String {
        let text = PEM.replace_all(text, GONE);
        let text = JWT.replace_all(&text, GONE);
        let text = SSH.replace_all(&text, GONE);
        let text = USERINFO.replace_all(&text, format!("${{1}}{GONE}@"));
        let text = SCHEME.replace_all(&text, format!("${{1}} {GONE}"));
        let text = KNOWN.replace_all(&text, GONE);
        let text = ASSIGNED.replace_all(&text, |found: &Captures<'_>| {
            // "token expired" says nothing secret; "token: abc" and "--token abc" do.
            let given =
                found[2].trim().starts_with(['=', ':', '"']) || found[1].starts_with('-') || is_flag(&text, found);
            if given && !is_harmless(&found[3]) {
                format!("{}{}{GONE}", &found[1], &found[2])
            } else {
                found[0].to_owned()
            }
        });
        let text = MAIL.replace_all(&text, GONE);
        let text = MAC.replace_all(&text, "<mac>");
        let text = IPV4.replace_all(&text, |found: &Captures<'_>| self.address(&found[0]));
        IPV6.replace_all(&text, |found: &Captures<'_>| self.address(&found[0])).into_owned()
    }

    fn address(&mut self, address: &str) -> String {
        if ["127.0.0.1", "0.0.0.0", "255.255.255.255"].contains(&address) {
            return address.to_owned();
        }
        let next = self.addresses.len() + 1;
        format!("<ip-{}>", self.addresses.entry(address.to_owned()).or_insert(next))
    }

    /// An object of the API, or any other JSON.
    pub fn object(&mut self, value: &mut Value) {
        if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
            if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
                // It repeats the object, as a text.
                annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
            }
        }
        if value.get("kind").and_then(Value::as_str) == Some("Secret") {
            for part in ["data", "stringData"] {
                value.as_object_mut().and_then(|object| object.remove(part));
            }
        }
        self.value(value);
    }

    fn value(&mut self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                self.variable(map);
                for (key, value) in map {
                    if let Value::String(text) = value
                        && is_secret(key)
                        && !text.is_empty()
                    {
                        GONE.clone_into(text);
                    } else {
                        self.value(value);
                    }
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|value| self.value(value)),
            Value::String(text) => *text = self.text(text),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// `{name: DB_PASSWORD, value: …}`, as containers' variables are written.
    #[expect(clippy::unused_self, reason = "beside its fellows")]
    fn variable(&self, map: &mut serde_json::Map<String, Value>) {
        let named = map.get("name").and_then(Value::as_str).is_some_and(is_secret);
        if let Some(Value::String(text)) = map.get_mut("value").filter(|_| named) {
            GONE.clone_into(text);
        }
    }
}

fn is_secret(key: &str) -> bool {
    !HARMLESS.contains(&key.to_lowercase().as_str()) && SECRET_KEY.is_match(key)
}

/// Behind `--`, as flags of programs are written.
fn is_flag(text: &str, found: &Captures<'_>) -> bool {
    found.get(1).is_some_and(|key| text[..key.start()].ends_with("--"))
}

fn is_harmless(value: &str) -> bool {
    let literal = ["true", "false", "null", "none", "{}", "[]", "-"].contains(&value);
    literal || value.starts_with(GONE) || value.starts_with('<')
}
