//! A model of GPU by its PCI ids: `0x25B610DE` is device 25b6 of vendor 10de, `0x25B610DE:0x14A910DE` that of one subsystem. Pure.

use std::{fmt, str::FromStr};

use crds::v1alpha1::GPUStatus;

/// Vendor and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id {
    pub vendor: u16,
    pub device: u16,
}

impl Id {
    /// As `GPUNode` has it: `10de:25b6`.
    pub fn told(text: &str) -> Option<Self> {
        let (vendor, device) = text.split_once(':')?;
        Some(Self { vendor: hex(vendor)?, device: hex(device)? })
    }

    /// As the files have it: `0x25B610DE`.
    fn written(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
        let (device, vendor) = (digits.len() == 8).then(|| digits.split_at_checked(4))??;
        Some(Self { vendor: hex(vendor)?, device: hex(device)? })
    }
}

fn hex(text: &str) -> Option<u16> {
    let all = text.len() == 4 && text.bytes().all(|b| b.is_ascii_hexdigit());
    all.then(|| u16::from_str_radix(text, 16).ok())?
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:04X}{:04X}", self.device, self.vendor)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    pub id: Id,
    pub subsystem: Option<Id>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is no device: write 0x, the device and the vendor, as in 0x25B610DE, and perhaps the subsystem, as in 0x25B610DE:0x14A910DE"
)]
pub struct NotAFilter;

impl Filter {
    pub fn matches(&self, gpu: &GPUStatus) -> bool {
        let same = |wanted: Id, told: &str| Id::told(told) == Some(wanted);
        let subsystem = gpu.subsystem.as_deref().unwrap_or_default();
        same(self.id, &gpu.id) && self.subsystem.is_none_or(|wanted| same(wanted, subsystem))
    }
}

impl FromStr for Filter {
    type Err = NotAFilter;

    fn from_str(text: &str) -> Result<Self, NotAFilter> {
        let (id, subsystem) = match text.split_once(':') {
            Some((id, subsystem)) => (id, Some(Id::written(subsystem).ok_or(NotAFilter)?)),
            None => (text, None),
        };
        Ok(Self { id: Id::written(id).ok_or(NotAFilter)?, subsystem })
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.subsystem {
            Some(subsystem) => write!(f, "{}:{subsystem}", self.id),
            None => self.id.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A16: &str = "10de:14a9";
    const A2: &str = "10de:157e";

    fn matches(filter: &str, subsystem: Option<&str>) -> bool {
        let filter: Filter = filter.parse().expect("a filter");
        let gpu =
            GPUStatus { id: "10de:25b6".to_owned(), subsystem: subsystem.map(str::to_owned), ..GPUStatus::default() };
        filter.matches(&gpu)
    }

    #[test]
    fn a_filter_without_a_subsystem_takes_both_boards_of_one_id() {
        for filter in ["0x25B610DE", "0x25b610de", "0X25B610DE"] {
            assert!(matches(filter, Some(A16)) && matches(filter, Some(A2)) && matches(filter, None), "{filter}");
        }
    }

    #[test]
    fn a_filter_with_a_subsystem_takes_one_board() {
        assert!(matches("0x25B610DE:0x14A910DE", Some(A16)));
        assert!(!matches("0x25B610DE:0x14A910DE", Some(A2)));
        assert!(!matches("0x25B610DE:0x14A910DE", None), "an unknown subsystem is no match");
        assert!(!matches("0x223610DE", Some(A16)), "another device");
        assert!(!matches("0x25B61002", Some(A16)), "another vendor");
    }

    #[test]
    fn what_could_never_match_is_no_filter() {
        let wrong = [
            "",
            "0x",
            "25B610DE",
            "0x25B6",
            "0x25B610DE1",
            "0x25B610DG",
            "0x25B610DE:",
            ":0x25B610DE",
            "0x25B610DE:14A9",
            "0x25B610DE:0x14A910DE:",
            "0x25B610DE::0x14A910DE",
            "0x25B610DE 0x14A910DE",
            "0x+5B610DE",
            "0x25Bé10D",
        ];
        for text in wrong {
            assert_eq!(text.parse::<Filter>(), Err(NotAFilter), "{text:?}");
        }
    }

    #[test]
    fn a_filter_is_written_as_it_is_read() {
        for text in ["0x25B610DE", "0x25B610DE:0x14A910DE"] {
            assert_eq!(text.parse::<Filter>().expect("a filter").to_string(), text);
        }
    }
}
