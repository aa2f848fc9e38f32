//! The address of a PCI function, parsed once at the border.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Address of one PCI function: domain, bus, device (0-31) and function (0-7).
///
/// Written as the kernel names it in `/sys/bus/pci/devices`: lower-case hex, a domain of at least four digits
/// (`0000:01:00.0`; a VMD domain is `10000:e1:00.0`). Eight-digit domains, as NVML writes them, are read as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Why a text is not the address of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PCI address: expected one like 0000:01:00.0")]
pub struct AddressError(String);

impl PciAddress {
    /// The segment of the host's PCI hierarchy (`0000`, or as NVIDIA Grace and Intel VMD have it, others).
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// The bus within the domain.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// The slot on the bus, 0-31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// The function in the slot, 0-7.
    pub fn function(self) -> u8 {
        self.function
    }

    /// Whether both are functions of one card or chip (same domain, bus and device).
    pub fn same_slot(self, other: Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| AddressError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let mut parts = rest.split(':');
    let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let address = PciAddress {
        domain: hex(domain, 4..=8)?,
        bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
        device: u8::try_from(hex(device, 2..=2)?).ok()?,
        function: u8::try_from(hex(function, 1..=1)?).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// `from_str_radix` alone would accept a sign.
fn hex(digits: &str, length: std::ops::RangeInclusive<usize>) -> Option<u32> {
    if !length.contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_address_reads_back_as_itself(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse(), Ok(address));
            let json = serde_json::to_string(&address).unwrap();
            prop_assert_eq!(serde_json::from_str::<PciAddress>(&json).unwrap(), address);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,20}") {
            let _ = text.parse::<PciAddress>();
        }

        #[test]
        fn what_parses_prints_as_the_same_number(text in "[0-9a-fA-F+:.-]{12,13}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert_eq!(address.to_string(), text.to_lowercase());
            }
        }
    }

    #[test]
    fn nvml_spelling_is_the_same_device() {
        let short: PciAddress = "0000:06:00.0".parse().unwrap();
        assert_eq!("00000000:06:00.0".parse(), Ok(short));
        assert_eq!("10000:E1:00.0".parse::<PciAddress>().unwrap().to_string(), "10000:e1:00.0");
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for text in ["", "01:00.0", "0000:01:20.0", "0000:01:00.8", "0000:1:00.0", "0000:01:00.0 ", "+000:01:00.0"] {
            assert_eq!(text.parse::<PciAddress>(), Err(AddressError(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn functions_of_one_card_share_a_slot_and_others_do_not() {
        let gpu: PciAddress = "0000:52:00.0".parse().unwrap();
        assert!(gpu.same_slot("0000:52:00.3".parse().unwrap()));
        assert!(!gpu.same_slot("0000:52:01.0".parse().unwrap()));
    }
}
