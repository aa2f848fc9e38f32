//! Image references from the peer's three parts.

use std::fmt;

use crds::v1::ImageSpec;

/// A complete image reference, as a container names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRef(String);

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("no image: set repository, image and version, or image alone to a full reference")]
    Missing,
    #[error("image {given} lacks {lacking}: set repository, image and version, or image alone to a full reference")]
    Partial { given: String, lacking: String },
    #[error("image {0:?} is no image reference: white space and control characters are not allowed")]
    Malformed(String),
}

/// `repository/image:version`, `repository/image@sha256:…`, or `image` alone as a full reference.
///
/// `suffix` goes behind a tag, as the driver's OS does (`595.91.07` + `ubuntu24.04`); a digest or a full reference
/// already names one image and takes none.
pub fn resolve(spec: &ImageSpec, suffix: Option<&str>) -> Result<ImageRef, Error> {
    let part = |part: &Option<String>| part.as_deref().map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned);
    let reference = match (part(&spec.repository), part(&spec.image), part(&spec.version)) {
        (None, None, None) => return Err(Error::Missing),
        (None, Some(image), None) if image.contains([':', '@']) => image,
        // As an NVIDIADriver may write it: `nvcr.io/nvidia/driver` and a version.
        (None, Some(image), Some(version)) if image.contains('/') => tagged(&image, &version, suffix),
        (Some(repository), Some(image), Some(version)) => tagged(&format!("{repository}/{image}"), &version, suffix),
        (repository, image, version) => {
            let parts = [("repository", &repository), ("image", &image), ("version", &version)];
            let lacking: Vec<&str> = parts.iter().filter(|(_, p)| p.is_none()).map(|(name, _)| *name).collect();
            let given: Vec<&str> = parts.iter().filter_map(|(_, p)| p.as_deref()).collect();
            return Err(Error::Partial { given: given.join(" "), lacking: lacking.join(" and ") });
        }
    };
    if reference.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(Error::Malformed(reference));
    }
    Ok(ImageRef(reference))
}

fn tagged(image: &str, version: &str, suffix: Option<&str>) -> String {
    match (version.starts_with("sha256:"), suffix) {
        (true, _) => format!("{image}@{version}"),
        (false, None) => format!("{image}:{version}"),
        (false, Some(suffix)) => format!("{image}:{version}-{suffix}"),
    }
}

/// A full reference of the operator's environment: a tag takes the suffix, a digest does not.
pub fn of_environment(reference: &str, suffix: Option<&str>) -> Result<ImageRef, Error> {
    let reference = match suffix {
        Some(suffix) if !reference.contains('@') => format!("{reference}-{suffix}"),
        Some(_) | None => reference.to_owned(),
    };
    resolve(&ImageSpec { image: Some(reference), ..ImageSpec::default() }, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(repository: &str, image: &str, version: &str) -> ImageSpec {
        let some = |s: &str| (!s.is_empty()).then(|| s.to_owned());
        ImageSpec { repository: some(repository), image: some(image), version: some(version), ..ImageSpec::default() }
    }

    fn resolved(repository: &str, image: &str, version: &str) -> Result<String, Error> {
        resolve(&spec(repository, image, version), Some("ubuntu24.04")).map(|image| image.to_string())
    }

    #[test]
    fn a_tag_takes_the_suffix() {
        assert_eq!(resolved("nvcr.io/nvidia", "driver", "595").as_deref(), Ok("nvcr.io/nvidia/driver:595-ubuntu24.04"));
    }

    #[test]
    fn a_digest_takes_none() {
        assert_eq!(resolved("r", "driver", "sha256:ab").as_deref(), Ok("r/driver@sha256:ab"));
    }

    #[test]
    fn a_full_reference_stands_alone() {
        assert_eq!(resolved("", "r.example/driver:1", "").as_deref(), Ok("r.example/driver:1"));
        assert_eq!(resolved("", "r.example/driver", "1").as_deref(), Ok("r.example/driver:1-ubuntu24.04"));
    }

    #[test]
    fn a_partial_triple_names_what_is_lacking() {
        let error = resolved("nvcr.io/nvidia", "driver", "").expect_err("partial");
        assert_eq!(error, Error::Partial { given: "nvcr.io/nvidia driver".to_owned(), lacking: "version".to_owned() });
        assert!(matches!(resolved("", "driver", ""), Err(Error::Partial { .. })));
    }

    #[test]
    fn nothing_and_rubbish_are_refused() {
        assert_eq!(resolved("", "", ""), Err(Error::Missing));
        assert!(matches!(resolved("r", "dri ver", "1"), Err(Error::Malformed(_))));
    }
}
