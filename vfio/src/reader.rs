//! Reading one PCI function.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use crate::address::PciAddress;
use crate::bar;
use crate::driver;
use crate::function::{Function, NVIDIA};
use crate::host::{self, Host};
use crate::inventory::{ObserveError, device_path};
use crate::pcie::{self, Aer, Link, Presence};
use crate::vgpu::{self, VgpuParent};

/// Reads functions in two rounds, each with the host's deadline: one whose driver or device does not answer is known all the
/// same by what the kernel knows by heart.
pub(crate) fn functions(
    host: &impl Host,
    abouts: &[About],
    errors: &mut Vec<ObserveError>,
) -> BTreeMap<PciAddress, Function> {
    let mut functions = BTreeMap::new();
    let subjects = abouts.iter().map(|about| (device_path(about.address), *about)).collect();
    let by_heart = host.each(subjects, |host, about| {
        let mut errors = Vec::new();
        let function = Reader { host, about: *about }.identity(&mut errors);
        (function, errors)
    });
    let mut silent = Vec::new();
    for (about, answer) in abouts.iter().zip(by_heart) {
        match answer {
            Ok((Ok(function), found)) => {
                errors.extend(found);
                if function.vendor == NVIDIA || about.mdev_parent {
                    // Another subject: what is known by heart is read again while this does not come back.
                    silent.push((device_path(about.address).join("config"), (*about, function.clone())));
                }
                functions.insert(about.address, function);
            }
            Ok((Err(error), found)) => errors.extend(found.into_iter().chain([error])),
            Err(error) => {
                let (address, reason) = (about.address, error.to_string());
                errors.push(ObserveError::Function { address, attribute: "directory", reason });
            }
        }
    }
    let addresses: Vec<_> = silent.iter().map(|(_, (about, _))| about.address).collect();
    let asked = host.each(silent, |host, (about, function)| {
        let (mut function, mut errors) = (function.clone(), Vec::new());
        Reader { host, about: *about }.ask(&mut function, &mut errors);
        (function, errors)
    });
    for (address, answer) in addresses.into_iter().zip(asked) {
        match answer {
            Ok((function, found)) => {
                errors.extend(found);
                functions.insert(address, function);
            }
            Err(error) => {
                errors.push(ObserveError::Late { address, reason: error.to_string() });
                functions.entry(address).and_modify(|function| function.late = true);
            }
        }
    }
    functions
}

/// Which function, and what is known of it before it is read.
#[derive(Clone, Copy)]
pub(crate) struct About {
    pub address: PciAddress,
    /// Whether a write to it hangs: what takes the device's lock is not read.
    pub locked: bool,
    /// Whether it is in `/sys/class/mdev_bus`.
    pub mdev_parent: bool,
}

struct Reader<'a, H> {
    host: &'a H,
    about: About,
}

