//! What both commands say of a host and a GPU, in a form that scripts may rely on.

use serde::Serialize;
use vfio::{Function, HolderKind, HostFacts, PciAddress};

use crate::agent::device_plugin::names;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostReport {
    pub kernel: String,
    pub architecture: String,
    pub os: String,
    pub cpu_vendor: String,
    pub command_line: String,
    /// `null` without UEFI.
    pub secure_boot: Option<bool>,
    pub iommu: bool,
    pub iommus: Vec<String>,
    pub iommufd: bool,
    /// Whether VMs may have devices whose interrupts the IOMMU does not check; `null` while VFIO is not loaded.
    pub unsafe_interrupts: Option<bool>,
    pub vfio_pci: VfioPci,
}

/// Where `vfio-pci` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum VfioPci {
    Loaded,
    Module,
    Missing,
}

impl HostReport {
    pub fn of(facts: &HostFacts) -> Self {
        let vfio_pci = match (facts.vfio_pci_loaded, facts.vfio_modules.contains("vfio_pci")) {
            (true, _) => VfioPci::Loaded,
            (false, true) => VfioPci::Module,
            (false, false) => VfioPci::Missing,
        };
        Self {
            kernel: facts.kernel_release.clone(),
            architecture: facts.architecture.clone(),
            os: [facts.os_id.as_str(), &facts.os_version].join(" ").trim().to_owned(),
            cpu_vendor: facts.cpu_vendor.clone(),
            command_line: facts.command_line.clone(),
            secure_boot: facts.secure_boot,
            iommu: facts.iommu,
            iommus: facts.iommus.iter().cloned().collect(),
            iommufd: facts.iommufd,
            unsafe_interrupts: facts.unsafe_interrupts,
            vfio_pci,
        }
    }

    /// In one line.
    pub fn text(&self) -> String {
        let iommu = match (self.iommu, self.iommus.is_empty()) {
            (true, true) => "IOMMU on".to_owned(),
            (true, false) => format!("IOMMU on ({})", self.iommus.join(", ")),
            (false, _) => "IOMMU off".to_owned(),
        };
        let vfio = match self.vfio_pci {
            VfioPci::Loaded => "vfio-pci loaded",
            VfioPci::Module => "vfio-pci not loaded",
            VfioPci::Missing => "vfio-pci missing",
        };
        let iommufd = if self.iommufd { ", iommufd" } else { "" };
        let secure_boot = if self.secure_boot == Some(true) { ", Secure Boot" } else { "" };
        let unsafe_interrupts = if self.unsafe_interrupts == Some(true) { ", unsafe interrupts allowed" } else { "" };
        let Self { kernel, architecture, os, .. } = self;
        format!("{os}, kernel {kernel} {architecture}, {iommu}, {vfio}{iommufd}{secure_boot}{unsafe_interrupts}\n")
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FunctionReport {
    pub address: PciAddress,
    /// `vendor:device` in hex.
    pub ids: String,
    /// Six hex digits.
    pub class: String,
    pub product: Option<&'static str>,
    pub driver: Option<String>,
}

impl FunctionReport {
    pub fn of(function: &Function) -> Self {
        Self {
            address: function.address,
            ids: format!("{:04x}:{:04x}", function.vendor, function.device),
            class: format!("{:06x}", function.class),
            product: names::product(function.vendor, function.device),
            driver: function.driver.clone(),
        }
    }

    pub fn text(&self) -> String {
        let Self { address, ids, product, driver, .. } = self;
        let product = product.map(|product| format!("{product}, ")).unwrap_or_default();
        format!("{address} ({product}{ids}, {})", driver.as_deref().unwrap_or("no driver"))
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderReport {
    pub kind: HolderKind,
    pub pid: i32,
    pub command: String,
    pub path: String,
    pub pod: Option<String>,
    pub next_step: String,
}

impl HolderReport {
    pub fn of(holder: &vfio::Holder) -> Self {
        Self {
            kind: holder.kind(),
            pid: holder.pid,
            command: holder.command.clone(),
            path: holder.path.display().to_string(),
            pod: holder.pod.clone(),
            next_step: holder.next_step(),
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalReport {
    /// One word.
    pub reason: &'static str,
    pub message: String,
}

impl RefusalReport {
    pub fn of(refusal: &vfio::Refusal) -> Self {
        Self { reason: refusal.reason(), message: refusal.to_string() }
    }
}
