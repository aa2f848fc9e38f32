//! A node's operating system and kernel, as labels and image tags write them.

/// The operating system as driver images are tagged: `ubuntu24.04`, `rhel9.4`; Rocky, and Red Hat from 10 on, without the
/// minor version (gpu-operator 26.7).
pub fn os_tag(os: &str) -> String {
    let at = os.find(|c: char| c.is_ascii_digit()).unwrap_or(os.len());
    let (name, version) = os.split_at(at);
    let major = version.split('.').next().unwrap_or_default();
    let by_major = match name {
        "rocky" => true,
        "rhel" => major.parse().is_ok_and(|major: u32| major >= 10),
        _ => false,
    };
    format!("{name}{}", if by_major { major } else { version })
}

/// What a label's value may have: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
pub fn label_value(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let value: String = text.chars().map(allowed).take(63).collect();
    value.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

/// A kernel's version in a name: lower case, and without the architecture, since images are for several.
pub fn kernel_in_name(kernel: &str) -> String {
    let mut name = kernel.to_lowercase();
    for architecture in ["x86_64_64k", "aarch64_64k", "x86_64", "aarch64"] {
        name = name.replace(architecture, "");
    }
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '.' }).collect();
    name.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_the_one_that_driver_images_have() {
        let tags = ["ubuntu24.04", "rhel9.4", "rhel10.1", "rocky9.5", "sles15.6", "arch"].map(os_tag);
        assert_eq!(tags, ["ubuntu24.04", "rhel9.4", "rhel10", "rocky9", "sles15.6", "arch"]);
    }

    #[test]
    fn any_kernel_fits_a_label_and_a_name() {
        let kernel = "6.1.0+deb_X-5.14.0-427.el9.x86_64";
        assert_eq!(label_value(kernel), "6.1.0_deb_X-5.14.0-427.el9.x86_64");
        assert_eq!(label_value(&"1+".repeat(40)).len(), 63);
        assert_eq!(kernel_in_name("5.14.0-427.el9.x86_64"), "5.14.0-427.el9");
        assert_eq!(kernel_in_name("6.8.0-1008-nvidia-64k"), "6.8.0-1008-nvidia-64k");
        assert_eq!(kernel_in_name("5.14.0-427.el9.aarch64_64k"), "5.14.0-427.el9");
        assert_eq!(kernel_in_name("6.1+A_b"), "6.1.a.b");
    }
}