impl<H: Host> Reader<'_, H> {
    /// What the kernel knows by heart.
    fn identity(&self, errors: &mut Vec<ObserveError>) -> Result<Function, ObserveError> {
        let vendor = self.id("vendor")?;
        let driver = self.required("driver", host::optional(host::link_name(self.host, &self.path("driver"))))?;
        let group =
            self.required("iommu_group", host::optional(host::link_name(self.host, &self.path("iommu_group"))))?;
        let iommu_group = match group {
            Some(name) => Some(self.required("iommu_group", name.parse().map_err(invalid))?),
            None => None,
        };
        let physfn = self.required("physfn", host::optional(host::link_name(self.host, &self.path("physfn"))))?;
        let physfn = match physfn {
            Some(name) => Some(self.required("physfn", name.parse().map_err(invalid))?),
            None => None,
        };
        let class = self.hex("class")?;
        let numvfs = if physfn.is_none() && vendor == NVIDIA { self.numvfs()? } else { 0 };
        // A virtual function that is a vGPU has one on the host's driver, too.
        let openable = |name: &&str| driver::is_vfio(name) || (physfn.is_some() && vendor == NVIDIA);
        let vfio_dev = driver.as_deref().filter(openable).and_then(|_| self.vfio_dev());
        Ok(Function {
            address: self.about.address,
            vendor,
            device: self.id("device")?,
            subsystem_vendor: self.id("subsystem_vendor")?,
            subsystem_device: self.id("subsystem_device")?,
            class,
            driver,
            driver_override: None,
            iommu_group,
            numa_node: self.soft(errors, "numa_node").and_then(|text| text.parse().ok()),
            physfn,
            numvfs,
            boot_vga: class >> 16 == 0x03 && self.soft(errors, "boot_vga").is_some_and(|text| text == "1"),
            vfio_dev,
            modalias: self.soft(errors, "modalias"),
            upstream: self.upstream(),
            bars: Vec::new(),
            reset_methods: Vec::new(),
            power_state: None,
            d3cold_allowed: None,
            vfs_possible: 0,
            link: None,
            aer: None,
            presence: None,
            vgpu: None,
            acs: None,
            late: false,
        })
    }

    fn numvfs(&self) -> Result<u16, ObserveError> {
        let entries = self.required("directory", self.host.list(&device_path(self.about.address)))?;
        let count = entries.iter().filter(|name| name.as_encoded_bytes().starts_with(b"virtfn")).count();
        Ok(u16::try_from(count).unwrap_or(u16::MAX))
    }

    fn vfio_dev(&self) -> Option<String> {
        self.host.list(&self.path("vfio-dev")).ok()?.first()?.to_str().map(str::to_owned)
    }

    /// What it asks the driver or the device for.
    fn ask(&self, function: &mut Function, errors: &mut Vec<ObserveError>) {
        if function.vendor == NVIDIA && !self.about.locked {
            function.driver_override = self.driver_override(errors);
        }
        if function.is_primary() {
            function.bars = self.soft(errors, "resource").map(|text| bar::parse(&text)).unwrap_or_default();
            let methods = self.soft(errors, "reset_method").unwrap_or_default();
            function.reset_methods = methods.split_ascii_whitespace().map(str::to_owned).collect();
            function.power_state = self.soft(errors, "power_state");
            function.d3cold_allowed = self.soft(errors, "d3cold_allowed").map(|text| text == "1");
            function.vfs_possible = self.soft(errors, "sriov_totalvfs").and_then(|text| text.parse().ok()).unwrap_or(0);
            function.aer = self.aer();
            if !self.sleeps(function) {
                function.presence = self.presence();
                function.link = self.link();
            }
        }
        function.vgpu = self.vgpu(function, errors);
    }

    fn path(&self, attribute: &str) -> PathBuf {
        device_path(self.about.address).join(attribute)
    }

    fn required<T>(&self, attribute: &'static str, result: io::Result<T>) -> Result<T, ObserveError> {
        let address = self.about.address;
        result.map_err(|error| ObserveError::Function { address, attribute, reason: error.to_string() })
    }

    /// An attribute without which the function is still known: absent on some kernels and devices.
    fn soft(&self, errors: &mut Vec<ObserveError>, attribute: &'static str) -> Option<String> {
        match host::optional(host::text(self.host, &self.path(attribute))) {
            Ok(value) => value,
            Err(error) => {
                errors.push(ObserveError::Attribute {
                    address: self.about.address,
                    attribute,
                    reason: error.to_string(),
                });
                None
            }
        }
    }

    fn hex(&self, attribute: &'static str) -> Result<u32, ObserveError> {
        let text = self.required(attribute, host::text(self.host, &self.path(attribute)))?;
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        self.required(attribute, u32::from_str_radix(digits, 16).map_err(|_| invalid(format!("`{text}` is no number"))))
    }

    fn id(&self, attribute: &'static str) -> Result<u16, ObserveError> {
        let value = self.hex(attribute)?;
        self.required(attribute, u16::try_from(value).map_err(invalid))
    }

    /// Reads `(null)` when empty.
    fn driver_override(&self, errors: &mut Vec<ObserveError>) -> Option<String> {
        self.soft(errors, "driver_override").filter(|name| !name.is_empty() && name != "(null)")
    }

    /// `…/pci0000:00/0000:00:01.0/0000:01:00.0`: the parent in the device tree.
    fn upstream(&self) -> Option<PciAddress> {
        let target = self.host.link(&device_path(self.about.address)).ok()?;
        target.parent()?.file_name()?.to_str()?.parse().ok()
    }

    /// Reading the configuration space of a function that is switched off switches it on (`pci_config_pm_runtime_get`,
    /// `drivers/pci/pci.c`). One that has fallen off is in D3cold, too, by the kernel's account, but nobody let it sleep.
    fn sleeps(&self, function: &Function) -> bool {
        function.power_state.as_deref() == Some("D3cold")
            && self.quiet("power/runtime_status").as_deref() == Some("suspended")
    }

    /// Four bytes only: each word asked of a function that does not answer takes until the bus gives up.
    fn presence(&self) -> Option<Presence> {
        pcie::presence(&self.host.head(&self.path("config"), 4).ok()?)
    }

    fn link(&self) -> Option<Link> {
        let texts = ["current_link_speed", "current_link_width", "max_link_speed", "max_link_width"];
        let [speed, width, max_speed, max_width] = texts.map(|attribute| self.quiet(attribute));
        pcie::link([&speed?, &width?], [&max_speed?, &max_width?])
    }

    fn aer(&self) -> Option<Aer> {
        let total = |attribute| pcie::total_errors(&self.quiet(attribute)?);
        Some(Aer {
            correctable: total("aer_dev_correctable")?,
            nonfatal: total("aer_dev_nonfatal")?,
            fatal: total("aer_dev_fatal")?,
        })
    }

    /// An attribute that fails with the device, which is no news then.
    fn quiet(&self, attribute: &str) -> Option<String> {
        host::text(self.host, &self.path(attribute)).ok()
    }

    fn vgpu(&self, function: &Function, errors: &mut Vec<ObserveError>) -> Option<VgpuParent> {
        let device = device_path(self.about.address);
        let (attribute, found) = if self.about.mdev_parent {
            ("mdev_supported_types", vgpu::mdev(self.host, &device))
        } else if function.vendor == NVIDIA && function.is_vf() {
            ("nvidia/current_vgpu_type", vgpu::vendor_vfio(self.host, &device))
        } else {
            return None;
        };
        found.unwrap_or_else(|error| {
            errors.push(ObserveError::Attribute { address: self.about.address, attribute, reason: error.to_string() });
            None
        })
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
