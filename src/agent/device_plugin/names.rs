//! Names that users already have in their VM specs: resource names and the variables that virt-launcher reads.
//!
//! The rule is that of NVIDIA's kubevirt-gpu-device-plugin, so that a VM spec written for it keeps working: the text after
//! the device id in `pci.ids`, upper-cased, `/`, `.` and runs of white space turned into `_`, all else but letters, digits
//! and `_` dropped; an id that the table does not have is named by its four hex digits.
//! The table is the one in the `pci-ids` crate, looked up below the vendor, never by device id alone.

use std::{fmt, str::FromStr};

/// PCI vendor id of NVIDIA.
pub const NVIDIA: u16 = 0x10de;

/// Longest name part of a qualified name (Kubernetes `IsQualifiedName`).
const MAX_NAME: usize = 63;
/// Longest domain of a qualified name, less `requests.`, which resource quotas put before it.
const MAX_DOMAIN: usize = 253 - "requests.".len();

/// Why a text is not a resource name that this plugin may serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "resource name {name:?} is not valid: {reason}; use the form nvidia.com/NAME with at most 63 letters, digits, '-', '_' or '.' in NAME"
    )]
    Invalid { name: String, reason: &'static str },
    #[error("resource name {name:?} belongs to {owner}; choose another name")]
    Reserved { name: String, owner: &'static str },
    #[error(
        "device {vendor:04x}:{device:04x} is not from NVIDIA (10de), so there is no rule for its resource name; leave it out of the offer"
    )]
    Vendor { vendor: u16, device: u16 },
}

/// An extended resource as in a pod's `resources.limits`: `domain/name`, valid for the kubelet and not someone else's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceName(String);

impl ResourceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ResourceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = |reason| Error::Invalid { name: text.to_owned(), reason };
        let (domain, name) = text.split_once('/').ok_or_else(|| invalid("there is no '/'"))?;
        if !is_domain(domain) {
            return Err(invalid("the part before '/' is not a DNS name"));
        }
        if !is_name(name) {
            return Err(invalid("the part after '/' is not a name"));
        }
        match owner(domain, name) {
            Some(owner) => Err(Error::Reserved { name: text.to_owned(), owner }),
            None => Ok(Self(text.to_owned())),
        }
    }
}

/// The variable that virt-launcher looks up depends on the list of the resource (`KubeVirt` 1.6-1.9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvPrefix {
    /// `permittedHostDevices.pciHostDevices`
    Pci,
    /// `permittedHostDevices.mediatedDevices`
    Mdev,
}

/// The variable that virt-launcher reads for a resource: upper case, `/` and `.` turned into `_`, `-` kept.
pub fn env_name(resource: &ResourceName, prefix: EnvPrefix) -> String {
    let prefix = match prefix {
        EnvPrefix::Pci => "PCI_RESOURCE",
        EnvPrefix::Mdev => "MDEV_PCI_RESOURCE",
    };
    format!("{prefix}_{}", resource.0.to_ascii_uppercase().replace(['/', '.'], "_"))
}

/// What the PCI table calls a device, e.g. `TU104GL [Tesla T4]`.
pub fn product(vendor: u16, device: u16) -> Option<&'static str> {
    pci_ids::Device::from_vid_pid(vendor, device).map(pci_ids::Device::name)
}

/// The resource name of an NVIDIA PCI device. Several ids can share a name (`1db1` and `1df5`): group by the name.
pub fn resource_name(vendor: u16, device: u16) -> Result<ResourceName, Error> {
    if vendor != NVIDIA {
        return Err(Error::Vendor { vendor, device });
    }
    // The rule makes three names that no kubelet accepts, so that nobody has them in a VM spec: two end in `_` (10de:24fa,
    // 10de:25f9), which is cut off, and one has 81 characters (10de:05be, a switch of 2008), which falls back to hex.
    let name = product(vendor, device).map(|product| sanitize(product).trim_end_matches('_').to_owned());
    let name = name.filter(|name| is_name(name));
    format!("nvidia.com/{}", name.unwrap_or_else(|| format!("{device:04x}"))).parse()
}

/// The resource name of a vGPU type by the kernel's name of it, case and `-` kept: `NVIDIA A10-4Q` → `NVIDIA_A10-4Q`, as
/// `KubeVirt` and NVIDIA's plugin make it.
pub fn vgpu_resource_name(name: &str) -> Result<ResourceName, Error> {
    let words: Vec<&str> = name.split_whitespace().collect();
    format!("nvidia.com/{}", words.join("_")).parse()
}

fn sanitize(product: &str) -> String {
    let words: Vec<&str> = product.split_ascii_whitespace().collect();
    words
        .join("_")
        .chars()
        .map(|c| if matches!(c, '/' | '.') { '_' } else { c.to_ascii_uppercase() })
        .filter(|c| c.is_ascii_alphanumeric() || *c == '_')
        .collect()
}

fn owner(domain: &str, name: &str) -> Option<&'static str> {
    if domain.ends_with("kubernetes.io") || domain.starts_with("requests.") {
        return Some("Kubernetes");
    }
    match (domain, name) {
        ("devices.kubevirt.io", _) => Some("KubeVirt"),
        ("nvidia.com", "gpu") => Some("NVIDIA's device plugin for containers"),
        ("nvidia.com", name) if name.starts_with("gpu.") || name.starts_with("mig-") => {
            Some("NVIDIA's device plugin for containers")
        }
        (_, _) => None,
    }
}

fn is_name(name: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    name.len() <= MAX_NAME
        && ends(name.chars().next())
        && ends(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_domain(domain: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    domain.len() <= MAX_DOMAIN && domain.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use pci_ids::FromId as _;

    use super::*;

    fn parsed(text: &str) -> ResourceName {
        text.parse().unwrap()
    }

    #[test]
    fn the_text_rule_is_that_of_the_nvidia_plugin() {
        for (text, name) in [
            ("GK104GL [GRID K520]", "GK104GL_GRID_K520"),
            ("gk104.gl [grid/k./520]", "GK104_GL_GRID_K__520"),
            ("GA100 [A800-SXM4-80GB]", "GA100_A800SXM480GB"),
            ("GA107GL [A2 / A16]", "GA107GL_A2___A16"),
            ("  TU116 \t USB 3.1 Host Controller ", "TU116_USB_3_1_HOST_CONTROLLER"),
        ] {
            assert_eq!(sanitize(text), name);
        }
    }

    /// Names in users' VM specs. A newer table that changes one of these needs an alias for the old name, not a new vector.
    #[test]
    fn names_that_users_have_in_vm_specs_stay() {
        for (device, name) in [
            (0x118a, "GK104GL_GRID_K520"),
            (0x1b38, "GP102GL_TESLA_P40"),
            (0x1db1, "GV100GL_TESLA_V100_SXM2_16GB"),
            (0x1df5, "GV100GL_TESLA_V100_SXM2_16GB"),
            (0x1e30, "TU102GL_QUADRO_RTX_6000_8000"),
            (0x1e78, "TU102GL_QUADRO_RTX_6000_8000"),
            (0x1eb1, "TU104GL_QUADRO_RTX_4000"),
            (0x1eb8, "TU104GL_TESLA_T4"),
            (0x20b0, "GA100_A100_SXM4_40GB"),
            (0x20b1, "GA100_A100_PCIE_40GB"),
            (0x20b5, "GA100_A100_PCIE_80GB"),
            (0x20b7, "GA100GL_A30_PCIE"),
            (0x20f1, "GA100_A100_PCIE_40GB"),
            (0x20f3, "GA100_A800SXM480GB"),
            (0x2080, "GA100"),
            (0x2230, "GA102GL_RTX_A6000"),
            (0x2235, "GA102GL_A40"),
            (0x2236, "GA102GL_A10"),
            (0x25b6, "GA107GL_A2___A16"),
            (0x26b9, "AD102GL_L40S"),
            (0x27b8, "AD104GL_L4"),
            (0x2302, "GH100"),
            (0x2330, "GH100_H100_SXM5_80GB"),
            (0x2331, "GH100_H100_PCIE"),
            (0x2335, "GH100_H200_SXM_141GB"),
            (0x233b, "GH100_H200_NVL"),
            (0x2342, "GH100_GH200_120GB___480GB"),
            (0x22a3, "GH100_H100_NVSWITCH"),
            (0x2901, "GB100_B200"),
            (0x2941, "GB100_HGX_GB200"),
            (0x2bb5, "GB202GL_RTX_PRO_6000_BLACKWELL_SERVER_EDITION"),
            (0x2204, "GA102_GEFORCE_RTX_3090"),
            (0x1aef, "GA102_HIGH_DEFINITION_AUDIO_CONTROLLER"),
            (0x1aec, "TU116_USB_3_1_HOST_CONTROLLER"),
            (0x1aed, "TU116_USB_TYPEC_UCSI_CONTROLLER"),
        ] {
            assert_eq!(resource_name(NVIDIA, device), Ok(parsed(&format!("nvidia.com/{name}"))), "10de:{device:04x}");
        }
    }

    #[test]
    fn an_id_that_the_table_lacks_is_named_by_its_hex_digits() {
        for (device, name) in [(0x2bb9, "2bb9"), (0x2c3a, "2c3a"), (0x3182, "3182"), (0x22a4, "22a4"), (0x0000, "0000")]
        {
            assert_eq!(product(NVIDIA, device), None);
            assert_eq!(resource_name(NVIDIA, device).unwrap().as_str(), format!("nvidia.com/{name}"));
        }
    }

    /// FNV over every NVIDIA id and name. Fails when the crate's table changes: a changed or new row renames a resource
    /// (from hex, too), so keep the old name as an alias or an override before taking the new number.
    #[test]
    fn no_name_changes_unnoticed_when_the_table_is_updated() {
        let nvidia = pci_ids::Vendor::from_id(NVIDIA).unwrap();
        let mut rows: Vec<(u16, String)> =
            nvidia.devices().map(|d| (d.id(), resource_name(NVIDIA, d.id()).unwrap().0)).collect();
        rows.sort();
        let hash = rows
            .iter()
            .flat_map(|(id, name)| format!("{id:04x} {name}\n").into_bytes())
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        assert_eq!((rows.len(), hash), (1931, 17_558_594_362_097_595_740));
    }

    #[test]
    fn a_name_that_no_kubelet_accepts_is_mended() {
        let nvidia = pci_ids::Vendor::from_id(NVIDIA).unwrap();
        let bad = nvidia.devices().filter(|device| !is_name(&sanitize(device.name()))).map(pci_ids::Device::id);
        let mended: Vec<String> = bad.map(|id| resource_name(NVIDIA, id).unwrap().0).collect();
        let expected =
            ["nvidia.com/05be", "nvidia.com/GA104_RTX_A4500_EMBEDDED_GPU", "nvidia.com/GA107_RTX_A1000_EMBEDDED_GPU"];
        assert_eq!(mended, expected);
    }

    #[test]
    fn the_product_is_looked_up_below_its_vendor() {
        assert_eq!(product(NVIDIA, 0x2331), Some("GH100 [H100 PCIe]"));
        assert_ne!(product(0x8086, 0x2331), Some("GH100 [H100 PCIe]"));
        assert_eq!(resource_name(0x8086, 0x2331), Err(Error::Vendor { vendor: 0x8086, device: 0x2331 }));
    }

    #[test]
    fn the_variable_is_the_one_that_virt_launcher_looks_up() {
        for (name, prefix, env) in [
            ("nvidia.com/TU104GL_TESLA_T4", EnvPrefix::Pci, "PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4"),
            ("nvidia.com/TU104GL_Tesla_T4", EnvPrefix::Pci, "PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4"),
            ("nvidia.com/3182", EnvPrefix::Pci, "PCI_RESOURCE_NVIDIA_COM_3182"),
            ("nvidia.com/NVIDIA_A10-4Q", EnvPrefix::Mdev, "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-4Q"),
            ("gpu.my-org.io/a.b", EnvPrefix::Pci, "PCI_RESOURCE_GPU_MY-ORG_IO_A_B"),
        ] {
            assert_eq!(env_name(&parsed(name), prefix), env);
        }
    }

    #[test]
    fn names_of_others_are_refused_with_their_owner() {
        for (name, whose) in [
            ("nvidia.com/gpu", "NVIDIA's device plugin for containers"),
            ("nvidia.com/gpu.shared", "NVIDIA's device plugin for containers"),
            ("nvidia.com/mig-1g.5gb", "NVIDIA's device plugin for containers"),
            ("devices.kubevirt.io/kvm", "KubeVirt"),
            ("kubernetes.io/gpu", "Kubernetes"),
            ("node.kubernetes.io/gpu", "Kubernetes"),
            ("requests.nvidia.com/A10", "Kubernetes"),
        ] {
            let refused = name.parse::<ResourceName>();
            assert_eq!(refused, Err(Error::Reserved { name: name.to_owned(), owner: whose }));
        }
        assert_eq!(parsed("nvidia.com/GPU_A10").as_str(), "nvidia.com/GPU_A10");
    }

    #[test]
    fn a_text_that_the_kubelet_would_refuse_is_no_resource_name() {
        let long = format!("nvidia.com/{}", "A".repeat(64));
        let wide = format!("{}/A", vec!["a"; 123].join("."));
        for text in [
            "",
            "A10",
            "/A10",
            "nvidia.com/",
            "nvidia.com/A10_",
            "nvidia.com/_A10",
            "nvidia.com/A/10",
            "nvidia.com/A 10",
        ]
        .into_iter()
        .chain(["Nvidia.com/A10", "nvidia..com/A10", "-nvidia.com/A10", &long, &wide])
        {
            assert!(matches!(text.parse::<ResourceName>(), Err(Error::Invalid { .. })), "{text:?}");
        }
        assert!(format!("nvidia.com/{}", "A".repeat(63)).parse::<ResourceName>().is_ok());
    }
}
